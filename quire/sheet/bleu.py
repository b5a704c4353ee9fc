"""Chapter 23: BLEU, against cases solved by hand and a counter that compares every pair of n-grams."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.functional import bleu_score as B
from quire.sheet.registry import entry, gap, worst

Code = Callable[..., Any]
Sentence = list[int]


def _explicit(candidates: list[Sentence], references: list[list[Sentence]]) -> float:
    """Each n-gram of a candidate crosses out an equal one, in the reference that has most of them."""
    log_precision = 0.0
    for n in range(1, 5):
        matches = totals = 0
        for candidate, own in zip(candidates, references, strict=True):
            windows = [candidate[i : i + n] for i in range(len(candidate) - n + 1)]
            totals += len(windows)
            for i, window in enumerate(windows):
                earlier = sum(other == window for other in windows[:i])
                in_reference = max(
                    sum(reference[j : j + n] == window for j in range(len(reference) - n + 1))
                    for reference in own
                )
                matches += earlier < in_reference
        if matches == 0:
            return 0.0
        log_precision += math.log(matches / totals) / 4
    length = closest = 0
    for candidate, own in zip(candidates, references, strict=True):
        length += len(candidate)
        best = len(own[0])
        for reference in own:
            distance = abs(len(reference) - len(candidate))
            if (distance, len(reference)) < (abs(best - len(candidate)), best):
                best = len(reference)
        closest += best
    return math.exp(min(0.0, 1 - closest / length) + log_precision)


def _corpus(sentences: int = 12, words: int = 6) -> tuple[list[Sentence], list[list[Sentence]]]:
    """Candidates that share stretches with references, of which each has one to three."""

    def draw(low: int, high: int) -> Sentence:
        length = int(torch.randint(low, high, ()))
        return torch.randint(0, words, (length,)).tolist()

    candidates, references = [], []
    for i in range(sentences):
        common = draw(3, 8)
        candidates.append(draw(0, 3) + common + draw(0, 4))
        references.append([draw(0, 5) + common + draw(0, 5) for _ in range(1 + i % 3)])
    return candidates, references


def _without_clipping(candidates: list[Sentence], references: list[list[Sentence]], order: int = 4) -> Tensor:
    """An n-gram counts each time, however often a reference has it: "the the the" is perfect."""
    counts = B.bleu_statistics(candidates, references, order)
    for n in range(1, order + 1):
        known = [set().union(*(B.n_grams(other, n) for other in own)) for own in references]
        found = [B.n_grams(candidate, n) for candidate in candidates]
        counts[n - 1] = sum(
            times
            for grams, there in zip(found, known, strict=True)
            for gram, times in grams.items()
            if gram in there
        )
    return counts


@entry(
    "measure/bleu",
    "BLEU",
    r"\mathrm{BLEU} = \min\left(1, e^{1 - r/c}\right) \exp\left(\tfrac14 \sum_{n=1}^{4} \log p_n\right), "
    r"\quad p_n = \frac{\sum_{y} \sum_{g \in y} \min\left(\#_y(g), \max_{y^*} \#_{y^*}(g)\right)}"
    r"{\sum_{y} \sum_{g \in y} \#_y(g)}",
    code=(B.bleu_statistics, B.bleu_from_statistics, B.sentence_bleu),
    wrong=(_without_clipping, B.bleu_from_statistics, B.sentence_bleu),
    tolerance=1e-12,
)
def _bleu(statistics: Code, score: Code, sentence: Code) -> float:
    errors = []
    # "the" seven times against two: matches 2 of 7, six pairs without a match, and no penalty for 7 > 6.
    the, cat, on, mat, sat = range(5)
    counts = statistics([[the] * 7], [[[the, cat, sat, on, the, mat]]])
    errors.append(gap(counts, torch.tensor([2, 0, 0, 0, 7, 6, 5, 4, 7, 6])))
    # One word is missing at the end of six: all n-grams match, and the penalty exp(1 − 6/5) is left.
    counts = statistics([[the, cat, sat, on, the]], [[[the, cat, sat, on, the, mat]]])
    errors.append(gap(score(counts), math.exp(-0.2)))
    # Half of the words, one of three pairs: √(1/2 · 1/3).
    counts = statistics([[the, cat, on, mat]], [[[the, cat, sat, sat]]], 2)
    errors.append(gap(score(counts), math.sqrt(1 / 6)))
    # (2/3 · (1 + 1)/(2 + 1) · (0 + 1)/(1 + 1) · 1)^¼ by adding one from pairs on.
    smoothed = sentence([the, cat, on], [[the, cat, sat]])
    errors.append(gap(smoothed, (2 / 3 * 2 / 3 * 1 / 2) ** 0.25))
    for _ in range(5):
        candidates, references = _corpus()
        whole = statistics(candidates, references)
        parts = statistics(candidates[:5], references[:5]) + statistics(candidates[5:], references[5:])
        errors += [gap(parts, whole), gap(score(whole), _explicit(candidates, references))]
    return worst(*errors)
