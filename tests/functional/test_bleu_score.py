"""BLEU by hand, by an explicit counter, and against sacrebleu and NLTK where they are installed."""

from __future__ import annotations

import math
import random

import pytest
import torch

from quire.errors import InputError
from quire.functional.bleu_score import bleu, bleu_from_statistics, bleu_statistics, n_grams, sentence_bleu


def corpus(seed: int, sentences: int = 20, words: int = 8, shortest: int = 0):
    draw = random.Random(seed)
    candidates, references = [], []
    for _ in range(sentences):
        base = [draw.randrange(words) for _ in range(draw.randint(max(shortest, 1), 14))]
        candidate = [draw.randrange(words) if draw.random() < 0.2 else word for word in base]
        candidates.append(candidate[: max(shortest, draw.randint(0, 14))])
        own = []
        for _ in range(3):
            reference = [draw.randrange(words) if draw.random() < 0.3 else word for word in base]
            own.append(reference + [draw.randrange(words)] * draw.randint(0, 3))
        references.append(own)
    return candidates, references


def explicit_counts(candidates, references, order=4):
    """Every candidate n-gram looks for an equal one that is not taken yet, reference by reference."""
    matches, totals, length, closest = [0] * order, [0] * order, 0, 0
    for candidate, own in zip(candidates, references, strict=True):
        length += len(candidate)
        lengths = sorted(len(reference) for reference in own)
        closest += min(lengths, key=lambda n: abs(n - len(candidate)))  # the first, so the shorter
        for n in range(1, order + 1):
            windows = [tuple(candidate[i : i + n]) for i in range(len(candidate) - n + 1)]
            totals[n - 1] += len(windows)
            for gram in set(windows):
                most = 0
                for reference in own:
                    there = [tuple(reference[i : i + n]) for i in range(len(reference) - n + 1)]
                    most = max(most, there.count(gram))
                matches[n - 1] += min(windows.count(gram), most)
    return [*matches, *totals, length, closest]


def explicit_score(counts, order=4):
    matches, totals, (length, closest) = counts[:order], counts[order:-2], counts[-2:]
    product = 1.0
    for match, total in zip(matches, totals, strict=True):
        product *= match / total
    penalty = 1.0 if length > closest else math.exp(1 - closest / length)
    return penalty * product ** (1 / order)


@pytest.mark.parametrize("seed", range(5))
def test_counts_and_score_equal_an_explicit_loop(seed):
    candidates, references = corpus(seed)
    counts = bleu_statistics(candidates, references)
    assert counts.dtype == torch.int64
    assert counts.tolist() == explicit_counts(candidates, references)
    assert bleu(candidates, references).item() == pytest.approx(explicit_score(counts.tolist()), rel=1e-12)


PAPER = (
    "It is a guide to action that ensures that the military will forever heed Party commands",
    "It is the guiding principle which guarantees the military forces always being under the command of the "
    "Party",
    "It is the practical guide for the army always to heed the directions of the party",
)


def test_the_examples_of_the_paper():
    references = [["the", "cat", "is", "on", "the", "mat"], ["there", "is", "a", "cat", "on", "the", "mat"]]
    counts = bleu_statistics([["the"] * 7], [references])
    assert counts.tolist() == [2, 0, 0, 0, 7, 6, 5, 4, 7, 7], "a unigram precision of 2/7"
    first = "It is a guide to action which ensures that the military always obeys the commands of the party"
    second = "It is to insure the troops forever hearing the activity guidebook that party direct"
    references = [text.split() for text in PAPER]
    good = bleu_statistics([first.split()], [references])
    bad = bleu_statistics([second.split()], [references])
    assert (good[0].item(), good[4].item()) == (17, 18)
    assert (bad[0].item(), bad[4].item()) == (8, 14)
    assert (good[1].item(), good[5].item()) == (10, 17)
    assert (bad[1].item(), bad[5].item()) == (1, 13)


def test_solved_by_hand():
    # All n-grams match and a word of six is missing.
    assert bleu([[1, 2, 3, 4, 5]], [[[1, 2, 3, 4, 5, 6]]]).item() == pytest.approx(math.exp(-1 / 5))
    # A word too many costs precision alone: 4/5, 3/4, 2/3, 1/2.
    assert bleu([[1, 2, 3, 4, 9]], [[[1, 2, 3, 4]]]).item() == pytest.approx((1 / 5) ** 0.25)
    assert bleu([[1, 2, 3, 4]], [[[1, 2, 3, 4]]]).item() == 1
    # No reference of this length; 3 and 5 are as close, and the shorter one counts.
    assert bleu_statistics([[1] * 4], [[[1] * 5, [1] * 3]])[-1] == 3
    assert bleu_statistics([[1] * 4], [[[1] * 3, [1] * 5]])[-1] == 3
    # Clipped by the reference that has most of it, not by their sum.
    assert bleu_statistics([[7, 7, 7, 7]], [[[7, 7], [7, 7, 7, 0]]], 1).tolist() == [3, 4, 4, 4]


def test_words_tensors_and_numbers_are_the_same():
    words = [["a", "b", "a", "c", "b"]], [[["a", "b", "a", "c"]]]
    numbers = [[0, 1, 0, 2, 1]], [[[0, 1, 0, 2]]]
    tensors = torch.tensor(numbers[0]), [[torch.tensor(numbers[1][0][0])]]
    assert bleu(*words) == bleu(*numbers) == bleu(*tensors) > 0
    assert n_grams(torch.tensor([1, 2, 1, 2]), 2) == {(1, 2): 2, (2, 1): 1}


