"""``python -m quantkit.cli``."""

from quantkit.cli.entry import main

main()
