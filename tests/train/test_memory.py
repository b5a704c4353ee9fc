"""Memory that runs out: smaller parts, the same step, nothing left of the try that failed."""

from __future__ import annotations

import random
from collections.abc import Callable as Function
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quire.data.batch import Batch
from quire.nn.heads import Categorical
from quire.options import Noise, Optim, Train
from quire.tasks.supervised import Supervised
from quire.train import Callback, Task, fit
from quire.train.descent import Descent
from quire.train.memory import Before
from quire.train.step import Stepper
from quire.tuning import LoRAConfig, inject
from tests.tasks.playing import circle, players
from tests.tasks.test_language import recurrent, text
from tests.train.examples import classes
from tests.train.test_parallel import Pairs, state, wide

pytestmark = pytest.mark.slow

ROWS = 20
SAID = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Limit:
    """A layer for which there is memory for so many rows: it fails on the way forward or back, as an
    allocator would, once it has been asked `first` times."""

    def __init__(self, layer: nn.Module, rows: int, where: str = "forward", first: int = 0) -> None:
        self.rows, self.where, self.first = rows, where, first
        self.failures = self.asked = 0
        self.most = 0
        self.handle = layer.register_forward_hook(self._look)

    def _look(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        value = output if isinstance(output, Tensor) else output[0]
        if not torch.is_grad_enabled():
            return
        if self.where == "forward":
            self._allocate(len(value))
        elif value.requires_grad:
            value.register_hook(lambda gradient: self._allocate(len(gradient)))

    def _allocate(self, rows: int) -> None:
        self.asked += 1
        if rows > self.rows and self.asked > self.first:
            self.failures += 1
            raise torch.OutOfMemoryError(SAID)
        self.most = max(self.most, rows)


def dense(*, norm: bool = False, dropout: float = 0.0) -> Supervised:
    """Norm and dropout come before the layer that memory is to run out in."""
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)]
    return Supervised(nn.Sequential(*layers), Categorical(3)).double()


def tuned() -> Supervised:
    """A frozen network with adapters."""
    task = dense()
    inject(task.model, LoRAConfig(rank=2))
    return task.double()


class Together(Pairs):
    """Compares the samples of a batch, and cannot do so in parts."""

    represent = Task.represent

    def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
        return self.coupled_terms(Pairs.represent(self, batch), batch)


def find(task: Task, kind: type[nn.Module] = nn.Linear) -> nn.Module:
    return [module for module in task.modules() if isinstance(module, kind)][-1]


# -- Kinds of tasks --------------------------------------------------------------------------------

Made = tuple[Task, Any, Train, nn.Module]


def one_player() -> Made:
    task = dense()
    return task, wide(classes(50)), Train(batch_size=ROWS, average=0.9), find(task)


def noisy_weights() -> Made:
    task = dense()
    return task, wide(classes(50)), Train(batch_size=ROWS, noise=Noise(inputs=0.1, weights=0.1)), find(task)


def two_players() -> Made:
    task = players().double()
    return task, wide(circle(50)), Train(batch_size=ROWS), find(task.discriminator)  # type: ignore[arg-type]


