"""``python -m quantkit.cli``."""

from quantkit.cli.main import main

main()
