"""`python -m detgen` is `detgen`."""

from detgen.cli import main

if __name__ == "__main__":
    main()
