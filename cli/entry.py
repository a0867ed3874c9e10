"""Where the command begins: signals are reported in one line from the start, before anything
large is imported.
"""

from __future__ import annotations

import os
import signal
import sys

from quantkit.cli.signals import get_interrupt_exit_code, interruptible
from quantkit.cli.streams import open_missing_streams


def main() -> None:
    """Run the command line and exit with its code."""
    open_missing_streams()
    # torch, which is imported later, then allocates in huge pages: fewer page faults.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Threads that wait for long take the processor from other programs.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        with interruptible():
            from quantkit.cli.main import main as command

            command()
    except KeyboardInterrupt as error:
        # Imported late: the command has to answer signals before anything large is imported.
        from quantkit.cli.output import report_interrupted

        report_interrupted(error)
        sys.exit(get_interrupt_exit_code(error))
    finally:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            # Nothing is left that needs a traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
