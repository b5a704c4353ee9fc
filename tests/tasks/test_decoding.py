"""Greedy decoding, draws and beams, as enumeration says."""

from __future__ import annotations

import math

import pytest
import torch

from quire.data.batch import Batch
from quire.functional.sampling import beam_search
from quire.nn.heads import IGNORE
from quire.tasks.translation import (
    Translation,
    decode_beam,
    select_rows,
    unpad,
)
from tests.tasks.translating import (
    BEGIN,
    END,
    WORDS,
    Table,
    enumerate_sequences,
    kinds,
    make,
    pairs,
)

pytestmark = pytest.mark.slow


@kinds
@pytest.mark.parametrize("seed", [0, 2, 4])
def test_greedy_decoding_by_a_loop_over_whole_prefixes(seed, kind):
    task, batch = make(seed, kind=kind), pairs()
    found = task.predict(batch.inputs)
    assert len({len(row) for row in unpad(found["tokens"], END)}) > 1, "rows of several lengths"
    for row, source in enumerate(batch.inputs):
        tokens, total = [BEGIN], 0.0
        while len(tokens) <= 5 and (len(tokens) == 1 or tokens[-1] != END):
            chances = task.model(source[None], torch.tensor([tokens]))[0, -1].softmax(-1)
            tokens.append(int(chances.argmax()))
            total += math.log(chances.max().item())
        assert unpad(found["tokens"], END, keep=True)[row] == tokens[1:]
        assert found["log_probability"][row].item() == pytest.approx(total)
        assert (found["tokens"][row, len(tokens) - 1 :] == END).all()


@kinds
def test_a_row_alone_decodes_as_in_a_batch(kind):
    task, batch = make(kind=kind), pairs()
    for mode in ("mode", "beam"):
        together = task.predict(batch.inputs, mode)
        for row in range(len(batch)):
            alone = task.predict(batch.inputs[row : row + 1], mode)
            assert unpad(alone["tokens"], END) == unpad(together["tokens"][row : row + 1], END)
            torch.testing.assert_close(alone["log_probability"][0], together["log_probability"][row])


@kinds
def test_beam_search_against_enumeration(kind):
    task, batch = make(max_length=3, sharpness=0.5, kind=kind), pairs(4)
    chosen = []
    for alpha in (0.0, 2.0):
        wide = task.predict(batch.inputs, "beam", beams=WORDS**2, length_penalty=alpha)
        for row, source in enumerate(batch.inputs):
            every = enumerate_sequences(task, source, 3)
            assert sum(map(math.exp, every.values())) == pytest.approx(1)
            best = max(every, key=lambda tokens: every[tokens] / len(tokens) ** alpha)
            assert tuple(unpad(wide["tokens"], END, keep=True)[row]) == best
            assert wide["log_probability"][row].item() == pytest.approx(every[best])
            chosen.append(best)
    assert chosen[:4] != chosen[4:], "the penalty matters here"


@kinds
@pytest.mark.parametrize("seed", range(5))
def test_a_beam_is_never_below_greedy(seed, kind):
    task, batch = make(seed, sharpness=1.5, kind=kind), pairs(20, seed)
    greedy = task.predict(batch.inputs)["log_probability"]
    for beams in (1, 2, 3):
        found = task.predict(batch.inputs, "beam", beams=beams)["log_probability"]
        assert (found >= greedy - 1e-9).all()


