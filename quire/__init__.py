"""Quire: deep learning from the formula sheet.

Attributes load on first use, so that `import quire` and the command's help cost nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = (
    "backprop",
    "data",
    "doctor",
    "estimators",
    "functional",
    "models",
    "nn",
    "report",
    "sheet",
    "tasks",
    "train",
    "tuning",
)
_NAMES = {"fit": "quire.train", "load": "quire.runs"}
__all__ = ["__version__", *_MODULES, *_NAMES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"quire.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'quire' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
