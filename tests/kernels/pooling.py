"""Where the pooling kernels can run, and how they are compared with float64."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor


def device() -> str:
    """CUDA, or the CPU where Triton interprets its kernels (TRITON_INTERPRET=1); else the test is skipped."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return "cuda"
    if not sys.modules["triton"].knobs.runtime.interpret:
        pytest.skip("needs a CUDA device, or Triton's interpreter")
    return "cpu"


def one_tile(monkeypatch: pytest.MonkeyPatch, *tuners: Any, tile: int = 0) -> None:
    """Take one tile instead of measuring all: compiling or interpreting each would take minutes."""
    for tuner in tuners:
        monkeypatch.setattr(tuner, "configs", [tuner.configs[tile]])
        monkeypatch.setattr(tuner, "cache", {})


def against_double(
    ours: Callable[..., Tensor],
    exact: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    tolerance: float,
    gradient_tolerance: float | None = None,
) -> None:
    """Values and all gradients, relative to the largest of each; the same bits when computed again."""
    given = [t.detach().requires_grad_() for t in inputs]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    found, wanted = ours(*given), exact(*wide)
    assert found.shape == wanted.shape
    assert found.dtype == inputs[2].dtype
    close(found, wanted, tolerance)
    factor = torch.randn_like(wanted)
    gradients = torch.autograd.grad(found, given, factor.to(found.dtype))
    for mine, theirs in zip(gradients, torch.autograd.grad(wanted, wide, factor), strict=True):
        assert mine.dtype == given[0].dtype
        close(mine, theirs, gradient_tolerance or tolerance)
    again = torch.autograd.grad(ours(*given), given, factor.to(found.dtype))
    assert all(torch.equal(one, other) for one, other in zip(gradients, again, strict=True))


def close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Relative to the largest of `wanted`, or absolute where all of it is 0."""
    assert found.isfinite().all()
    scale = wanted.detach().abs().max().item() or 1.0
    assert (found.detach().double() - wanted).abs().max() <= tolerance * scale


def unseen_are_zero(pool: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    """Queries that see no key give zeros, and no gradient goes to or from them; of queries (2, 5, D)."""
    given = [t.requires_grad_() for t in inputs]
    lengths = torch.tensor([[4, 0, 9, 0, 1], [0] * 5], device=device())
    out = pool(*given, lengths=lengths, backend="triton")
    gradients = torch.autograd.grad(out.square().sum() + out.sum(), given)
    assert (out[lengths == 0] == 0).all()
    assert (out[lengths > 0] != 0).all()
    assert (gradients[0][lengths == 0] == 0).all()
    for gradient in gradients[:3]:
        assert gradient.isfinite().all()
        assert (gradient[1] == 0).all()
        assert (gradient[0] != 0).any()
