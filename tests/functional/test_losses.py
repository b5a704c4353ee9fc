from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from quire.errors import InputError
from quire.functional import losses as L
from quire.functional.losses import LOSSES

NAMES = list(LOSSES)
SEPARATE = [name for name in NAMES if not LOSSES[name].couples_samples]


def example(name, n=12, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs, options = LOSSES[name].example(generator, n, dtype)
    return (inputs[0].detach().requires_grad_(), *inputs[1:]), options


def test_every_loss_of_the_sheet_is_registered():
    assert set(NAMES) >= {
        "quadratic_cost", "mse", "half_squared_error", "l1", "smooth_l1", "gaussian_nll", "nll", "kl_div",
        "binary_cross_entropy", "binary_cross_entropy_with_logits", "multi_label", "cross_entropy",
        "margin_ranking", "triplet_margin", "cosine_embedding", "info_nce",
    }  # fmt: skip
    assert LOSSES["info_nce"].couples_samples
    assert not LOSSES["cross_entropy"].couples_samples


@pytest.mark.parametrize("name", NAMES)
def test_reductions_agree(name):
    inputs, options = example(name)
    loss = LOSSES[name]
    each = loss.function(*inputs, reduction="none", **options)
    total = loss.function(*inputs, reduction="sum", **options)
    weight = loss.weigh(None, *inputs[1:], **options)  # counted without the prediction
    assert each.shape[0] == 12
    assert total.shape == ()
    torch.testing.assert_close(each.sum(), total)
    mean = loss.function(*inputs, reduction="mean", **options)
    torch.testing.assert_close(mean, total / weight, rtol=1e-14, atol=0)
    torch.testing.assert_close(loss.function(*inputs, **options), mean, rtol=0, atol=0)


@pytest.mark.parametrize("name", SEPARATE)
def test_sums_and_weights_of_parts_add_up(name):
    inputs, options = example(name, n=11)
    loss = LOSSES[name]
    parts = list(zip(*(value.split([1, 4, 6]) for value in inputs), strict=True))
    total = sum(loss.function(*part, reduction="sum", **options) for part in parts)
    weight = sum(loss.weigh(*part, **options) for part in parts)
    torch.testing.assert_close(total / weight, loss.function(*inputs, **options), rtol=1e-13, atol=1e-13)


def test_a_coupled_loss_says_so_because_its_parts_do_not_add_up():
    inputs, options = example("info_nce", n=12)
    parts = list(zip(*(value.split(6) for value in inputs), strict=True))
    total = sum(L.info_nce(*part, reduction="sum", **options) for part in parts)
    assert abs(total - L.info_nce(*inputs, reduction="sum", **options)) > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name):
    inputs, options = example(name, n=5, seed=3)
    function = LOSSES[name].function
    assert torch.autograd.gradcheck(lambda first: function(first, *inputs[1:], **options), (inputs[0],))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_follows_float64(name, dtype):
    inputs, options = example(name, dtype=dtype, seed=1)
    loss = LOSSES[name].function
    mean = loss(*inputs, **options)
    mean.backward()
    raised = [value.detach().double() if value.is_floating_point() else value for value in inputs]
    raised[0].requires_grad_()
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    exact = loss(*raised, **wide)
    exact.backward()
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    assert mean.dtype == dtype
    torch.testing.assert_close(mean.double(), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(inputs[0].grad.double(), raised[0].grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("binary_cross_entropy", "nll", "kl_div")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0.0, 1e4, -1e4])
def test_extreme_predictions_stay_finite(name, dtype, size):
    inputs, options = example(name, dtype=dtype)
    prediction = torch.full_like(inputs[0], size).requires_grad_()
    loss = LOSSES[name].function(prediction, *inputs[1:], **options)
    loss.backward()
    assert loss.isfinite()
    assert prediction.grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_batch_is_zero(name):
    inputs, options = example(name, n=0)
    loss = LOSSES[name].function(*inputs, **options)
    loss.backward()
    assert loss == 0
    assert LOSSES[name].weigh(*inputs, **options) == 0
    assert inputs[0].grad.shape == inputs[0].shape


