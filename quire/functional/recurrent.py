"""Recurrent cells as pure functions, and the loop that carries their state through time.

    Elman  h′ = σ(W_ih x + b_ih + W_hh h + b_hh)
    LSTM   (i, f, g, o) = W_ih x + b_ih + W_hh h + b_hh
           c′ = σ(f)⊙c + σ(i)⊙tanh(g),   h′ = σ(o)⊙tanh(c′)
    GRU    r, z = σ(W_ih x + b_ih + W_hh h + b_hh),   h′ = (1−z)⊙n + z⊙h
           n = tanh(W_in x + b_in + r⊙(W_hn h + b_hn))

Weights are laid out as in torch.nn: the G gates of a cell below each other in weight_ih (G·H, D) and
weight_hh (G·H, H), in the order i, f, g, o and r, z, n. A *step* takes a = W_ih x + b_ih ready-made, because
a loop computes it for all times at once; a *cell* takes x.

B sequences, T steps, D inputs, H hidden units, G gates.

LSTM: S. Hochreiter and J. Schmidhuber (1997), with the forget gate of F. Gers et al. (2000). GRU: K. Cho et
al. (2014), where the reset gate comes before the matrix product; cuDNN and PyTorch apply it after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from quire.errors import InputError, unknown_name
from quire.functional.activations import ACTIVATIONS
from quire.functional.initialise import orthogonal_

State = TypeVar("State", Tensor, tuple[Tensor, Tensor])
"""h of Elman's cell and of the GRU, (h, c) of the LSTM."""

Reset = Literal["after", "before"]
Keeps = Literal["z", "1-z"]


# Cells ----------------------------------------------------------------------------------------


def elman_step(
    a: Tensor, h: Tensor, weight_hh: Tensor, bias_hh: Tensor | None = None, *, nonlinearity: str = "tanh"
) -> Tensor:
    """h′ = σ(a + W_hh h + b_hh) for a = W_ih x + b_ih; (B, H) → (B, H)."""
    return ACTIVATIONS[nonlinearity].function(a + linear(h, weight_hh, bias_hh))