@pytest.mark.parametrize("seed", range(3))
def test_parts_of_a_corpus_add_up(seed):
    candidates, references = corpus(seed)
    whole = bleu_statistics(candidates, references)
    parts = sum(bleu_statistics([c], [r]) for c, r in zip(candidates, references, strict=True))
    assert torch.equal(parts, whole)
    assert bleu_from_statistics(parts) == bleu(candidates, references)


def test_the_mean_of_sentences_is_something_else():
    # A perfect sentence of 8 tokens, and one of 4 without anything right: 8/12, 7/10, 6/8, 5/6 together.
    candidates, references = [list(range(8)), [9] * 4], [[list(range(8))], [[0] * 4]]
    wanted = (8 / 12 * 7 / 10 * 6 / 8 * 5 / 6) ** 0.25
    assert bleu(candidates, references).item() == pytest.approx(wanted)


def test_nothing_to_count_gives_zero_and_never_nan():
    assert bleu([[]], [[[1, 2]]]).item() == 0
    assert bleu([[]], [[[]]]).item() == 0
    assert bleu([], []).item() == 0
    assert bleu([[1, 2, 3, 4]], [[[5, 6, 7, 8]]], smoothing="halving").item() == 0
    assert bleu([[1, 2, 3, 4]], [[[4, 3, 2, 1]]]).item() == 0, "no pair matches"
    # Too short for 3-grams: the mean is over the orders that there are.
    assert bleu([[1, 2]], [[[1, 2]]]).item() == 1
    assert bleu([[1, 2]], [[[1, 3]]], smoothing="halving").item() == pytest.approx((1 / 2 * 1 / 2) ** 0.5)


def test_smoothing_by_hand():
    candidate, reference = [1, 2, 3, 9, 8], [1, 2, 3, 4, 5]  # 3/5, 2/4, 1/3, 0/2
    assert sentence_bleu(candidate, [reference], smoothing="none").item() == 0
    add_one = 3 / 5 * 3 / 5 * 2 / 4 * 1 / 3
    assert sentence_bleu(candidate, [reference]).item() == pytest.approx(add_one**0.25)
    halving = 3 / 5 * 2 / 4 * 1 / 3 * (1 / 2) / 2
    assert sentence_bleu(candidate, [reference], smoothing="halving").item() == pytest.approx(halving**0.25)
    twice = 2 / 4 * 1 / 3 * (1 / 2) / 2 * (1 / 4) / 1
    assert sentence_bleu([1, 2, 9, 8], [[1, 2, 3, 4]], smoothing="halving").item() == pytest.approx(
        twice**0.25
    )


@pytest.mark.parametrize("seed", range(5))
def test_equals_sacrebleu(seed):
    sacrebleu = pytest.importorskip("sacrebleu")
    candidates, references = corpus(seed)
    texts = [" ".join(map(str, candidate)) for candidate in candidates]
    streams = [[" ".join(map(str, own[i])) for own in references] for i in range(3)]
    for ours, theirs in (("none", "none"), ("add-one", "add-k"), ("halving", "exp")):
        peer = sacrebleu.BLEU(
            tokenize="none", smooth_method=theirs, smooth_value=1 if theirs == "add-k" else None,
            effective_order=True,
        )  # fmt: skip
        score = peer.corpus_score(texts, streams)
        assert bleu(candidates, references, smoothing=ours).item() * 100 == pytest.approx(score.score)
        if ours != "add-one":  # then theirs are the smoothed ones
            counts = bleu_statistics(candidates, references).tolist()
            assert counts == [*score.counts, *score.totals, score.sys_len, score.ref_len]
        for text, candidate, own in zip(texts, candidates, references, strict=True):
            wanted = peer.sentence_score(text, [" ".join(map(str, reference)) for reference in own]).score
            assert sentence_bleu(candidate, own, smoothing=ours).item() * 100 == pytest.approx(wanted)


@pytest.mark.parametrize("seed", range(3))
def test_equals_nltk(seed):
    peer = pytest.importorskip("nltk.translate.bleu_score")
    candidates, references = corpus(seed, shortest=4)
    assert bleu(candidates, references).item() == pytest.approx(peer.corpus_bleu(references, candidates))
    smooth = peer.SmoothingFunction().method2
    for candidate, own in zip(candidates, references, strict=True):
        wanted = peer.sentence_bleu(own, candidate, smoothing_function=smooth)
        assert sentence_bleu(candidate, own).item() == pytest.approx(wanted)


def test_messages():
    with pytest.raises(InputError, match="1 candidates and 2 lists of references\n  expected: one list"):
        bleu([[1]], [[[1]], [[2]]])
    with pytest.raises(InputError, match=r"references \[\] of candidate 0"):
        bleu([[1]], [[]])
    with pytest.raises(InputError, match=r"bleu of 'the cat'\n.*\n  fix: split text into words"):
        bleu(["the cat"], [[["the", "cat"]]])
    with pytest.raises(InputError, match=r"bleu of 1\n.*\n.*a single reference is a list of one"):
        bleu([[1, 2]], [[1, 2]])
    with pytest.raises(InputError, match="unknown smoothing 'add-two'"):
        bleu([[1]], [[[1]]], smoothing="add-two")
    with pytest.raises(InputError, match="max_order is 0"):
        bleu([[1]], [[[1]]], 0)
    with pytest.raises(InputError, match=r"statistics of shape \(2, 10\)"):
        bleu_from_statistics(torch.zeros(2, 10))
