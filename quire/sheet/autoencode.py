"""Chapter 18: autoencoders, against explicit loops, torch.distributions, Jacobians and singular vectors.

B rows, D features, K numbers of a code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Laplace, Normal

from quire.data.batch import Batch
from quire.functional.autoencode import (
    code_sparsity,
    contractive_layer,
    contractive_penalty,
    corrupt,
    laplace_nll,
)
from quire.functional.regularise import gaussian_noise
from quire.models.autoencoder import Autoencoder, AutoencoderConfig, linear_autoencoder
from quire.sheet.registry import entry, gap, require, worst
from quire.sheet.regularise import standard_errors
from quire.tasks.reconstruction import Reconstruction, ReconstructionRules

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Code = Callable[..., Any]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _batch(rows: Tensor) -> Batch:
    return Batch({"inputs": rows}, torch.arange(len(rows)))


def _loss(task: Any, batch: Batch) -> Tensor:
    """Σ_terms scale · sum / weight, as the trainer computes it."""
    weights = task.weigh(batch)
    terms = [task.scales.get(name, 1.0) * value / weights[name] for name, value in task.terms(batch).items()]
    return torch.stack(terms).sum()


def _trained(kind: str, code: int) -> tuple[Any, Any, Any]:
    """An estimator of this kind on the small digits, the digits and their classes."""
    from sklearn.datasets import load_digits

    from quire.estimators.autoencoder import Autoencoder as Estimator

    pixels, digits = load_digits(return_X_y=True)
    settings: dict[str, Any] = {"max_iter": 20, "n_iter_no_change": 20, "random_state": 0}
    model = Estimator(code, kind, hidden_layer_sizes=(64,), learning_rate_init=3e-3, **settings)  # type: ignore[arg-type]
    return model.fit(pixels), pixels, digits


# Plain ----------------------------------------------------------------------------------------


def _picture_of_reconstructions() -> Figure:
    from quire.report.reconstructions import reconstruction_figure

    model, pixels, _ = _trained("plain", 12)
    few = pixels[:10]
    back = model.inverse_transform(model.transform(few))
    before, after = (255 / 16 * rows.reshape(-1, 1, 8, 8) for rows in (few, back))
    return reconstruction_figure(before, after, name="Digits, and what 12 numbers keep of each")


class _Copy(nn.Module):
    """Gives the input back by not coding it at all."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        inner = Autoencoder(config)
        self.encoder, self.decoder = inner.encoder, inner.decoder
        self.encode, self.decode = inner.encode, inner.decode

    def forward(self, x: Tensor) -> Tensor:
        return x


@entry(
    "autoencode/plain",
    "Autoencoder",
    r"h = f(x), \quad \hat x = g(h), \quad L = \sum_n \lVert x_n - g(f(x_n)) \rVert^2, \quad \dim h < \dim x",
    code=Autoencoder,
    wrong=_Copy,
    tolerance=1e-12,
    picture=_picture_of_reconstructions,
)
def _plain(build: Code) -> float:
    config = AutoencoderConfig((5,), hidden=(4,), activation="tanh", code=2, code_activation="sigmoid")
    model, x = build(config).double(), _random(3, 5)
    first, inner, outer, last = (layer for layer in model.modules() if isinstance(layer, nn.Linear))
    by_hand = torch.empty(3, 5, dtype=torch.float64)
    for n in range(3):
        hidden = torch.tanh(first.weight @ x[n] + first.bias)
        h = 1 / (1 + torch.exp(-(inner.weight @ hidden + inner.bias)))
        by_hand[n] = last.weight @ torch.tanh(outer.weight @ h + outer.bias) + last.bias
    # Whatever the size of an image, its reconstruction has it too; with tied weights and nothing but
    # linear layers, decoding is the transpose of encoding: ⟨f(x), h⟩ = ⟨x, g(h)⟩.
    errors = [gap(model(x), by_hand)]
    for shape in ((1, 8, 8), (2, 5, 7), (1, 13, 1)):
        config = AutoencoderConfig(shape, "convolutional", (6,), 3, "linear", code=4, tied=True)
        tied, images, codes = build(config).double(), _random(2, *shape), _random(2, 4)
        with torch.no_grad():
            inside = (tied.encode(images) - tied.encode(torch.zeros_like(images))) * codes
        outside = (tied.decode(codes) * images).flatten(1)
        errors += [require(tied(images).shape == images.shape), gap(inside.sum(1), outside.sum(1))]
    return worst(*errors)