def lstm_step(
    a: Tensor, state: tuple[Tensor, Tensor], weight_hh: Tensor, bias_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """c′ = σ(f)⊙c + σ(i)⊙tanh(g), h′ = σ(o)⊙tanh(c′) for a = W_ih x + b_ih of width 4H."""
    h, c = state
    i, f, g, o = (a + linear(h, weight_hh, bias_hh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_step(
    a: Tensor,
    h: Tensor,
    weight_hh: Tensor,
    bias_hh: Tensor | None = None,
    *,
    reset: Reset = "after",
    keeps: Keeps = "z",
) -> Tensor:
    """The GRU for a = W_ih x + b_ih of width 3H, in four conventions.

    reset="after"   n = tanh(a_n + r⊙(W_hn h + b_hn)), PyTorch's and cuDNN's
    reset="before"  n = tanh(a_n + W_hn (r⊙h) + b_hn), Cho's
    keeps="z"       h′ = (1−z)⊙n + z⊙h, PyTorch's and Cho's
    keeps="1-z"     h′ = z⊙n + (1−z)⊙h
    """
    check_convention(reset, keeps)
    size = h.shape[-1]
    gates, a_n = a.split([2 * size, size], -1)
    if reset == "after":
        b_gates, b_n = linear(h, weight_hh, bias_hh).split([2 * size, size], -1)
        r, z = (gates + b_gates).sigmoid().chunk(2, -1)
        n = torch.tanh(a_n + r * b_n)
    else:
        w_gates, w_n = weight_hh.split([2 * size, size])
        bias_gates, bias_n = (None, None) if bias_hh is None else bias_hh.split([2 * size, size])
        r, z = (gates + linear(h, w_gates, bias_gates)).sigmoid().chunk(2, -1)
        n = torch.tanh(a_n + linear(r * h, w_n, bias_n))
    return n + z * (h - n) if keeps == "z" else h + z * (n - h)


def elman_cell(
    x: Tensor,
    h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    *,
    nonlinearity: str = "tanh",
) -> Tensor:
    """h′ = σ(W_ih x + b_ih + W_hh h + b_hh); x (B, D), h (B, H) → (B, H)."""
    return elman_step(linear(x, weight_ih, bias_ih), h, weight_hh, bias_hh, nonlinearity=nonlinearity)


def lstm_cell(
    x: Tensor,
    state: tuple[Tensor, Tensor],
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(h, c) → (h′, c′), both (B, H), for x (B, D) and weights of the gates i, f, g, o."""
    return lstm_step(linear(x, weight_ih, bias_ih), state, weight_hh, bias_hh)


def gru_cell(
    x: Tensor,
    h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    *,
    reset: Reset = "after",
    keeps: Keeps = "z",
) -> Tensor:
    """x (B, D), h (B, H) → (B, H) for weights of the gates r, z, n, in the conventions of `gru_step`."""
    return gru_step(linear(x, weight_ih, bias_ih), h, weight_hh, bias_hh, reset=reset, keeps=keeps)


def check_convention(reset: str, keeps: str) -> None:
    if reset not in ("after", "before"):
        raise unknown_name("place of the reset gate", reset, ("after", "before"))
    if keeps not in ("z", "1-z"):
        raise unknown_name("share of the old state", keeps, ("z", "1-z"))


# Through time ---------------------------------------------------------------------------------


def unroll(
    cell: Callable[[Tensor, State], State],
    x: Tensor,
    state: State,
    lengths: Tensor | None = None,
    *,
    reverse: bool = False,
) -> tuple[Tensor, State]:
    """state_t = cell(x_t, state_{t−1}) for each step of x (B, T, …): all h_t (B, T, H) and the last state.

    Beyond a sequence's length its state stays and its outputs are zero, so that the last state is the one
    after its own last step, and the first one where the length is 0. In reverse each sequence begins at its
    own last step; outputs stay in the order of x.
    """
    valid = None
    if lengths is not None:
        valid = valid_steps(lengths, x)
        # The state there is discarded, but the gradient would be 0·x: a NaN for anything not finite.
        x = x.masked_fill(~valid.reshape(*valid.shape, *[1] * (x.dim() - 2)), 0)
    outputs = []
    steps = list(enumerate(x.unbind(1)))
    for t, step in reversed(steps) if reverse else steps:
        new = cell(step, state)
        state = new if valid is None else _choose(valid[:, t : t + 1], new, state)
        outputs.append(_hidden(state))
    if not outputs:
        return x.new_zeros(len(x), 0, _hidden(state).shape[-1]), state
    output = torch.stack(outputs[::-1] if reverse else outputs, 1)
    return (output if valid is None else output.masked_fill(~valid.unsqueeze(-1), 0)), state


def valid_steps(lengths: Tensor, x: Tensor) -> Tensor:
    """t < length: True where x (B, T, …) belongs to its sequence, (B, T)."""
    check_lengths(lengths, x)
    return torch.arange(x.shape[1], device=x.device) < lengths.to(x.device).unsqueeze(-1)


def check_lengths(lengths: Tensor, x: Tensor) -> None:
    if lengths.shape != x.shape[:1] or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise InputError(
            f"lengths of shape {tuple(lengths.shape)} and type {lengths.dtype}".replace("torch.", ""),
            expected=f"one integer for each of the {x.shape[0]} sequences",
            fix="give lengths as an integer tensor (B,)",
        )


def _hidden(state: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return state if isinstance(state, Tensor) else state[0]


def _choose(condition: Tensor, new: State, old: State) -> State:
    if isinstance(new, Tensor):
        return torch.where(condition, new, old)
    return torch.where(condition, new[0], old[0]), torch.where(condition, new[1], old[1])


def detach_state(state: State) -> State:
    """The same numbers without their history: gradients of truncated backpropagation end here."""
    if isinstance(state, Tensor):
        return state.detach()
    return state[0].detach(), state[1].detach()


# Initial weights ------------------------------------------------------------------------------


def orthogonal_gates_(
    weight_hh: Tensor, *, gain: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Fill each gate's H×H block of weight_hh (G·H, H) with gain times an orthogonal matrix.

    Blocks and not the whole: one orthogonal (G·H, H) matrix has blocks of size 1/√G, through which a state
    fades.
    """
    for block in gate_blocks(weight_hh):
        orthogonal_(block, gain=gain, generator=generator)
    return weight_hh


def gate_singular_values(weight_hh: Tensor) -> Tensor:
    """Singular values of each gate's H×H block of weight_hh (G·H, H), largest first: (G, H)."""
    blocks = gate_blocks(weight_hh)
    wide = blocks if blocks.dtype == torch.float64 else blocks.float()  # there is no half-precision SVD
    return torch.linalg.svdvals(wide)


def gate_blocks(weight_hh: Tensor) -> Tensor:
    """weight_hh (G·H, H) as a view (G, H, H), without history."""
    rows, size = weight_hh.shape if weight_hh.dim() == 2 else (0, 0)
    if not size or rows % size:
        raise InputError(
            f"recurrent weights of shape {tuple(weight_hh.shape)}",
            expected="G gates of H×H below each other, (G·H, H)",
            fix="give weight_hh_l0 of a recurrent layer",
        )
    return weight_hh.detach().view(-1, size, size)
