"""One of several processes that train together, as the command sees it; nothing heavy is imported for it."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

MEMBER = "--member"
"""NUMBER COUNT MEETING before the recipe: what `quire train` starts its own processes with."""


def leave(code: int) -> NoReturn:
    """End this process. One of several does so without Python's own end: while that takes things apart,
    threads of PyTorch's may let go of objects of Python, and are then aborted with all that was done."""
    if MEMBER not in sys.argv and "WORLD_SIZE" not in os.environ:  # which torchrun sets
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