# Linear ---------------------------------------------------------------------------------------


def _without_centre(features: int, code: int) -> Autoencoder:
    """No biases, so that the first direction points at the mean instead of along the variance."""
    model = linear_autoencoder(features, code)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("bias"))
    return model


@entry(
    "autoencode/linear",
    "A linear autoencoder spans PCA's subspace",
    r"\min_{V,W,b,c} \sum_n \lVert x_n - V(W x_n + b) - c \rVert^2 = N \sum_{i > K} \lambda_i, \quad "
    r"\operatorname{span} V^* = \operatorname{span}(u_1, \dots, u_K)",
    code=(linear_autoencoder, Reconstruction),
    wrong=(_without_centre, Reconstruction),
    tolerance=1e-6,
)
def _linear(build: Code, task_of: Code) -> float:
    rows, features, size = 60, 6, 2
    scales = torch.tensor([3.0, 2.0, 1.0, 0.6, 0.4, 0.2], dtype=torch.float64)
    x = (_random(rows, features) * scales) @ torch.linalg.qr(_random(features, features))[0] + 2.0
    model = build(features, size).double()
    task, batch = task_of(model), _batch(x)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    search = torch.optim.LBFGS(
        parameters, max_iter=300, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        search.zero_grad()
        loss = _loss(task, batch)
        loss.backward()
        return loss

    search.step(closure)
    centred = x - x.mean(0)
    variances, directions = torch.linalg.eigh(centred.T @ centred / rows)  # rising
    principal, left_over = directions[:, -size:], variances[:-size].sum()
    decoder = [layer for layer in model.decoder.modules() if isinstance(layer, nn.Linear)][-1]
    spanned = torch.linalg.qr(decoder.weight.detach())[0]
    # The sines of the principal angles between the two subspaces.
    sines = torch.linalg.svdvals(spanned - principal @ (principal.T @ spanned))
    return worst(float(sines.max()), gap(_loss(task, batch) * features, left_over))


# Sparse ---------------------------------------------------------------------------------------


@entry(
    "autoencode/sparse",
    "Sparse autoencoder: L1 on the code is a Laplace prior",
    r"L = \sum_n \lVert x_n - \hat x_n \rVert^2 + \lambda \sum_{n,i} |h_{ni}|, \qquad "
    r"\lambda \sum_i |h_i| = -\log \prod_i \tfrac{\lambda}{2} e^{-\lambda |h_i|} + K \log \tfrac{\lambda}{2}",
    code=(code_sparsity, laplace_nll, Reconstruction),
    wrong=(
        lambda codes: codes.square().sum(1),
        lambda codes, strength: strength * codes.square().sum(1),
        Reconstruction,
    ),
    tolerance=1e-12,
)
def _sparse(sparsity: Code, nll: Code, task_of: Code) -> float:
    strength, size = 0.7, 4
    prior = Laplace(torch.zeros(size, dtype=torch.float64), 1 / strength)
    codes = _random(9, size)
    constant = strength * sparsity(codes) + prior.log_prob(codes).sum(1)
    model = Autoencoder(AutoencoderConfig((5,), hidden=(6,), activation="tanh", code=size)).double()
    task, x = task_of(model, ReconstructionRules(sparsity=strength)), _random(7, 5)
    parameters = list(model.parameters())
    learned = torch.autograd.grad(_loss(task, _batch(x)), parameters)
    # The most probable codes: Gaussian rows of variance ½ about the reconstruction, Laplace codes.
    joint = Normal(model(x), math.sqrt(0.5)).log_prob(x).sum() + prior.log_prob(model.encode(x)).sum()
    wanted = torch.autograd.grad(-joint / x.numel(), parameters)
    return worst(
        gap(nll(codes, strength), -prior.log_prob(codes).sum(1)),
        gap(constant, torch.full((9,), size * math.log(strength / 2), dtype=torch.float64)),
        *(gap(a, b) for a, b in zip(learned, wanted, strict=True)),
    )


# Denoising ------------------------------------------------------------------------------------


def _wants_the_noise_back(model: Autoencoder, rules: ReconstructionRules) -> Reconstruction:
    task = Reconstruction(model, rules)
    task.augment = lambda batch: _batch(gaussian_noise(batch.inputs, rules.amount))  # type: ignore[method-assign]
    return task


@entry(
    "autoencode/denoising",
    "Denoising autoencoder",
    r"L = \mathbb{E}_{\tilde x | x} \lVert x - g(f(\tilde x)) \rVert^2; \qquad g(f(x)) = Ax + c: \quad "
    r"L = \lVert A\, \mathbb{E}[\tilde x] + c - x \rVert^2 + "
    r"\sum_j \operatorname{Var}[\tilde x_j] \lVert A_{:j} \rVert^2",
    code=(corrupt, Reconstruction),
    wrong=(
        lambda x, kind, amount, low=0.0, high=1.0: gaussian_noise(x, amount**2),
        _wants_the_noise_back,
    ),
    tolerance=4.0,
)
def _denoising(damage: Code, task_of: Code) -> float:
    rows, features, amount, low, high = 8000, 4, 0.4, -1.0, 2.5
    model, x = linear_autoencoder(features, 2).double(), _random(features)
    many = x.expand(rows, features)
    with torch.no_grad():
        shift = model(torch.zeros(1, features, dtype=torch.float64))[0]
        matrix = (model(torch.eye(features, dtype=torch.float64)) - shift).T

        def expected(mean: Tensor, variance: Tensor) -> Tensor:
            return (matrix @ mean + shift - x).square().sum() + variance @ matrix.square().sum(0)

        keep = 1 - amount
        mean = keep * x + amount * (low + high) / 2
        moments = {
            "gaussian": (x, torch.full_like(x, amount**2)),
            "masking": (keep * x, keep * amount * x.square()),
            "salt_and_pepper": (mean, keep * x.square() + amount * (low**2 + high**2) / 2 - mean.square()),
        }
        errors = []
        for kind, (mean, variance) in moments.items():
            drawn = (model(damage(many, kind, amount, low, high)) - x).square().sum(1)
            errors.append(standard_errors(drawn, expected(mean, variance)))
        for kind in ("gaussian", "masking"):
            task = task_of(model, ReconstructionRules(noise=kind, amount=amount))  # type: ignore[arg-type]
            clean = gap(
                task.loss_each(_batch(many[:2]))["reconstruction"], (model(many[:2]) - x).square().mean(1)
            )
            drawn = task.loss_each(task.augment(_batch(many)))["reconstruction"] * features
            # Judged on clean rows, exactly; learned from damaged ones.
            errors += [require(clean < 1e-12), standard_errors(drawn, expected(*moments[kind]))]
    return worst(*errors)


# Contractive ----------------------------------------------------------------------------------


def _picture_of_codes() -> Figure:
    from quire.report.reconstructions import latent_figure

    model, pixels, digits = _trained("contractive", 8)
    return latent_figure(
        model.transform(pixels), digits, [str(k) for k in range(10)], "Contractive codes of digits"
    )


def _slopes_not_squared(inputs: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
    h = torch.sigmoid(inputs @ weight.T + bias)
    return (h * (1 - h)) @ weight.square().sum(1)


def _gradient_of_the_sum(encode: Code, inputs: Tensor) -> Tensor:
    x = inputs.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(encode(x).sum(), x, create_graph=True)
    return gradient.square().flatten(1).sum(1)


@entry(
    "autoencode/contractive",
    "Contractive autoencoder",
    r"L = \sum_n \lVert x_n - \hat x_n \rVert^2 + \lambda \sum_{n,i} \lVert \nabla_x h_{ni} \rVert^2, \qquad "
    r"h = \sigma(Wx + b): \; \sum_i \lVert \nabla_x h_i \rVert^2 = "
    r"\sum_i \big(h_i (1 - h_i)\big)^2 \lVert W_{i:} \rVert^2",
    code=(contractive_layer, contractive_penalty),
    wrong=(_slopes_not_squared, _gradient_of_the_sum),
    tolerance=1e-8,
    picture=_picture_of_codes,
)
def _contractive(layer: Code, any_depth: Code) -> float:
    x, rows = _random(3, 5), range(3)

    def by_jacobian(encode: Code) -> Tensor:
        jacobian = torch.autograd.functional.jacobian(encode, x, create_graph=True)
        return torch.stack([jacobian[n, :, n].square().sum() for n in rows])

    @torch.no_grad()
    def by_differences(encode: Code) -> Tensor:
        step = 1e-5 * torch.eye(5, dtype=torch.float64)
        slopes = [(encode(x[n] + step) - encode(x[n] - step)) / 2e-5 for n in rows]
        return torch.stack([slope.square().sum() for slope in slopes])

    errors = []
    one = nn.Sequential(nn.Linear(5, 4), nn.Sigmoid()).double()
    deep = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Softplus(), nn.Linear(4, 3)).double()
    first = one[0]
    assert isinstance(first, nn.Linear)
    for encode, value in (
        (one, layer(x, first.weight, first.bias, "sigmoid")),
        (one, any_depth(one, x)),
        (deep, any_depth(deep, x)),
    ):
        weights = [parameter for parameter in encode.parameters() if parameter.dim() == 2]
        wanted = by_jacobian(encode)
        errors += [gap(value, wanted), gap(value, by_differences(encode))]
        for a, b in zip(
            torch.autograd.grad(value.sum(), weights), torch.autograd.grad(wanted.sum(), weights), strict=True
        ):
            errors.append(gap(a, b))
    return worst(*errors)


# Losses ---------------------------------------------------------------------------------------


def _of_the_whole_row(model: Autoencoder, rules: ReconstructionRules) -> Reconstruction:
    """Counts what was seen as well as what was hidden, and compares logits as if they were shares."""
    return Reconstruction(model)


@entry(
    "autoencode/reconstruction",
    "Reconstruction losses",
    r"(x - \hat x)^2 = -\log \mathcal{N}(x; \hat x, \tfrac12) - \tfrac12 \log \pi, \quad "
    r"-x \log \sigma(\hat x) - (1 - x) \log \sigma(-\hat x) = -\log \mathrm{Ber}(x; \sigma(\hat x)); \qquad "
    r"\frac{\sum_{d \in M} \ell(\hat x_d, x_d)}{|M|} \text{ for hidden places } M",
    code=Reconstruction,
    wrong=_of_the_whole_row,
    tolerance=1e-12,
)
def _reconstruction(task_of: Code) -> float:
    model = Autoencoder(AutoencoderConfig((6,), hidden=(5,), activation="tanh", code=3)).double()
    x, bits = _random(8, 6), (torch.rand(8, 6) < 0.5).double()
    squared = _loss(task_of(model, ReconstructionRules()), _batch(x))
    gaussian = -Normal(model(x), math.sqrt(0.5)).log_prob(x).mean() - 0.5 * math.log(math.pi)
    crossed = _loss(task_of(model, ReconstructionRules(loss="bernoulli")), _batch(bits))
    bernoulli = -Bernoulli(logits=model(bits)).log_prob(bits).mean()
    masked = task_of(model, ReconstructionRules(masked=0.5))
    batch = masked.augment(_batch(x))
    hidden = batch.fields.get("hidden", torch.zeros(8, 6, dtype=torch.bool))
    seen = torch.where(hidden, 0.0, x)
    places = [(n, d) for n in range(8) for d in range(6) if hidden[n, d]]
    back = model(seen).tolist()
    by_loop = sum((back[n][d] - x[n, d].item()) ** 2 for n, d in places) / max(len(places), 1)
    parts = [*batch.split(3)]
    together = sum(masked.terms(part)["reconstruction"] for part in parts)
    counted = sum(masked.weigh(part)["reconstruction"] for part in parts)
    return worst(
        gap(squared, gaussian),
        gap(crossed, bernoulli),
        require((hidden.sum(1) == 3).all()),
        gap(_loss(masked, batch), by_loop),
        gap(together / counted, by_loop),
    )
