from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import InputError
from quire.functional import convexity, maths, probability
from quire.functional.probability import DiscreteNetwork

# Norms, products, logarithms ------------------------------------------------------------------


@pytest.mark.parametrize("p", [1, 1.5, 2, 3, math.inf])
@pytest.mark.parametrize("dim", [0, -1, (0, 1)])
def test_norms_and_their_gradients_equal_pytorchs(p, dim):
    x = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    ours, theirs = maths.p_norm(x, p, dim), torch.linalg.vector_norm(x, p, dim=dim)
    torch.testing.assert_close(ours, theirs)
    direction = torch.randn_like(ours)
    slopes = [torch.autograd.grad((norm * direction).sum(), x)[0] for norm in (ours, theirs)]
    torch.testing.assert_close(*slopes)
    assert maths.p_norm(x, p, dim, keepdim=True).dim() == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_norms_neither_overflow_nor_vanish(dtype, size, p):
    x = torch.tensor([3.0, -4.0, 0.0], dtype=dtype).mul(size).requires_grad_()
    norm = maths.p_norm(x, p)
    norm.backward()
    expected = (3**p + 4**p) ** (1 / p)
    assert norm.item() / size == pytest.approx(expected, rel=2e-2 if dtype == torch.bfloat16 else 1e-5)
    assert x.grad.isfinite().all()
    assert x.grad[0] > 0 > x.grad[1]


@pytest.mark.parametrize("p", [1, 1.5, 2, math.inf])
def test_norm_of_zero_has_a_gradient_of_zero(p):
    x = torch.zeros(3, requires_grad=True)
    maths.p_norm(x, p).backward()
    assert (x.grad == 0).all()
    assert maths.p_norm(torch.tensor([1.0, -math.inf]), p) == math.inf


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=6), st.floats(1, 8))
def test_triangle_inequality(values, p):
    x = torch.tensor(values, dtype=torch.float64)
    y = x.flip(0) * 0.7 - 1
    assert maths.p_norm(x + y, p) <= maths.p_norm(x, p) + maths.p_norm(y, p) + 1e-9


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_norm_of_what_is_no_number_is_none_either(p):
    rows = torch.tensor([[math.nan, 1.0], [3.0, -math.inf], [0.0, 2.0]])
    found = maths.p_norm(rows, p)
    assert found[0].isnan()
    assert found[1:].tolist() == [math.inf, 2.0]


def test_a_norm_is_euclids_along_the_last_dimension_unless_said_otherwise():
    assert maths.p_norm(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).tolist() == [5.0, 1.0]


def test_logarithms():
    assert maths.log_base(torch.tensor(1000.0, dtype=torch.float64), 10).item() == pytest.approx(3)
    assert maths.log_base(torch.tensor(8.0), 0.5).item() == pytest.approx(-3)


@given(st.integers(1, 8), st.integers(1, 8), st.booleans())
@settings(deadline=None, max_examples=30)
def test_convolution_equals_numpys(n, m, batched):
    f, g = torch.randn(3, n, dtype=torch.float64), torch.randn(3, m, dtype=torch.float64)
    if batched:
        expected = np.stack([np.convolve(f[i], g[i]) for i in range(3)])
        np.testing.assert_allclose(maths.convolve(f, g), expected, atol=1e-13)
        expected = np.stack([np.convolve(f[i], g[0]) for i in range(3)])  # one kernel for all
        np.testing.assert_allclose(maths.convolve(f, g[0]), expected, atol=1e-13)
        np.testing.assert_allclose(maths.convolve(g[0], f), expected, atol=1e-13)
    else:
        np.testing.assert_allclose(maths.convolve(f[0], g[0]), np.convolve(f[0], g[0]), atol=1e-13)


def test_convolution_can_be_differentiated():
    f, g = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in (5, 3))
    assert torch.autograd.gradcheck(maths.convolve, (f, g))
    assert torch.autograd.gradcheck(maths.convolved_difference, (f, g))


