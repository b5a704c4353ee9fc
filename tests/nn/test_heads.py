"""Every registered head keeps one contract; each head is compared with an independent oracle."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from sklearn import metrics
from torch import Tensor, distributions, nn

from quire.errors import InputError
from quire.nn import HEADS, Bernoulli, Categorical, Gaussian, Head, Heteroscedastic, build_head
from quire.nn.heads import IGNORE, MODES

CASES: list[dict[str, Any]] = [
    {"head": "categorical", "dim": 4},
    {"head": "categorical", "dim": 3, "label_smoothing": 0.1, "class_weights": [1.0, 2.0, 0.5]},
    {"head": "bernoulli", "dim": 1},
    {"head": "bernoulli", "dim": 3},
    {"head": "gaussian", "dim": 1, "loss": "squared"},
    {"head": "gaussian", "dim": 2, "loss": "nll"},
    {"head": "heteroscedastic", "dim": 1},
    {"head": "heteroscedastic", "dim": 2},
]
cases = pytest.mark.parametrize("spec", CASES, ids=lambda spec: "-".join(map(str, spec.values())))


def example(
    spec: dict[str, Any], rows: int = 12, dtype: torch.dtype = torch.float64
) -> tuple[Head, Tensor, Tensor]:
    head = build_head(spec).to(dtype)
    raw = torch.randn(rows, head.outputs_needed, dtype=dtype)
    if isinstance(head, Categorical):
        target = torch.randint(0, head.dim, (rows,))
        target[1] = IGNORE
    elif isinstance(head, Bernoulli):
        target = torch.randint(0, 2, (rows, head.dim)).to(dtype)
        target[1, 0] = IGNORE
    else:
        target = torch.randn(rows, head.dim, dtype=dtype) * 3 + 7
        head.fit_target(target)
    return head, raw, target


def test_the_cases_cover_every_head() -> None:
    assert {case["head"] for case in CASES} == set(HEADS)


@cases
def test_the_losses_of_rows_add_up_and_have_their_gradient(spec: dict[str, Any]) -> None:
    head, raw, target = example(spec)
    raw.requires_grad_()
    each = head.loss_each(raw, target)
    assert each.shape == (12,)
    torch.testing.assert_close(head.loss_sum(raw, target), each.sum())
    assert torch.autograd.gradcheck(lambda r: head.loss_sum(r, target), raw)
    for parameter in head.parameters():
        (gradient,) = torch.autograd.grad(head.loss_sum(raw, target), parameter)
        assert (gradient != 0).all()


@cases
def test_sums_and_weights_of_parts_add_up_to_the_whole(spec: dict[str, Any]) -> None:
    head, raw, target = example(spec)
    parts = [slice(0, 1), slice(1, 2), slice(2, 9), slice(9, 12)]
    torch.testing.assert_close(
        sum(head.loss_sum(raw[p], target[p]) for p in parts), head.loss_sum(raw, target)
    )
    assert float(sum(head.weigh(target[p]) for p in parts)) == pytest.approx(float(head.weigh(target)))
    tallies = [head.tally(raw[p], target[p]) for p in parts]
    summed = {key: sum(tally[key] for tally in tallies) for key in tallies[0]}
    assert head.measures(summed) == pytest.approx(head.measures(head.tally(raw, target)))


@cases
@pytest.mark.parametrize("mode", MODES)
def test_predictions_are_columns_of_as_many_rows(spec: dict[str, Any], mode: str) -> None:
    head, raw, _ = example(spec)
    answer = head.predict(raw, mode)
    assert all(len(column) == 12 and column.isfinite().all() for column in answer.values())
    main = answer["class" if "class" in answer else "value"]
    single = head.dim == 1 or isinstance(head, Categorical)
    assert main.shape == ((12,) if single else (12, head.dim))
    if "low" in answer:
        assert (answer["low"] <= main).all()
        assert (main <= answer["high"]).all()


@cases
def test_samples_repeat_with_a_generator_and_differ_without(spec: dict[str, Any]) -> None:
    head, raw, _ = example(spec, rows=64)
    key = "value" if "value" in head.predict(raw) else "class"
    first, second = (
        head.predict(raw, "sample", generator=torch.Generator().manual_seed(5))[key] for _ in range(2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(
        first, head.predict(raw, "sample", generator=torch.Generator().manual_seed(6))[key]
    )


@cases
def test_half_precision_and_extreme_outputs_stay_finite(spec: dict[str, Any]) -> None:
    head, raw, target = example(spec, dtype=torch.float32)
    for outputs in (raw.bfloat16(), raw * 1e4, raw.bfloat16() * 1e4):
        outputs = outputs.detach().requires_grad_()
        loss = head.loss_sum(outputs, target)
        assert loss.isfinite()
        assert loss.dtype == torch.float32
        (gradient,) = torch.autograd.grad(loss, outputs)
        assert gradient.isfinite().all()
        for mode in MODES:
            assert all(column.isfinite().all() for column in head.predict(outputs.detach(), mode).values())
        assert all(math.isfinite(value) for value in head.measures(head.tally(outputs, target)).values())


@cases
def test_a_head_is_rebuilt_from_json_and_its_state(spec: dict[str, Any]) -> None:
    head, raw, target = example(spec)
    again = build_head(json.loads(json.dumps(head.spec()))).double()
    again.load_state_dict(head.state_dict())
    assert again.spec() == head.spec() == spec
    assert type(head).from_spec(spec).spec() == spec
    assert torch.equal(again.loss_each(raw, target), head.loss_each(raw, target))


# Each head by itself --------------------------------------------------------------------------


def test_categorical_mean_is_torchs_weighted_mean() -> None:
    weights = [1.0, 2.0, 0.5]
    head = Categorical(3, label_smoothing=0.2, class_weights=weights).double()
    raw = torch.randn(9, 3, dtype=torch.float64)
    target = torch.tensor([0, 1, 2, IGNORE, 1, 0, IGNORE, 2, 2])
    wanted = nn.functional.cross_entropy(raw, target, torch.tensor(weights).double(), label_smoothing=0.2)
    torch.testing.assert_close(head.loss_sum(raw, target) / head.weigh(target), wanted)


@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 3.0]])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_categorical_takes_shares_of_classes(weights: list[float] | None, smoothing: float) -> None:
    head = Categorical(3, label_smoothing=smoothing, class_weights=weights).double()
    raw = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    shares = torch.rand(12, 3, dtype=torch.float64).softmax(1)
    shares[3], shares[7] = 0.0, -1.0
    kept = [i for i in range(12) if i not in (3, 7)]
    scale = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    wanted = nn.functional.cross_entropy(
        raw[kept], shares[kept], scale, label_smoothing=smoothing, reduction="sum"
    )
    torch.testing.assert_close(head.loss_sum(raw, shares), wanted)
    torch.testing.assert_close(head.loss_each(raw, shares).sum(), wanted)
    assert (head.loss_each(raw, shares)[[3, 7]] == 0).all()
    counts = sum(1.0 if weights is None else (shares[i] @ scale).item() for i in kept)  # type: ignore[operator]
    assert float(head.weigh(shares)) == pytest.approx(counts)
    torch.testing.assert_close(head.loss_sum(raw, shares.float()), wanted, rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(head.loss_sum(raw, shares), raw, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, raw)[0])
    half = head.float().loss_sum(raw.bfloat16(), shares)
    assert half.dtype == torch.float32


@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 3.0]])
def test_a_one_hot_row_counts_like_its_class(weights: list[float] | None) -> None:
    head = Categorical(3, label_smoothing=0.1, class_weights=weights)
    raw, target = torch.randn(2, 5, 3), torch.randint(0, 3, (2, 5))
    target[1, 2:] = IGNORE
    rows = nn.functional.one_hot(target.clamp(min=0), 3) * (target != IGNORE)[..., None].float()
    torch.testing.assert_close(head.loss_each(raw, rows), head.loss_each(raw, target))
    torch.testing.assert_close(head.loss_sum(raw, rows), head.loss_sum(raw, target))
    assert float(head.weigh(rows)) == pytest.approx(float(head.weigh(target)))


def test_categorical_reads_sequences() -> None:
    head = Categorical(5)
    raw, target = torch.randn(2, 7, 5), torch.randint(0, 5, (2, 7))
    target[0, 3:] = IGNORE
    wanted = nn.functional.cross_entropy(raw.transpose(1, 2), target, reduction="none").sum(1)
    torch.testing.assert_close(head.loss_each(raw, target), wanted)
    assert head.weigh(target) == 10
    assert head.predict(raw, "sample")["class"].shape == (2, 7)
    assert head.tally(raw, target)["confusion"].sum() == 10


def test_categorical_set_is_the_smallest_of_its_level() -> None:
    raw = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    answer = {
        level: Categorical(4).predict(raw, "interval", level=level)["set"][0].tolist()
        for level in (0.4, 0.7, 0.9)
    }
    assert answer == {
        0.4: [True, False, False, False],
        0.7: [True, True, False, False],
        0.9: [True, True, True, False],
    }


def test_classification_measures_are_scikit_learns() -> None:
    raw, target = torch.randn(200, 4), torch.randint(0, 4, (200,))
    got = Categorical(4).measures(Categorical(4).tally(raw, target))
    predicted = raw.argmax(1)
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(target, predicted, average="macro")
    wanted = {
        "accuracy": metrics.accuracy_score(target, predicted),
        "precision": precision,
        "recall": recall,
        "f1": f1,
    }
    assert got == pytest.approx(wanted)


def test_bernoulli_measures_are_scikit_learns_for_each_label() -> None:
    raw, target = torch.randn(150, 2), torch.randint(0, 2, (150, 2))
    got = Bernoulli(2).measures(Bernoulli(2).tally(raw, target))
    predicted = (raw > 0).long()
    f1 = [metrics.f1_score(target[:, i], predicted[:, i], average="macro") for i in range(2)]
    assert got["f1"] == pytest.approx(sum(f1) / 2)
    assert got["accuracy"] == pytest.approx((predicted == target).double().mean().item())


def test_ignored_labels_do_not_count() -> None:
    head, raw = Bernoulli(2), torch.randn(5, 2)
    target = torch.tensor([[0, 1], [1, IGNORE], [IGNORE, IGNORE], [1, 1], [0, 0]])
    kept = target != IGNORE
    wanted = nn.functional.binary_cross_entropy_with_logits(raw[kept], target[kept].float())
    torch.testing.assert_close(head.loss_sum(raw, target) / head.weigh(target), wanted)
    assert head.loss_each(raw, target)[2] == 0
    right = ((raw > 0) == target)[kept].double().mean().item()
    assert head.measures(head.tally(raw, target))["accuracy"] == pytest.approx(right)


def test_bernoulli_interval_holds_both_answers_when_unsure() -> None:
    raw = torch.logit(torch.tensor([[0.97], [0.6], [0.02]]))
    answer = Bernoulli(1).predict(raw, "interval", level=0.9)
    assert answer["low"].tolist() == [1, 0, 0]
    assert answer["high"].tolist() == [1, 1, 0]


@pytest.mark.parametrize("name", ["bernoulli", "gaussian", "heteroscedastic"])
def test_a_single_output_takes_targets_as_a_row_or_as_a_column(name: str) -> None:
    head = build_head({"head": name, "dim": 1})
    raw, target = torch.randn(6, head.outputs_needed), torch.randint(0, 2, (6,)).float()
    assert torch.equal(head.loss_each(raw, target), head.loss_each(raw, target[:, None]))
    assert torch.equal(
        head.tally(raw, target)[next(iter(head.tally(raw, target)))],
        next(iter(head.tally(raw, target[:, None]).values())),
    )


def test_squared_loss_is_half_the_squared_error_in_standard_units() -> None:
    head = Gaussian(2).double()
    target = torch.randn(40, 2, dtype=torch.float64) * torch.tensor([3.0, 0.2]) + 5
    head.fit_target(target)
    raw = torch.randn(40, 2, dtype=torch.float64)
    standard = (target - target.mean(0)) / target.std(0, correction=0)
    torch.testing.assert_close(head.loss_sum(raw, target), 0.5 * (raw - standard).square().sum())


def test_the_learned_noise_is_that_of_maximum_likelihood() -> None:
    head = Gaussian(1, loss="nll").double()
    raw, target = torch.zeros(50, 1, dtype=torch.float64), torch.randn(50, 1, dtype=torch.float64) * 2
    head.set_noise(target.square().mean(0))
    (gradient,) = torch.autograd.grad(head.loss_sum(raw, target), head.log_variance)
    assert gradient.abs().max() < 1e-9
    wanted = -distributions.Normal(0.0, target.square().mean().sqrt()).log_prob(target).sum()
    torch.testing.assert_close(head.loss_sum(raw, target), wanted)


@pytest.mark.parametrize(
    "head", [Gaussian(2), Gaussian(2, loss="nll"), Heteroscedastic(2)], ids=lambda h: repr(h)
)
def test_regression_measures_are_scikit_learns_in_the_targets_units(head: Head) -> None:
    target = torch.randn(80, 2, dtype=torch.float64) * torch.tensor([4.0, 0.5]) + torch.tensor([1000.0, -3.0])
    head = build_head(head.spec()).double()
    head.fit_target(target)
    raw = torch.randn(80, head.outputs_needed, dtype=torch.float64) * 0.3
    predicted = head.predict(raw)["value"]
    got = head.measures(head.tally(raw, target))
    assert got["rmse"] == pytest.approx(metrics.root_mean_squared_error(target, predicted))
    assert got["mae"] == pytest.approx(metrics.mean_absolute_error(target, predicted))
    assert got["r2"] == pytest.approx(metrics.r2_score(target, predicted))
    if "coverage" in got:
        answer = head.predict(raw, "interval", level=0.9)
        inside = (answer["low"] <= target) & (target <= answer["high"])
        assert got["coverage"] == pytest.approx(inside.double().mean().item())


def test_a_constant_target_keeps_its_scale() -> None:
    head = Gaussian(1)
    head.fit_target(torch.full((7,), 0.1))
    assert head.scale.item() == 1.0
    assert head.predict(torch.zeros(2, 1))["value"].tolist() == pytest.approx([0.1, 0.1])


def test_intervals_grow_with_the_level_and_the_noise() -> None:
    head = Gaussian(1)
    head.fit_target(torch.tensor([0.0, 20.0]))  # mean 10, deviation 10
    head.set_noise(0.25)
    answer = head.predict(torch.zeros(1, 1), "interval", level=0.9)
    # 1.6448536 standard deviations of 10 · √0.25 either side.
    assert answer["low"].item() == pytest.approx(10 - 8.224268, abs=1e-4)
    assert answer["high"].item() == pytest.approx(10 + 8.224268, abs=1e-4)


def test_samples_have_the_distributions_moments() -> None:
    rows = 40_000
    head = Heteroscedastic(1)
    head.fit_target(torch.tensor([4.0, 6.0]))  # mean 5, deviation 1
    raw = torch.tensor([[0.5, math.log(4.0)]]).expand(rows, 2)
    value = head.predict(raw, "sample", generator=torch.Generator().manual_seed(0))["value"]
    assert abs(value.mean().item() - 5.5) < 4 * 2 / math.sqrt(rows)
    assert abs(value.std().item() - 2.0) < 4 * 2 / math.sqrt(2 * rows)


def test_predictions_of_the_log_variance_are_clamped_softly() -> None:
    from quire.nn.heads import soft_clamp

    x = torch.tensor([-1e4, -20.0, -6.0, 0.0, 6.0, 20.0, 1e4], dtype=torch.float64)
    y = soft_clamp(x)
    torch.testing.assert_close(y[2:5], x[2:5], rtol=0, atol=1e-9)
    assert (y.abs() <= 12.0 + 1e-9).all()
    assert (y.diff() >= 0).all()


# Errors ---------------------------------------------------------------------------------------


def message(call: Any) -> str:
    with pytest.raises(InputError) as caught:
        call()
    return str(caught.value)


def test_errors_say_what_came_what_was_expected_and_what_to_do() -> None:
    text = message(lambda: build_head({"head": "gausian", "dim": 1}))
    assert "unknown head 'gausian'" in text
    assert "did you mean 'gaussian'?" in text
    assert 'an entry "head": NAME' in message(lambda: build_head({"dim": 1}))
    assert "does not understand" in message(lambda: build_head({"head": "gaussian", "dim": 1, "los": "nll"}))
    assert "an integer >= 1" in message(lambda: Gaussian(0))
    assert "did you mean 'squared'?" in message(lambda: Gaussian(1, loss="square"))  # type: ignore[arg-type]
    text = message(lambda: Heteroscedastic(2).loss_sum(torch.zeros(3, 2), torch.zeros(3, 2)))
    assert "a last dimension of 4" in text
    assert "head.outputs_needed" in text
    text = message(lambda: Gaussian(2).loss_sum(torch.zeros(3, 2), torch.zeros(2, 3)))
    assert "targets of shape (2, 3)" in text
    assert "expected: shape (3, 2)" in text
    text = message(lambda: Gaussian(1).loss_sum(torch.zeros(3, 1), torch.zeros(1, 3)))
    assert "shape (3, 1) or (3,)" in text
    text = message(lambda: Categorical(3).loss_sum(torch.zeros(4, 3), torch.zeros(4, 2)))
    assert "integers) of shape (4,), or shares of the classes of shape (4, 3)" in text
    assert "argmax(dim=-1)" in text
    text = message(lambda: Categorical(3).tally(torch.zeros(4, 3), torch.zeros(4, 3)))
    assert "expected: class numbers (integers) of shape (4,)\n" in text
    assert "did you mean 'sample'?" in message(lambda: Gaussian(1).predict(torch.zeros(1, 1), "samples"))
    assert "a probability in (0, 1)" in message(lambda: Gaussian(1).predict(torch.zeros(1, 1), level=90))
    assert "2 class weights" in message(lambda: Categorical(3, class_weights=[1.0, 2.0]))
    assert "not finite" in message(lambda: Gaussian(1).fit_target(torch.tensor([1.0, math.nan])))
    assert "residual variance" in message(lambda: Gaussian(1).set_noise(-1.0))


def test_a_class_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match="from 0 to 2"):
        Categorical(3).loss_sum(torch.zeros(2, 3), torch.tensor([0, 3]))
    with pytest.raises(InputError, match="from 0 to 2"):
        Categorical(3).tally(torch.zeros(2, 3), torch.tensor([0, 3]))


@pytest.mark.gpu
@cases
def test_heads_give_the_same_on_the_gpu(spec: dict[str, Any]) -> None:
    head, raw, target = example(spec)
    wanted = head.loss_each(raw, target)
    measures = head.measures(head.tally(raw, target))
    head = head.cuda()
    torch.testing.assert_close(head.loss_each(raw.cuda(), target.cuda()).cpu(), wanted)
    assert head.measures(head.tally(raw.cuda(), target.cuda())) == pytest.approx(measures)
    for mode in MODES:
        head.predict(raw.cuda(), mode)