@pytest.mark.parametrize("function", [L.cross_entropy, L.nll])
@pytest.mark.parametrize("weight", [None, torch.tensor([0.2, 1.0, 3.0])])
def test_a_batch_that_is_all_ignored_is_zero_without_gradient(function, weight):
    scores = torch.randn(4, 3, requires_grad=True)
    loss = function(scores, torch.full((4,), -100), weight=weight)
    loss.backward()
    assert loss == 0
    assert (scores.grad == 0).all()
    assert F.cross_entropy(scores, torch.full((4,), -100)).isnan()  # what it would be otherwise


@pytest.mark.parametrize("weight", [None, torch.rand(5, dtype=torch.float64)])
@pytest.mark.parametrize("ignore_index", [-100, 2])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_cross_entropy_has_pytorchs_semantics(weight, ignore_index, label_smoothing, reduction):
    options = {
        "weight": weight, "ignore_index": ignore_index,
        "label_smoothing": label_smoothing, "reduction": reduction,
    }  # fmt: skip
    for shape in ((7, 5), (4, 5, 6), (2, 5, 3, 3)):
        logits = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        target = torch.randint(0, 5, (shape[0], *shape[2:]))
        target[0] = ignore_index
        ours, theirs = L.cross_entropy(logits, target, **options), F.cross_entropy(logits, target, **options)
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
        slopes = [torch.autograd.grad(loss.sum(), logits)[0] for loss in (ours, theirs)]
        torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("weight", [None, torch.rand(5, dtype=torch.float64)])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_cross_entropy_with_class_probabilities(weight, reduction):
    logits = torch.randn(7, 5, dtype=torch.float64)
    target = torch.randn(7, 5, dtype=torch.float64).softmax(1)
    options = {"weight": weight, "reduction": reduction, "label_smoothing": 0.1}
    expected = F.cross_entropy(logits, target, **options)
    torch.testing.assert_close(L.cross_entropy(logits, target, **options), expected)


def test_cross_entropy_of_one_sample_and_of_small_integers():
    logits = torch.randn(4)
    torch.testing.assert_close(
        L.cross_entropy(logits, torch.tensor(2)), F.cross_entropy(logits, torch.tensor(2))
    )
    batch, target = torch.randn(3, 4), torch.tensor([0, 3, 1], dtype=torch.int32)
    torch.testing.assert_close(L.cross_entropy(batch, target), F.cross_entropy(batch, target.long()))


def test_class_weights_of_another_dtype_are_promoted():
    logits = torch.randn(6, 3, dtype=torch.bfloat16)
    target, weight = torch.randint(0, 3, (6,)), torch.tensor([0.1, 1.0, 7.0])
    expected = F.cross_entropy(logits.float(), target, weight)
    torch.testing.assert_close(L.cross_entropy(logits, target, weight=weight), expected)


def test_solved_by_hand():
    ones = torch.ones(2, 3)
    zeros = torch.zeros(2, 3)
    assert L.quadratic_cost(ones, zeros) == 1.5  # ½·3 for each of two samples
    assert L.mse(2 * ones, zeros) == 4
    assert L.half_squared_error(2 * ones, zeros) == 2
    assert L.smooth_l1(torch.tensor([0.5, 3.0]), torch.zeros(2), reduction="sum") == 0.125 + 2.5
    even = torch.zeros(4, 10)
    assert L.cross_entropy(even, torch.arange(4)).item() == pytest.approx(math.log(10))
    assert L.perplexity(even, torch.tensor([1, 2, -100, 4])).item() == pytest.approx(10)
    assert L.binary_cross_entropy(torch.tensor([0.5]), torch.ones(1)).item() == pytest.approx(math.log(2))
    assert L.gaussian_nll(torch.zeros(1), torch.ones(1) * 2, torch.ones(1)) == 2
    # Weighted mean: (0.5·ln2 + 2·ln2) / (0.5 + 2), the third target being ignored.
    weighted = L.cross_entropy(torch.zeros(3, 2), torch.tensor([0, 1, -100]), weight=torch.tensor([0.5, 2.0]))
    assert weighted.item() == pytest.approx(math.log(2))
    assert L.margin_ranking(torch.ones(1), torch.zeros(1), -torch.ones(1), margin=0.5) == 1.5
    same = torch.eye(3, dtype=torch.float64)
    expected = -math.log(math.e / (math.e + 2))
    assert L.info_nce(same, same, temperature=1.0).item() == pytest.approx(expected)


