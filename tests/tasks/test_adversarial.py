"""The adversarial task by itself: its two losses, measures, warnings, samples, scores and description."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch

from quire.data.batch import Batch
from quire.errors import InputError
from quire.models.gan import Discriminator, DiscriminatorConfig, Generator, GeneratorConfig
from quire.tasks.adversarial import Adversarial, pixel_inputs
from quire.train import build_task, evaluate
from quire.train.evaluate import check_monitor
from tests.tasks.playing import circle, pixels, players


def batch_of(data: Any, rows: int) -> Batch:
    return data.take(torch.arange(rows))


@pytest.mark.parametrize("loss", ["non-saturating", "min-max"])
@pytest.mark.parametrize("classes", [0, 4])
def test_the_losses_are_the_logarithms_of_the_players_probabilities(loss: Any, classes: int) -> None:
    task = players(classes=classes, loss=loss).double()
    batch = task.augment(batch_of(circle(6), 6))
    batch = batch.replace(inputs=batch.inputs.double())
    noise, label = batch.fields["noise"], batch.target if classes else None
    assert noise.dtype == torch.float64
    real = torch.sigmoid(task.discriminator(batch.inputs, label)).tolist()
    fake = torch.sigmoid(task.discriminator(task.generator(noise, label), label)).tolist()
    sums = task.terms(batch, "discriminator") | task.terms(batch, "generator")
    wanted = -sum(math.log(p) for p in real) - sum(math.log(1 - p) for p in fake)
    assert sums["discriminator"].item() == pytest.approx(wanted, rel=1e-12)
    wanted = -sum(math.log(p) for p in fake) if loss != "min-max" else sum(math.log(1 - p) for p in fake)
    assert sums["generator"].item() == pytest.approx(wanted, rel=1e-12)
    assert task.weigh(batch) == {"discriminator": 6.0, "generator": 6.0}
    judged, _ = task.judge(batch)
    assert judged == sums


def test_data_and_samples_share_no_statistics() -> None:
    discriminator = Discriminator(DiscriminatorConfig((2,), hidden=(8, 8), norm="batch", spectral=False))
    task = Adversarial(players().generator, discriminator)
    batch = task.augment(batch_of(circle(6), 6))
    found = task.terms(batch, "discriminator")["discriminator"]
    real, fake = discriminator(batch.inputs), discriminator(task.generator(batch.fields["noise"]))
    wanted = -real.sigmoid().log().sum() - (1 - fake.sigmoid()).log().sum()
    torch.testing.assert_close(found, wanted)
    together = discriminator(torch.cat([batch.inputs, task.generator(batch.fields["noise"])]))
    assert not torch.allclose(together[:6], real, atol=1e-3)


def test_noise_is_drawn_from_the_stream_that_training_saves_and_for_judging_from_none() -> None:
    task, batch = players(), batch_of(circle(6), 6)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    drawn = task.augment(batch).fields["noise"]
    assert not torch.equal(task.augment(batch).fields["noise"], drawn)
    torch.set_rng_state(state)
    assert torch.equal(task.augment(batch).fields["noise"], drawn)
    state = torch.get_rng_state()
    assert evaluate(task, circle(50)) == evaluate(task, circle(50))
    task.sample(5)
    assert torch.equal(torch.get_rng_state(), state)
    other = Batch(batch.fields, batch.rows + 6)
    assert task.terms(batch, "generator") != task.terms(other, "generator")  # other rows, other noise


def test_measures_count_what_the_discriminator_gets_right() -> None:
    task = players()
    task.discriminator.forward = lambda inputs, label=None: inputs[:, 0]  # type: ignore
    task.generator.forward = lambda noise, label=None: torch.full((len(noise), 2), -1.0)  # type: ignore
    data = circle(200)
    found = evaluate(task, data, batch_size=30)
    assert found["real_accuracy"] == pytest.approx((data.inputs[:, 0] > 0).double().mean().item())
    assert found["fake_accuracy"] == 1.0
    assert found["spread"] == pytest.approx(0, abs=1e-6)
    assert found["discriminator"] == pytest.approx(
        torch.nn.functional.softplus(-data.inputs[:, 0]).mean().item() + math.log1p(math.exp(-1)), rel=1e-5
    )
    assert found["loss"] == pytest.approx(found["discriminator"] + found["generator"])


@pytest.mark.parametrize("classes", [0, 4])
def test_distance_and_spread_are_0_and_1_for_the_data_themselves(classes: int) -> None:
    data = circle(100)
    task = players(classes=classes)
    rows = data.inputs.flip(0) if not classes else data.inputs
    place = 0

    def copy(noise: torch.Tensor, label: torch.Tensor | None = None) -> torch.Tensor:
        nonlocal place
        place += len(noise)
        return rows[place - len(noise) : place]

    task.generator.forward = copy  # type: ignore[method-assign]
    found = evaluate(task, data, batch_size=32)
    assert found["sliced_wasserstein"] == pytest.approx(0, abs=1e-6)
    assert found["spread"] == pytest.approx(1)


@pytest.mark.parametrize("classes", [0, 4])
def test_the_mean_of_each_class_has_distance_1_and_no_spread(classes: int) -> None:
    data = circle(100)
    task = players(classes=classes)
    means = torch.stack([data.inputs[data.target == c].mean(0) for c in range(4)])

    def mean(noise: torch.Tensor, label: torch.Tensor | None = None) -> torch.Tensor:
        return means[label] if classes else data.inputs.mean(0).expand(len(noise), 2)

    task.generator.forward = mean  # type: ignore[method-assign]
    found = evaluate(task, data, batch_size=32)
    assert found["sliced_wasserstein"] == pytest.approx(1, rel=1e-5)
    assert found["spread"] == pytest.approx(0, abs=1e-5)


def test_distance_and_spread_add_up_over_classes_and_batches() -> None:
    data = circle(40)
    task = players(classes=4)
    found = evaluate(task, data, batch_size=16)
    task.eval()
    noise = [
        torch.randn(rows, 3, generator=torch.Generator().manual_seed(place))
        for place, rows in ((0, 16), (16, 16), (32, 8))
    ]
    made = task.generator(torch.cat(noise), data.target).detach().double()
    apart = real_variance = fake_variance = 0.0
    for one in range(4):
        rows, samples = data.inputs[data.target == one].double(), made[data.target == one]
        for direction in task.directions.double():
            x, y = (points @ direction for points in (rows, samples))
            apart += sum((a - b) ** 2 for a, b in zip(sorted(x.tolist()), sorted(y.tolist()), strict=True))
            real_variance += len(x) * x.var(correction=0).item()
            fake_variance += len(y) * y.var(correction=0).item()
    assert found["sliced_wasserstein"] == pytest.approx(math.sqrt(apart / real_variance), rel=1e-5)
    assert found["spread"] == pytest.approx(math.sqrt(fake_variance / real_variance), rel=1e-5)


def test_a_single_row_of_each_class_has_no_spread_but_may_be_watched() -> None:
    data = circle(50)
    firsts = torch.tensor([int((data.target == k).nonzero()[0]) for k in range(4)])
    found = evaluate(players(classes=4), data.subset(firsts))
    assert math.isnan(found["sliced_wasserstein"])
    assert math.isnan(found["spread"])
    check_monitor(players(classes=4), data.subset(firsts), "sliced_wasserstein")


def test_the_right_points_under_the_wrong_class_are_far_away() -> None:
    data = circle(100)
    task = players(classes=4)
    means = torch.stack([data.inputs[data.target == c].mean(0) for c in range(4)])
    task.generator.forward = lambda noise, label: means[(label + 1) % 4]  # type: ignore
    assert evaluate(task, data)["sliced_wasserstein"] > 5


# -- Warnings ----------------------------------------------------------------------------------


def history(loss: str = "non-saturating", **values: float) -> list[dict[str, Any]]:
    fine = {
        "generator": -0.7 if loss == "min-max" else 0.7,
        "real_accuracy": 0.6,
        "fake_accuracy": 0.6,
        "spread": 1.0,
        "sliced_wasserstein": 0.1,
    }
    return [{"split": split, "values": {**fine, **values}} for split in ("train", "validation")] * 5


@pytest.mark.parametrize(
    ("loss", "values", "text"),
    [
        (
            "non-saturating",
            {"real_accuracy": 1.0, "fake_accuracy": 0.995},
            r"discriminator has won.*0\.995 on",
        ),
        ("non-saturating", {"generator": 8.0}, r"the generator has lost: its loss is 8 .*larger steps"),
        ("min-max", {"generator": -0.001}, r"the generator has lost.*loss=\"non-saturating\""),
        ("non-saturating", {"spread": 0.1}, r"the samples have collapsed: they vary 0\.1 times"),
        (
            "non-saturating",
            {"fake_accuracy": 0.0, "sliced_wasserstein": 2.0},
            r"the generator has won.*2 standard",
        ),
    ],
)
def test_a_player_that_has_won_is_warned_of(loss: Any, values: dict[str, float], text: str) -> None:
    task = players(loss=loss)
    (found,) = task.warnings(history(loss, **values))
    assert re.search(text, found), found
    assert task.warnings(history(loss, **values)[:-1]) == []  # four validations are not five
    assert task.warnings([*history(loss, **values), *history(loss)[-1:]]) == []  # it is over


def test_an_equilibrium_is_no_reason_to_warn() -> None:
    assert players().warnings(history(real_accuracy=0.5, fake_accuracy=0.5)) == []
    assert players().warnings([]) == []
    assert players().warnings([{"split": "validation", "values": {"generator": None}}] * 9) == []


# -- Samples and scores ------------------------------------------------------------------------


def test_samples_are_the_same_for_a_seed_in_any_number() -> None:
    task = players(norm="batch")
    task.train()
    many = task.sample(1500, seed=4)
    assert task.training
    assert many.shape == (1500, 2)
    assert torch.equal(many, task.sample(1500, seed=4))
    assert not torch.equal(many, task.sample(1500, seed=5))
    task.eval()
    noise = torch.randn(1500, 3, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(many, task.generator(noise))
    torch.testing.assert_close(task.sample(1500, temperature=0.3, seed=4), task.generator(0.3 * noise))
    with pytest.raises(InputError, match="temperature is -1"):
        task.sample(1, temperature=-1)


def test_samples_of_images_are_bytes_of_the_classes_asked_for() -> None:
    task = players(shape=(1, 6, 5), classes=2, output="tanh", inputs=pixel_inputs(1)).eval()
    made = task.sample(7, 1, seed=2)
    assert made.dtype == torch.uint8
    assert made.shape == (7, 1, 6, 5)
    noise = torch.randn(7, 3, generator=torch.Generator().manual_seed(2))
    wanted = task.generator(noise, torch.ones(7, dtype=torch.int64)) * 127.5 + 127.5
    torch.testing.assert_close(made.float(), wanted, atol=0.51, rtol=0)
    assert torch.equal(made, task.sample(7, [1] * 7, seed=2))
    in_turn = task.sample(7, seed=2)
    assert torch.equal(in_turn, task.sample(7, torch.tensor([0, 1, 0, 1, 0, 1, 0]), seed=2))
    # Scaled again, a sample is what the discriminator was shown.
    torch.testing.assert_close(task.scaled(made), (wanted - 127.5) / 127.5, atol=0.005, rtol=0)


@pytest.mark.parametrize(
    ("classes", "label", "text"),
    [
        (0, 1, r"made without classes.*leave the label out"),
        (4, 4, r"label \[4, 4, 4\] for 3 samples.*from 0 to 3"),
        (4, [0, 1], r"label \[0, 1\] for 3 samples.*one class, or 3"),
        (4, [0.5, 1.0, 2.0], r"label \[0\.5, 1\.0, 2\.0\]"),
    ],
)
def test_wrong_labels_are_explained(classes: int, label: Any, text: str) -> None:
    with pytest.raises(InputError, match=f"(?s){text}"):
        players(classes=classes).sample(3, label)
    with pytest.raises(InputError, match="count is 0"):
        players().sample(0)


def test_scores_are_probabilities_of_being_data() -> None:
    data = circle(9)
    task = players().eval()
    wanted = torch.sigmoid(task.discriminator(data.inputs))
    torch.testing.assert_close(task.predict(data.inputs)["score"], wanted)
    torch.testing.assert_close(task.loss_each(batch_of(data, 9))["discriminator"], -wanted.log())
    task = players(classes=4).eval()
    each = torch.stack([task.discriminator(data.inputs, torch.full((9,), c)).sigmoid() for c in range(4)], 1)
    found = task.predict(data.inputs)
    torch.testing.assert_close(found["score"], each.max(1).values)
    assert torch.equal(found["class"], each.argmax(1))
    named = task.predict(data.inputs, label=data.target)
    torch.testing.assert_close(named["score"], each[torch.arange(9), data.target])
    with pytest.raises(InputError, match="unknown mode of two players 'interval'"):
        task.predict(data.inputs, "interval")


# -- Description -------------------------------------------------------------------------------


def test_a_task_is_rebuilt_from_its_description() -> None:
    task = players(
        shape=(1, 6, 5), classes=2, kind="convolutional", norm="batch", spectral=True, output="tanh",
        loss="min-max", discriminator_steps=3, step_factors={"discriminator.": 0.5}, inputs=pixel_inputs(1),
    ).eval()  # fmt: skip
    spec = json.loads(json.dumps(task.spec()))
    again = build_task(spec)
    assert isinstance(again, Adversarial)
    again.load_state_dict(task.state_dict())
    again.eval()
    assert again.spec() == task.spec()
    assert torch.equal(again.sample(4, seed=1), task.sample(4, seed=1))
    assert evaluate(again, pixels(20)) == evaluate(task, pixels(20))
    spec["generator"], spec["discriminator"] = spec["discriminator"], spec["generator"]
    with pytest.raises(InputError, match=r"the models discriminator and generator"):
        build_task(spec)


def test_players_that_do_not_fit_are_refused() -> None:
    generator = Generator(GeneratorConfig((2,), classes=3))
    with pytest.raises(InputError, match=r"(?s)with classes 3 and a discriminator with classes 2"):
        Adversarial(generator, Discriminator(DiscriminatorConfig((2,), classes=2)))
    with pytest.raises(InputError, match=r"(?s)with shape \(2,\) and a discriminator with shape \(3,\)"):
        Adversarial(generator, Discriminator(DiscriminatorConfig((3,), classes=3)))
    with pytest.raises(InputError, match=r"(?s)unknown generator loss 'minmax'.*did you mean 'min-max'"):
        players(loss="minmax")
    with pytest.raises(InputError, match="discriminator_steps is 0"):
        players(discriminator_steps=0)
