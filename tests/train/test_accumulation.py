"""Gradients over micro-batches equal the full batch's, for every loss, whatever the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.data.batch import Batch
from quire.errors import InputError
from quire.functional.losses import LOSSES, Loss
from quire.options import Optim, Train
from quire.train.step import Stepper
from quire.train.task import Task, Weight


class LossTask(Task):
    """Any registered loss behind a small linear model; the first of the loss's inputs is predicted."""

    def __init__(self, loss: Loss, batch: Batch, options: dict[str, Any]) -> None:
        super().__init__()
        self.loss, self.options = loss, options
        self.model = nn.Linear(batch.inputs[0].numel(), batch.inputs[0].numel()).double()

    @property
    def couples_samples(self) -> bool:  # type: ignore[override]
        return self.loss.couples_samples

    def arguments(self, prediction: Tensor, batch: Batch) -> list[Tensor]:
        others = [batch.fields[f"other{i}"] for i in range(len(batch.fields) - 1)]
        return [prediction, *others]

    def represent(self, batch: Batch) -> Tensor:
        flat = batch.inputs.reshape(len(batch), -1)
        if self.loss.name in PROBABILITIES:
            moved = flat * torch.sigmoid(self.model(flat))
        else:
            moved = flat + 0.1 * torch.tanh(self.model(flat))
        return moved.reshape(batch.inputs.shape)

    def weigh(self, batch: Batch) -> dict[str, Weight]:
        return {"loss": self.loss.weigh(*self.arguments(batch.inputs, batch), **self.options)}

    def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
        return self.coupled_terms(self.represent(batch), batch)

    def coupled_terms(self, representations: Tensor, batch: Batch) -> dict[str, Tensor]:
        arguments = self.arguments(representations, batch)
        return {"loss": self.loss.function(*arguments, **self.options, reduction="sum")}

    def predict(self, inputs: Tensor, mode: str = "mode", **options: Any) -> dict[str, Tensor]:
        raise NotImplementedError

    def spec(self) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Task:
        raise NotImplementedError


PROBABILITIES = {"binary_cross_entropy"}
"""Losses whose predictions must stay in [0, 1]."""


def example(name: str, rows: int = 23) -> tuple[LossTask, Batch]:
    loss = LOSSES[name]
    inputs, options = loss.example(torch.Generator().manual_seed(3), rows, torch.float64)
    prediction, *others = inputs
    fields = {"inputs": prediction.detach(), **{f"other{i}": value for i, value in enumerate(others)}}
    batch = Batch(fields, torch.arange(rows))
    torch.manual_seed(0)
    return LossTask(loss, batch, options), batch


def gradient(task: Task, batch: Batch, micro_batches: int) -> Tensor:
    """The gradient as the trainer computes it: read off a step of plain gradient descent."""
    stepper = Stepper(
        task, Optim("sgd", lr=1.0), Train(micro_batches=micro_batches), torch.device("cpu"), total_steps=1
    )
    stepper.step(batch, 0)
    found = torch.cat([group.grad.clone() for group in stepper.players[0].groups])
    stepper.close()
    return found


@pytest.mark.parametrize("micro_batches", [3, 7])
@pytest.mark.parametrize("name", list(LOSSES))
def test_micro_batches_give_the_full_batch_gradient(name: str, micro_batches: int) -> None:
    task, batch = example(name)
    state = {key: value.clone() for key, value in task.state_dict().items()}
    whole = gradient(task, batch, 1)
    task.load_state_dict(state)
    parts = gradient(task, batch, micro_batches)
    assert whole.abs().max() > 0
    torch.testing.assert_close(parts, whole, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", list(LOSSES))
def test_the_full_batch_gradient_is_that_of_the_mean(name: str) -> None:
    task, batch = example(name)
    arguments = task.arguments(task.represent(batch), batch)
    mean = task.loss.function(*arguments, **task.options, reduction="mean")
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(mean, list(task.parameters()))])
    torch.testing.assert_close(gradient(task, batch, 1), expected, rtol=1e-11, atol=1e-12)


def test_averaging_the_means_would_have_been_wrong() -> None:
    """The mistake that (sum, weight) terms exist to prevent is visible on these examples."""
    task, batch = example("cross_entropy")
    state = {key: value.clone() for key, value in task.state_dict().items()}
    whole = gradient(task, batch, 1)
    naive = torch.zeros_like(whole)
    for part in batch.split(3):
        task.load_state_dict(state)
        naive += gradient(task, part, 1) / 3
    assert (naive - whole).abs().max() > 1e-3 * whole.abs().max()


def test_a_coupled_loss_draws_the_same_dropout_masks_in_both_passes() -> None:
    class Dropping(LossTask):
        def represent(self, batch: Batch) -> Tensor:
            return nn.functional.dropout(super().represent(batch), 0.5)

    batch = example("info_nce")[1]
    torch.manual_seed(0)
    task = Dropping(LOSSES["info_nce"], batch, {})
    state = {key: value.clone() for key, value in task.state_dict().items()}
    torch.manual_seed(1)
    whole = torch.cat([task.represent(part) for part in batch.split(3)])  # masks in the trainer's order
    mean = task.coupled_terms(whole, batch)["loss"] / task.weigh(batch)["loss"]
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(mean, list(task.parameters()))])
    task.load_state_dict(state)
    torch.manual_seed(1)
    torch.testing.assert_close(gradient(task, batch, 3), expected, rtol=1e-11, atol=1e-12)


def test_several_terms_are_scaled_and_added() -> None:
    from quire.models.mlp import MLP, MLPConfig
    from quire.nn.heads import Categorical, Gaussian
    from quire.tasks.supervised import Supervised

    torch.manual_seed(0)
    heads = {"kind": Categorical(3), "size": Gaussian(1)}
    task = Supervised(MLP(MLPConfig(5, 4, hidden=(6,))), heads, {"size": 0.3}).double()
    fields = {
        "inputs": torch.randn(20, 5).double(),
        "target.kind": torch.randint(0, 3, (20,)),
        "target.size": torch.randn(20).double(),
    }
    fields["target.kind"][:8] = -100
    batch = Batch(fields, torch.arange(20))
    raw = task.model(fields["inputs"])
    kept = fields["target.kind"] >= 0
    loss = nn.functional.cross_entropy(raw[kept, :3], fields["target.kind"][kept])
    loss = loss + 0.3 * 0.5 * (raw[:, 3] - fields["target.size"]).square().mean()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(task.model.parameters()))])
    for parts in (1, 3, 7):
        state = {key: value.clone() for key, value in task.state_dict().items()}
        torch.testing.assert_close(gradient(task, batch, parts), expected, rtol=1e-11, atol=1e-12)
        task.load_state_dict(state)


def test_a_coupled_loss_without_representations_is_refused() -> None:
    class Opaque(LossTask):
        represent = Task.represent

    batch = example("info_nce")[1]
    task = Opaque(LOSSES["info_nce"], batch, {})
    with pytest.raises(
        InputError, match=r"(?s)micro_batches 3.*compares the samples.*set --train.micro_batches 1"
    ):
        Stepper(task, Optim(), Train(micro_batches=3), torch.device("cpu"), total_steps=1)


def test_a_batch_in_which_every_target_is_ignored_moves_nothing() -> None:
    from tests.train.examples import classes, classifier

    data = classes(20)
    batch = data.take(torch.arange(20)).replace(target=torch.full((20,), -100))
    for explicit in (True, False):
        task = classifier()
        if not explicit:
            task.explicit = lambda: None
        assert gradient(task, batch, 3).abs().max() == 0