def test_rules_of_differentiation_by_hand():
    x = torch.tensor([2.0], dtype=torch.float64)
    assert maths.power_rule(3)(x) == 12
    assert maths.power_rule(0)(torch.zeros(1)) == 0  # not 0·0⁻¹
    square, double = torch.square, lambda v: 2 * v
    assert maths.product_rule(square, double, square, double)(x) == 32  # (x⁴)'
    assert maths.quotient_rule(square, double, square, double)(x) == 0  # 1'
    assert maths.chain_rule(double, square, double)(x) == 32


# High dimensions ------------------------------------------------------------------------------


def test_points_for_a_resolution():
    assert [maths.points_for_resolution(d, 0.1) for d in (1, 2, 10)] == [10, 100, 10**10]
    assert maths.points_for_resolution(2, 0.3) == 16
    assert maths.points_for_resolution(1000, 0.5) == 2**1000


@pytest.mark.parametrize("dimensions", [1, 7, 100])
def test_distances_concentrate_as_predicted(dimensions):
    generator = torch.Generator().manual_seed(dimensions)
    measured = maths.simulated_distance_spread(dimensions, 50_000, generator=generator)
    # The relative error of a standard deviation from n draws is about √((κ−1)/4n), κ < 6 here: 0.5%.
    assert measured.item() == pytest.approx(maths.squared_distance_spread(dimensions), rel=0.025)


# Convexity ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_convex_functions_pass_in_any_precision(dtype):
    low = torch.full((4,), -5.0, dtype=dtype)
    for function in (
        lambda x: x.square().sum(-1),
        lambda x: x.logsumexp(-1),
        lambda x: x.abs().amax(-1),
        lambda x: 3 * x.sum(-1) + 1000,  # linear: equality everywhere, up to rounding
    ):
        assert convexity.convexity_violation(function, low, -low) is None


@pytest.mark.parametrize("function", [torch.sin, torch.tanh, lambda x: -x.square(), lambda x: x.abs().sqrt()])
def test_a_violation_is_a_disproof(function):
    found = convexity.convexity_violation(function, -3.0, 3.0)
    x, other, weight, amount = (value.double() for value in found)
    middle = function(weight * x + (1 - weight) * other)
    chord = weight * function(x) + (1 - weight) * function(other)
    assert 0 <= weight <= 1
    assert (middle - chord).item() == pytest.approx(amount.item(), rel=1e-3)
    assert amount > 0.1


def test_infinite_values_of_a_convex_function():
    def inside(x):  # x² on [−1, 1], ∞ elsewhere: convex
        return torch.where(x.abs() <= 1, x.square(), math.inf)

    assert convexity.convexity_violation(inside, -3.0, 3.0) is None
    hole = convexity.convexity_violation(lambda x: torch.where(x.abs() <= 1, math.inf, x.square()), -3.0, 3.0)
    assert hole is not None
    assert (hole.weight * hole.x + (1 - hole.weight) * hole.other).abs() <= 1


def test_convex_sets():
    low, high = torch.tensor([-2.0, -2.0]), torch.tensor([2.0, 2.0])
    half_plane = convexity.convex_set_violation(lambda x: x.sum(-1) < 1, low, high)
    assert half_plane is None
    x, other, weight, depth = convexity.convex_set_violation(lambda x: x.prod(-1) > 0, low, high)
    assert x.prod() > 0
    assert other.prod() > 0
    middle = weight * x + (1 - weight) * other
    assert middle.prod() <= 0
    assert depth > 0.5
    assert depth.item() == pytest.approx(min(math.dist(middle, x), math.dist(middle, other)), rel=1e-5)
    ends = convexity.convex_set_violation(lambda x: x.abs() > 1, 1.0 - 4, 3.0)
    middle = ends.weight * ends.x + (1 - ends.weight) * ends.other
    assert middle.abs() <= 1
    nearer = min((middle - ends.x).abs(), (middle - ends.other).abs())
    assert ends.amount.item() == pytest.approx(nearer.item(), rel=1e-5)


