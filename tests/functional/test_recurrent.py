"""Recurrent cells against torch.nn's cells and against loops over single numbers; the loop through time."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.errors import InputError
from quire.functional.initialise import orthogonal_
from quire.functional.recurrent import (
    detach_state,
    elman_cell,
    gate_singular_values,
    gru_cell,
    lstm_cell,
    orthogonal_gates_,
    unroll,
    valid_steps,
)

CONVENTIONS = [(reset, keeps) for reset in ("after", "before") for keeps in ("z", "1-z")]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def gradients(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a random weighing of all outputs, the same for equal shapes."""
    generator = torch.Generator().manual_seed(7)
    total = sum((out * torch.randn(out.shape, generator=generator)).sum() for out in outputs)
    assert isinstance(total, Tensor)
    return torch.autograd.grad(total, leaves, retain_graph=True)


CELLS: dict[str, tuple[Any, type[nn.RNNCellBase], dict[str, Any]]] = {
    "tanh": (elman_cell, nn.RNNCell, {}),
    "relu": (partial(elman_cell, nonlinearity="relu"), nn.RNNCell, {"nonlinearity": "relu"}),
    "lstm": (lstm_cell, nn.LSTMCell, {}),
    "gru": (gru_cell, nn.GRUCell, {}),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_equals_torch_in_values_and_gradients(name: str, bias: bool) -> None:
    cell, peer_class, options = CELLS[name]
    peer = peer_class(3, 4, bias=bias, dtype=torch.float64, **options)
    weights = list(peer.parameters())
    x = normal(5, 3).requires_grad_()
    h, c = normal(5, 4).requires_grad_(), normal(5, 4).requires_grad_()
    state = (h, c) if name == "lstm" else h
    mine, theirs = cell(x, state, *weights), peer(x, state)
    as_tuple = [v if isinstance(v, tuple) else (v,) for v in (mine, theirs)]
    torch.testing.assert_close(as_tuple[0], as_tuple[1], rtol=1e-13, atol=1e-13)
    leaves = [x, h, *weights] + ([c] if name == "lstm" else [])
    pairs = zip(gradients(as_tuple[0], leaves), gradients(as_tuple[1], leaves), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def sigma(a: float) -> float:
    return 1 / (1 + math.exp(-a))


def gru_by_hand(x: Tensor, h: Tensor, w: list[Tensor], reset: str, keeps: str) -> Tensor:
    """One sample, number by number: x (D,), h (H,)."""
    size = len(h)

    def at(row: int, of: Tensor, weight: Tensor, bias: Tensor) -> float:
        return sum(weight[row, j].item() * of[j].item() for j in range(len(of))) + bias[row].item()

    def gate(row: int) -> float:
        return sigma(at(row, x, w[0], w[2]) + at(row, h, w[1], w[3]))

    r, z = [gate(i) for i in range(size)], [gate(size + i) for i in range(size)]
    damped = torch.tensor([r[i] * h[i].item() for i in range(size)], dtype=torch.float64)
    new = []
    for i in range(size):
        row = 2 * size + i
        after, before = r[i] * at(row, h, w[1], w[3]), at(row, damped, w[1], w[3])
        recurrent = after if reset == "after" else before
        n = math.tanh(at(row, x, w[0], w[2]) + recurrent)
        share = z[i] if keeps == "z" else 1 - z[i]
        new.append(share * h[i].item() + (1 - share) * n)
    return torch.tensor(new, dtype=torch.float64)


@pytest.mark.parametrize(("reset", "keeps"), CONVENTIONS)
def test_each_convention_of_the_gru_number_by_number(reset: Any, keeps: Any) -> None:
    x, h = normal(3, 2), normal(3, 4)
    w = [normal(12, 2), normal(12, 4), normal(12), normal(12)]
    found = gru_cell(x, h, *w, reset=reset, keeps=keeps)
    by_hand = torch.stack([gru_by_hand(x[n], h[n], w, reset, keeps) for n in range(3)])
    torch.testing.assert_close(found, by_hand, rtol=1e-12, atol=1e-12)
    others = [gru_cell(x, h, *w, reset=r, keeps=k) for r, k in CONVENTIONS if (r, k) != (reset, keeps)]
    assert all((found - other).abs().max() > 1e-3 for other in others)


def test_wrong_conventions_are_named() -> None:
    x, h, w = normal(1, 2), normal(1, 4), (normal(12, 2), normal(12, 4))
    with pytest.raises(InputError, match=r"(?s)unknown place of the reset gate 'befor'.*mean 'before'"):
        gru_cell(x, h, *w, reset="befor")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"(?s)unknown share of the old state 'h'.*1-z, z"):
        gru_cell(x, h, *w, keeps="h")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown activation 'tanhh'"):
        elman_cell(x, h, normal(4, 2), normal(4, 4), nonlinearity="tanhh")


# Through time ---------------------------------------------------------------------------------


def lstm_of(weights: list[Tensor]) -> Any:
    return lambda x, state: lstm_cell(x, state, *weights)


def test_the_loop_equals_torch_over_time() -> None:
    peer = nn.LSTM(3, 4, batch_first=True, dtype=torch.float64)
    x, state = normal(5, 6, 3).requires_grad_(), (normal(5, 4), normal(5, 4))
    weights = list(peer.parameters())
    output, (h, c) = unroll(lstm_of(weights), x, state)
    wanted, (wanted_h, wanted_c) = peer(x, tuple(part[None] for part in state))
    for a, b in ((output, wanted), (h, wanted_h[0]), (c, wanted_c[0])):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    pairs = zip(
        gradients((output, c), [x, *weights]), gradients((wanted, wanted_c[0]), [x, *weights]), strict=True
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_each_sequence_is_run_as_if_alone(kind: str, reverse: bool) -> None:
    gates = {"lstm": 4, "gru": 3}[kind]
    weights = [normal(gates * 4, 3), normal(gates * 4, 4), normal(gates * 4), normal(gates * 4)]
    function: Any = {"lstm": lstm_cell, "gru": gru_cell}[kind]

    def cell(x: Tensor, state: Any) -> Any:
        return function(x, state, *weights)

    x, h, c = normal(4, 6, 3), normal(4, 4), normal(4, 4)
    lengths = [6, 1, 0, 4]
    state: Any = (h, c) if kind == "lstm" else h
    output, last = unroll(cell, x, state, torch.tensor(lengths), reverse=reverse)
    for row, length in enumerate(lengths):
        now: Any = (h[row : row + 1], c[row : row + 1]) if kind == "lstm" else h[row : row + 1]
        wanted = torch.zeros(6, 4, dtype=torch.float64)
        for t in reversed(range(length)) if reverse else range(length):
            now = cell(x[row : row + 1, t], now)
            wanted[t] = (now[0] if kind == "lstm" else now)[0]
        torch.testing.assert_close(output[row], wanted)
        ends = zip(*[(v if kind == "lstm" else (v,)) for v in (last, now)], strict=True)
        for end, expected in ends:
            torch.testing.assert_close(end[row], expected[0])


def test_padding_has_no_effect_even_if_it_is_not_finite() -> None:
    weights = [normal(16, 3).requires_grad_(), normal(16, 4).requires_grad_()]
    x, lengths, state = normal(3, 5, 3), torch.tensor([2, 0, 5]), (normal(3, 4), normal(3, 4))
    bad = torch.where(valid_steps(lengths, x).unsqueeze(-1), x, torch.nan).requires_grad_()
    clean = x.clone().requires_grad_()
    found = []
    for inputs in (clean, bad):
        output, (h, c) = unroll(lstm_of(weights), inputs, state, lengths)
        found.append((output, h, c, *gradients((output, h, c), [inputs, *weights])))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()


def test_no_steps_and_no_sequences() -> None:
    weights, state = [normal(16, 3), normal(16, 4)], (normal(2, 4), normal(2, 4))
    output, last = unroll(lstm_of(weights), normal(2, 0, 3), state)
    assert output.shape == (2, 0, 4)
    assert last is state
    empty = (normal(0, 4), normal(0, 4))
    output, _ = unroll(lstm_of(weights), normal(0, 5, 3), empty, torch.zeros(0, dtype=torch.long))
    assert output.shape == (0, 5, 4)


@pytest.mark.parametrize("lengths", [torch.tensor([1, 2]), torch.tensor([1.0, 2.0, 3.0]), torch.tensor(3)])
def test_lengths_that_fit_no_batch(lengths: Tensor) -> None:
    with pytest.raises(InputError, match=r"(?s)lengths of shape .* and type .*one integer for each of the 3"):
        valid_steps(lengths, normal(3, 5, 2))


def test_a_detached_state_has_the_same_numbers_and_no_history() -> None:
    h, c = normal(2, 3).requires_grad_(), normal(2, 3).requires_grad_()
    for kept, given in zip(detach_state((h * 2, c * 3)), (h * 2, c * 3), strict=True):
        assert torch.equal(kept, given)
        assert not kept.requires_grad
    assert not detach_state(h).requires_grad
    assert h.requires_grad


# Initial weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("gates", [1, 3, 4])
@pytest.mark.parametrize("gain", [1.0, 0.5])
def test_every_gate_is_orthogonal(gates: int, gain: float) -> None:
    weight = nn.Parameter(torch.empty(gates * 6, 6, dtype=torch.float64))
    assert orthogonal_gates_(weight, gain=gain) is weight
    for block in weight.detach().split(6):
        torch.testing.assert_close(block @ block.T, gain**2 * torch.eye(6, dtype=torch.float64))
    torch.testing.assert_close(
        gate_singular_values(weight), torch.full((gates, 6), gain, dtype=torch.float64)
    )
    blocks = weight.detach().split(6)
    assert all((a - b).abs().max() > 1e-3 for a in blocks for b in blocks if a is not b)


def test_an_orthogonal_whole_has_blocks_that_fade() -> None:
    weight = orthogonal_(torch.empty(24, 6, dtype=torch.float64))
    values = gate_singular_values(weight)
    assert values.square().mean().item() == pytest.approx(1 / 4)
    assert values[:, -1].max() < 1


def test_singular_values_of_a_known_matrix() -> None:
    # [[3, 0], [4, 5]] has WᵀW with eigenvalues 45 and 5.
    weight = torch.tensor([[3.0, 0.0], [4.0, 5.0], [0.0, 2.0], [-1.0, 0.0]])
    wanted = torch.tensor([[math.sqrt(45), math.sqrt(5)], [2.0, 1.0]])
    torch.testing.assert_close(gate_singular_values(weight), wanted)
    assert gate_singular_values(weight.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("shape", [(7, 3), (5,), (0, 0)])
def test_weights_without_square_blocks_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"(?s)recurrent weights of shape .*\(G·H, H\).*weight_hh_l0"):
        orthogonal_gates_(torch.empty(shape))


# The sheet ------------------------------------------------------------------------------------


def test_the_proofs_reject_each_wrong_part_by_itself() -> None:
    import quire.sheet.recurrent  # noqa: F401  registers the chapter
    from quire.sheet.registry import ENTRIES, run_proof

    chapter = [entry for _, entry in ENTRIES.items() if entry.chapter == "recurrent"]
    assert len(chapter) >= 8
    for entry in chapter:
        assert entry.verify().passed, entry.verify()
        for place, wrong in enumerate(entry.wrong):
            parts = (*entry.code[:place], wrong, *entry.code[place + 1 :])
            assert run_proof(entry.proof, parts)[0] > entry.tolerance, (entry.id, place)
