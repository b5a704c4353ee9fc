"""Recorded steps: the same training, and no recording where a replay would leave something out."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quire.data.batch import TensorData
from quire.errors import NonFiniteError
from quire.functional.modes import has_hooks
from quire.nn.heads import Categorical
from quire.options import Optim, Schedule, Train
from quire.tasks.supervised import Supervised
from quire.train import fit
from quire.train.capture import host_state
from quire.train.descent import Callback, Descent, Record
from tests.tasks.playing import circle, players


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


class Waiting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1.0 if x.sum().item() > 0 else 0.5)


class Drawing(nn.Module):
    """Draws on the host, by one of three generators."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "python":
            return self.layer(x) * random.random()
        if self.kind == "numpy":
            return self.layer(x) * float(np.random.rand())
        return self.layer(x) * float(torch.rand(()))


@pytest.mark.parametrize("kind", ["python", "numpy", "torch"])
def test_a_draw_on_the_host_is_seen(kind: str) -> None:
    model = Drawing(kind)
    before = host_state(model)
    assert host_state(model) == before
    model(torch.ones(2, 3))
    assert host_state(model) != before


def test_a_counter_in_a_module_is_seen() -> None:
    model = nn.Sequential(nn.Identity(), Counting())
    before = host_state(model)
    model(torch.ones(2, 3))
    assert host_state(model) != before


def test_a_plain_network_leaves_nothing_on_the_host() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4))
    before = host_state(model)
    model(torch.ones(2, 3)).sum().backward()
    assert host_state(model) == before


def test_a_tensor_on_the_host_that_changes_is_seen() -> None:
    model = nn.BatchNorm1d(3)
    before = host_state(model)
    model(torch.randn(4, 3))
    assert host_state(model) != before


def test_hooks_are_seen() -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    assert not has_hooks(model)
    model[0].register_forward_hook(lambda *_: None)
    assert has_hooks(model)


# On a GPU -----------------------------------------------------------------------------------------


class Keep(Callback):
    """The recorder as it stands at the end."""

    def on_end(self, descent: Descent) -> None:
        self.recorder = descent.stepper.recorder


class Losses(Keep):
    """And the training loss of every epoch."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_record(self, descent: Descent, record: Record) -> None:
        if record["split"] == "train":
            self.losses.append(record["values"]["loss"])

    @property
    def recorded(self) -> bool:
        return self.recorder is not None and bool(self.recorder.recordings)


def rows(count: int = 203, features: int = 3) -> TensorData:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, features, generator=generator)
    return TensorData({"inputs": x, "target": (x.sum(1) > 0).long()})


def train(model: nn.Module, *, capture: bool, data: TensorData | None = None, **changes: Any) -> Keep:
    keep = Keep()
    optim = changes.pop("optim", Optim(lr=1e-2))
    options = Train(batch_size=32, capture=capture, **changes)
    fit(
        Supervised(model, Categorical(2)), data or rows(), epochs=6, optim=optim, train=options,
        device="cuda", callbacks=[keep],
    )  # fmt: skip
    return keep


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    # A norm right behind a layer would take its bias away again, whose gradient would then be rounding alone,
    # and Adam makes steps of any gradient.
    return nn.Sequential(
        nn.Linear(3, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Dropout(dropout), nn.Linear(16, 2)
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optim": Optim(lr=1e-2, schedule=Schedule("cosine", warmup=5), clip_norm=0.5)},
        {"optim": Optim("sgd", lr=1e-2, momentum=0.9, weight_decay=0.01, l1=1e-4)},
        {"precision": "bfloat16"},
        {"average": 0.9},
    ],
)
def test_a_recorded_run_is_the_run(changes: dict[str, Any]) -> None:
    """Two recordings: of whole batches, and of the last one of each epoch, which is smaller."""
    plain, recorded = network(), network()
    train(plain, capture=False, **changes)
    keep = train(recorded, capture=True, **changes)
    assert keep.recorder is not None
    assert keep.recorder.refused == ""
    assert len(keep.recorder.recordings) == 2
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(recorded.state_dict()[name], value, rtol=2e-4, atol=2e-5)


@pytest.mark.gpu
def test_dropout_differs_from_replay_to_replay() -> None:
    model = network(dropout=0.5)
    keep = train(model, capture=True)
    assert keep.recorder is not None
    assert keep.recorder.recordings
    model.train()
    recording = next(iter(keep.recorder.recordings.values()))
    batch = next(rows().to("cuda").batches(torch.arange(203), 32))
    values = [page.values[row].clone() for page, row in [recording.replay(batch, {}, 0.0) for _ in range(2)]]
    assert not torch.equal(*values)


@pytest.mark.gpu
def test_batches_are_cut_in_any_order_and_pages_are_kept() -> None:
    """More steps than a page has rows, over epochs whose last batch is smaller, from a data set that is
    gathered in several pieces: the loss of each step is that of a step that is not recorded."""
    data = rows(32 * 40 + 7)
    found = {}
    for capture in (False, True):
        model = network()
        keep = Losses()
        fit(
            Supervised(model, Categorical(2)), data, epochs=15, optim=Optim(lr=1e-3),
            train=Train(batch_size=32, capture=capture), device="cuda", callbacks=[keep],
        )  # fmt: skip
        found[capture] = keep
    assert found[True].recorded
    assert len(found[True].losses) == 15
    torch.testing.assert_close(
        torch.tensor(found[True].losses), torch.tensor(found[False].losses), rtol=1e-4, atol=1e-5
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "reason"),
    [(Counting(), "numbers on the host"), (Waiting(), "waits"), (Drawing("python"), "numbers on the host")],
)
def test_what_python_decides_is_not_recorded(model: nn.Module, reason: str) -> None:
    keep = train(model, capture=True)
    assert keep.recorder is not None
    assert not keep.recorder.recordings
    assert reason in keep.recorder.refused


@pytest.mark.gpu
def test_a_bad_batch_is_named_in_a_recorded_run() -> None:
    data = rows(1600)
    order = torch.randperm(1600, generator=torch.Generator().manual_seed(0))
    bad = int(order[20 * 32 + 5])
    data.fields["inputs"][bad, 1] = float("inf")
    with pytest.raises(NonFiniteError, match=f"step 20:.*rows {bad} of"):
        train(network(), capture=True, data=data)


@pytest.mark.gpu
def test_players_that_take_turns_are_recorded_each_way() -> None:
    """Steps of the discriminator alone, and of both."""
    keep = Keep()
    found = fit(
        players(discriminator_steps=2), circle(96), epochs=10, train=Train(batch_size=32), device="cuda",
        callbacks=[keep],
    )  # fmt: skip
    assert keep.recorder is not None
    assert len(keep.recorder.recordings) == 2
    assert all(math.isfinite(record["values"]["loss"]) for record in found.history)