def test_a_beam_that_loses_the_greedy_sequence_gets_it_back():
    # Greedy is 3, 5, end with 0.45 · 0.3. After two steps both beams are at 4 (0.4 · 0.5, twice), which leads
    # to nothing better than 0.2 / 8.
    chances = torch.full((8, 8), 1 / 8, dtype=torch.float64)
    chances[BEGIN] = torch.tensor([0.025, 0.025, 0.025, 0.45, 0.4, 0.025, 0.025, 0.025])
    chances[3] = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1, 0.3, 0.1, 0.1])
    chances[4] = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5])
    chances[5] = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    table, source = Table(chances.log()), torch.ones(1, 1, dtype=torch.long)
    start = torch.tensor([BEGIN])
    search = {"beams": 2, "steps": 5, "end": END, "select": select_rows}
    (alone,) = beam_search(table.step, table.encode(source), start, **search)
    assert math.exp(alone[0].log_probability) == pytest.approx(0.025)
    for alpha in (0.0, 1.0):
        found = decode_beam(table, source, max_length=5, beams=2, length_penalty=alpha)
        assert found.tokens.tolist() == [[3, 5, END]]
        assert found.log_probability.exp().item() == pytest.approx(0.135)


def test_draws_have_the_model_s_probabilities():
    task = make(max_length=2, sharpness=1.5)
    source = torch.tensor([[3, 4, 5]])
    every = enumerate_sequences(task, source[0], 2)
    for temperature in (1.0, 0.5):
        drawn = task.predict(source.expand(4000, -1), "sample", temperature=temperature, seed=5)
        counts: dict[tuple[int, ...], int] = {}
        for tokens, total in zip(
            unpad(drawn["tokens"], END, keep=True), drawn["log_probability"].tolist(), strict=True
        ):
            counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
            assert total == pytest.approx(every[tuple(tokens)]), "of the model, not of its heated form"
        for first in range(WORDS):
            state = task.pairs.encode(source)
            logits, _ = task.pairs.step(torch.tensor([BEGIN]), state)
            chance = (logits / temperature).softmax(-1)[0, first].item()
            share = sum(n for tokens, n in counts.items() if tokens[0] == first) / 4000
            assert abs(share - chance) < 5 * math.sqrt(chance * (1 - chance) / 4000) + 1e-9


def test_a_seed_repeats_a_draw():
    task, batch = make(sharpness=1.5), pairs(30)
    one, two = (task.predict(batch.inputs, "sample", seed=3)["tokens"] for _ in range(2))
    assert torch.equal(one, two)
    other = task.predict(batch.inputs, "sample", seed=4)["tokens"]
    assert one.shape != other.shape or not torch.equal(one, other)
    generator = torch.Generator().manual_seed(3)
    assert torch.equal(task.predict(batch.inputs, "sample", generator=generator)["tokens"], one)
    cold = task.predict(batch.inputs, "sample", temperature=0.0)
    assert torch.equal(cold["tokens"], task.predict(batch.inputs)["tokens"])


def test_any_model_with_the_methods_will_do():
    chances = torch.full((WORDS, WORDS), 0.01)
    chances[BEGIN, 3] = chances[3, 4] = chances[4, END] = 1
    task = Translation(Table(chances.log()), max_length=6)
    source = torch.zeros(2, 0, dtype=torch.long)
    for mode in ("mode", "beam"):
        assert task.predict(source, mode)["tokens"].tolist() == [[3, 4, END]] * 2
    assert task.predict(source, max_length=2)["tokens"].tolist() == [[3, 4]] * 2
    batch = Batch(
        {"inputs": source, "target": torch.tensor([[3, 4, END], [4, END, IGNORE]])}, torch.arange(2)
    )
    assert task.measures(task.tally(batch))["exact_match"] == 0.5


def test_rows_of_a_nested_state():
    state = {"a": torch.arange(6).view(3, 2), "b": [(torch.arange(3), None)], "c": 7}
    taken = select_rows(state, torch.tensor([2, 0, 2]))
    assert taken["a"].tolist() == [[4, 5], [0, 1], [4, 5]]
    assert taken["b"][0][0].tolist() == [2, 0, 2]
    assert (taken["b"][0][1], taken["c"]) == (None, 7)
    kept = select_rows(make().pairs.encode(torch.ones(2, 3).long()), torch.tensor([1]))
    assert type(kept).__name__ == "DecoderState"
    assert kept.hidden.shape[0] == 1
