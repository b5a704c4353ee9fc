"""A client that asks the board as a browser on this machine would, and runs for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from quire.board.app import Board, application
from quire.board.worker import Worker
from tests.board.making import Client, finished, make_run


@pytest.fixture(scope="session")
def formulas() -> Iterator[Worker]:
    """One process with PyTorch for all tests, as it takes seconds to start: when it is first asked."""
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture
def client(formulas: Worker) -> Iterator[Client]:
    """A client of a board over a folder; what it started is ended."""
    boards: list[Board] = []

    def make(root: Path) -> TestClient:
        boards.append(Board(root))
        boards[-1].formulas = formulas
        return TestClient(
            application(boards[-1]), base_url="http://127.0.0.1:8765", raise_server_exceptions=False
        )

    yield make
    for made in boards:
        made.doctor.close()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with a finished run, an interrupted one, and one that trains just now."""
    root = tmp_path / "runs"
    make_run(root, "alpha", day=1, lr=0.1, result=finished(0.9))
    make_run(root, "beta", day=2, lr=0.01, recipe="resnet", result=finished(0.8, stopped="interrupted"))
    make_run(root, "gamma", day=3, lr=0.001)
    return root
