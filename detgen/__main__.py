"""`detgen`, and `python -m detgen`: where the process begins."""

from __future__ import annotations

import gc
import sys

from detgen import failing
from detgen.interruption import ending_signals, interrupt
from detgen.streams import forgiving_streams

# That are made before garbage is looked for. PyTorch's import alone makes 170,000 that stay, and by default ends in 370
# searches, which take a tenth of its time.
_OBJECTS = 50_000


def main() -> None:
    """Run the command line; it ends the process."""
    gc.set_threshold(_OBJECTS, *gc.get_threshold()[1:])
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
