"""The loop: what each option does, against closed forms and PyTorch's own optimisers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.data.batch import TensorData, epoch_order
from quire.errors import InputError
from quire.functional.schedules import step_size
from quire.models.mlp import MLP, MLPConfig
from quire.nn.heads import Categorical
from quire.options import Noise, Optim, Schedule, Train
from quire.tasks.supervised import Supervised
from quire.train import Callback, evaluate, fit
from quire.train.descent import Descent, Record
from tests.train.examples import classes, classifier, numbers, regressor

FULL = Train(batch_size=0)


def reference(
    optimiser: Any, steps: int, *, lr: Any = None, clip: float | None = None, l1: float = 0.0
) -> Any:
    """The same classifier trained by a plain PyTorch loop on full batches."""
    task, data = classifier(), classes()
    chosen = optimiser(task.parameters())
    for step in range(steps):
        chosen.zero_grad()
        loss = nn.functional.cross_entropy(task.model(data.inputs), data.target)
        loss = loss + l1 * sum(p.abs().sum() for p in task.parameters())
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(task.parameters(), clip)
        if lr is not None:
            for group in chosen.param_groups:
                group["lr"] = lr(step)
        chosen.step()
    return task


def assert_same_weights(task: nn.Module, other: nn.Module, tolerance: float = 1e-6) -> None:
    for (name, a), b in zip(task.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=tolerance, msg=f"{name}: {(a - b).abs().max()}")


CASES = {
    "sgd": (Optim("sgd", lr=0.5), lambda p: torch.optim.SGD(p, lr=0.5)),
    "momentum": (Optim("sgd", lr=0.2, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9)),
    "sgd l2": (
        Optim("sgd", lr=0.2, momentum=0.9, weight_decay=0.1, decay="l2"),
        lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, weight_decay=0.1),
    ),
    "adam": (Optim(lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    "adam l2": (
        Optim(lr=0.01, weight_decay=0.1, decay="l2"),
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    ),
    "adamw": (
        Optim(lr=0.01, weight_decay=0.1, beta1=0.8, beta2=0.99, eps=1e-6),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, betas=(0.8, 0.99), eps=1e-6),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("explicit", [True, False])
def test_the_optimisers_are_pytorchs_step_by_step(name: str, explicit: bool) -> None:
    optim, theirs = CASES[name]
    task = classifier()
    if not explicit:
        task.explicit = lambda: None
    fit(task, classes(), steps=30, optim=optim, train=FULL)
    assert_same_weights(task, reference(theirs, 30), 3e-6)


def test_clipping_by_norm_is_pytorchs() -> None:
    task = classifier()
    fit(task, classes(), steps=20, optim=Optim("sgd", lr=0.5, clip_norm=0.05), train=FULL)
    assert_same_weights(task, reference(lambda p: torch.optim.SGD(p, lr=0.5), 20, clip=0.05), 3e-6)


def test_clipping_by_value_bounds_each_component_of_a_step() -> None:
    task = classifier()
    before = [p.detach().clone() for p in task.parameters()]
    fit(task, classes(), steps=1, optim=Optim("sgd", lr=1.0, clip_value=0.01), train=FULL)
    moved = torch.cat(
        [(p.detach() - b).abs().flatten() for p, b in zip(task.parameters(), before, strict=True)]
    )
    assert moved.max() <= 0.01 + 1e-7
    assert (moved > 0.0099).sum() > 3


def test_a_gradient_that_is_short_enough_is_left_alone() -> None:
    plain, clipped = classifier(), classifier()
    fit(plain, classes(), steps=5, optim=Optim("sgd", lr=0.5), train=FULL)
    fit(clipped, classes(), steps=5, optim=Optim("sgd", lr=0.5, clip_norm=1e3), train=FULL)
    assert_same_weights(plain, clipped, 0.0)


def test_clipping_by_value_comes_before_clipping_by_norm() -> None:
    task = classifier()
    before = torch.cat([p.detach().flatten() for p in task.parameters()])
    optim = Optim("sgd", lr=1.0, clip_value=0.01, clip_norm=0.02)
    fit(task, classes(), steps=1, optim=optim, train=FULL)
    moved = torch.cat([p.detach().flatten() for p in task.parameters()]) - before
    assert moved.norm().item() == pytest.approx(0.02, rel=1e-3)  # the norm after clamping, brought to 0.02


def test_the_l1_penalty_is_that_of_the_loss() -> None:
    task = classifier()
    fit(task, classes(), steps=20, optim=Optim("sgd", lr=0.1, l1=0.01), train=FULL)
    assert_same_weights(task, reference(lambda p: torch.optim.SGD(p, lr=0.1), 20, l1=0.01), 3e-6)


def test_biases_are_left_undecayed_on_request() -> None:
    tasks = [classifier(), classifier()]
    for task, biases in zip(tasks, (True, False), strict=True):
        with torch.no_grad():
            task.model.head.bias.fill_(10.0)
        optim = Optim("sgd", lr=0.1, weight_decay=1.0, decay_biases=biases)
        fit(task, classes(), steps=10, optim=optim, train=FULL)
    assert tasks[0].model.head.bias.mean() < 5 < tasks[1].model.head.bias.mean()


def test_the_schedule_is_followed() -> None:
    schedule = Schedule("cosine", warmup=5)
    task = classifier()
    result = fit(task, classes(), steps=20, optim=Optim("sgd", lr=0.5, schedule=schedule), train=FULL)
    expected = reference(
        lambda p: torch.optim.SGD(p, lr=0.5), 20, lr=lambda s: step_size(schedule, 0.5, s, 20)
    )
    assert_same_weights(task, expected, 3e-6)
    lrs = [r["values"]["lr"] for r in result.history]
    assert lrs[0] == pytest.approx(0.1)
    assert lrs == sorted(lrs[:5]) + sorted(lrs[5:], reverse=True)


def test_discriminative_step_sizes() -> None:
    def run(factors: dict[str, float]) -> Supervised:
        torch.manual_seed(0)
        task = Supervised(MLP(MLPConfig(5, 3, hidden=(8,))), Categorical(3), step_factors=factors)
        fit(task, classes(), steps=1, optim=Optim("sgd", lr=1.0), train=FULL)
        return task

    start = classifier()
    full, slow = run({}), run({"model.body.": 0.1})
    origin = dict(start.named_parameters())
    for name, p in slow.named_parameters():
        moved = p - origin[name]
        wanted = dict(full.named_parameters())[name] - origin[name]
        torch.testing.assert_close(moved, wanted * (0.1 if "body" in name else 1.0), rtol=1e-4, atol=1e-7)


def test_every_row_is_used_once_an_epoch_in_a_seeded_order() -> None:
    seen: list[int] = []

    task = classifier()
    inner = task.weigh
    task.weigh = lambda batch: (seen.extend(batch.rows.tolist()), inner(batch))[1]  # type: ignore[method-assign]
    fit(task, classes(50), epochs=2, train=Train(batch_size=8), seed=4)
    assert sorted(seen[:50]) == sorted(seen[50:]) == list(range(50))
    assert seen[:50] != seen[50:]
    assert seen[:50] == epoch_order(50, 4, 0).tolist()


def test_the_shown_training_loss_is_the_loss_that_was_optimised() -> None:
    """With a step size of almost nothing the running mean over uneven batches is the whole set's loss."""
    task = classifier()
    result = fit(task, classes(50), epochs=1, optim=Optim("sgd", lr=1e-12), train=Train(batch_size=8))
    expected = nn.functional.cross_entropy(task.model(classes(50).inputs), classes(50).target)
    assert result.history[0]["values"]["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_the_shown_loss_does_not_depend_on_micro_batches() -> None:
    shown = []
    for parts in (1, 4):
        result = fit(
            classifier(), classes(50), steps=1, optim=Optim("sgd", lr=1e-12),
            train=Train(batch_size=0, micro_batches=parts),
        )  # fmt: skip
        shown.append(result.history[0]["values"]["loss"])
    assert shown[0] == pytest.approx(shown[1], rel=1e-6)


def test_judging_in_batches_is_judging_the_whole() -> None:
    """Dropout rests, ignored targets do not count, and the size of a batch does not matter."""
    task, data = classifier(dropout=0.5).train(), classes(50)
    data.fields["target"][::3] = -100
    kept = data.target >= 0
    whole = evaluate(task, data)
    assert task.training
    task.eval()
    raw = task.model(data.inputs)[kept]
    assert whole["loss"] == pytest.approx(
        nn.functional.cross_entropy(raw, data.target[kept]).item(), rel=1e-6
    )
    assert whole["accuracy"] == pytest.approx((raw.argmax(1) == data.target[kept]).double().mean().item())
    assert evaluate(task, data, batch_size=7) == pytest.approx(whole, rel=1e-6)


def test_validation_chooses_the_weights_that_are_kept() -> None:
    task, validation = classifier(), classes(60, seed=9)
    result = fit(task, classes(), validation, epochs=60, optim=Optim(lr=0.1), train=Train(batch_size=20))
    losses = {r["step"]: r["values"]["loss"] for r in result.history if r["split"] == "validation"}
    assert result.best == min(losses.values()) == losses[result.best_step]
    assert result.best_step < result.steps, "the case must overfit to show anything"
    assert evaluate(task, validation)["loss"] == pytest.approx(result.best, rel=1e-6)
    last = classifier()
    options = Train(batch_size=20, restore="last")
    fit(last, classes(), validation, epochs=60, optim=Optim(lr=0.1), train=options)
    assert evaluate(last, validation)["loss"] == pytest.approx(losses[result.steps], rel=1e-6)


def test_early_stopping_waits_for_its_patience() -> None:
    task, validation = classifier(), classes(60, seed=9)
    options = Train(batch_size=20, patience=3)
    result = fit(task, classes(), validation, epochs=500, optim=Optim(lr=0.1), train=options)
    assert result.stopped == "early"
    assert result.steps == result.best_step + 3 * 5  # three epochs of five steps


def test_validation_every_n_steps() -> None:
    result = fit(
        classifier(), classes(), classes(30, 2), steps=10, train=Train(batch_size=20, validate_every=3)
    )
    assert [r["step"] for r in result.history if r["split"] == "validation"] == [3, 6, 9, 10]


def test_a_monitor_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(InputError, match=r"(?s)--train.monitor acuracy.*accuracy"):
        fit(classifier(), classes(), classes(30, 2), epochs=1, train=Train(monitor="acuracy"))


def test_the_moving_average_is_what_is_judged_and_kept() -> None:
    class Follow(Callback):
        def __init__(self) -> None:
            self.average: list[Tensor] | None = None

        def on_step(self, descent: Descent, step: int) -> None:
            flats = [p.detach().clone() for p in descent.task.parameters()]
            if self.average is None:
                self.average = start
            decay = min(0.9, step / (step + 10))
            self.average = [decay * a + (1 - decay) * w for a, w in zip(self.average, flats, strict=True)]

    task = classifier()
    start = [p.detach().clone() for p in task.parameters()]
    follow = Follow()
    fit(
        task,
        classes(),
        steps=25,
        optim=Optim(lr=0.05),
        train=Train(batch_size=20, average=0.9),
        callbacks=[follow],
    )
    assert follow.average is not None
    for parameter, expected in zip(task.parameters(), follow.average, strict=True):
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["inputs", "activations", "weights"])
def test_noise_changes_training_and_leaves_nothing_behind(kind: str) -> None:
    quiet, noisy = classifier(), classifier()
    fit(quiet, classes(), steps=10, train=FULL)
    fit(noisy, classes(), steps=10, train=Train(batch_size=0, noise=Noise(**{kind: 0.5})))
    assert not torch.equal(quiet.model.head.weight, noisy.model.head.weight)
    x = classes().inputs
    assert torch.equal(noisy.model(x), noisy.train().model(x)), "no noise after training"
    assert not any(module._forward_hooks for module in noisy.modules())


