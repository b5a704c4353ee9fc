"""Data: readers, built-in sets, preparation, splits and batches. Names load on first use."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "batch": ("Batch", "Data", "TensorData", "epoch_order"),
    "builtin": ("BUILTIN",),
    "load": ("TableData", "load_table"),
    "preparation": ("Preparation", "PrepareInputs", "Prepared"),
    "readers": ("read_table",),
    "splits": ("split_rows",),
    "table": ("Table", "from_dataframe", "table_from_arrays"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return importlib.import_module(f"quire.data.{name}")
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"quire.data.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'quire.data' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, *_HOMES]
