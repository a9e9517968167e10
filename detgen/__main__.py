"""`detgen`, and `python -m detgen`: where the process begins."""

from __future__ import annotations

import sys

from detgen import failing


def main() -> None:
    """Run the command line; it ends the process."""
    try:
        from detgen.cli import app  # here, since an interruption while it is loaded is to end the process quietly, too

        app(prog_name="detgen")
    except KeyboardInterrupt:
        sys.exit(130)  # as the commands themselves do
    except Exception as error:
        sys.exit(failing.end(error))


if __name__ == "__main__":
    main()