def test_weight_noise_takes_the_gradient_at_the_perturbed_weights() -> None:
    """A step of size ~0 must restore the weights exactly."""
    task = classifier()
    before = [p.detach().clone() for p in task.parameters()]
    fit(
        task, classes(), steps=3, optim=Optim("sgd", lr=1e-30),
        train=Train(batch_size=0, noise=Noise(weights=0.3)),
    )  # fmt: skip
    for parameter, old in zip(task.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old, rtol=0, atol=1e-25)


def test_mixed_precision_keeps_float32_weights_and_learns() -> None:
    task = classifier()
    fit(task, classes(), epochs=60, optim=Optim(lr=0.03), train=Train(batch_size=20, precision="bfloat16"))
    assert all(p.dtype == torch.float32 for p in task.parameters())
    assert evaluate(task, classes())["accuracy"] > 0.9


@pytest.mark.slow
def test_compiled_training_gives_the_same_weights() -> None:
    plain, compiled = classifier(), classifier()
    fit(plain, classes(), steps=5, train=FULL)
    fit(compiled, classes(), steps=5, train=Train(batch_size=0, compile=True))
    assert_same_weights(plain, compiled, 1e-5)


def test_the_model_is_left_clean() -> None:
    task = classifier()
    fit(task, classes(), epochs=1)
    pointers = {p.untyped_storage().data_ptr() for p in task.parameters()}
    assert len(pointers) == len(list(task.parameters())), "each parameter has memory of its own again"
    assert all(p.grad is None for p in task.parameters())
    assert not task.training


