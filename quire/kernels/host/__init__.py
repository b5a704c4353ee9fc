"""Loops in C++ for a CPU, each the twin of PyTorch operations that are its oracle.

PyTorch's operations each go through memory and take microseconds to be called. Where an algorithm is short
work on each of many rows, as in K-means with few clusters, that is most of the time, and only a loop that
keeps a row in registers is faster. The library is made when Quire is installed (pyproject.toml), and is no
Python module: its functions take addresses. Where there is no compiler it is missing, and everything is
computed by PyTorch.

A loop that is new: one .cpp file here, named in pyproject.toml, and its functions below; a caller beside its
twin in `quire.functional` that asks `library()`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from sysconfig import get_config_var

import torch
from torch import Tensor

VERSION = 3
"""Of the functions' arguments; a library of another version is one that was not made again."""

PLACE, NUMBER, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
FUNCTIONS = {
    # copy.cpp
    "quire_copy": (None, PLACE, NUMBER),
    # host.cpp
    "quire_width": (NUMBER,),
    "quire_limit_width": (None, NUMBER),
    "quire_padded": (NUMBER, NUMBER),
    # mixture.cpp
    "quire_mixture_size": (NUMBER,),
    "quire_mixture": (NUMBER, PLACE),
    # move.cpp
    "quire_has_threads": (NUMBER,),
    "quire_move_size": (NUMBER,),
    "quire_move": (REAL, PLACE, REAL, REAL),
    # nearest.cpp
    "quire_sweep_size": (NUMBER,),
    "quire_aim": (None, PLACE),
    "quire_sweep": (NUMBER, PLACE, NUMBER),
    "quire_total": (None, PLACE),
    # survey.cpp
    "quire_survey": (None, PLACE, NUMBER, NUMBER, NUMBER, NUMBER, PLACE, PLACE, PLACE),
}
"""What each gives, and what it takes."""


@cache
def library() -> ctypes.CDLL | None:
    """The functions, or None where they were not made."""
    path = Path(__file__).with_name(f"_host{get_config_var('EXT_SUFFIX')}")
    try:
        found = ctypes.CDLL(str(path))
        if found.quire_host_version() != VERSION:
            return None
        for name, (result, *arguments) in FUNCTIONS.items():
            getattr(found, name).restype, getattr(found, name).argtypes = result, arguments
    except (OSError, AttributeError):  # missing, of another machine, or of something else
        return None
    return found


def takes(*tensors: Tensor) -> bool:
    """Whether there is a library and these are numbers in memory that it knows."""
    known = (torch.float32, torch.float64)
    return library() is not None and all(t.device.type == "cpu" and t.dtype in known for t in tensors)


def as_rows(x: Tensor) -> Tensor:
    """(N, D) with the numbers of a row side by side, which is all that loops ask of memory."""
    return x if x.stride(1) == 1 else x.contiguous()
