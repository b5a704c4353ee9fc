"""Chapter 19: variational autoencoders, on models whose likelihood is known.

Where decoder and encoder are linear and the noise is Gaussian, p(x) = N(b, WWᵀ + s²I) and the posterior are
known. Expectations of quadratic functions are exact on the 2d points ±√d e_i, which have the mean and the
covariance of N(0, I).

B rows, M samples of each row's code, d latent dimensions, D numbers of a row, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, distributions

from quire.data.batch import TensorData
from quire.functional.variational import (
    bernoulli_log_likelihood,
    elbo,
    gaussian_log_likelihood,
    importance_weighted_bound,
    latent_kl,
    log_importance_weights,
    reparameterise,
)
from quire.models.vae import VAE, VAEConfig
from quire.nn.images import ImageInputs
from quire.options import Optim, Schedule, Train
from quire.sheet.registry import entry, gap, require, worst
from quire.tasks.variational import Variational
from quire.train import evaluate, fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Code = Callable[..., Any]
STANDARD_ERRORS = 5.0


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _identity(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def _sigma_points(latent: int) -> Tensor:
    """(2d, 1, d)"""
    points = math.sqrt(latent) * _identity(latent)
    return torch.cat([points, -points])[:, None]


def _off(draws: Tensor, truth: float) -> float:
    """By how many standard errors a mean over draws is off, beyond those that chance may take."""
    error = draws.std() / math.sqrt(len(draws))
    return max(0.0, float((draws.mean() - truth).abs() / error) - STANDARD_ERRORS)


# Posterior and decoders -------------------------------------------------------------------------


@entry(
    "variational/reparameterisation",
    "Reparameterisation",
    r"z = \mu + \sigma \odot \varepsilon, \; \varepsilon \sim \mathcal N(0, I): \quad "
    r"\nabla_{\mu,\sigma} \mathbb E_q f(z) = \mathbb E_\varepsilon \nabla_{\mu,\sigma} f(\mu + \sigma \odot "
    r"\varepsilon)",
    code=reparameterise,
    wrong=lambda mean, log_std, noise: mean + (2 * log_std).exp() * noise,
    tolerance=1e-10,
)
def _reparameterisation(draw: Code) -> float:
    mean, log_std = _random(7, 1).requires_grad_(), (0.5 * _random(7, 1)).requires_grad_()
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(8))
    noise = nodes[:, None, None].expand(-1, 7, 1)  # an exact rule for polynomials up to degree 15
    expected = (draw(mean, log_std, noise).pow(4) * (weights / weights.sum())[:, None, None]).sum()
    found = torch.autograd.grad(expected, (mean, log_std))
    m, s = mean.detach(), log_std.detach().exp()
    # E z⁴ = μ⁴ + 6μ²σ² + 3σ⁴, and ∂/∂ log σ = σ ∂/∂σ.
    draws = draw(m[0], log_std[0].detach(), _random(200_000, 1))[:, 0]
    return worst(
        gap(expected, (m**4 + 6 * m**2 * s**2 + 3 * s**4).sum()),
        gap(found[0], 4 * m**3 + 12 * m * s**2),
        gap(found[1], 12 * m**2 * s**2 + 12 * s**4),
        _off(draws, m[0].item()),
        _off((draws - m[0]).square(), s[0].item() ** 2),
    )


@entry(
    "variational/kl",
    "Divergence from the prior",
    r"\mathrm{KL}(\mathcal N(\mu, \operatorname{diag} \sigma^2) \,\|\, \mathcal N(0, I)) = \tfrac12 "
    r"(\|\mu\|^2 + \|\sigma\|^2 - 2 \langle \log \sigma, 1 \rangle - d)",
    code=latent_kl,
    wrong=lambda mean, log_std: 0.5 * (mean.square() + (2 * log_std).exp() - log_std - 1).sum(-1),
    tolerance=1e-10,
)
def _kl(divergence: Code) -> float:
    mean, log_std = _random(5, 3), 0.7 * _random(5, 3)
    posterior = distributions.Normal(mean, log_std.exp())
    prior = distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    errors = [gap(divergence(mean, log_std), distributions.kl_divergence(posterior, prior).sum(-1))]
    z = posterior.sample((100_000,))
    ratio = (posterior.log_prob(z) - prior.log_prob(z)).sum(-1)  # Monte Carlo
    errors += [_off(ratio[:, row], divergence(mean, log_std)[row].item()) for row in range(5)]
    tiny = torch.full((1, 4), 1e-9, dtype=torch.float64)  # close to the prior digits must not cancel
    errors += [require(gap(divergence(tiny, tiny) / 6e-18, torch.ones(1)) < 1e-6)]
    return worst(*errors, gap(divergence(torch.zeros(2, 3), torch.zeros(2, 3)), torch.zeros(2)))


@entry(
    "variational/decoders",
    "Bernoulli and Gaussian decoders",
    r"\log p(x \mid z) = \sum_i x_i a_i - \operatorname{softplus}(a_i) \quad \text{or} \quad -\tfrac12 "
    r"\sum_i \Big( \frac{(x_i - m_i)^2}{s^2} + \log 2 \pi s^2 \Big)",
    code=(bernoulli_log_likelihood, gaussian_log_likelihood),
    wrong=(
        lambda logits, target: -(target - logits.sigmoid()).square().flatten(-1).sum(-1),
        lambda mean, target, log_std=0.0: (-0.5 * (target - mean).square() / math.exp(log_std) ** 2).sum(-1),
    ),
    tolerance=1e-10,
)
def _decoders(bernoulli: Code, gaussian: Code) -> float:
    raw = 3 * _random(4, 5, 6)
    bits, numbers = (torch.rand(5, 6, dtype=torch.float64) < 0.4).double(), _random(5, 6)
    coins = distributions.Bernoulli(logits=raw).log_prob(bits).sum(-1)
    bells = distributions.Normal(raw, math.exp(-0.3))
    extreme = torch.tensor([[1e4, -1e4]], dtype=torch.float64)
    return worst(
        gap(bernoulli(raw, bits), coins),
        gap(bernoulli(raw[0], bits), coins[0]),
        gap(bernoulli(extreme, torch.tensor([[1.0, 1.0]]).double()), torch.tensor([-1e4])),
        gap(gaussian(raw, numbers, -0.3), bells.log_prob(numbers).sum(-1)),
    )


# Bounds on a linear-Gaussian model --------------------------------------------------------------


def _posterior(weight: Tensor, apart: Tensor, log_std: float) -> tuple[Tensor, Tensor]:
    """Means (B, d) and covariance (d, d) of p(z | x), from x − b."""
    variance = math.exp(2 * log_std)
    covariance = torch.linalg.inv(
        torch.eye(weight.shape[1], dtype=torch.float64) + weight.mT @ weight / variance
    )
    return apart @ weight @ covariance / variance, covariance


class _Linear:
    """x = Wz + b + s·noise with its exact likelihood, and some q(z | x) = N(Ax + c, diag σ²)."""

    def __init__(self, rows: int = 6, latent: int = 2, size: int = 4) -> None:
        self.weight, self.bias, self.log_std = _random(size, latent), _random(size), -0.4
        self.x = _random(rows, size) * 1.5
        covariance = self.weight @ self.weight.mT + math.exp(2 * self.log_std) * torch.eye(
            size, dtype=torch.float64
        )
        self.evidence = distributions.MultivariateNormal(self.bias, covariance).log_prob(self.x)
        # Near the posterior, whose covariance is (I + WᵀW/s²)⁻¹, but not it.
        mean, covariance = _posterior(self.weight, self.x - self.bias, self.log_std)
        std = covariance.diagonal().sqrt()
        self.mean = mean + 0.5 * std * _random(rows, latent)
        self.log_q = std.log() + 0.2 + 0.2 * _random(rows, latent)

    def with_exact_posterior(self) -> _Linear:
        """A model whose columns are orthonormal, so that p(z | x) has a diagonal covariance, taken as q."""
        other, variance = _Linear(), math.exp(2 * self.log_std)
        other.weight = torch.linalg.qr(_random(4, 2)).Q
        covariance = other.weight @ other.weight.mT + variance * _identity(4)
        other.evidence = distributions.MultivariateNormal(other.bias, covariance).log_prob(other.x)
        other.mean = (other.x - other.bias) @ other.weight / (1 + variance)
        other.log_q = torch.full_like(other.mean, 0.5 * math.log(variance / (1 + variance)))
        return other

    def log_likelihood(self, z: Tensor) -> Tensor:
        means = z @ self.weight.mT + self.bias
        return distributions.Normal(means, math.exp(self.log_std)).log_prob(self.x).sum(-1)

    def closed_elbo(self) -> Tensor:
        """E_q log p(x | z) − KL with E‖x − Wz − b‖² = ‖x − Wμ − b‖² + Σ σ_j²‖W_j‖²."""
        apart = (self.x - self.mean @ self.weight.mT - self.bias).square().sum(-1)
        apart = apart + ((2 * self.log_q).exp() * self.weight.square().sum(0)).sum(-1)
        constant = self.x.shape[1] * (math.log(2 * math.pi) + 2 * self.log_std)
        posterior = distributions.Normal(self.mean, self.log_q.exp())
        prior = distributions.Normal(torch.zeros_like(self.mean), 1.0)
        kl = distributions.kl_divergence(posterior, prior).sum(-1)
        return -0.5 * (apart * math.exp(-2 * self.log_std) + constant) - kl


@entry(
    "variational/elbo",
    "Evidence lower bound with M samples",
    r"\log p(x) \ge \frac1M \sum_m \log p(x \mid z_m) - \mathrm{KL}(q(z \mid x) \,\|\, p(z)), \quad "
    r"z_m \sim q",
    code=elbo,
    wrong=lambda log_likelihood, kl: log_likelihood.sum(0) - kl,
    tolerance=1e-10,
)
def _elbo(bound: Code) -> float:
    linear = _Linear()
    kl = latent_kl(linear.mean, linear.log_q)
    exact = bound(linear.log_likelihood(reparameterise(linear.mean, linear.log_q, _sigma_points(2))), kl)
    noise = _random(4 * 20_000, 6, 2)
    draws = linear.log_likelihood(reparameterise(linear.mean, linear.log_q, noise)).view(4, 20_000, 6)
    sampled = bound(draws, kl.expand(20_000, 6))  # M = 4, again and again
    return worst(
        gap(exact, linear.closed_elbo()),
        require(bool((exact <= linear.evidence).all())),
        *(_off(sampled[:, row], linear.closed_elbo()[row].item()) for row in range(6)),
    )


@entry(
    "variational/importance-bound",
    "Importance-weighted bound",
    r"\mathrm{ELBO} = L_1 \le L_M \le L_{M+1} \le \log p(x), \quad L_M = \mathbb E \log \frac1M \sum_m "
    r"\frac{p(x \mid z_m) p(z_m)}{q(z_m \mid x)}",
    code=(log_importance_weights, importance_weighted_bound),
    wrong=(
        lambda log_likelihood, z, mean, log_std: log_likelihood - 0.5 * z.square().sum(-1),
        lambda log_weights: log_weights.mean(0),
    ),
    tolerance=1e-9,
)
def _importance(weigh: Code, bound: Code) -> float:
    linear = _Linear()
    pools, most = 400, 256
    z = reparameterise(linear.mean, linear.log_q, _random(most * pools, 6, 2))
    weights = weigh(linear.log_likelihood(z), z, linear.mean, linear.log_q).view(most, pools, 6)
    # The same draws in smaller groups: by Jensen's inequality each halving may only lower the mean.
    levels = [bound(weights.reshape(m, -1, pools, 6)).mean(0) for m in (1, 2, 4, 16, 64, most)]
    means = [level.mean(0) for level in levels]
    chance = STANDARD_ERRORS * levels[-1].std(0) / math.sqrt(pools)
    exact = linear.with_exact_posterior()
    codes = reparameterise(exact.mean, exact.log_q, _random(3, 6, 2))
    constant = weigh(exact.log_likelihood(codes), codes, exact.mean, exact.log_q)
    return worst(
        *(require((low < high).all()) for low, high in pairwise(means)),
        *(_off(levels[0][:, row], linear.closed_elbo()[row].item()) for row in range(6)),
        require(bool((means[-1] <= linear.evidence + chance).all())),
        require(float((means[-1] - linear.evidence).abs().max()) < 0.1),
        gap(constant, exact.evidence.expand(3, -1)),
        gap(bound(constant), exact.evidence),
    )


# The model --------------------------------------------------------------------------------------


def _best_linear(x: Tensor, latent: int) -> tuple[float, float]:
    """Mean log-likelihood and noise of the likeliest linear-Gaussian model, from the eigenvalues λ of the
    covariance: s² is the mean of those that are left out (Tipping and Bishop, 1999)."""
    values = torch.linalg.eigvalsh(torch.cov(x.mT, correction=0)).flip(0)
    noise = values[latent:].mean()
    log_determinant = values[:latent].log().sum() + (len(values) - latent) * noise.log()
    size = len(values)
    return float(-0.5 * (size * math.log(2 * math.pi) + log_determinant + size)), float(noise.sqrt())


@entry(
    "variational/vae",
    "Variational autoencoder",
    r"\max_{\theta,\phi} \sum_n \mathbb E_{q_\phi(z \mid x_n)} \log p_\theta(x_n \mid z) - \mathrm{KL}("
    r"q_\phi(z \mid x_n) \,\|\, p(z)), \quad q_\phi = \mathcal N(\mu_\phi(x), \operatorname{diag} "
    r"\sigma_\phi^2(x))",
    code=(VAE, Variational),
    wrong=(
        lambda config: VAE(replace(config, latent=1)),
        lambda model, **options: Variational(model, **{**options, "beta": 3.0}),
    ),
    tolerance=0.03,
    picture=lambda: _picture(),
)
def _vae(build: Code, task: Code) -> float:
    """A linear one comes to the likeliest linear-Gaussian model, where the bound is log p(x)."""
    spread = torch.tensor([2.0, 1.5, 0.5, 0.5, 0.5], dtype=torch.float64)
    x = (_random(400, 5) * spread) @ torch.linalg.qr(_random(5, 5)).Q + _random(5)
    learner = task(build(VAEConfig((5,), hidden=(), latent=2)), decoder="gaussian", samples=4).double()
    data, schedule = TensorData({"inputs": x}), Schedule("cosine", warmup=20)
    fit(learner, data, steps=600, optim=Optim(lr=0.05, schedule=schedule), train=Train(batch_size=0))
    learner.samples = 64
    found, (best, noise) = evaluate(learner, data), _best_linear(x, 2)
    again = evaluate(learner, data, batch_size=37)
    return worst(
        abs(found["elbo"] - best),
        abs(found["importance_bound"] - best),
        abs(learner.log_noise.exp().item() - noise),
        require(found.keys() == again.keys() and max(abs(found[k] - again[k]) for k in found) < 1e-9),
    )


def _blind(config: VAEConfig) -> VAE:
    """A class that is asked for and not looked at."""
    model = VAE(config)
    model._one_hot = lambda label, rows: rows.new_zeros(len(rows), config.classes)  # type: ignore
    return model


@entry(
    "variational/conditional",
    "Conditional variational autoencoder",
    r"\log p(x \mid y) \ge \mathbb E_{q(z \mid x, y)} \log p(x \mid z, y) - \mathrm{KL}(q(z \mid x, y) \,"
    r"\|\, p(z)), \quad \text{encoder}(x, e_y), \; \text{decoder}(z, e_y)",
    code=VAE,
    wrong=_blind,
    tolerance=1e-9,
)
def _conditional(build: Code) -> float:
    size, latent, classes, rows = 4, 2, 3, 500
    model = build(VAEConfig((size,), hidden=(), latent=latent, classes=classes)).double()
    x, label = _random(rows, size), torch.randint(classes, (rows,))
    reads, gives = model.encoder.layers[-1], model.decoder.layers[0]
    one_hot = torch.tensor([[float(y == k) for k in range(classes)] for y in label.tolist()]).double()
    weight, shift = gives.weight.detach()[:, :latent], gives.weight.detach()[:, latent:]
    back = _posterior(weight, _identity(size), math.log(0.8))[0]  # (D, d), from x − b − U_y to μ
    with torch.no_grad():
        gives.bias.copy_(_random(size))
        reads.weight[:latent] = torch.cat([back.mT, -back.mT @ shift], 1)
        reads.bias[:latent] = -gives.bias @ back
    mean, log_std = model.encode(x, label)
    both = torch.cat([x, one_hot], 1) @ reads.weight.mT + reads.bias
    task = Variational(model, decoder="gaussian", noise=0.8, importance=256).double()
    # Given its class, a row is N(b + U_y, WWᵀ + s²I): the decoder's weights are (W U).
    covariance = weight @ weight.mT + 0.64 * _identity(size)
    own = distributions.MultivariateNormal(gives.bias + shift.mT[label], covariance)
    evidence = own.log_prob(x).mean().item()
    bound = evaluate(task, TensorData({"inputs": x, "target": label}))["importance_bound"]
    image = build(VAEConfig((1, 5, 6), "convolutional", (), channels=2, latent=2, classes=2)).double()
    pixels, maps = _random(3, 1, 5, 6), torch.zeros(3, 2, 5, 6, dtype=torch.float64)
    maps[0, 1], maps[1, 0], maps[2, 1] = 1.0, 1.0, 1.0
    joined = torch.cat(image.encode(pixels, torch.tensor([1, 0, 1])), 1)
    return worst(
        gap(torch.cat([mean, log_std], 1), both),
        gap(task.sample(classes, temperature=0.0), (gives.bias + shift.mT)),
        gap(joined, image.encoder(torch.cat([pixels, maps], 1))),
        require(evidence - 0.05 < bound < evidence + 0.01),
    )


def _collapsed(model: VAE, **options: Any) -> Variational:
    """Whose codes are those of the prior, whatever the row."""
    task = Variational(model, **options)
    task.predict = lambda inputs: {"code": torch.randn(len(inputs), task.latent)}  # type: ignore
    return task


@entry(
    "variational/semi-supervised",
    "Few labels on the codes of many rows",
    r"\hat y(x) = \arg\min_c \| \mu_\phi(x) - \bar\mu_c \|, \quad \bar\mu_c = \text{mean of } \mu_\phi "
    r"\text{ over the labelled rows of class } c, \; \phi \text{ learned without labels}",
    code=Variational,
    wrong=_collapsed,
    tolerance=0.06,
)
def _semi_supervised(build: Code) -> float:
    size, classes = 500, 3
    centres = torch.tensor([[0.0, 4.0], [-3.5, -2.0], [3.5, -2.0]])
    target = torch.arange(600) % classes
    inside = centres[target] + 0.4 * torch.randn(600, 2)
    x = inside @ torch.linalg.qr(torch.randn(size, 2)).Q.mT + torch.randn(600, size)
    labelled = torch.arange(2 * classes)  # two rows of each class have a label

    def mistakes(features: Tensor) -> float:
        means = torch.stack([features[labelled][target[labelled] == c].mean(0) for c in range(classes)])
        said = torch.cdist(features, means).argmin(1)
        return float((said != target)[len(labelled) :].double().mean())

    task = build(VAE(VAEConfig((size,), hidden=(), latent=2)), decoder="gaussian", importance=0)
    fit(task, TensorData({"inputs": x}), epochs=30, optim=Optim(lr=0.005))
    found = mistakes(task.predict(x)["code"])
    return worst(found, require(found < mistakes(x) - 0.1))


def _picture() -> Figure:
    from sklearn.datasets import load_digits

    from quire.report.latent import traversal_figure

    digits = np.rint(load_digits().images * (255 / 16)).astype(np.uint8)
    data = TensorData({"inputs": torch.from_numpy(digits)[:, None]})
    torch.manual_seed(0)
    model, scale = VAE(VAEConfig((1, 8, 8), hidden=(128,), latent=6)), ImageInputs([0.0], [255.0])
    task = Variational(model, inputs=scale, importance=0)
    fit(task, data, epochs=40, optim=Optim(lr=3e-3))
    kl = task.kl_by_dimension(data)
    best = kl.argsort(descending=True).tolist()
    rows = torch.cat([task.traverse(best, steps=11), task.sample(11)[None]]).numpy()
    names = [*(f"z{i} ({kl[i]:.1f} nats)" for i in best), "samples"]
    return traversal_figure(rows, np.linspace(-2.5, 2.5, 11), names, "Latent traversal, and samples")
