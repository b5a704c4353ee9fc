"""From logits to tokens: temperature, top-k, top-p, a draw, the best token, and beam search.

    p_τ(v) = exp(a_v/τ) / Σ_u exp(a_u/τ)

Filters are pure functions from logits to logits: what is filtered out becomes −∞, so that they chain.

B rows, V tokens of the vocabulary, K beams, W of them alive; `logits` are (…, V).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from quire.errors import InputError

State = TypeVar("State")


def temperature(logits: Tensor, value: float) -> Tensor:
    """a/τ: below 1 sharper, above 1 flatter; at 0 only the best token is left."""
    if not 0 <= value < math.inf:
        raise InputError(
            f"temperature {value}", expected="a number >= 0", fix="take 0 for the best token, 1 for no change"
        )
    if value == 0:
        return torch.full_like(logits, -torch.inf).scatter(-1, greedy(logits).unsqueeze(-1), 0.0)
    return logits / value


def top_k(logits: Tensor, k: int) -> Tensor:
    """The k best logits; the others −∞. Whatever equals the k-th best stays as well."""
    if k < 1:
        raise InputError(
            f"top_k of {k}", expected="an integer >= 1", fix="leave top_k out to keep all tokens"
        )
    if k >= logits.shape[-1]:
        return logits
    least = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def top_p(logits: Tensor, p: float) -> Tensor:
    """The fewest of the best tokens whose probabilities reach p; the others −∞. The best always stays.

    Among equal logits the earlier token of the vocabulary goes first.
    """
    if not 0 < p <= 1:
        raise InputError(f"top_p of {p}", expected="a number in (0, 1]", fix="leave top_p out to keep all")
    if p == 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probability = ordered.softmax(-1, dtype=full_precision(logits))
    # A token goes when those before it reach p already; before the best there is nothing.
    gone = probability.cumsum(-1) - probability >= p
    gone[..., 0] = False
    return logits.masked_fill(torch.zeros_like(gone).scatter(-1, order, gone), -torch.inf)


def greedy(logits: Tensor) -> Tensor:
    """argmax_v a_v, the first of equals: (…, V) → (…)."""
    return logits.argmax(-1)


_scale, _keep_best, _keep_mass = temperature, top_k, top_p  # under names that options do not hide


def filter_logits(
    logits: Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """The logits after temperature, then top-k, then top-p."""
    if temperature != 1:
        logits = _scale(logits, temperature)
    if top_k is not None:
        logits = _keep_best(logits, top_k)
    return logits if top_p is None else _keep_mass(logits, top_p)


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A token from each row of logits, (…, V) → (…), after temperature, top-k and top-p.

    A temperature of 0 takes the best and draws nothing. A logit of −∞ is never drawn; each row needs another.
    """
    kept = filter_logits(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    if temperature == 0:
        return greedy(kept)
    probability = kept.softmax(-1, dtype=full_precision(kept))
    # On a GPU the same check would wait for the device; its kernel asserts instead.
    if probability.device.type == "cpu" and probability.isnan().any():
        raise InputError(
            "logits with NaN, or a row of nothing but −∞",
            expected="at least one finite logit in each row, and no NaN",
            fix="allow at least one token in each row",
        )
    rows = probability.reshape(-1, probability.shape[-1])
    return torch.multinomial(rows, 1, generator=generator).reshape(logits.shape[:-1])


def full_precision(logits: Tensor) -> torch.dtype:
    """float32, or float64 if the logits are."""
    return torch.promote_types(logits.dtype, torch.float32)


# Beam search ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hypothesis:
    """A sequence, its log p(y), and the score that ranks it."""

    tokens: tuple[int, ...]
    """Without the start token; with the end token if the sequence ended."""
    log_probability: float
    score: float


@torch.no_grad()
def beam_search(
    step: Callable[[Tensor, State], tuple[Tensor, State]],
    state: State,
    start: Tensor,
    *,
    beams: int,
    steps: int,
    end: int,
    select: Callable[[State, Tensor], State],
    length_penalty: float = 0.0,
) -> list[list[Hypothesis]]:
    """The best sequences by log p(y) / |y|^α that the search meets: up to `beams` for each row, best first.

    `step(tokens, state)` takes the last tokens (R,) and gives the logits (R, V) of the next and a new state;
    `state` and `start` (B,) hold B rows, and `select(state, rows)` picks rows of a state, some of them
    several times. A sequence ends with the token `end` or after `steps` tokens, and |y| counts its tokens.

    In each step the K best continuations by log p are looked at; those that end are put aside, and the search
    goes on with the K best that do not, until none of them can beat what lies aside. α is `length_penalty`:
    with 0 one beam is greedy decoding. With K ≥ V^(steps−1) the search is exhaustive for any α.
    """
    _check_search(beams, steps, length_penalty, start)
    batch, tokens = len(start), start
    offsets = torch.arange(batch, device=start.device).unsqueeze(1)
    aside: list[list[Hypothesis]] = [[] for _ in range(batch)]
    paths: list[list[tuple[int, ...]]] = [[()] for _ in range(batch)]
    totals = torch.zeros(batch, 1, dtype=torch.float32, device=start.device)
    for length in range(1, steps + 1):
        logits, state = step(tokens, state)
        width, last = totals.shape[1], length == steps
        each = logits.log_softmax(-1, dtype=full_precision(logits)).view(batch, width, -1)
        vocabulary = each.shape[-1]
        joint = totals.unsqueeze(-1) + each  # (B, W, V)
        best, places = joint.flatten(1).topk(min(beams, width * vocabulary))
        for row, found in enumerate(zip(best.tolist(), places.tolist(), strict=True)):
            for total, place in zip(*found, strict=True):
                origin, token = divmod(place, vocabulary)
                if (token == end or last) and total > -math.inf:
                    path = (*paths[row][origin], token)
                    aside[row].append(Hypothesis(path, total, total / length**length_penalty))
            aside[row] = sorted(aside[row], key=lambda one: -one.score)[:beams]
        if last or vocabulary == 1:
            break
        joint[:, :, end] = -torch.inf
        totals, places = joint.flatten(1).topk(min(beams, width * (vocabulary - 1)))
        # A sum of logarithms only falls, and the longest sequence is divided by the most.
        hopes = (totals[:, 0] / steps**length_penalty).tolist()
        if all(
            len(one) == beams and one[-1].score >= hope for one, hope in zip(aside, hopes, strict=True)
        ) or all(hope == -math.inf for hope in hopes):
            break
        origins, words = places // vocabulary, places % vocabulary
        paths = [
            [(*paths[row][origin], word) for origin, word in zip(*beam, strict=True)]
            for row, beam in enumerate(zip(origins.tolist(), words.tolist(), strict=True))
        ]
        state = select(state, (offsets * width + origins).flatten())
        tokens = words.flatten()
    return aside


def _check_search(beams: int, steps: int, length_penalty: float, start: Tensor) -> None:
    for name, value in (("beams", beams), ("steps", steps)):
        if value < 1:
            raise InputError(
                f"{name} is {value}", expected="an integer >= 1", fix=f"set {name} to at least 1"
            )
    if not 0 <= length_penalty < math.inf:
        raise InputError(
            f"length_penalty {length_penalty}", expected="a number >= 0", fix="take 0 to rank by log p alone"
        )
    if start.dim() != 1:
        raise InputError(
            f"start tokens of shape {tuple(start.shape)}",
            expected="one token for each row, of shape (B,)",
            fix="give torch.full((B,), begin)",
        )
