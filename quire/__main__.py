"""`python -m quire`, and so `torchrun -m quire`, is the command."""

from __future__ import annotations

from quire.cli.main import main
from quire.cli.member import leave

if __name__ == "__main__":
    leave(main())
