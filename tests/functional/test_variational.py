"""Variational formulas against torch.distributions, explicit loops and integer arithmetic of Python's own."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor, distributions
from torch.testing import assert_close

from quire.errors import InputError
from quire.functional import variational as V


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_divergence_and_its_gradient_are_those_of_torch() -> None:
    mean, log_std = numbers(5, 3).requires_grad_(), numbers(5, 3, seed=1).requires_grad_()
    prior = distributions.Normal(torch.zeros(5, 3).double(), torch.ones(5, 3).double())
    wanted = distributions.kl_divergence(distributions.Normal(mean, log_std.exp()), prior)
    assert_close(V.latent_kl_by_dimension(mean, log_std), wanted)
    assert_close(V.latent_kl(mean, log_std), wanted.sum(-1))
    found = torch.autograd.grad(V.latent_kl(mean, log_std).sum(), (mean, log_std))
    assert_close(found, torch.autograd.grad(wanted.sum(), (mean, log_std)))


def test_the_divergence_of_the_prior_is_zero_and_close_to_it_stays_exact() -> None:
    zero = torch.zeros(1, 4)
    assert V.latent_kl(zero, zero).item() == 0.0
    # ½(μ² + σ² − 2 log σ − 1) = ½μ² + (log σ)² + …, which float32 would lose in σ² − 1.
    tiny = torch.full((1, 4), 1e-4)
    assert_close(V.latent_kl(tiny, tiny).item(), 4 * 1.5e-8, rtol=2e-2, atol=0.0)


def test_a_draw_has_the_moments_that_were_asked_for() -> None:
    mean, log_std = torch.tensor([[1.0, -2.0]]).double(), torch.tensor([[0.3, -1.0]]).double()
    z = V.reparameterise(mean, log_std, numbers(100_000, 1, 2))
    assert z.shape == (100_000, 1, 2)
    assert_close(z.mean(0), mean, atol=0.02, rtol=0.0)
    assert_close(z.std(0), log_std.exp(), atol=0.02, rtol=0.0)


def test_decoders_sum_over_all_of_a_sample() -> None:
    logits, bits = 3 * numbers(2, 5, 1, 4, 3), (numbers(5, 1, 4, 3, seed=2) > 0).double()
    wanted = distributions.Bernoulli(logits=logits).log_prob(bits).flatten(2).sum(2)
    assert_close(V.bernoulli_log_likelihood(logits, bits), wanted)
    assert_close(V.bernoulli_log_likelihood(logits[1], bits), wanted[1])
    log_std = torch.tensor(-0.7).double()
    values = numbers(5, 1, 4, 3, seed=3)
    bell = distributions.Normal(logits, log_std.exp()).log_prob(values).flatten(2).sum(2)
    assert_close(V.gaussian_log_likelihood(logits, values, log_std), bell)
    assert_close(V.gaussian_log_likelihood(logits, values), stats_normal(logits, values))


def stats_normal(mean: Tensor, values: Tensor) -> Tensor:
    found = stats.norm.logpdf(values.numpy(), loc=mean.numpy(), scale=1.0)
    return torch.from_numpy(found).flatten(2).sum(2)


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[200.0, -200.0]], requires_grad=True)
    value = V.bernoulli_log_likelihood(logits, torch.tensor([[0.0, 0.0]]))
    assert value.item() == -200.0
    (gradient,) = torch.autograd.grad(value, logits)
    assert gradient.tolist() == [[-1.0, 0.0]]


def test_bounds_by_hand() -> None:
    likelihood, kl = torch.tensor([[-3.0, -1.0], [-5.0, -1.0]]), torch.tensor([1.0, 0.5])
    assert V.elbo(likelihood, kl).tolist() == [-5.0, -1.5]
    weights = torch.tensor([[0.5, 2.0], [1.5, 2.0]]).log()
    assert_close(V.importance_weighted_bound(weights), torch.tensor([0.0, math.log(2.0)]))
    assert_close(V.importance_weighted_bound(weights - 1e4), torch.tensor([-1e4, math.log(2.0) - 1e4]))


def test_importance_weights_are_ratios_of_densities() -> None:
    mean, log_std, z, likelihood = (
        numbers(4, 3),
        numbers(4, 3, seed=1),
        numbers(6, 4, 3, seed=2),
        numbers(6, 4),
    )
    prior = distributions.Normal(0.0, 1.0).log_prob(z).sum(-1)
    posterior = distributions.Normal(mean, log_std.exp()).log_prob(z).sum(-1)
    assert_close(V.log_importance_weights(likelihood, z, mean, log_std), likelihood + prior - posterior)
    assert_close(V.diagonal_normal_log_density(z, mean, log_std), posterior)


# Noise by row ---------------------------------------------------------------------------------


def mixed(x: int) -> int:
    """splitmix64's last step, in Python's integers."""
    x &= 2**64 - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


@pytest.mark.parametrize("seed", [0, 7, 2**40])
def test_a_rows_noise_is_what_integers_of_any_size_give(seed: int) -> None:
    rows = [0, 1, 5, 123_456_789, 2**40]
    found = V.row_uniform(torch.tensor(rows), 4, seed, torch.float64)
    golden = 0x9E3779B97F4A7C15
    for i, row in enumerate(rows):
        key = mixed(row * golden + seed * 0x632BE59BD9B4E019)
        for place in range(4):
            assert found[i, place].item() == (mixed(key + (place + 1) * golden) >> 40) / 2**24


def test_a_rows_noise_does_not_depend_on_its_neighbours() -> None:
    rows = torch.tensor([9, 3, 700])
    assert torch.equal(V.row_normal(rows, 5)[1], V.row_normal(torch.tensor([3]), 5)[0])
    assert torch.equal(V.row_uniform(rows, 5)[:, :2], V.row_uniform(rows, 2))
    assert not torch.equal(V.row_uniform(rows, 5, seed=1), V.row_uniform(rows, 5, seed=2))


def test_the_noise_of_rows_is_uniform_or_normal_and_independent() -> None:
    rows = torch.arange(4000)
    uniform, normal = V.row_uniform(rows, 20).double(), V.row_normal(rows, 20).double()
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert stats.kstest(uniform.flatten().numpy(), "uniform").pvalue > 1e-3
    assert stats.kstest(normal.flatten().numpy(), "norm").pvalue > 1e-3
    between_places = torch.corrcoef(normal.mT) - torch.eye(20)
    between_rows = torch.corrcoef(torch.stack([normal[:-1].flatten(), normal[1:].flatten()]))[0, 1]
    between_seeds = torch.corrcoef(
        torch.stack([normal.flatten(), V.row_normal(rows, 20, 1).double().flatten()])
    )[0, 1]
    assert between_places.abs().max() < 5 / math.sqrt(4000)
    assert max(abs(between_rows), abs(between_seeds)) < 5 / math.sqrt(80_000)


@pytest.mark.gpu
def test_the_noise_of_rows_is_the_same_on_the_gpu() -> None:
    rows = torch.tensor([0, 5, 2**40])
    assert torch.equal(V.row_uniform(rows, 9).cuda(), V.row_uniform(rows.cuda(), 9))
    assert_close(V.row_normal(rows, 9), V.row_normal(rows.cuda(), 9).cpu())


# Traversal and errors -------------------------------------------------------------------------


def test_a_traversal_moves_one_dimension_at_a_time() -> None:
    codes = V.traversal(torch.tensor([5.0, 6.0, 7.0]), [2, 0], 3, 1.5)
    assert codes.tolist() == [
        [[5.0, 6.0, -1.5], [5.0, 6.0, 0.0], [5.0, 6.0, 1.5]],
        [[-1.5, 6.0, 7.0], [0.0, 6.0, 7.0], [1.5, 6.0, 7.0]],
    ]
    assert V.traversal(torch.zeros(3), None, 2, 1.0).shape == (3, 2, 3)
    with pytest.raises(InputError, match=r"the latent dimension 3\n  expected: 0 to 2"):
        V.traversal(torch.zeros(3), [3], 2, 1.0)
    with pytest.raises(InputError, match="1 steps"):
        V.traversal(torch.zeros(3), None, 1, 1.0)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match=r"means \(2, 3\) and log standard deviations \(2, 1\)"):
        V.latent_kl(torch.zeros(2, 3), torch.zeros(2, 1))
    with pytest.raises(InputError, match=r"decoded numbers \(4, 3\) and targets \(4, 1\)"):
        V.bernoulli_log_likelihood(torch.zeros(4, 3), torch.zeros(4, 1))
    with pytest.raises(InputError, match=r"decoded numbers \(3,\) and targets \(3,\)"):
        V.gaussian_log_likelihood(torch.zeros(3), torch.zeros(3))
    with pytest.raises(InputError, match=r"(?s)log-likelihoods \(2,\).*fix: give a single draw"):
        V.elbo(torch.zeros(2), torch.zeros(2))