def carried() -> Made:
    task = recurrent().double()
    return task, text(), Train(batch_size=ROWS // 2, carry=True), find(task)


def compared() -> Made:
    task = Pairs()
    return task, wide(classes(50)), Train(batch_size=ROWS), find(task)


def adapted() -> Made:
    task = tuned()
    return task, wide(classes(50)), Train(batch_size=ROWS), task.model[3]


KINDS: dict[str, Function[[], Made]] = {
    made.__name__: made for made in (one_player, noisy_weights, two_players, carried, compared, adapted)
}


def learned(kind: str, *, rows: int, where: str = "forward", first: int = 0) -> tuple[dict[str, Tensor], Any]:
    task, data, train, layer = KINDS[kind]()
    limit = Limit(layer, rows, where, first)
    optim = Optim(lr=0.02, clip_norm=0.5, l1=1e-3, weight_decay=0.1)
    done = fit(task, data, steps=6, optim=optim, train=train, seed=3, train_measures=False)
    values = [record["values"] for record in done.history]
    return state(task), (limit, values)


@pytest.mark.parametrize("first", [0, 5], ids=["at once", "later"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_step_is_the_same_in_smaller_parts(kind: str, where: str, first: int) -> None:
    wanted, (free, values) = learned(kind, rows=1000)
    found, (limit, told) = learned(kind, rows=6, where=where, first=first)
    assert free.failures == 0 < limit.failures
    assert limit.failures <= 4  # parts stay as small as they were found to have to be
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
    for one, other in zip(told, values, strict=True):
        parts = one.pop("micro_batches", 0)
        assert parts in (0, 2, 4, 8)
        assert one == pytest.approx(other, rel=1e-11)
    assert parts


@pytest.mark.parametrize(
    "options", [{"norm": True}, {"dropout": 0.5}, {"norm": True, "dropout": 0.5}], ids=str
)
@pytest.mark.parametrize("first", [0, 2])
def test_moments_and_random_numbers_are_not_changed_by_a_try_that_fails(
    options: dict[str, Any], first: int
) -> None:
    """To the bit as if the parts had been smaller from that step on."""

    def run(limited: bool) -> dict[str, Tensor]:
        task = dense(**options)
        train = Train(batch_size=ROWS, micro_batches=1 if limited or first else 2)
        if limited:
            limit = Limit(find(task), ROWS // 2, first=first)
        saw = []

        class Switch(Callback):
            """Where nothing fails, the parts become smaller at the same step."""

            def on_step(self, descent: Descent, step: int) -> None:
                if step == first and not limited:
                    descent.stepper.parts.count = 2
                saw.append((torch.rand(()).item(), step))

        fit(task, wide(classes(60)), steps=6, train=train, seed=3, callbacks=[Switch()], train_measures=False)
        if limited:
            assert limit.failures == 1
        return state(task) | {"drawn": torch.tensor(saw)}

    wanted, found = run(False), run(True)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_what_a_pass_writes_to_is_put_back_and_nothing_else_is_kept() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("table", torch.arange(3.0))
            self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
            self.register_buffer("other", torch.zeros(2))

        def forward(self) -> None:
            self.count += 1
            self.other = self.other + 1  # another tensor in its place

    model = nn.ModuleList([Counting(), nn.BatchNorm1d(2), nn.Linear(2, 2)])
    before = Before(model, torch.device("cpu"))
    for _ in range(3):
        before.remember()
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        drawn = [torch.rand(()).item(), *([] if before.known else [random.random(), np.random.rand()])]
        model[0]()
        model[1](torch.randn(3, 2))
        before.restore()
        assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
        assert [torch.rand(()).item(), random.random(), np.random.rand()][: len(drawn)] == drawn
        before.restore()
        model[0]()
        model[1](torch.randn(3, 2))
        before.learn()
        # Both buffers of each module that was written to besides its tables; the draws were PyTorch's.
        assert (len(before.places), len(before.draws)) == (6, 1)
    plain = Before(nn.BatchNorm1d(2).eval(), torch.device("cpu"))
    plain.remember()
    plain.learn()
    assert not plain.places
    assert not plain.draws


@pytest.mark.parametrize("kind", ["one_player", "two_players", "carried"])
def test_a_step_that_the_host_does_not_wait_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way that steps go on a GPU, with tensors on the host."""
    wanted, _ = learned(kind, rows=1000)
    make = Stepper.__init__

    def on_device(self: Stepper, *given: Any, **options: Any) -> None:
        make(self, *given, **options)
        self.on_host, self.skip, self.one = False, torch.zeros(()), torch.ones(())

    monkeypatch.setattr(Stepper, "__init__", on_device)
    found, (limit, _) = learned(kind, rows=6, first=5)
    assert limit.failures
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
