"""BLEU (Papineni, Roukos, Ward and Zhu 2002): how much of a translation stands in a reference.

N candidates, each with one or more references; K the longest n-grams that are counted, 4 in the paper.

    BLEU = min(1, exp(1 − r/c)) · exp(1/K Σ_n log p_n),    p_n = matches_n / totals_n

totals_n counts the n-grams of all candidates. matches_n counts those that a reference has as well, each at
most as often as the reference that has it most often (clipping). c is the length of all candidates together,
and r adds up, for each candidate, the length of the reference that is closest to it, the shorter one of two.

Nothing but these 2K + 2 whole numbers is needed, and they add up: a corpus may be counted in parts, and is
divided once. The mean of sentences' scores is something else. Scores are between 0 and 1, not 0 and 100.

Tokens are token numbers, or words; which tokens a text has decides the score, so only scores of the same
tokens can be compared. n-grams longer than every candidate are left out of the mean, where the paper's
formula would be 0/0.

A corpus where no 4-gram matches scores 0. With single sentences that is often so, and counts are smoothed:

    "add-one"   (matches_n + 1) / (totals_n + 1) for n > 1 (Lin and Och 2004)
    "halving"   1/2, 1/4, … matches in the first, second, … order that has none (NIST's mteval)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.errors import InputError, unknown_name

Tokens = Sequence[Hashable] | Tensor
SMOOTHINGS = ("none", "add-one", "halving")


def n_grams(tokens: Tokens, n: int) -> Counter[tuple[Hashable, ...]]:
    """How often each run of n tokens stands in `tokens`."""
    words = _words("n_grams", tokens)
    return Counter(zip(*(words[i:] for i in range(n)), strict=False))


def bleu_statistics(
    candidates: Sequence[Tokens] | Tensor, references: Sequence[Sequence[Tokens]], max_order: int = 4
) -> Tensor:
    """(matches_1 … matches_K, totals_1 … totals_K, c, r), int64 on the CPU; `references[i]` are all those of
    `candidates[i]`."""
    if len(candidates) != len(references):
        raise InputError(
            f"bleu of {len(candidates)} candidates and {len(references)} lists of references",
            expected="one list of references for each candidate",
            fix="give [[first, second], …]: references[i] holds the references of candidates[i]",
        )
    if max_order < 1:
        raise InputError(f"max_order is {max_order}", expected="at least 1", fix="leave it at 4")
    matches, totals = [0] * max_order, [0] * max_order
    candidate_length = reference_length = 0
    for i, candidate in enumerate(candidates):
        words = _words("bleu", candidate)
        if isinstance(references[i], str) or not len(references[i]):
            raise InputError(
                f"references {references[i]!r} of candidate {i}",
                expected="a list of one or more references",
                fix="leave candidates without a reference out",
            )
        others = [_words("bleu", reference) for reference in references[i]]
        candidate_length += len(words)
        reference_length += min((len(other) for other in others), key=lambda n: (abs(n - len(words)), n))
        for n in range(1, min(max_order, len(words)) + 1):
            found = n_grams(words, n)
            most: Counter[tuple[Hashable, ...]] = Counter()
            for other in others:
                most |= n_grams(other, n)
            matches[n - 1] += (found & most).total()
            totals[n - 1] += found.total()
    return torch.tensor([*matches, *totals, candidate_length, reference_length])


def bleu_from_statistics(statistics: Tensor, smoothing: str = "none") -> Tensor:
    """The score of summed `bleu_statistics`, a float64 scalar on their device."""
    if smoothing not in SMOOTHINGS:
        raise unknown_name("smoothing", smoothing, SMOOTHINGS)
    if statistics.dim() != 1 or len(statistics) < 4 or len(statistics) % 2:
        raise InputError(
            f"statistics of shape {tuple(statistics.shape)}",
            expected="K matches, K totals and the lengths c and r, (2K + 2,)",
            fix="add up what bleu_statistics gives, batch by batch",
        )
    order = len(statistics) // 2 - 1
    counts = statistics.double()
    matches, totals = counts[:order].clone(), counts[order:-2].clone()
    candidate_length, reference_length = counts[-2], counts[-1]
    something = matches.sum() > 0
    if smoothing == "add-one":
        matches[1:] += 1
        totals[1:] += 1
    elif smoothing == "halving":
        none = (matches == 0) & (totals > 0)
        matches = torch.where(none, 0.5 ** none.cumsum(0), matches)
    counted = totals > 0
    # log 0 = −∞ is meant: one order without a match and no smoothing make the score 0.
    logs = torch.where(counted, (matches / totals.clamp(min=1)).log(), 0.0)
    mean = logs.sum() / counted.sum().clamp(min=1)
    brevity = (1 - reference_length / candidate_length.clamp(min=1)).clamp(max=0)
    return torch.where(something, (brevity + mean).exp(), 0.0)


def bleu(
    candidates: Sequence[Tokens] | Tensor,
    references: Sequence[Sequence[Tokens]],
    max_order: int = 4,
    *,
    smoothing: str = "none",
) -> Tensor:
    """BLEU of a corpus: counts are added over all sentences, then divided."""
    return bleu_from_statistics(bleu_statistics(candidates, references, max_order), smoothing)


def sentence_bleu(
    candidate: Tokens, references: Sequence[Tokens], max_order: int = 4, *, smoothing: str = "add-one"
) -> Tensor:
    """BLEU of one sentence, smoothed."""
    return bleu([candidate], [references], max_order, smoothing=smoothing)


def _words(name: str, tokens: Any) -> list[Hashable]:
    """A list of hashable tokens: numbers of a tensor compare by identity, so they become plain ones."""
    if isinstance(tokens, Tensor):
        tokens = tokens.tolist()
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise InputError(
            f"{name} of {tokens!r}",
            expected="a sequence of tokens",
            fix='split text into words: "the cat".split(); a single reference is a list of one',
        )
    return list(tokens)
