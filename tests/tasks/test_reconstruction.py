"""Reconstruction: terms and weights, damage while training, hidden places, units, and what is learned."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.data.batch import Batch, TensorData
from quire.errors import InputError
from quire.models.autoencoder import Autoencoder, AutoencoderConfig
from quire.nn.images import ImageInputs
from quire.options import Noise, Optim, Train
from quire.tasks.reconstruction import Reconstruction, ReconstructionRules
from quire.train import fit
from quire.train.evaluate import evaluate
from quire.train.gradients import Gradients, loss_factors
from quire.train.sums import add_up
from quire.train.task import build_task

pytestmark = pytest.mark.slow


def make(
    shape: tuple[int, ...] = (6,), *, inputs: ImageInputs | None = None, **options: Any
) -> Reconstruction:
    """`options` are those of the network and of the rules."""
    names = options.keys() & AutoencoderConfig.__dataclass_fields__.keys()
    model = {name: options.pop(name) for name in names}
    settings = {"hidden": (8,), "activation": "tanh", "code": 3, "channels": 3, **model}
    torch.manual_seed(0)
    network = Autoencoder(AutoencoderConfig(shape, **settings)).double()
    task = Reconstruction(network, ReconstructionRules(**options), inputs=inputs)
    return task.double()


def rows(count: int = 10, *shape: int) -> Tensor:
    return torch.randn(count, *(shape or (6,)), dtype=torch.float64)


def batch_of(inputs: Tensor) -> Batch:
    return Batch({"inputs": inputs}, torch.arange(len(inputs)))


def pixels(count: int = 6, channels: int = 1, height: int = 9, width: int = 7) -> Tensor:
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8)


# Terms ----------------------------------------------------------------------------------------


def test_terms_by_hand() -> None:
    task, x = make(sparsity=0.5, contraction=0.2), rows()
    sums, weights = task.terms(batch_of(x)), task.weigh(batch_of(x))
    codes = task.model.encode(x)
    jacobian = torch.autograd.functional.jacobian(task.model.encode, x)
    slopes = sum(jacobian[n, :, n].square().sum() for n in range(10))
    assert list(sums) == list(weights) == ["reconstruction", "sparsity", "contraction"]
    torch.testing.assert_close(sums["reconstruction"], (task.model(x) - x).square().sum())
    torch.testing.assert_close(sums["sparsity"], codes.abs().sum())
    torch.testing.assert_close(sums["contraction"], slopes)
    assert weights == dict.fromkeys(sums, 60.0)
    assert task.scales == {"sparsity": 0.5, "contraction": 0.2}
    assert list(make().terms(batch_of(x))) == ["reconstruction"]


def test_bernoulli_by_hand() -> None:
    task, x = make(loss="bernoulli"), torch.rand(5, 6, dtype=torch.float64)
    p = task.model(x).sigmoid()
    wanted = -(x * p.log() + (1 - x) * (1 - p).log())
    torch.testing.assert_close(task.terms(batch_of(x))["reconstruction"], wanted.sum())
    torch.testing.assert_close(task.loss_each(batch_of(x))["reconstruction"], wanted.mean(1))
    with pytest.raises(InputError, match=r"the loss 'bernoulli' of values from -\d(.|\n)*values in \[0, 1\]"):
        task.terms(batch_of(x - 1))


@pytest.mark.parametrize(
    "options", [{"sparsity": 0.3}, {"contraction": 0.1}, {"masked": 0.4}, {"noise": "gaussian"}]
)
def test_parts_of_a_batch_have_the_gradient_of_the_whole(options: dict[str, Any]) -> None:
    task, x = make(**options), rows(11)
    torch.manual_seed(3)
    batch = task.augment(batch_of(x))

    def gradient(parts: int) -> list[Tensor]:
        task.zero_grad()
        micro = batch.split(parts)
        factors = loss_factors(task, add_up(task.weigh(part) for part in micro))
        Gradients(task)(micro, factors, "model")
        return [p.grad.clone() for p in task.parameters() if p.grad is not None]

    torch.testing.assert_close(gradient(1), gradient(4))


def test_contraction_refuses_batch_norm() -> None:
    with pytest.raises(InputError, match="a contraction penalty on an encoder with batch norm"):
        make(contraction=0.1, norm="batch")


# Damage ---------------------------------------------------------------------------------------


def test_noise_is_for_training_and_the_clean_row_is_wanted() -> None:
    task, x = make(noise="gaussian", amount=0.5), rows(2000)
    batch = task.augment(batch_of(x))
    noise = batch.inputs - x
    assert noise.std().item() == pytest.approx(0.5, rel=0.05)
    torch.testing.assert_close(
        task.terms(batch)["reconstruction"], (task.model(batch.inputs) - x).square().sum()
    )
    plain = task.terms(batch_of(x))["reconstruction"]
    torch.testing.assert_close(plain, (task.model(x) - x).square().sum())
    assert len(batch.split(3)[0].fields["clean"]) == 667


def test_noise_of_the_trainer_is_not_wanted_back_either() -> None:
    # --train.noise.inputs comes after `augment` and changes the inputs alone.
    task, x = make(), rows()
    batch = task.augment(batch_of(x)).replace(inputs=x + 1)
    torch.testing.assert_close(task.terms(batch)["reconstruction"], (task.model(x + 1) - x).square().sum())
    fit(task, TensorData({"inputs": x}), steps=2, train=Train(noise=Noise(inputs=0.1)))


def test_salt_and_pepper_are_black_and_white_pixels() -> None:
    x = pixels(200) // 2 + 60
    task = make((1, 9, 7), inputs=ImageInputs([100.0], [50.0]), noise="salt_and_pepper", amount=0.5)
    damaged = task.augment(batch_of(x)).inputs
    changed = (damaged - x).abs() > 1e-9
    assert changed.double().mean().item() == pytest.approx(0.5, abs=0.02)
    assert set(damaged[changed].round(decimals=6).tolist()) == {0.0, 255.0}
    table = make(noise="salt_and_pepper", amount=1.0).augment(batch_of(rows()))
    clean = table.fields["clean"]
    ends = (table.inputs == clean.amin(0)) | (table.inputs == clean.amax(0))
    assert ends.all()
    shares = make(noise="salt_and_pepper", amount=1.0, loss="bernoulli").augment(batch_of(rows().sigmoid()))
    assert set(shares.inputs.flatten().tolist()) == {0.0, 1.0}


def test_damage_shows_what_the_network_works_from() -> None:
    x = pixels(4, height=8, width=8)
    task = make((1, 8, 8), inputs=ImageInputs([128.0], [64.0]), masked=0.5, patch=4)
    shown = task.damage(x)
    hidden = (shown - x).abs() > 1e-6
    assert ((shown[hidden] - 128).abs() < 1e-6).all()
    filled = task.predict(x)["reconstruction"]
    torch.testing.assert_close(filled[~hidden], x.double()[~hidden])
    noisy = make(noise="masking", amount=0.5)
    seeded = [noisy.damage(rows(), torch.Generator().manual_seed(1)) == 0 for _ in range(2)]
    assert torch.equal(*seeded)
    assert 10 < seeded[0].sum() < 50


# Hidden places --------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "channels"), [((6,), 1), ((2, 9, 7), 2)])
def test_only_hidden_places_count(shape: tuple[int, ...], channels: int) -> None:
    task, x = make(shape, masked=0.4, patch=3), rows(5, *shape)
    batch = task.augment(batch_of(x))
    hidden = batch.fields["hidden"]
    assert hidden.shape == (5, *shape) if channels == 1 else (5, 1, *shape[1:])
    back = task.model(torch.where(hidden, 0.0, x))
    total, count = 0.0, 0
    for place in torch.ones(5, *shape).nonzero().tolist():
        where = tuple(place) if channels == 1 else (place[0], 0, *place[2:])
        if hidden[where]:
            total += float((back[tuple(place)] - x[tuple(place)]).detach() ** 2)
            count += 1
    assert task.weigh(batch)["reconstruction"] == count
    assert task.terms(batch)["reconstruction"].item() == pytest.approx(total)
    each = task.loss_each(batch)["reconstruction"] * hidden.expand_as(x).flatten(1).sum(1)
    assert each.sum().item() == pytest.approx(total)
    assert not torch.equal(task.augment(batch_of(x)).fields["hidden"], hidden), "drawn anew for every step"


def test_judging_hides_the_same_places_in_any_batches() -> None:
    task, data = make(masked=0.5), TensorData({"inputs": rows(150)})
    torch.manual_seed(1)
    first = evaluate(task, data, 150)
    torch.manual_seed(2)
    other = evaluate(task, data, 7)
    assert first == pytest.approx(other)
    again = build_task(json.loads(json.dumps(task.spec()))).double()
    again.load_state_dict(task.state_dict())
    assert evaluate(again, data) == pytest.approx(first)


@pytest.mark.parametrize(
    ("shape", "options"), [((6,), {"masked": 0.05}), ((1, 4, 4), {"masked": 0.5, "patch": 9})]
)
def test_hiding_nothing_or_everything_is_refused(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="at least one place that is hidden and one that is seen"):
        make(shape, **options)


# Measures and predictions ---------------------------------------------------------------------


def test_measures_by_hand() -> None:
    task, x = make(sparsity=0.1, noise="gaussian", amount=0.2), rows(30)
    found = evaluate(task, TensorData({"inputs": x}), 8)
    back, codes = task.model(x).detach(), task.model.encode(x)
    assert found["mse"] == pytest.approx((back - x).square().mean().item())
    spread = (x - x.mean(0)).square().sum()
    assert found["r2"] == pytest.approx(1 - ((back - x).square().sum() / spread).item())
    assert found["active"] == pytest.approx((codes.abs() > 0.01).double().mean().item())
    assert found["loss"] == pytest.approx(found["mse"] + 0.1 * codes.abs().sum().item() / x.numel())
    assert found["restored_mse"] != pytest.approx(found["mse"], rel=1e-6)
    assert found == evaluate(task, TensorData({"inputs": x}), 8)


def test_predictions_of_rows() -> None:
    task, x = make(), rows(4)
    found = task.predict(x)
    torch.testing.assert_close(found["code"], task.model.encode(x))
    torch.testing.assert_close(found["reconstruction"], task.model(x))
    torch.testing.assert_close(found["error"], (task.model(x) - x).square().mean(1))
    assert not found["error"].requires_grad
    with pytest.raises(InputError, match="unknown mode of reconstruction 'sample'"):
        task.predict(x, "sample")


@pytest.mark.parametrize("loss", ["squared", "bernoulli"])
def test_predictions_of_images_are_pixels(loss: str) -> None:
    mean, std = ([10.0, 20.0], [30.0, 40.0]) if loss == "squared" else ([0.0, 0.0], [255.0, 255.0])
    task = make((2, 9, 7), kind="convolutional", inputs=ImageInputs(mean, std), loss=loss)
    x = pixels(channels=2)
    found = task.predict(x)
    scaled = (x.double() - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    out = task.model(scaled).detach()
    out = out if loss == "squared" else torch.sigmoid(out)
    wanted = out * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
    torch.testing.assert_close(found["reconstruction"], wanted.clamp(0, 255))
    torch.testing.assert_close(found["error"], (out - scaled).square().flatten(1).mean(1))


def test_is_rebuilt_from_its_description() -> None:
    task = make(
        (1, 9, 7), kind="convolutional", inputs=ImageInputs([1.0], [2.0]), masked=0.5, patch=2, tied=True
    )
    again = build_task(json.loads(json.dumps(task.spec()))).double()
    assert isinstance(again, Reconstruction)
    assert again.rules == task.rules
    again.load_state_dict(task.state_dict())
    x = pixels()
    for name, value in task.predict(x).items():
        assert torch.equal(again.predict(x)[name], value), name
    with pytest.raises(InputError, match="a reconstruction by MLP"):
        build_task({"task": "reconstruction", "model": {"model": "mlp", "in_features": 2, "out_features": 1}})


class Predicts(nn.Module):
    def __init__(self, task: Reconstruction) -> None:
        super().__init__()
        self.task = task

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.task.predict(x).values())


@pytest.mark.parametrize("options", [{}, {"masked": 0.5}, {"loss": "bernoulli"}])
def test_predictions_can_be_exported_with_any_number_of_rows(options: dict[str, Any]) -> None:
    task = make((1, 9, 7), kind="convolutional", inputs=ImageInputs([0.0], [255.0]), **options).eval()
    dynamic = ({0: torch.export.Dim("rows")},)
    program = torch.export.export(Predicts(task), (pixels(5),), dynamic_shapes=dynamic)
    x = pixels(70)
    torch.testing.assert_close(program.module()(x), tuple(task.predict(x).values()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "l1"}, "unknown reconstruction loss 'l1'"),
        ({"noise": "guassian"}, "unknown kind of noise 'guassian'(.|\n)*did you mean 'gaussian'"),
        ({"noise": "masking", "amount": 1.5}, r"amount is 1.5\n  expected: a share in \[0, 1\]"),
        ({"sparsity": -1.0}, "sparsity is -1.0"),
        ({"masked": 1.0}, "masked is 1.0"),
        ({"patch": 0}, "patch is 0"),
    ],
)
def test_wrong_rules(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ReconstructionRules(**options)


# Learning -------------------------------------------------------------------------------------


def plane(count: int = 400) -> Tensor:
    """Rows on a bent two-dimensional surface in six dimensions, standardised."""
    torch.manual_seed(5)
    z = torch.randn(count, 2)
    x = torch.cat([z, z[:, :1] * z[:, 1:], torch.sin(2 * z), z.sum(1, keepdim=True)], 1)
    return (x - x.mean(0)) / x.std(0)


def learn(epochs: int = 30, **options: Any) -> tuple[Reconstruction, dict[str, float]]:
    task = make(**{"hidden": (32,), "code": 2, **options}).float()
    data = TensorData({"inputs": plane()})
    fit(task, data, epochs=epochs, optim=Optim(lr=5e-3), train=Train(batch_size=32))
    return task, evaluate(task, data)


def test_a_narrow_code_learns_the_surface() -> None:
    _, found = learn(60)
    assert found["r2"] > 0.93


def test_penalties_do_what_they_say() -> None:
    width: dict[str, Any] = {"hidden": (8,), "code": 6, "code_activation": "relu", "tied": True}
    free, _ = learn(**width)
    sparse, found = learn(**width, sparsity=1.0)
    flat, _ = learn(**width, contraction=0.5)
    x = plane()
    active = [(task.model.encode(x) > 0.01).float().mean().item() for task in (free, sparse)]
    assert active[1] < 0.8 * active[0]
    assert found["active"] == pytest.approx(active[1])
    slopes = [task.model.contraction(x).mean().item() for task in (free, flat)]
    assert slopes[1] < 0.5 * slopes[0]


def test_noise_teaches_to_restore() -> None:
    options: dict[str, Any] = {"code": 6, "activation": "relu"}
    _, copied = learn(60, **options)
    denoised, found = learn(60, **options, noise="gaussian", amount=0.5)
    assert found["restored_mse"] < 0.8 * 0.5**2, "less is wrong than the noise put in"
    assert copied["mse"] < found["mse"]
    noisy = denoised.damage(plane(), torch.Generator().manual_seed(0))
    restored = denoised.predict(noisy)["reconstruction"]
    assert functional.mse_loss(restored, plane()) < 0.8 * functional.mse_loss(noisy, plane())


def test_hidden_features_are_learned_from_the_others() -> None:
    _, found = learn(60, masked=1 / 3, code=4)
    assert found["r2"] > 0.4


def test_images_are_learned_in_bytes() -> None:
    torch.manual_seed(0)
    bright = torch.randint(0, 2, (120, 1, 1, 2), dtype=torch.uint8) * 255
    x = bright.repeat_interleave(5, 2).repeat_interleave(3, 3)[:, :, :, :5]
    task = Reconstruction(
        Autoencoder(AutoencoderConfig((1, 5, 5), "convolutional", (16,), 4, code=2)),
        ReconstructionRules(loss="bernoulli"),
        inputs=ImageInputs([0.0], [255.0]),
    )
    fit(task, TensorData({"inputs": x}), epochs=30, optim=Optim(lr=1e-2), train=Train(batch_size=20))
    assert (task.predict(x)["reconstruction"] - x.float()).abs().mean() < 10
