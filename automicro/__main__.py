"""``python -m automicro``: the same as the command ``automicro``."""

import sys

from automicro.cli import main

if __name__ == "__main__":
    sys.exit(main())