def test_the_model_is_left_clean_after_a_failure_too() -> None:
    class Fail(Callback):
        def on_start(self, descent: Descent) -> None:
            raise RuntimeError("not today")

    task = classifier()
    with pytest.raises(RuntimeError, match="not today"):
        fit(task, classes(), epochs=1, callbacks=[Fail()])
    assert len({p.untyped_storage().data_ptr() for p in task.parameters()}) == len(list(task.parameters()))


def test_least_squares_is_reached_by_descent() -> None:
    task, data = regressor(), numbers()
    fit(task, data, steps=2000, optim=Optim("sgd", lr=0.1), train=FULL)
    design = torch.cat([data.inputs, torch.ones(len(data), 1)], 1)
    best = torch.linalg.lstsq(design, data.target).solution
    found = torch.cat([task.model.head.weight.detach()[0], task.model.head.bias.detach()])
    torch.testing.assert_close(found, best, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_noise_of_a_regressor_is_estimated_from_residuals() -> None:
    task, data = regressor(), numbers(2000)
    fit(task, data, numbers(500, 7), steps=2000, optim=Optim("sgd", lr=0.1), train=FULL)
    assert task.head.noise_variance.sqrt().item() == pytest.approx(0.1, rel=0.15)
    interval = task.predict(numbers(3000, 8).inputs, "interval", level=0.9)
    truth = numbers(3000, 8).target
    inside = ((interval["low"] <= truth) & (truth <= interval["high"])).float().mean()
    assert inside == pytest.approx(0.9, abs=0.03)


def test_the_noise_is_that_of_the_validation_rows() -> None:
    task, validation = regressor(), numbers(40, 7)
    fit(task, numbers(30), validation, steps=50, optim=Optim("sgd", lr=0.1), train=FULL)
    residuals = task.model(validation.inputs)[:, 0] - validation.target
    assert task.head.noise_variance.item() == pytest.approx(residuals.square().mean().item(), rel=1e-5)
    few = numbers(20, 7)  # too few to estimate from, so the training rows serve
    fit(task, numbers(30), few, steps=50, optim=Optim("sgd", lr=0.1), train=FULL)
    residuals = task.model(numbers(30).inputs)[:, 0] - numbers(30).target
    assert task.head.noise_variance.item() == pytest.approx(residuals.square().mean().item(), rel=1e-5)


@pytest.mark.parametrize("explicit", [True, False])
def test_targets_are_standardised_in_training_and_restored_in_predictions(explicit: bool) -> None:
    task, data = regressor(), numbers(200)
    data.fields["target"] = 1000 + 50 * data.target
    task.head.fit_target(data.target)
    if not explicit:
        task.explicit = lambda: None
    fit(task, data, steps=1500, optim=Optim("sgd", lr=0.1), train=FULL)
    design = torch.cat([data.inputs, torch.ones(len(data), 1)], 1).double()
    best = design @ torch.linalg.lstsq(design, data.target.double()).solution
    torch.testing.assert_close(task.predict(data.inputs)["value"].double(), best, rtol=1e-5, atol=0.05)


def test_both_or_neither_length_is_an_error() -> None:
    with pytest.raises(InputError, match="one of the two"):
        fit(classifier(), classes())
    with pytest.raises(InputError, match="one of the two"):
        fit(classifier(), classes(), epochs=1, steps=1)


def test_no_rows_and_frozen_models_are_errors() -> None:
    empty = TensorData({"inputs": torch.zeros(0, 5), "target": torch.zeros(0, dtype=torch.long)})
    with pytest.raises(InputError, match="no training rows"):
        fit(classifier(), empty, epochs=1)
    frozen = classifier().requires_grad_(False)
    with pytest.raises(InputError, match="without trainable parameters"):
        fit(frozen, classes(), epochs=1)


def test_callbacks_hear_of_everything() -> None:
    heard: list[str] = []

    class Listen(Callback):
        def on_start(self, descent: Descent) -> None:
            heard.append("start")

        def on_step(self, descent: Descent, step: int) -> None:
            heard.append(f"step {step}")

        def on_record(self, descent: Descent, record: Record) -> None:
            heard.append(f"{record['split']} {record['step']}")

        def on_end(self, descent: Descent) -> None:
            heard.append("end")

    options = Train(batch_size=45)
    fit(classifier(), classes(90), classes(30, 2), epochs=1, train=options, callbacks=[Listen()])
    assert heard == ["start", "step 1", "step 2", "train 2", "validation 2", "end"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda: Optim(lr=0), r"--optim.lr is 0\n  expected: a number > 0"),
        (lambda: Optim(lr=float("nan")), "--optim.lr is nan"),
        (lambda: Optim(momentum=1.0), r"--optim.momentum is 1.0\n  expected: a number in \[0, 1\)"),
        (lambda: Optim(name="sgdd"), "--optim.name is 'sgdd'"),
        (lambda: Train(batch_size=-1), "--train.batch_size is -1"),
        (lambda: Train(average=1.0), "--train.average is 1.0"),
        (lambda: Train(precision="fp8"), "--train.precision is 'fp8'"),
        (lambda: Noise(inputs=-1), "--train.noise.inputs is -1"),
    ],
)
def test_wrong_options_fail_when_they_are_made(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        options()


@pytest.mark.gpu
def test_a_gpu_gives_the_cpus_result() -> None:
    on_cpu, on_gpu = classifier(), classifier()
    fit(on_cpu, classes(), classes(30, 2), epochs=5, train=Train(batch_size=20))
    fit(on_gpu, classes(), classes(30, 2), epochs=5, train=Train(batch_size=20), device="cuda")
    assert_same_weights(on_cpu, on_gpu.cpu(), 1e-4)
