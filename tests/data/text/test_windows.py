"""Windows and streams against plain loops over the text."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.data.batch import Batch, Data
from quire.data.text import IGNORE, MappedTokens, TensorTokens, TokenStreams, TokenWindows
from quire.errors import InputError
from quire.nn import heads

Row = tuple[list[int], list[int]]
Make = Callable[[list[int]], TensorTokens | MappedTokens]


@pytest.fixture(params=["memory", "map"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """A function from a list of numbers to tokens, in memory or in a file."""

    def tokens(values: list[int]) -> TensorTokens | MappedTokens:
        if request.param == "memory":
            return TensorTokens.of(np.array(values), max(values) + 1)
        path = tmp_path / "tokens.bin"
        np.array(values, "<u2").tofile(path)
        return MappedTokens(np.memmap(path, "<u2", mode="r"))

    return tokens


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 300, length).tolist()


def row_of(values: list[int], start: int, context: int, stop: int | None = None) -> Row:
    """The inputs that there are, and targets before `stop` with the rest ignored."""
    stop = len(values) if stop is None else stop
    inputs = [values[i] for i in range(start, start + context) if i < min(stop, len(values))]
    target = [values[i] if i < stop else IGNORE for i in range(start + 1, start + 1 + context)]
    return inputs, target


def same(batch: Batch, expected: list[Row]) -> bool:
    """Inputs beyond the end of the text may be anything."""
    pairs = zip(batch.inputs.tolist(), batch.target.tolist(), expected, strict=True)
    return all(got[: len(inputs)] == inputs and target == wanted for got, target, (inputs, wanted) in pairs)


def test_ignored_targets_are_those_of_the_heads() -> None:
    assert IGNORE == heads.IGNORE


def test_every_start_is_a_training_row(make: Make) -> None:
    values = text(50)
    data = TokenWindows(make(values), 7)
    assert (len(data), data.row_size, data.complete) == (43, 7, True)
    rows = torch.randperm(43)
    batch = data.take(rows)
    assert same(batch, [row_of(values, r, 7) for r in rows.tolist()])
    assert batch.inputs.dtype == batch.target.dtype == torch.int64
    assert batch.inputs.shape == batch.target.shape == (43, 7)
    assert batch.complete
    assert torch.equal(batch.rows, rows)
    assert len(TokenWindows(make(values[:8]), 7)) == 1


@pytest.mark.parametrize("length", [2, 5, 14, 15, 16, 22, 29])
def test_judging_predicts_every_token_once(make: Make, length: int) -> None:
    values = text(length)
    data = TokenWindows(make(values), 7, 7, partial=True)
    assert len(data) == -(-(length - 1) // 7)
    batch = data.take(torch.arange(len(data)))
    assert same(batch, [row_of(values, start, 7) for start in range(0, length - 1, 7)])
    assert batch.target[batch.target != IGNORE].tolist() == values[1:]
    assert data.complete == ((length - 1) % 7 == 0) == bool((batch.target != IGNORE).all())
    if length > 7:
        assert same(TokenWindows(make(values), 7).judged().take(torch.arange(1)), [row_of(values, 0, 7)])


def test_one_window_that_is_filled_up() -> None:
    """A single row: inputs and targets must not lie in the same place."""
    batch = TokenWindows(TensorTokens(torch.tensor([5, 6, 7])), 4, 4, partial=True).take(torch.tensor([0]))
    assert batch.inputs.tolist() == [[5, 6, 7, 7]]
    assert batch.fields["target"].tolist() == [[6, 7, IGNORE, IGNORE]]


def test_strides_between(make: Make) -> None:
    values = text(40)
    data = TokenWindows(make(values), 6, 4)
    assert data.places().tolist() == list(range(0, 40 - 6, 4))
    assert same(data.take(torch.arange(len(data))), [row_of(values, s, 6) for s in range(0, 34, 4)])


def test_batches_are_rows_in_order_from_any_place(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    values = text(60)
    tokens = make(values)
    monkeypatch.setattr(type(tokens), "gather_bytes", 16 * 5 * 4 * 3)  # three batches at once
    data = TokenWindows(tokens, 5)
    order = torch.randperm(len(data))
    for start in (0, 1, 4, 13, 14, 20):
        batches = list(data.batches(order, 4, start))
        assert torch.cat([order[:0], *[b.rows for b in batches]]).equal(order[4 * start :])
        for batch in batches:
            assert len(batch) <= 4
            assert same(batch, [row_of(values, r, 5) for r in batch.rows.tolist()])
    assert list(data.batches(order[:0], 4)) == []


def test_a_subset_is_its_rows(make: Make) -> None:
    values = text(30)
    for data in (TokenWindows(make(values), 4), TokenWindows(make(values), 4, 4, partial=True)):
        rows = torch.tensor([5, 0, len(data) - 1, 3])
        for part in (
            data.subset(rows),
            data.subset(torch.arange(len(data))).subset(rows),
            data.subset(rows).to("cpu"),
        ):
            assert len(part) == 4
            assert part.take(torch.tensor([2, 0])).target.equal(data.take(rows[[2, 0]]).target)
        assert len(data.subset(rows[:0])) == 0


def test_numbers_lie_in_the_smallest_type() -> None:
    kinds = {
        256: torch.uint8,
        257: torch.int16,
        2**15: torch.int16,
        2**15 + 1: torch.int32,
        10**6: torch.int32,
    }
    for size, kind in kinds.items():
        tokens = TensorTokens.of(np.array([0, size - 1, 1]), size)
        assert tokens.values.dtype == kind
        assert tokens.windows(torch.tensor([0]), 3, whole=True).tolist() == [[0, size - 1, 1]]


def stream_rows(values: list[int], batch_size: int, context: int) -> list[list[Row]]:
    """Batches by a plain loop: stream i predicts the i-th stretch of ⌈(L − 1)/B⌉ tokens."""
    stretch = -(-(len(values) - 1) // batch_size)
    found = []
    for step in range(-(-stretch // context)):
        batch = []
        for stream in range(batch_size):
            start = stream * stretch + step * context
            batch.append(row_of(values, start, context, min((stream + 1) * stretch + 1, len(values))))
        found.append(batch)
    return found


@pytest.mark.parametrize(
    ("length", "batch_size", "context"), [(61, 3, 5), (50, 4, 7), (10, 4, 3), (7, 1, 2), (6, 5, 9)]
)
def test_streams_go_on_where_they_stopped(make: Make, length: int, batch_size: int, context: int) -> None:
    values = text(length)
    data = TokenStreams(make(values), batch_size, context)
    expected = stream_rows(values, batch_size, context)
    batches = list(data.batches(torch.arange(len(data)), batch_size))
    assert len(batches) == len(expected) == data.steps
    for i, (batch, rows) in enumerate(zip(batches, expected, strict=True)):
        assert same(batch, rows)
        assert batch.fields["begin"].tolist() == [i == 0] * batch_size
        assert batch.complete == bool((batch.target != IGNORE).all())
    for before, after in pairwise(batches):
        full = after.target[:, 0] != IGNORE
        assert after.inputs[full, 0].equal(before.target[full, -1])
    predicted = torch.cat([batch.target for batch in batches])
    assert (predicted != IGNORE).sum() == length - 1
    later = list(data.batches(torch.arange(len(data)), batch_size, start=1))
    assert [b.fields["begin"].tolist() for b in later] == [b.fields["begin"].tolist() for b in batches[1:]]


def test_a_stream_says_where_it_does_not_go_on(make: Make) -> None:
    data = TokenStreams(make(text(60)), 3, 4)
    assert data.take(torch.tensor([7, 8])).fields["begin"].tolist() == [True, True]
    order = torch.tensor([0, 1, 2, 3, 5, 4, 6, 8, 7, 9, 10, 11])
    begins = [b.fields["begin"].tolist() for b in data.batches(order, 3)]
    assert begins == [[True] * 3, [False, True, True], [False] * 3, [False, True, True]]
    assert all(all(b.fields["begin"].tolist()) for b in data.batches(torch.arange(len(data)), 2))
    shorter = [b.fields["begin"].tolist() for b in data.batches(torch.tensor([0, 1, 2, 3, 4]), 3)]
    assert shorter == [[True] * 3, [False] * 2]
    part = data.subset(torch.tensor([2, 5, 8]))
    assert part.take(torch.arange(3)).inputs.equal(data.take(torch.tensor([2, 5, 8])).inputs)
    assert [b.fields["begin"].item() for b in part.batches(torch.arange(3), 1)] == [True, False, False]


def test_too_few_tokens(make: Make) -> None:
    with pytest.raises(InputError, match=r"7 tokens for windows of 7[\s\S]*at least 8 tokens"):
        TokenWindows(make(text(7)), 7)
    with pytest.raises(InputError, match="at least 2 tokens"):
        TokenWindows(make([3]), 7, 7, partial=True)
    with pytest.raises(InputError, match="3 tokens for 3 streams"):
        TokenStreams(make(text(3)), 3, 2)
    with pytest.raises(InputError, match="a context of 0"):
        TokenWindows(make(text(9)), 0)


class Bigram(torch.nn.Module):
    """p(next | token), a table of logits: tokens (B, T) to (B, T, V)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(size, size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


def test_the_trainer_takes_windows_and_streams(make: Make) -> None:
    from quire.nn.heads import Categorical
    from quire.options import Optim, Train
    from quire.tasks.supervised import Supervised
    from quire.train import fit
    from quire.train.evaluate import evaluate

    values = [i * i % 11 for i in range(203)]
    windows = TokenWindows(make(values), 8)
    training: tuple[Data, bool]
    for training in ((windows, True), (TokenStreams(make(values), 4, 8), False)):
        torch.manual_seed(0)
        task = Supervised(Bigram(11), Categorical(11))
        train = Train(batch_size=4, shuffle=training[1], restore="last")
        fit(task, training[0], windows.judged(), epochs=3, optim=Optim(lr=0.1), train=train)
        judged = evaluate(task, windows.judged())["loss"]
        logits = task.model(torch.tensor(values[:-1]))
        whole = torch.nn.functional.cross_entropy(logits, torch.tensor(values[1:])).item()
        assert judged == pytest.approx(whole, rel=1e-5)
        assert judged < 1.0 < 2.39  # log 11 = 2.398 at the start


@pytest.mark.gpu
def test_windows_on_the_gpu() -> None:
    values = text(500)
    tokens = TensorTokens.of(np.array(values), 300)
    mapped = MappedTokens(np.array(values, np.uint16))
    for cpu in (
        TokenWindows(tokens, 9),
        TokenWindows(tokens, 9, 9, partial=True),
        TokenStreams(tokens, 5, 9),
    ):
        gpu = cpu.to("cuda")
        order = torch.randperm(len(cpu))
        for one, other in zip(cpu.batches(order, 16), gpu.batches(order, 16), strict=True):
            assert other.inputs.is_cuda
            for name in one.fields:
                assert other.fields[name].cpu().equal(one.fields[name])
    batch = next(TokenWindows(mapped, 9).to("cuda").batches(torch.arange(20), 4))
    assert batch.inputs.is_pinned()
    assert (
        batch.to(torch.device("cuda"))
        .inputs.cpu()
        .equal(TokenWindows(tokens, 9).take(torch.arange(4)).inputs)
    )
