"""Two players in the one trainer: steps against a loop by hand, precision, resuming, the guard, learning."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.data.batch import Batch, TensorData
from quire.errors import NonFiniteError
from quire.options import Optim, Train
from quire.tasks.adversarial import Adversarial, pixel_inputs
from quire.train import Callback, evaluate, fit
from quire.train.checkpoints import newest_checkpoint
from quire.train.step import Stepper
from tests.tasks.playing import centres, circle, pixels, players
from tests.train.examples import folder, often

pytestmark = pytest.mark.slow

LR = 0.5
CPU = torch.device("cpu")


def by_hand(task: Adversarial, batch: Batch, clip: float | None) -> Adversarial:
    """One step of each player on the whole batch, with PyTorch's loss."""
    task = copy.deepcopy(task)
    label = batch.target if task.classes else None
    noise, entropy = batch.fields["noise"], functional.binary_cross_entropy_with_logits
    ones, zeros = torch.ones(len(batch)).double(), torch.zeros(len(batch)).double()
    for player in (task.discriminator, task.generator):
        fake = task.discriminator(task.generator(noise, label), label)
        if player is task.discriminator:
            real = task.discriminator(batch.inputs, label)
            loss = entropy(real, ones) + entropy(fake, zeros)
        elif task.loss == "min-max":
            loss = -entropy(fake, zeros)
        else:
            loss = entropy(fake, ones)
        gradients = torch.autograd.grad(loss, list(player.parameters()))
        length = torch.cat([g.flatten() for g in gradients]).norm().item()
        shrink = min(1.0, clip / length) if clip is not None else 1.0
        with torch.no_grad():
            for parameter, gradient in zip(player.parameters(), gradients, strict=True):
                parameter -= LR * shrink * gradient
    return task


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(
    "options", [{}, {"classes": 4}, {"loss": "min-max"}], ids=["plain", "classes", "min-max"]
)
def test_a_step_is_what_a_loop_by_hand_does(options: Any, clip: float | None, micro_batches: int) -> None:
    """Whole or in uneven parts, each player clipped by its own norm, the discriminator first."""
    task = players(**options).double()
    batch = circle(11).take(torch.arange(11))
    batch = batch.replace(inputs=batch.inputs.double())
    torch.manual_seed(7)
    wanted = by_hand(task, task.augment(batch), clip)
    torch.manual_seed(7)
    optim, train = Optim("sgd", lr=LR, clip_norm=clip), Train(micro_batches=micro_batches)
    before = {name: p.detach().clone() for name, p in task.named_parameters()}
    stepper = Stepper(task, optim, train, CPU, total_steps=1)
    sums, weights = stepper.step(batch, 0)
    assert weights == {"discriminator": 11.0, "generator": 11.0}
    assert sums.keys() == weights.keys()
    for (name, found), right in zip(task.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-13)
        assert not torch.equal(found, before[name]), name
    if clip is not None:
        for player in stepper.players:
            assert player.norm().item() == pytest.approx(clip)
    stepper.close()


def test_a_player_only_moves_in_its_turn() -> None:
    task = players(discriminator_steps=3)
    stepper = Stepper(task, Optim("sgd", lr=0.1), Train(), CPU, total_steps=6)
    batch = circle(11).take(torch.arange(11))
    moved = []
    for number in range(6):
        before = [p.detach().clone() for p in task.parameters()]
        _, weights = stepper.step(batch, number)
        names = {
            name.split(".")[0]
            for (name, p), old in zip(task.named_parameters(), before, strict=True)
            if not torch.equal(p, old)
        }
        assert names == set(weights)
        moved.append("generator" in names)
        assert "discriminator" in names
    assert moved == [False, False, True] * 2


def test_the_loss_that_is_shown_is_over_the_steps_that_were_taken() -> None:
    """With steps of no size every loss is a constant, however seldom its player moves."""
    task = players(discriminator_steps=3)
    noise = torch.randn(11, 3)
    task.augment = lambda batch: batch.replace(noise=noise)  # type: ignore[method-assign]
    data = circle(11)
    wanted, _ = task.judge(task.augment(data.take(torch.arange(11))))
    found = fit(
        task,
        data,
        steps=9,
        optim=Optim(lr=1e-12),
        train=Train(batch_size=11, validate_every=9, shuffle=False),
    )
    values = found.history[-1]["values"]
    for player in task.players:
        assert values[player] == pytest.approx(wanted[player].item() / 11, rel=1e-5)


def test_step_factors_are_for_one_player_each() -> None:
    task = players(step_factors={"generator.": 0.25})
    stepper = Stepper(task, Optim("sgd", lr=0.1), Train(), CPU, total_steps=1)
    factors = {p.name: {group.step_factor for group in p.groups} for p in stepper.players}
    assert factors == {"discriminator": {1.0}, "generator": {0.25}}


def test_mixed_precision_computes_in_bfloat16_and_keeps_weights_in_float32() -> None:
    seen = set()
    task = players(norm="batch", spectral=True, classes=4)
    for layer in task.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(
                lambda module, inputs, output: seen.add(output.dtype) if module.training else None
            )
    train = Train(batch_size=32, precision="bfloat16", restore="last")
    fit(task, circle(200), circle(50, 2), epochs=4, optim=Optim(lr=1e-3), train=train)
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in task.parameters()} == {torch.float32}
    plain = players(norm="batch", spectral=True, classes=4)
    fit(
        plain,
        circle(200),
        circle(50, 2),
        epochs=4,
        optim=Optim(lr=1e-3),
        train=Train(batch_size=32, restore="last"),
    )
    found, wanted = evaluate(task, circle(50, 2)), evaluate(plain, circle(50, 2))
    for player in task.players:
        assert found[player] == pytest.approx(wanted[player], rel=0.05)
        assert found[player] != wanted[player]


