"""Several processes of a test's own: each calls `main` of a module, with its number."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

Found = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors and facts of a run."""
PATIENCE = 400
"""Seconds, on a machine that has much else to do."""


def together(module: str, path: Path, count: int, *arguments: Any) -> None:
    """`main(path, number, *arguments)` of `module` in `count` processes at once. All must come to their end;
    none is left behind."""
    started = []
    for number in range(count):
        call = f"main(Path({str(path)!r}), {number}, *{arguments!r})"
        # What is imported stays, and need not be looked at whenever garbage is collected. At the end not
        # Python's own, which threads of PyTorch's that are still there may turn into an abort.
        imports = f"import gc, os; from pathlib import Path; from {module} import main"
        code = f"{imports}; gc.freeze(); {call}; os._exit(0)"
        started.append(subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True))
    try:
        problems = [process.communicate(timeout=PATIENCE)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * count, "\n".join(problems)


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` has filled: once, however many test processes ask for it. They only read it."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    path, done = root / name, root / f"{name}.done"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
            make(path)
            done.touch()
    return path


def write(path: Path, found: Mapping[str, Found], number: int) -> None:
    """What process `number` has found, by names."""
    for name, (tensors, facts) in found.items():
        save_file(tensors, path / f"{name} {number}.safetensors")
        (path / f"{name} {number}.json").write_text(json.dumps(facts))


def read(path: Path, name: str, number: int) -> Found:
    facts = json.loads((path / f"{name} {number}.json").read_text())
    return load_file(path / f"{name} {number}.safetensors"), facts
