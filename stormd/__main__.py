"""The command line as `python -m stormd`, for when the script `stormd` is not on PATH."""

import sys

from stormd.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