# -- Resuming ----------------------------------------------------------------------------------


class Crash(Exception):
    pass


class CrashAfter(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, descent: Any, step: int) -> None:
        if step == self.step:
            raise Crash


def train_images(path: Path, *, crash: int = 0, resume: bool = False, seed: int = 5) -> None:
    task = players(
        shape=(1, 6, 5), classes=2, kind="convolutional", norm="batch", spectral=True, output="tanh",
        inputs=pixel_inputs(1), discriminator_steps=2,
    )  # fmt: skip
    store = folder(path, resume=resume)
    options = often(
        checkpoint_every=4, average=0.9, monitor="sliced_wasserstein", micro_batches=2, validate_every=3
    )
    try:
        fit(
            task, pixels(50), pixels(30, 2), steps=14, optim=Optim(lr=2e-4, beta1=0.5), train=options,
            seed=seed, store=store, callbacks=[CrashAfter(crash)] if crash else [],
        )  # fmt: skip
    finally:
        store.close()


def outcome(path: Path) -> dict[str, Tensor]:
    tensors = newest_checkpoint(path / "checkpoints").tensors
    assert {"optimiser-discriminator", "optimiser-generator", "weights", "best", "average", "random"} <= set(
        tensors
    )
    return {f"{kind}:{name}": value for kind, part in tensors.items() for name, value in part.items()}


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    train_images(tmp_path / "whole")
    whole = outcome(tmp_path / "whole")
    for crash in (5, 9):  # in the second epoch between the generator's turns, and after one of them
        with pytest.raises(Crash):
            train_images(tmp_path / f"run{crash}", crash=crash)
        train_images(tmp_path / f"run{crash}", resume=True)
        again = outcome(tmp_path / f"run{crash}")
        assert again.keys() == whole.keys()
        torch.testing.assert_close(again, whole, rtol=0, atol=0, equal_nan=True)
    train_images(tmp_path / "other", seed=6)
    other = outcome(tmp_path / "other")
    assert any(not torch.equal(whole[name], other[name]) for name in whole if name.startswith("weights:"))


# -- The guard ---------------------------------------------------------------------------------


def test_a_bad_row_is_named_and_neither_player_moves() -> None:
    data = circle(60)
    data.inputs[45, 1] = float("nan")
    task, expected = players(), players()
    plain = Train(batch_size=20, shuffle=False)
    fit(expected, TensorData({k: v[:40] for k, v in data.fields.items()}), steps=2, train=plain)
    with pytest.raises(NonFiniteError) as caught:
        fit(task, data, epochs=1, train=plain)
    assert "step 2:" in str(caught.value)
    assert caught.value.rows == [45]
    for name, value in task.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name


class InfiniteSlope(nn.Module):
    """√|x − x₀|: finite everywhere, with an infinite slope at the first number it ever sees."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.detach()).abs().sqrt() + x


def test_a_gradient_of_the_generator_that_is_not_finite_stops_the_generator() -> None:
    task = players()
    task.generator.decoder.layers.append(InfiniteSlope())
    before = {name: value.clone() for name, value in task.state_dict().items()}
    with pytest.raises(NonFiniteError, match=r"step 0: the gradient of 'generator\.decoder"):
        fit(task, circle(40), epochs=1, train=Train(batch_size=20))
    for name, value in task.generator.state_dict().items():
        assert torch.equal(value, before[f"generator.{name}"]), name
    assert all(value.isfinite().all() for value in task.state_dict().values())


def test_the_rest_of_an_epoch_may_be_a_single_row() -> None:
    task = players(norm="batch")
    found = fit(task, circle(41), epochs=2, train=Train(batch_size=20))
    assert found.steps == 6
    assert task.generator.decoder.layers[1].num_batches_tracked > 0


# -- Learning ----------------------------------------------------------------------------------


def test_every_mode_of_a_mixture_is_found() -> None:
    task = players(norm="batch", spectral=True, hidden=(32, 32))
    options = Train(batch_size=64, restore="last", validate_every=200)
    found = fit(task, circle(2000), circle(500, 2), steps=800, optim=Optim(lr=2e-3, beta1=0.5), train=options)
    made = task.sample(1000)
    distance, nearest = torch.cdist(made, centres()).min(1)
    near = distance < 0.5
    shares = torch.bincount(nearest[near], minlength=4) / 1000
    assert shares.min() > 0.1, shares
    values = [record["values"] for record in found.history if record["split"] == "validation"]
    assert values[-1]["sliced_wasserstein"] < 0.25
    assert task.warnings(found.history) == []


def test_a_class_that_is_asked_for_is_made() -> None:
    task = players(norm="batch", spectral=True, hidden=(32, 32), classes=4)
    options = Train(batch_size=64, restore="best", monitor="sliced_wasserstein", validate_every=200)
    fit(task, circle(2000), circle(500, 2), steps=800, optim=Optim(lr=2e-3, beta1=0.5), train=options)
    asked = torch.arange(1000) % 4
    made = torch.cdist(task.sample(1000, asked), centres()).argmin(1)
    for one in range(4):
        assert (made[asked == one] == one).double().mean() > 0.9
    # The discriminator knows which class a row would be real under.
    data = circle(500, 3)
    assert (task.predict(data.inputs)["class"] == data.target).double().mean() > 0.9