def test_info_nce_compares_directions_not_lengths():
    query, key = torch.randn(2, 6, 4, dtype=torch.float64)
    rows = []
    for i in range(6):
        scores = torch.stack([F.cosine_similarity(query[i], key[j], dim=0) for j in range(6)]) / 0.3
        rows.append(scores.logsumexp(0) - scores[i])
    expected = torch.stack(rows)
    lengths = torch.rand(2, 6, 1, dtype=torch.float64) * 9 + 0.5
    found = L.info_nce(lengths[0] * query, lengths[1] * key, temperature=0.3, reduction="none")
    torch.testing.assert_close(found, expected)


PEERS = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "gaussian_nll": F.gaussian_nll_loss,
    "binary_cross_entropy": F.binary_cross_entropy,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "multi_label": F.multilabel_soft_margin_loss,
    "cross_entropy": F.cross_entropy,
    "nll": F.nll_loss,
    "margin_ranking": F.margin_ranking_loss,
    "triplet_margin": F.triplet_margin_loss,
    "cosine_embedding": F.cosine_embedding_loss,
}


@pytest.mark.parametrize("name", list(PEERS))
def test_left_out_options_are_pytorchs(name):
    inputs, _ = example(name)
    torch.testing.assert_close(LOSSES[name].function(*inputs), PEERS[name](*inputs))


@pytest.mark.parametrize(("p", "swap"), [(1.0, False), (3.0, False), (2.0, True), (1.0, True)])
def test_triplets_by_other_norms_and_sides(p, swap):
    inputs, _ = example("triplet_margin", n=40)
    options = {"margin": 2.0, "p": p, "swap": swap, "reduction": "none"}
    found = L.triplet_margin(*inputs, **options)
    torch.testing.assert_close(found, F.triplet_margin_loss(*inputs, **options))
    assert not torch.allclose(found, L.triplet_margin(*inputs, margin=2.0, reduction="none"))


def test_divergence_from_a_target_of_logarithms():
    (prediction, target), _ = example("kl_div")
    found = L.kl_div(prediction, target.log(), log_target=True, reduction="none")
    torch.testing.assert_close(found, L.kl_div(prediction, target, reduction="none"))


def test_temperature_of_info_nce_that_is_left_out():
    (query, key), _ = example("info_nce")
    torch.testing.assert_close(L.info_nce(query, key), L.info_nce(query, key, temperature=0.1))


