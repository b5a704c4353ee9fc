"""`python -m quire`, and so `torchrun -m quire`, is the command."""

from __future__ import annotations

import sys

from quire.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