def test_jensen_gap_by_hand():
    values, probabilities = torch.tensor([0.0, 2.0]), torch.tensor([0.5, 0.5])
    assert convexity.jensen_gap(torch.square, values, probabilities) == 1  # E[X²] − E[X]² = 2 − 1
    assert convexity.jensen_gap(torch.sqrt, values, probabilities) < 0  # concave


# Probability ----------------------------------------------------------------------------------


def test_bayes_with_an_impossible_observation():
    posterior = probability.bayes(torch.tensor([0.5, 0.5]), torch.tensor([[0.2, 0.8, 0.0], [0.6, 0.4, 0.0]]))
    torch.testing.assert_close(posterior[:, 0], torch.tensor([0.25, 0.75]))
    assert (posterior[:, 2] == 0).all()


def test_divergences_with_zeros():
    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.25, 0.75, 0.0], dtype=torch.float64, requires_grad=True)
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert probability.kl_divergence(p, q).item() == pytest.approx(expected)
    assert probability.entropy(p).item() == pytest.approx(math.log(2))
    for value in (
        probability.kl_divergence(p, q),
        probability.js_divergence(p, q),
        probability.distribution_cross_entropy(p, q),
    ):
        assert all(slope.isfinite().all() for slope in torch.autograd.grad(value, (p, q)))
    assert probability.kl_divergence(q, torch.tensor([1.0, 0.0, 0.0]).double()) == math.inf


def test_divergences_of_what_is_no_number_are_none():
    broken, q = torch.tensor([math.nan, 0.5]), torch.tensor([0.5, 0.5])
    assert probability.entropy(broken).isnan()
    assert probability.kl_divergence(broken, q).isnan()
    assert probability.js_divergence(q, broken).isnan()
    with pytest.raises(InputError, match="the prior has a sum of nan"):
        probability.bayes(broken, TABLE)


def test_divergences_gradcheck():
    p, q = (torch.rand(4, dtype=torch.float64).add(0.1).requires_grad_() for _ in range(2))
    for function in (
        probability.kl_divergence,
        probability.js_divergence,
        probability.distribution_cross_entropy,
    ):
        assert torch.autograd.gradcheck(function, (p, q))


def test_likeliest_weights_of_whole_numbers_are_none():
    fit = probability.gaussian_mle(torch.tensor([[1], [2]]), torch.tensor([1, 1]))  # 3/5, and (0.4² + 0.2²)/2
    assert fit.weights.tolist() == pytest.approx([0.6])
    assert fit.variance.item() == pytest.approx(0.1)


def test_likeliest_weights_of_columns_that_repeat():
    x = torch.randn(20, 2, dtype=torch.float64)
    x = torch.cat([x, x[:, :1]], 1)  # rank 2 of 3
    y = torch.randn(20, 2, dtype=torch.float64)
    weights, variance = probability.gaussian_mle(x, y)
    expected = np.linalg.lstsq(x.numpy(), y.numpy(), rcond=None)[0]
    np.testing.assert_allclose(weights, expected, atol=1e-12)
    np.testing.assert_allclose(variance, ((y - x @ weights) ** 2).mean(0), atol=1e-12)
    assert probability.gaussian_mle(x.bfloat16(), y.bfloat16()).weights.dtype == torch.bfloat16


# Graphical models -----------------------------------------------------------------------------


