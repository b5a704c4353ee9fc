"""Filters by hand and against Hugging Face's, draws against probabilities, beams against enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional import sampling as S

INF = math.inf


def kept(logits: Tensor) -> list[int]:
    return (logits > -INF).nonzero()[:, 0].tolist()


# Filters --------------------------------------------------------------------------------------


def test_temperature_divides_and_zero_leaves_the_best() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [-INF, 0.5, -2.0]])
    torch.testing.assert_close(
        S.temperature(logits, 2.0), torch.tensor([[0.5, 1.5, 1.5], [-INF, 0.25, -1.0]])
    )
    cold = S.temperature(logits, 0)
    assert torch.equal(cold, torch.tensor([[-INF, 0.0, -INF], [-INF, 0.0, -INF]]))
    # The limit of small temperatures, where the best token is unique.
    torch.testing.assert_close(S.temperature(logits[1], 1e-3).softmax(-1), cold[1].softmax(-1))


def test_top_k_by_hand() -> None:
    logits = torch.tensor([0.0, 4.0, 1.0, 4.0, 2.0])
    assert kept(S.top_k(logits, 1)) == [1, 3]  # both are best
    assert kept(S.top_k(logits, 3)) == [1, 3, 4]
    assert torch.equal(S.top_k(logits, 5), logits)
    assert torch.equal(S.top_k(logits, 99), logits)
    assert kept(S.top_k(torch.tensor([-INF, 1.0, -INF]), 2)) == [1]


def test_top_p_by_hand() -> None:
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    assert kept(S.top_p(logits, 1e-9)) == [1]
    assert kept(S.top_p(logits, 0.49)) == [1]
    assert kept(S.top_p(logits, 0.51)) == [1, 3]
    assert kept(S.top_p(logits, 0.76)) == [1, 2, 3]
    assert kept(S.top_p(logits, 0.95)) == [0, 1, 2, 3]
    assert torch.equal(S.top_p(logits, 1.0), logits)
    assert kept(S.top_p(torch.zeros(4), 0.5)) == [0, 1]  # of equals the first
    assert kept(S.top_p(torch.tensor([-INF, 0.0, -INF]), 0.999)) == [1]
    assert kept(S.top_p(torch.tensor([100.0, 0.0, 0.0], dtype=torch.bfloat16), 0.999)) == [0]


@pytest.mark.parametrize("seed", range(5))
def test_filters_are_those_of_hugging_face(seed: int) -> None:
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(seed)) * 3
    logits[0, :30] = -INF
    for k in (1, 7, 40, 100):
        assert torch.equal(S.top_k(logits, k), process.TopKLogitsWarper(k)(None, logits))
    for p in (0.01, 0.3, 0.9, 0.999):
        assert torch.equal(S.top_p(logits, p), process.TopPLogitsWarper(p)(None, logits))
    chained = process.TemperatureLogitsWarper(0.7)(None, logits)
    chained = process.TopPLogitsWarper(0.8)(None, process.TopKLogitsWarper(12)(None, chained))
    assert torch.equal(S.filter_logits(logits, temperature=0.7, top_k=12, top_p=0.8), chained)


# Drawing --------------------------------------------------------------------------------------


def test_draws_follow_the_filtered_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0, -INF])
    options = {"temperature": 1.5, "top_k": 3}
    drawn = S.sample(logits.expand(20_000, -1), **options, generator=torch.Generator().manual_seed(1))
    wanted = torch.tensor([0.0, *[math.exp(a / 1.5) for a in (1, 2, 3)], 0.0])
    wanted /= wanted.sum()
    observed = torch.bincount(drawn, minlength=5) / 20_000
    assert observed[0] == observed[4] == 0
    # Five standard deviations of a proportion.
    assert ((observed - wanted).abs() <= 5 * (wanted * (1 - wanted) / 20_000).sqrt()).all()


def test_a_seed_repeats_a_draw_and_shapes_are_kept() -> None:
    logits = torch.randn(2, 3, 50)
    first, second, other = (
        S.sample(logits, generator=torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    )
    assert first.shape == (2, 3)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_no_heat_is_greedy_and_leaves_the_generator_alone() -> None:
    logits = torch.randn(7, 9)
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    assert torch.equal(S.sample(logits, temperature=0, generator=generator), logits.argmax(-1))
    assert torch.equal(generator.get_state(), before)
    assert S.greedy(torch.tensor([2.0, 5.0, 5.0])) == 1


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda a: S.temperature(a, -1), "temperature -1"),
        (lambda a: S.temperature(a, math.nan), "temperature nan"),
        (lambda a: S.top_k(a, 0), "leave top_k out"),
        (lambda a: S.top_p(a, 0.0), "a number in (0, 1]"),
        (lambda a: S.top_p(a, 1.1), "top_p of 1.1"),
        (lambda a: S.sample(a, temperature=-2), "temperature -2"),
        (lambda a: S.sample(torch.full((2, 3), -INF)), "nothing but −∞"),
        (lambda a: S.sample(a * math.nan), "logits with NaN"),
    ],
)
def test_wrong_options_say_so(call: object, text: str) -> None:
    with pytest.raises(InputError) as caught:
        call(torch.randn(2, 4))  # type: ignore[operator]
    assert text in str(caught.value)
    assert "expected:" in str(caught.value)


# Beam search ----------------------------------------------------------------------------------


class Bigrams:
    """log p(next | last two tokens) from a table (V, V, V): a model with a memory, which is its state."""

    def __init__(self, vocabulary: int, seed: int, rows: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (rows, vocabulary, vocabulary, vocabulary)
        self.table = torch.randn(shape, generator=generator, dtype=torch.float64).mul(2).log_softmax(-1)
        self.rows = rows

    def start(self) -> Tensor:
        return torch.stack([torch.arange(self.rows), torch.zeros(self.rows, dtype=torch.long)], 1)

    def step(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        row, before = state.unbind(1)
        return self.table[row, before, tokens] + 3.0, torch.stack([row, tokens], 1)  # logits: shifted

    def score(self, sequence: tuple[int, ...], row: int = 0) -> float:
        before, last, total = 0, 0, 0.0
        for token in sequence:
            total += float(self.table[row, before, last, token])
            before, last = last, token
        return total


def every_sequence(vocabulary: int, steps: int, end: int) -> list[tuple[int, ...]]:
    """All that end with `end`, or have `steps` tokens none of which is `end` but the last."""
    found = []
    for length in range(1, steps + 1):
        for one in itertools.product(range(vocabulary), repeat=length):
            if end not in one[:-1] and (one[-1] == end or length == steps):
                found.append(one)
    return found


def search(model: Bigrams, **options: object) -> list[list[S.Hypothesis]]:
    return S.beam_search(
        model.step,
        model.start(),
        torch.zeros(model.rows, dtype=torch.long),
        select=lambda state, rows: state[rows],
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("penalty", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_wide_beam_finds_what_enumeration_finds(seed: int, penalty: float) -> None:
    model = Bigrams(4, seed, rows=2)
    steps, end, beams = 4, 2, 64
    found = search(model, beams=beams, steps=steps, end=end, length_penalty=penalty)
    for row in range(2):
        sequences = every_sequence(4, steps, end)
        wanted = sorted((model.score(one, row) / len(one) ** penalty for one in sequences), reverse=True)
        assert [one.score for one in found[row]] == pytest.approx(wanted[:beams], abs=1e-12)
        assert len({one.tokens for one in found[row]} & set(sequences)) == beams
        for one in found[row]:
            assert one.log_probability == pytest.approx(model.score(one.tokens, row), abs=1e-12)
            assert one.score == pytest.approx(one.log_probability / len(one.tokens) ** penalty, abs=1e-12)


def test_all_sequences_have_probability_one() -> None:
    found = search(Bigrams(3, 5), beams=100, steps=3, end=0)[0]
    assert sum(math.exp(one.log_probability) for one in found) == pytest.approx(1)
    assert len(found) == len(every_sequence(3, 3, 0))


@pytest.mark.parametrize("seed", range(10))
def test_one_beam_is_greedy_decoding(seed: int) -> None:
    model = Bigrams(6, seed)
    path: tuple[int, ...] = ()
    before = last = 0
    while len(path) < 8 and last != 5:
        before, last = last, int(model.table[0, before, last].argmax())
        path += (last,)
    (found,) = search(model, beams=1, steps=8, end=5)[0]
    assert found.tokens == path
    assert found.score == found.log_probability == pytest.approx(model.score(path))


def test_more_beams_find_nothing_worse_here_and_rows_do_not_mix() -> None:
    together = search(Bigrams(5, 0, rows=3), beams=4, steps=6, end=1)
    model = Bigrams(5, 0, rows=3)
    for row in range(3):
        alone = Bigrams(5, 0)
        alone.table = model.table[row : row + 1]
        assert search(alone, beams=4, steps=6, end=1)[0] == together[row]
        greedy = search(alone, beams=1, steps=6, end=1)[0][0]
        assert together[row][0].score >= greedy.score
        assert [one.score for one in together[row]] == sorted((o.score for o in together[row]), reverse=True)


def test_a_length_penalty_lets_longer_sequences_overtake() -> None:
    """Ending at once is the most probable; the other way is longer, and certain after its first step."""

    def step(tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.tensor([0.49, 0.51]) if not state.any() else torch.tensor([1.0, 0.0])
        return first.log().expand(len(tokens), 2), state + 1

    def best(penalty: float) -> S.Hypothesis:
        return S.beam_search(
            step, torch.zeros(1), torch.tensor([0]),
            beams=1, steps=4, end=1, length_penalty=penalty, select=lambda s, r: s[r],
        )[0][0]  # fmt: skip

    assert best(0.0).tokens == (1,)
    assert best(1.0).tokens == (0, 0, 0, 0)
    assert best(1.0).score == pytest.approx(math.log(0.49) / 4)


def test_impossible_tokens_are_never_taken() -> None:
    def step(tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tensor([[0.0, -INF, -INF]]).expand(len(tokens), 3), state

    found = S.beam_search(
        step, torch.zeros(1), torch.tensor([0]), beams=3, steps=4, end=2, select=lambda s, r: s[r]
    )[0]
    assert [one.tokens for one in found] == [(0, 0, 0, 0)]
    found = S.beam_search(
        step, torch.zeros(1), torch.tensor([0]), beams=3, steps=4, end=0, select=lambda s, r: s[r]
    )[0]
    assert [one.tokens for one in found] == [(0,)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"beams": 0, "steps": 3}, "beams is 0"),
        ({"beams": 2, "steps": 0}, "steps is 0"),
        ({"beams": 2, "steps": 3, "length_penalty": -1.0}, "length_penalty -1"),
    ],
)
def test_a_wrong_search_says_so(options: dict[str, float], text: str) -> None:
    with pytest.raises(InputError) as caught:
        search(Bigrams(3, 0), end=0, **options)
    assert text in str(caught.value)
    with pytest.raises(InputError, match="of shape"):
        S.beam_search(
            lambda t, s: (t, s), 0, torch.zeros(1, 1), beams=1, steps=1, end=0, select=lambda s, r: s
        )
