"""Parameters that wait before they move, changes of a batch before a step, and filters channels last."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from quire.data.batch import Batch, TensorData
from quire.models.mlp import MLP, MLPConfig
from quire.nn.heads import Categorical
from quire.options import Optim, Train
from quire.tasks.supervised import Supervised
from quire.train import Callback, fit
from quire.train.checkpoints import newest_checkpoint
from quire.train.descent import Descent
from quire.train.task import Task
from tests.train.examples import classes, folder

STEPS = 5  # an epoch's


def waiting(epochs: float = 2.0) -> Supervised:
    torch.manual_seed(0)
    model = MLP(MLPConfig(5, 3, hidden=(8,), norm="batch"))
    return Supervised(model, Categorical(3), frozen={"model.body.": epochs})


class Watch(Callback):
    """The weights and statistics after each step."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def on_step(self, descent: Descent, step: int) -> None:
        self.states.append({name: v.clone() for name, v in descent.task.state_dict().items()})


def train(task: Supervised, **options: object) -> Watch:
    watch = Watch()
    data = classes(STEPS * 8)
    fit(task, data, epochs=4, train=Train(batch_size=8), callbacks=[watch], **options)  # type: ignore[arg-type]
    return watch


@pytest.mark.parametrize("optim", [Optim(lr=0.01, weight_decay=0.1), Optim("sgd", lr=0.1, momentum=0.9)])
def test_frozen_parameters_and_statistics_wait_and_then_move(optim: Optim) -> None:
    task = waiting()
    before = {name: value.clone() for name, value in task.state_dict().items()}
    states = train(task, optim=optim).states
    body = [name for name in before if name.startswith("model.body.")]
    for state in states[: 2 * STEPS]:
        for name in body:
            assert torch.equal(state[name], before[name]), name
    for name in body:
        assert not torch.equal(states[2 * STEPS][name], before[name]), name
    assert not torch.equal(states[0]["model.head.weight"], before["model.head.weight"])
    assert all(p.requires_grad for p in task.parameters())


def test_an_optimiser_counts_a_parameters_own_steps() -> None:
    """The first step of Adam has the length lr, whenever it is taken: m and v are corrected by the
    steps of the parameter, not by those of the run."""
    task = waiting()
    states = train(task, optim=Optim(lr=0.01)).states
    moved = (states[2 * STEPS]["model.body.0.weight"] - states[0]["model.body.0.weight"]).abs()
    assert moved.max() == pytest.approx(0.01, rel=1e-3)


def test_resuming_across_the_joining_is_exact(tmp_path: Path) -> None:
    for name, stops in (("whole", [4]), ("parts", [1, 3, 4])):
        for i, epochs in enumerate(stops):
            store = folder(tmp_path / name, resume=i > 0)
            fit(
                waiting(), classes(STEPS * 8), epochs=epochs, train=Train(batch_size=8), store=store,
                optim=Optim(lr=0.01),
            )  # fmt: skip
            store.close()
    whole, parts = (newest_checkpoint(tmp_path / name / "checkpoints") for name in ("whole", "parts"))
    for name, value in whole.tensors["weights"].items():
        assert torch.equal(value, parts.tensors["weights"][name]), name


def test_a_batch_is_changed_once_a_step_before_it_is_weighed() -> None:
    """Only training sees the change, and the loss is divided by the weight of the changed batch."""

    class Halved(Task):
        """The mean of w·x over the rows that are left."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.changed = 0

        def augment(self, batch: Batch) -> Batch:
            self.changed += 1
            return Batch({"inputs": batch.inputs[::2]}, batch.rows[::2])

        def weigh(self, batch: Batch) -> dict[str, float]:
            return {"mean": float(len(batch))}

        def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
            return {"mean": (self.weight * batch.inputs).sum()}

        def predict(self, inputs: Tensor, mode: str = "mode", **options: object) -> dict[str, Tensor]:
            return {}

        def spec(self) -> dict[str, object]:
            return {}

        @classmethod
        def from_spec(cls, spec: object) -> Halved:
            return cls()

    task = Halved()
    data = TensorData({"inputs": torch.tensor([3.0, 100.0, 3.0, 100.0])})
    options = Train(batch_size=4, shuffle=False, micro_batches=2)
    fit(task, data, data, steps=1, optim=Optim("sgd", lr=1.0), train=options)
    assert task.changed == 1
    assert task.weight.item() == 1 - 3.0


def test_filters_may_lie_channels_last() -> None:
    """The flat buffers keep the order in memory; values and saved states are the same."""

    def trained(layout: torch.memory_format) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 5, 1), nn.Flatten(), nn.Linear(80, 2)
        )
        model = model.double().to(memory_format=layout)
        inputs = torch.randn(20, 3, 6, 6, generator=torch.Generator().manual_seed(1)).double()
        data = TensorData({"inputs": inputs, "target": torch.arange(20) % 2})
        fit(
            Supervised(model, Categorical(2)), data, epochs=3, train=Train(batch_size=5), optim=Optim(lr=0.01)
        )
        return model

    plain, last = trained(torch.contiguous_format), trained(torch.channels_last)
    assert last[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not last[0].weight.is_contiguous()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(last.state_dict()[name], value)