def sprinkler(dtype=torch.float64):
    return DiscreteNetwork(
        {
            "rain": ((), torch.tensor([0.8, 0.2], dtype=dtype)),
            "sprinkler": (("rain",), torch.tensor([[0.6, 0.4], [0.99, 0.01]], dtype=dtype)),
            "wet": (
                ("sprinkler", "rain"),
                torch.tensor([[[1.0, 0.0], [0.2, 0.8]], [[0.1, 0.9], [0.01, 0.99]]], dtype=dtype),
            ),
        }
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sprinkler_by_hand(dtype):
    posterior = sprinkler(dtype).posterior(["rain"], {"wet": 1})
    # P(wet) = 0.8·0.4·0.9 + 0.2·(0.99·0.8 + 0.01·0.99) = 0.44838, of which rain 0.16038
    assert posterior.dtype == dtype
    assert posterior[1].item() == pytest.approx(0.16038 / 0.44838, rel=2e-2 if dtype.itemsize == 2 else 1e-5)
    explained = sprinkler().posterior(["rain"], {"wet": 1, "sprinkler": 1})[1]
    assert explained < 0.01  # the sprinkler explains the wet grass away
    assert sprinkler().probability({}) == 1


@st.composite
def networks(draw):
    count = draw(st.integers(1, 6))
    sizes = [draw(st.integers(1, 3)) for _ in range(count)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tables = {}
    for i in range(count):
        parents = [j for j in range(i) if draw(st.booleans())][:3]
        shape = [*(sizes[j] for j in parents), sizes[i]]
        table = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.01
        tables[f"v{i}"] = (tuple(f"v{j}" for j in parents), table / table.sum(-1, keepdim=True))
    order = draw(st.permutations(list(tables)))
    return {name: tables[name] for name in order}, sizes


def full_joint(tables, sizes):
    joint = torch.zeros(sizes, dtype=torch.float64)
    for state in itertools.product(*(range(size) for size in sizes)):
        value = 1.0
        for i in range(len(sizes)):
            parents, table = tables[f"v{i}"]
            value *= table[(*(state[int(parent[1:])] for parent in parents), state[i])].item()
        joint[state] = value
    return joint


@settings(deadline=None, max_examples=40)
@given(networks(), st.data())
def test_inference_equals_the_full_table(network, data):
    tables, sizes = network
    model, joint = DiscreteNetwork(tables), full_joint(*network)
    names = [f"v{i}" for i in range(len(sizes))]
    torch.testing.assert_close(model.marginal(*names), joint)
    asked = data.draw(st.permutations(names))
    cut = data.draw(st.integers(1, len(names)))
    query, rest = asked[:cut], asked[cut:]
    observed = {name: data.draw(st.integers(0, sizes[int(name[1:])] - 1)) for name in rest[:2]}
    sliced = joint[tuple(observed.get(name, slice(None)) for name in names)]
    left = [name for name in names if name not in observed]
    hidden = [i for i, name in enumerate(left) if name not in query]
    table = sliced.sum(hidden) if hidden else sliced
    kept = [name for name in left if name in query]
    expected = table.permute([kept.index(name) for name in query]) / table.sum()
    torch.testing.assert_close(model.posterior(query, observed), expected)
    torch.testing.assert_close(model.probability(observed), table.sum())


def test_a_long_chain_needs_no_full_table():
    # 200 variables have 2^200 joint states; elimination never holds more than two of them at a time.
    flip = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)
    tables = {"x0": ((), torch.tensor([1.0, 0.0], dtype=torch.float64))}
    tables |= {f"x{i}": ((f"x{i - 1}",), flip) for i in range(1, 200)}
    last = DiscreteNetwork(tables).marginal("x199")
    torch.testing.assert_close(last, torch.linalg.matrix_power(flip, 199)[0])


def test_probabilities_can_be_differentiated_by_the_tables():
    def posterior(logits):
        network = sprinkler()
        network = DiscreteNetwork(
            {
                "rain": ((), logits.softmax(0)),
                "sprinkler": (("rain",), network.tables["sprinkler"]),
                "wet": (("sprinkler", "rain"), network.tables["wet"]),
            }
        )
        return network.posterior(["rain"], {"wet": 1})

    assert torch.autograd.gradcheck(posterior, torch.zeros(2, dtype=torch.float64, requires_grad=True))


# Messages -------------------------------------------------------------------------------------

HALF = torch.tensor([0.5, 0.5])
TABLE = HALF.expand(2, 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: maths.p_norm(HALF, 0.5), r"p=0.5[\s\S]*p ≥ 1[\s\S]*triangle inequality"),
        (lambda: maths.hadamard(HALF, TABLE), r"shapes \(2,\) and \(2, 2\)"),
        (lambda: maths.log_base(HALF, 1), r"base 1[\s\S]*other than 1"),
        (lambda: maths.log_base(HALF, -2), r"base -2"),
        (lambda: maths.convolve(torch.zeros(0), HALF), r"shapes \(0,\) and \(2,\)"),
        (lambda: maths.points_for_resolution(2, 1.5), r"spacing 1.5[\s\S]*\(0, 1\]"),
        (lambda: maths.squared_distance_spread(0), r"0 dimensions"),
        (lambda: convexity.convexity_violation(torch.sin, 1.0, 0.0), r"from 1.0 to 0.0[\s\S]*low < high"),
        (
            lambda: convexity.convexity_violation(torch.square, HALF * 0, HALF),
            r"\(10000, 2\) to \(10000, 2\)[\s\S]*one value for each point",
        ),
        (lambda: convexity.convexity_violation(torch.log, -1.0, 4.0), r"no number at -0\.\d+[\s\S]*narrow"),
        (
            lambda: convexity.convex_set_violation(lambda x: x > 9, 0.0, 1.0),
            r"no two random points[\s\S]*narrow",
        ),
        (lambda: convexity.jensen_gap(torch.square, HALF, 2 * HALF), r"sum to 2[\s\S]*divide"),
        (lambda: probability.bayes(HALF, TABLE[:1]), r"prior \(2,\) and a likelihood \(1, 2\)"),
        (lambda: probability.bayes(2 * HALF, TABLE), r"the prior has a sum of 2"),
        (lambda: probability.gaussian_mle(HALF, HALF), r"inputs \(2,\)[\s\S]*\(N, D\)"),
        (lambda: DiscreteNetwork({}), r"without variables"),
        (lambda: DiscreteNetwork({"a": (("b",), TABLE)}), r"'a' has the unknown parent 'b'"),
        (
            lambda: DiscreteNetwork({"a": (("b",), TABLE), "b": (("a",), TABLE)}),
            r"cycle: (a → b → a|b → a → b)[\s\S]*acyclic",
        ),
        (lambda: DiscreteNetwork({"a": ((), 3 * HALF)}), r"the table of 'a' has a sum of 3"),
        (
            lambda: DiscreteNetwork({"a": ((), torch.tensor([1.5, -0.5]))}),
            r"the table of 'a' has the entry -0.5",
        ),
        (
            lambda: DiscreteNetwork({"a": ((), HALF), "b": (("a",), HALF.expand(3, 2))}),
            r"table of 'b' has shape \(3, 2\)[\s\S]*2 for a, its own",
        ),
        (lambda: sprinkler().marginal("rian"), r"unknown variable 'rian'[\s\S]*did you mean 'rain'"),
        (lambda: sprinkler().posterior(["rain"], {"wet": 2}), r"wet=2[\s\S]*from 0 to 1"),
        (lambda: sprinkler().posterior(["rain"], {"rain": 1}), r"twice: rain"),
        (
            lambda: sprinkler().posterior(["wet"], {"rain": 0, "sprinkler": 0, "wet": 1}),
            r"twice: wet",
        ),
    ],
)
def test_messages(call, words):
    with pytest.raises(InputError, match=words):
        call()


def test_impossible_evidence():
    network = DiscreteNetwork({"a": ((), torch.tensor([1.0, 0.0])), "b": (("a",), TABLE)})
    with pytest.raises(InputError, match=r"\{'a': 1\} has probability 0"):
        network.posterior(["b"], {"a": 1})
    assert (network.conditional(["b"], ["a"])[1] == 0).all()
