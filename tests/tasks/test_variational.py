"""The task of variational autoencoders: its terms, what is random in them and what is not, its measures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import distributions
from torch.testing import assert_close

from quire.data.batch import Batch, TensorData
from quire.errors import InputError
from quire.functional.variational import row_normal, row_uniform
from quire.models.vae import VAE, VAEConfig
from quire.nn.images import ImageInputs
from quire.options import Optim, Train
from quire.tasks.variational import CODES, VALUES, Variational
from quire.train import build_task, evaluate, fit
from quire.train.descent import Callback, Descent
from tests.train.examples import folder, often


def digits(rows: int = 200, start: int = 0) -> TensorData:
    found = load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)[start : start + rows, None]
    return TensorData(
        {"inputs": torch.from_numpy(pixels), "target": torch.from_numpy(found.target[start : start + rows])}
    )


def rows_in_unit(rows: int = 60, size: int = 6) -> TensorData:
    return TensorData({"inputs": torch.rand(rows, size, generator=torch.Generator().manual_seed(3))})


def images(classes: int = 0, seed: int = 0, hidden: tuple[int, ...] = (32,), **options: Any) -> Variational:
    torch.manual_seed(seed)
    model = VAE(VAEConfig((1, 8, 8), hidden=hidden, latent=4, classes=classes))
    return Variational(model, inputs=ImageInputs([0.0], [255.0]), **options)


def vectors(seed: int = 0, classes: int = 0, **options: Any) -> Variational:
    torch.manual_seed(seed)
    return Variational(VAE(VAEConfig((6,), hidden=(8,), latent=3, classes=classes)), **options)


def whole(data: TensorData) -> Batch:
    return data.take(torch.arange(len(data)))


# Loss -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [0, 2])
@pytest.mark.parametrize("decoder", ["bernoulli", "gaussian"])
def test_terms_are_those_of_torchs_distributions(decoder: Any, classes: int) -> None:
    task = vectors(decoder=decoder, samples=3, noise=0.6, classes=classes).double().eval()
    with torch.no_grad():
        task.model.encoder.layers[-1].bias.normal_()  # posteriors of any width
    fields = {"inputs": rows_in_unit().inputs[:7].double(), "target": torch.tensor([0, 1, 1, 0, 1, 0, 0])}
    batch = Batch(fields, torch.tensor([4, 0, 9, 100, 2, 3, 50]))
    x, label = batch.inputs, batch.target if classes else None
    if decoder == "bernoulli":
        x = (row_uniform(batch.rows, 6, VALUES, torch.float64) < x).double()
    mean, log_std = task.model.encode(x, label)
    q = distributions.Normal(mean, log_std.exp())
    wanted = torch.zeros(())
    for m in range(3):
        z = q.mean + q.stddev * row_normal(batch.rows, 3, CODES + m, torch.float64)
        raw = task.model.decode(z, label)
        p = distributions.Bernoulli(logits=raw) if decoder == "bernoulli" else distributions.Normal(raw, 0.6)
        wanted = wanted - p.log_prob(x).sum() / 3
    kl = distributions.kl_divergence(q, distributions.Normal(torch.zeros_like(mean), 1.0)).sum()
    terms = task.terms(batch)
    assert_close(terms, {"reconstruction": wanted, "kl": kl})
    assert task.weigh(batch) == {"reconstruction": 7.0, "kl": 7.0}
    sums, tallies = task.judge(batch)
    assert_close(sums, {name: value.detach() for name, value in terms.items()})
    assert_close(task.loss_each(batch)["elbo"].sum(), (wanted + kl).detach())
    assert_close(tallies["elbo"], -(wanted + kl).detach())


def test_a_step_binarises_at_random_and_draws_its_own_noise() -> None:
    task = images(samples=2)
    batch = whole(digits(150))
    seen = torch.stack([task.augment(batch).inputs for _ in range(200)]).double() / 255
    assert seen.unique().tolist() == [0.0, 1.0]
    grey = batch.inputs.double() / 255
    assert (seen.mean(0) - grey).abs().max() < 5 * 0.5 / math.sqrt(200)
    one, other = task.augment(batch), task.augment(batch)
    assert one.fields["noise"].shape == (150, 2, 4)
    assert not torch.equal(one.fields["noise"], other.fields["noise"])
    assert one.inputs.dtype == torch.uint8
    # What is 0 or 1 already stays, whichever of the two ways it goes.
    assert torch.equal(task.augment(one).inputs, one.inputs)
    assert_close(task._values(one), task._values(Batch({"inputs": one.inputs}, one.rows)))
    assert images(binarise=False).augment(batch).inputs is batch.inputs


def test_parts_of_a_batch_give_the_gradient_of_the_whole() -> None:
    """The noise of a step is split with its rows."""
    weights = []
    for parts in (1, 4):
        task = images(samples=2, warmup=5)
        fit(task, digits(90), epochs=4, optim=Optim("sgd", lr=1e-3), train=Train(30, micro_batches=parts))
        weights.append(torch.cat([p.detach().flatten() for p in task.parameters()]))
    assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-6)


def test_the_divergence_is_let_in_slowly_and_judged_in_full() -> None:
    task = vectors(warmup=4, beta=2.0, binarise=False)
    batch = whole(rows_in_unit())
    full = task.eval().terms(batch)["kl"]
    factors = []
    task.train()
    for _ in range(7):
        task.augment(batch)
        factors.append(float(task.terms(batch)["kl"].detach() / full.detach()))
    assert factors == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    assert int(task.steps) == 7
    judged = evaluate(vectors(warmup=4, beta=2.0), rows_in_unit())
    assert judged["loss"] == pytest.approx(judged["reconstruction"] + 2 * judged["kl"])
    assert judged["elbo"] == pytest.approx(-judged["reconstruction"] - judged["kl"])


class Crash(Exception):
    pass


class CrashAfter(Callback):
    def on_step(self, descent: Descent, step: int) -> None:
        if step == 7:
            raise Crash


def test_a_resumed_run_goes_on_in_the_middle_of_the_warm_up(tmp_path: Path) -> None:
    def train(path: Path, *, resume: bool = False, crash: bool = False) -> Variational:
        task, store = images(warmup=12), folder(path, resume=resume)
        try:
            fit(
                task, digits(90), digits(40, 90), epochs=3, train=often(checkpoint_every=2), store=store,
                callbacks=[CrashAfter()] if crash else [],
            )  # fmt: skip
        finally:
            store.close()
        return task

    wanted = train(tmp_path / "whole")
    with pytest.raises(Crash):
        train(tmp_path / "run", crash=True)
    found = train(tmp_path / "run", resume=True)
    assert int(found.steps) == int(wanted.steps) > 0
    for name, value in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


def test_mixed_precision_learns() -> None:
    task = images()
    before = evaluate(task, digits(100))["loss"]
    fit(task, digits(200), epochs=5, train=Train(20, precision="bfloat16"), optim=Optim(lr=3e-3))
    assert evaluate(task, digits(100))["loss"] < before


# Measures -------------------------------------------------------------------------------------


def test_a_judgement_depends_on_weights_and_rows_alone() -> None:
    task, data = images(classes=10, importance=3), digits(70)
    state = torch.get_rng_state()
    first = evaluate(task, data)
    assert torch.equal(torch.get_rng_state(), state), "no generator was touched"
    assert evaluate(task, data, batch_size=9) == pytest.approx(first, rel=1e-5)
    assert first["elbo"] <= first["importance_bound"]
    assert first["loss"] == pytest.approx(-first["elbo"], rel=1e-6)


def test_the_importance_weighted_bound_by_a_loop() -> None:
    task = vectors(importance=5, decoder="gaussian", noise=0.5).double().eval()
    data = TensorData({"inputs": rows_in_unit(4).inputs.double()})
    mean, log_std = task.model.encode(data.inputs)
    total = 0.0
    for row in range(4):
        weights = []
        for m in range(5):
            noise = row_normal(torch.tensor([row]), 3, CODES + m, torch.float64)[0]
            z = mean[row] + log_std[row].exp() * noise
            raw = task.model.decode(z[None])[0]
            log_p = distributions.Normal(raw, 0.5).log_prob(data.inputs[row]).sum()
            log_p = log_p + distributions.Normal(0.0, 1.0).log_prob(z).sum()
            weights.append(
                (log_p - distributions.Normal(mean[row], log_std[row].exp()).log_prob(z).sum()).exp()
            )
        total += math.log(sum(w.item() for w in weights) / 5)
    assert evaluate(task, data)["importance_bound"] == pytest.approx(total / 4)


def test_dead_dimensions_are_counted_and_warned_of() -> None:
    task = vectors(decoder="gaussian", importance=0)
    with torch.no_grad():
        last = task.model.encoder.layers[-1]
        last.weight.zero_()
        last.bias.zero_()
    data = rows_in_unit()
    judged = evaluate(task, data)
    assert (judged["active_units"], judged["collapsed"]) == (0.0, 1.0)
    assert "importance_bound" not in judged
    record = {"split": "validation", "values": judged}
    (said,) = task.warnings([{"split": "train", "values": {}}, record])
    assert "collapsed: 3 of 3 latent dimensions" in said
    assert "warmup" in said
    with torch.no_grad():
        last.weight[0] = 1.0  # one mean that follows the inputs,
        last.bias[4] = -1.0  # one posterior that is narrower than the prior,
        last.bias[5] = 0.06  # and one that differs from it by 0.004 nats
    judged = evaluate(task, data)
    assert judged["active_units"] == 1.0
    assert judged["collapsed"] == pytest.approx(1 / 3)
    assert task.warnings([{"split": "validation", "values": judged}]) == []
    assert task.warnings([]) == []
    kl = task.kl_by_dimension(data)
    assert kl[1].item() == pytest.approx(0.5 * (math.exp(-2) + 2 - 1))
    assert 0 < kl[2].item() < 0.01
    assert kl.sum().item() == pytest.approx(judged["kl"], rel=1e-5)


def test_digits_are_learned_better_than_pixel_by_pixel() -> None:
    task, train, test = images(importance=5, hidden=(64,)), digits(1400), digits(397, 1400)
    result = fit(task, train, test, epochs=12, optim=Optim(lr=3e-3))
    # The best that a model without codes can do: each pixel is on with its mean, in nats.
    share = (train.inputs.double() / 255).mean(0).clamp(1e-3, 1 - 1e-3)
    each = (test.inputs.double() / 255) * share.log() + (1 - test.inputs.double() / 255) * (1 - share).log()
    judged = evaluate(task, test)
    assert judged["elbo"] > each.flatten(1).sum(1).mean().item() + 2
    assert judged["elbo"] < judged["importance_bound"]
    assert judged["active_units"] >= 2
    assert task.warnings(result.history) == []


# Predictions ----------------------------------------------------------------------------------


def test_predictions_depend_on_the_row_alone() -> None:
    task, batch = images(classes=10).eval(), whole(digits(20))
    found = task.predict(batch.inputs, label=batch.target)
    assert found["code"].shape == (20, 4)
    assert found["reconstruction"].shape == batch.inputs.shape
    rebuilt = task.model(batch.inputs.float() / 255, batch.target)[0].sigmoid() * 255
    assert_close(found["reconstruction"], rebuilt.detach())
    alone = task.predict(batch.inputs[7:8], label=batch.target[7:8])
    assert_close(alone["elbo"], found["elbo"][7:8])
    mean, _ = task.model.encode(batch.inputs.float() / 255, batch.target)
    assert_close(found["code"], mean.detach())
    # Its noise is a fixed one, but its mean over rows is the judgement's, up to chance.
    judged = -task.loss_each(batch)["elbo"]
    assert abs(float((found["elbo"] - judged).mean())) < 5 * float((found["elbo"] - judged).std()) / 20**0.5
    with pytest.raises(InputError, match="unknown mode of a variational autoencoder 'interval'"):
        task.predict(batch.inputs, "interval", label=batch.target)


def test_without_a_label_each_row_gets_the_class_that_explains_it_best() -> None:
    task, batch = images(classes=10).eval(), whole(digits(20))
    found = task.predict(batch.inputs)
    each = [task.predict(batch.inputs, label=k) for k in range(10)]
    bounds = torch.stack([one["elbo"] for one in each])
    assert torch.equal(found["class"], bounds.argmax(0))
    assert len(found["class"].unique()) > 1
    for name in ("code", "reconstruction", "elbo"):
        wanted = torch.stack([each[k][name][row] for row, k in enumerate(found["class"].tolist())])
        assert_close(found[name], wanted)


def test_samples_have_the_form_of_the_inputs() -> None:
    task = images(classes=10).train()
    made = task.sample(12)
    assert (made.shape, made.dtype) == ((12, 1, 8, 8), torch.uint8)
    assert task.training
    assert torch.equal(made, task.sample(12))
    assert not torch.equal(made, task.sample(12, seed=1))
    assert torch.equal(made, task.sample(12, label=[*range(10), 0, 1])), "classes come in turn"
    threes = task.sample(2, label=3, temperature=0.0)
    assert torch.equal(threes[0], threes[1])
    wanted = task.model.decode(torch.zeros(1, 4), torch.tensor([3])).sigmoid() * 255
    assert torch.equal(threes[:1], wanted.round().to(torch.uint8))
    assert task.sample(50, noisy=True).unique().tolist() == [0, 255]
    rows = vectors(decoder="gaussian", noise=0.2)
    means = rows.sample(4000, temperature=0.5, noisy=False)
    assert not torch.equal(means, rows.sample(4000, temperature=0.5)), "rows are drawn from p(x | z)"
    noise = rows.sample(4000, temperature=0.5) - means
    assert_close(noise.std(0), torch.full((6,), 0.1), atol=0.01, rtol=0.0)
    assert torch.equal(rows.sample(3, temperature=0.0), rows.sample(3, temperature=0.0, noisy=False))
    assert rows.sample(2000, temperature=1.0).shape == (2000, 6)
    with pytest.raises(InputError, match="made without classes"):
        rows.sample(3, label=1)
    with pytest.raises(InputError, match="temperature is -1"):
        rows.sample(3, temperature=-1.0)
    with pytest.raises(InputError, match=r"label \[10, 10\] for 2 samples"):
        task.sample(2, label=10)


def test_a_traversal_shows_one_dimension_in_each_row() -> None:
    task = images(classes=10)
    found = task.traverse([2, 0], steps=5, span=2.0, label=7)
    assert found.shape == (2, 5, 1, 8, 8)
    code = torch.tensor([[0.0, 0.0, -2.0, 0.0]])
    wanted = task.model.eval().decode(code, torch.tensor([7])).sigmoid() * 255
    assert torch.equal(found[0, 0], wanted[0].round().to(torch.uint8))
    assert torch.equal(found[0, 2], found[1, 2])  # both are 0 in the middle
    around = torch.tensor([0.5, 0.5, 0.5, 0.5])
    assert not torch.equal(task.traverse([2], around=around), task.traverse([2]))
    with pytest.raises(InputError, match=r"a code of shape \(3,\)"):
        task.traverse(around=torch.zeros(3))
    with pytest.raises(InputError, match="made without classes"):
        images().traverse(label=1)


# What is refused, and saving ------------------------------------------------------------------


def test_values_that_are_no_probabilities_are_refused_with_their_row() -> None:
    data = rows_in_unit()
    data.inputs[41, 2] = 1.5
    message = r"(?s)the value 1.5 in row 41\n.*in \[0, 1\] for a Bernoulli.*decoder=\"gaussian\""
    with pytest.raises(InputError, match=message):
        fit(vectors(), data, epochs=1)
    with pytest.raises(InputError, match=message):
        evaluate(vectors(), data)
    data.inputs[41, 2] = float("nan")
    with pytest.raises(InputError, match="the value nan in row 41"):
        evaluate(vectors(), data)
    fit(vectors(decoder="gaussian"), TensorData({"inputs": 5 * rows_in_unit().inputs}), epochs=1)


def test_wrong_options_and_data_are_refused() -> None:
    with pytest.raises(InputError, match="unknown decoder 'poisson'"):
        vectors(decoder="poisson")
    with pytest.raises(InputError, match="samples is 0"):
        vectors(samples=0)
    with pytest.raises(InputError, match="noise is 0"):
        vectors(decoder="gaussian", noise=0.0)
    scaled = ImageInputs([33.0], [78.0])
    with pytest.raises(InputError, match=r"(?s)pixels scaled by mean=\[33.0\].*ImageInputs\(\[0.0\]"):
        Variational(VAE(VAEConfig((1, 8, 8))), inputs=scaled)
    assert Variational(VAE(VAEConfig((1, 8, 8))), inputs=scaled, decoder="gaussian").sample(1).max() <= 255
    with pytest.raises(InputError, match="no class numbers for a conditional model"):
        fit(images(classes=10), TensorData({"inputs": digits(9).inputs}), epochs=1)
    with pytest.raises(InputError, match="the class number 9"):
        fit(images(classes=5), digits(20), epochs=1)
    with pytest.raises(InputError, match=r"(?s)inputs of type torch.uint8.*fix: give the task inputs="):
        evaluate(Variational(VAE(VAEConfig((1, 8, 8)))), digits(9))


@pytest.mark.parametrize("decoder", ["bernoulli", "gaussian"])
def test_a_task_is_rebuilt_from_its_description(decoder: Any) -> None:
    task = images(classes=10, decoder=decoder, samples=2, importance=3, warmup=9, beta=0.5)
    fit(task, digits(60), epochs=1)
    again = build_task(json.loads(json.dumps(task.spec())))
    again.load_state_dict(task.state_dict())
    assert again.spec() == task.spec()
    assert evaluate(again, digits(30)) == evaluate(task, digits(30))
    assert int(again.steps) == 1


def test_a_given_noise_is_kept_and_one_that_is_not_given_is_learned() -> None:
    data = TensorData({"inputs": 0.1 * torch.randn(200, 6)})
    kept, learned = vectors(decoder="gaussian", noise=0.5), vectors(decoder="gaussian")
    for task in (kept, learned):
        fit(task, data, epochs=60, optim=Optim(lr=0.03))
    assert kept.log_noise.exp().item() == pytest.approx(0.5)
    assert 0.05 < learned.log_noise.exp().item() < 0.15


@pytest.mark.gpu
def test_a_judgement_is_the_same_on_the_gpu() -> None:
    task, data = images(classes=10, importance=4).double(), digits(80)
    wanted = evaluate(task, data)
    assert evaluate(task.cuda(), data.to("cuda")) == pytest.approx(wanted, rel=1e-6)
    assert torch.equal(task.sample(20).cpu(), task.cpu().sample(20))
