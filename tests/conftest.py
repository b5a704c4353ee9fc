"""One thread a test process: the suite runs a process per core, and more threads than cores only wait."""

from __future__ import annotations

import gc

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What is imported and collected stays to the end: whoever collects garbage need not look at it again."""
    gc.collect()
    gc.freeze()
