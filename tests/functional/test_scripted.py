"""Loops that run as scripts do what they do as Python."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.functional.mixture_chunks import DIAG, FULL, SPHERICAL, TIED, sweep_chunks
from quire.functional.scripted import scripted


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def test_a_function_becomes_a_script_once_and_can_be_called_as_before() -> None:
    again = scripted(doubled)
    assert again(torch.ones(2)).tolist() == [2, 2]
    program = again._program
    assert isinstance(program, torch.jit.ScriptFunction)
    again(torch.ones(2))
    assert again._program is program


def test_what_cannot_be_a_script_is_called_as_it_is() -> None:
    def odd(x: Tensor) -> dict[object, object]:
        return {x: {1, "two"}}

    x = torch.ones(1)
    again = scripted(odd)
    assert list(again(x)) == [x]
    assert again._program is odd


@pytest.mark.parametrize("kind", [FULL, DIAG, SPHERICAL, TIED])
@pytest.mark.parametrize("starts", [1, 2])
def test_the_loop_of_mixtures_is_a_script_and_gives_what_python_gives(kind: int, starts: int) -> None:
    torch.manual_seed(kind)
    size = 4
    width = {FULL: 10, DIAG: 7, SPHERICAL: 5, TIED: 4}[kind]
    x, theta = torch.randn(23, size - 1), 0.1 * torch.randn(3 * starts, width, dtype=torch.float64)
    shift = torch.randn(size - 1, dtype=torch.float64)
    scale = torch.eye(size - 1).double() * 1.5 if kind in (FULL, TIED) else torch.full_like(shift, 1.5)
    arguments = x, shift, scale, theta, starts, kind, 10
    found, wanted = sweep_chunks(*arguments), sweep_chunks.function(*arguments)
    assert isinstance(sweep_chunks._program, torch.jit.ScriptFunction)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
