"""Triton kernels, each the twin of a plain PyTorch form in `quire.functional`, which is its oracle.

This file imports without Triton, and says whether a kernel can run; the files beside it need Triton.
"""

from __future__ import annotations

import sys
from typing import Literal, get_args

import torch
from torch import Tensor

from quire.errors import InputError, unknown_name

Backend = Literal["auto", "torch", "triton"]
BACKENDS = get_args(Backend)


def refusal(*tensors: Tensor) -> str:
    """Why no kernel can take these tensors: "a tensor on cpu", …, or "" where one can."""
    for tensor in tensors:
        if tensor.device.type != "cuda" and not _interpreted():
            return f"a tensor on {tensor.device.type}"
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"a tensor of type {tensor.dtype}"
    return "" if _has_triton() else "no Triton"


def use_triton(backend: str, reason: str, *, worth: bool = True, takes: str = "") -> bool:
    """Whether `backend` means the kernel; "auto" does where nothing speaks against it and it is worth it.

    `reason` is why the kernel cannot be used, "" if it can; with "triton" it becomes the error. `takes` is
    what the kernel asks for besides its tensors' types.
    """
    if backend not in BACKENDS:
        raise unknown_name("backend", backend, BACKENDS)
    if backend == "triton" and reason:
        raise InputError(
            f"{reason} with backend='triton'",
            expected="Triton, and float32, bfloat16 or float16 tensors on a CUDA device" + takes,
            fix="use backend='auto', which takes PyTorch's operations where the kernel cannot run",
        )
    return backend == "triton" or (backend == "auto" and worth and not reason)


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def _interpreted() -> bool:
    """Triton's interpreter runs kernels on the CPU, to be tested; Triton is not imported to find out."""
    if torch.compiler.is_compiling():  # the settings of Triton cannot be traced
        return False
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)