@pytest.mark.parametrize("name", SEPARATE)
def test_the_mean_of_many_samples_fits_into_half_precision(name):
    """The sum of so many does not: float16 ends at 65504."""
    inputs, options = example(name, n=50_000, dtype=torch.float16)
    loss = LOSSES[name].function
    mean = loss(*inputs, **options)
    (slope,) = torch.autograd.grad(mean * 1000, inputs[0])
    raised = [value.detach().double() if value.is_floating_point() else value for value in inputs]
    wide = {
        key: value.double() if isinstance(value, torch.Tensor) else value for key, value in options.items()
    }
    assert mean.dtype == slope.dtype == torch.float16
    assert mean.item() == pytest.approx(loss(*raised, **wide).item(), rel=2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_perplexity_of_half_precision_has_the_digits_of_its_logits(dtype):
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    target = torch.arange(50) % 9
    expected = L.perplexity(logits.double(), target)
    torch.testing.assert_close(L.perplexity(logits, target).double(), expected, rtol=1e-5, atol=0)
    far = torch.tensor([[0.0, 14.0]], dtype=dtype)  # e¹⁴ is above the largest number of float16
    assert L.perplexity(far, torch.tensor([0])).item() == pytest.approx(math.exp(14), rel=1e-4)


def test_quadratic_cost_of_a_row_of_numbers():
    each = L.quadratic_cost(torch.tensor([1.0, 4.0]), torch.tensor([0.0, 1.0]), reduction="none")
    assert each.tolist() == [0.5, 4.5]


def test_quadratic_cost_of_vectors_and_images():
    p, t = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    torch.testing.assert_close(L.quadratic_cost(p, t), (p - t).square().mean() / 2)
    p, t = torch.randn(2, 4, 3, 5, 5, dtype=torch.float64)
    expected = (p - t).square().sum((1, 2, 3)) / 2
    torch.testing.assert_close(L.quadratic_cost(p, t, reduction="none"), expected)
    torch.testing.assert_close(L.quadratic_cost(p, t), expected.mean())


def test_a_variance_below_eps_is_still_pushed_up():
    variance = torch.full((3,), 1e-9, requires_grad=True)
    L.gaussian_nll(torch.zeros(3), torch.ones(3), variance).backward()
    assert (variance.grad < 0).all()


def test_gaussian_variance_broadcasts():
    mean, target = torch.randn(2, 5, 3, dtype=torch.float64)
    variance = torch.rand(5, 1, dtype=torch.float64) + 0.1
    expected = F.gaussian_nll_loss(mean, target, variance.expand(5, 3), full=True)
    torch.testing.assert_close(L.gaussian_nll(mean, target, variance, full=True), expected)


def test_gradient_formulas():
    logits = torch.tensor([[0.0, 0.0]])
    torch.testing.assert_close(L.softmax_gradient(logits, torch.tensor([1])), torch.tensor([[0.5, -0.5]]))
    row = L.logistic_gradient(torch.tensor([[2.0, 4.0]]), torch.zeros(1), torch.ones(1))
    torch.testing.assert_close(row, torch.tensor([[-1.0, -2.0]]))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: L.mse(torch.zeros(4, 1), torch.zeros(4)),
            r"mse of shapes \(4, 1\) and \(4,\)[\s\S]*view_as",
        ),
        (
            lambda: L.mse(torch.zeros(2), torch.zeros(2), reduction="men"),
            r"unknown reduction 'men'[\s\S]*mean",
        ),
        (lambda: L.smooth_l1(torch.zeros(2), torch.zeros(2), beta=0.0), r"beta=0.0[\s\S]*expected: beta > 0"),
        (
            lambda: L.binary_cross_entropy(torch.tensor([1.5]), torch.ones(1)),
            r"from 1.5 to 1.5[\s\S]*probabilities in \[0, 1\][\s\S]*with_logits",
        ),
        (
            lambda: L.binary_cross_entropy(torch.tensor([math.nan]), torch.ones(1)),
            r"from nan to nan[\s\S]*probabilities",
        ),
        (
            lambda: L.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 3])),
            r"target 3 is out of bounds[\s\S]*from 0 to 2[\s\S]*more outputs",
        ),
        (
            lambda: L.nll(torch.zeros(2, 3), torch.tensor([0, -1])),
            r"target -1 is out of bounds[\s\S]*from 0 to 2",
        ),
        (
            lambda: L.cross_entropy(torch.zeros(2, 3), torch.zeros(2)),
            r"torch.float32 target \(2,\)[\s\S]*class indices \(torch.int64\) of shape \(2,\)",
        ),
        (
            lambda: L.cross_entropy(torch.zeros(2, 3), torch.zeros(3, dtype=torch.long)),
            r"target \(3,\)[\s\S]*shape \(2,\)",
        ),
        (
            lambda: L.cross_entropy(
                torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), weight=torch.ones(2)
            ),
            r"class weights of shape \(2,\)[\s\S]*each of 3 classes",
        ),
        (lambda: L.info_nce(torch.zeros(3), torch.zeros(3)), r"shape \(3,\)[\s\S]*embeddings \(N, D\)"),
        (lambda: L.info_nce(torch.ones(2, 2), torch.ones(2, 2), temperature=-1.0), r"temperature=-1.0"),
        (lambda: LOSSES["cross_entropi"], r"unknown loss 'cross_entropi'[\s\S]*did you mean 'cross_entropy'"),
    ],
)
def test_messages(call, words):
    with pytest.raises(InputError, match=words):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_the_gpu(name):
    inputs, options = example(name, dtype=torch.float32)
    expected = LOSSES[name].function(*inputs, **options)
    moved = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    there = LOSSES[name].function(*(value.detach().cuda() for value in inputs), **moved)
    torch.testing.assert_close(there.cpu(), expected.detach())
