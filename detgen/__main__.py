"""`detgen`, and `python -m detgen`: where the process begins."""

from __future__ import annotations

import sys

from detgen import failing
from detgen.interruption import ending_signals, interrupt
from detgen.streams import forgiving_streams


def main() -> None:
    """Run the command line; it ends the process."""
    try:
        with ending_signals(interrupt), forgiving_streams():
            try:
                # Here, since an interruption while it is loaded is to end the process quietly, too.
                from detgen.cli import app

                app(prog_name="detgen")
            except Exception as error:
                sys.exit(failing.end(error))
    except KeyboardInterrupt:
        sys.exit(130)  # as the commands themselves do


if __name__ == "__main__":
    main()
