"""The tests of the board need its extra; where it is not installed there is nothing to collect."""

from __future__ import annotations

from importlib.util import find_spec

READY = all(map(find_spec, ("starlette", "uvicorn", "latex2mathml"))) and any(
    map(find_spec, ("httpx2", "httpx"))
)
collect_ignore_glob = [] if READY else ["test_*.py"]
if READY:
    from tests.board.fixtures import client, formulas, runs  # noqa: F401
