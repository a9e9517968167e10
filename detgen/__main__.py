"""The entry point of `detgen` and `python -m detgen`."""

from __future__ import annotations

import gc
import sys

from detgen import failing
from detgen.interruption import ending_signals, interrupt
from detgen.streams import forgiving_streams

# How many more new objects than freed ones start a garbage collection. Importing PyTorch alone makes 170,000 that stay;
# with Python's default that takes 370 collections, a tenth of the import's time.
_OBJECTS = 50_000


def main() -> None:
    """Run the command line, which ends the process."""
    gc.set_threshold(_OBJECTS, *gc.get_threshold()[1:])
    try:
        with ending_signals(interrupt), forgiving_streams():
            try:
                # Imported here so that an interruption during the import ends the process quietly, too.
                from detgen.cli import app

                app(prog_name="detgen")
            except Exception as error:
                sys.exit(failing.end(error))
    except KeyboardInterrupt:
        sys.exit(130)  # as the commands themselves do


if __name__ == "__main__":
    main()
