"""Chapter 9, first part: what keeps a model from fitting the training data too closely.

Statistical proofs return how many standard errors the estimate is off; the tolerance is then 4.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from sklearn.linear_model import Lasso, Ridge
from torch import Tensor, nn

from quire.functional import augment, losses, regularise
from quire.nn.dropout import monte_carlo_dropout
from quire.nn.noise import GaussianNoise, install, perturbed
from quire.sheet.registry import entry, gap, require, worst


def standard_errors(values: Tensor, expected: float | Tensor) -> float:
    """Distance of the means of `values` (rows are draws) from `expected` in standard errors, the largest."""
    spread = values.std(0) / len(values) ** 0.5
    return float(((values.mean(0) - expected).abs() / spread).max())


# Penalties ------------------------------------------------------------------------------------


def _regression() -> tuple[Tensor, Tensor]:
    x = torch.randn(40, 6).double()
    y = x @ torch.tensor([2.0, -1.0, 0.0, 0.0, 0.5, 0.0]).double() + 0.3 * torch.randn(40).double()
    return x, y


@entry(
    "regularise/l1",
    "L1 penalty",
    r"\min_w \; C(w) + \lambda \sum_i |w_i|",
    code=regularise.l1_penalty,
    wrong=lambda parameters, strength: strength * sum(w.square().sum() for w in parameters),
    tolerance=1e-9,
)
def _(penalty: Callable[..., Tensor]) -> float:
    x, y = _regression()
    model = Lasso(alpha=0.2, fit_intercept=False, tol=1e-12, max_iter=100_000).fit(x.numpy(), y.numpy())
    best = torch.from_numpy(model.coef_)

    def objective(w: Tensor) -> Tensor:
        return (x @ w - y).square().mean() / 2 + penalty([w[:2], w[2:]], 0.2)

    # scikit-learn's optimum must be ours: no move along any axis goes below it.
    moves = torch.cat([torch.eye(6), -torch.eye(6), torch.randn(20, 6)]).double() * 1e-3
    rise = torch.stack([objective(best + move) - objective(best) for move in moves])
    w = torch.randn(6).double().requires_grad_()
    (gradient,) = torch.autograd.grad(penalty([w], 0.2), w)
    return worst(
        float((-rise).clamp(min=0).max()), gap(gradient, 0.2 * w.sign()), require((best == 0).sum() >= 2)
    )


@entry(
    "regularise/l2",
    "L2 penalty",
    r"\min_w \; C(w) + \tfrac{\lambda}{2} \sum_i w_i^2",
    code=regularise.l2_penalty,
    wrong=lambda parameters, strength: strength * sum(w.square().sum() for w in parameters),
    tolerance=1e-9,
)
def _(penalty: Callable[..., Tensor]) -> float:
    x, y = _regression()
    model = Ridge(alpha=3.0, fit_intercept=False, solver="cholesky").fit(x.numpy(), y.numpy())
    w = torch.from_numpy(model.coef_).requires_grad_()
    value = (x @ w - y).square().sum() / 2 + penalty([w[:2], w[2:]], 3.0)
    (gradient,) = torch.autograd.grad(value, w)
    return gap(gradient, torch.zeros_like(w))  # the gradient vanishes at scikit-learn's optimum


# Early stopping -------------------------------------------------------------------------------


class _AgainstPrevious(regularise.EarlyStopping):
    """Compares with the value before instead of the best one, a common slip."""

    def update(self, value: float) -> bool:
        stop = super().update(value)
        self.best = value
        return stop


@entry(
    "regularise/early-stopping",
    "Early stopping",
    r"\text{stop at the first } t \text{ with } \min_{u > t - p} v_u \ge \min_{u \le t - p} v_u",
    code=regularise.EarlyStopping,
    wrong=_AgainstPrevious,
    tolerance=0.0,
)
def _(make: Callable[..., regularise.EarlyStopping]) -> float:
    def stops_at(stopping: regularise.EarlyStopping, values: list[float]) -> int | None:
        return next((t for t, value in enumerate(values) if stopping.update(value)), None)

    errors = []
    for patience in (1, 2, 3, 5):
        for _ in range(20):
            values = torch.rand(30).tolist()
            late = range(patience, 30)
            expected = next(
                (t for t in late if min(values[t - patience + 1 : t + 1]) >= min(values[: t - patience + 1])),
                None,
            )
            errors.append(require(stops_at(make(patience), values) == expected))
            negated = [-value for value in values]
            errors.append(require(stops_at(make(patience, higher_is_better=True), negated) == expected))
            first, second = make(patience), make(patience)  # interrupted after 3 values, then resumed
            if stops_at(first, values[:3]) is None:
                second.load_state_dict(first.state_dict())
                rest = stops_at(second, values[3:])
                errors.append(require((None if rest is None else rest + 3) == expected))
    # By hand: with a margin of 0.1, only 1.0 and 0.8 are improvements, so the third value after 0.8 stops.
    by_hand = make(3, min_delta=0.1)
    errors.append(require(stops_at(by_hand, [1.0, 0.95, 0.8, 0.75, math.nan, 0.71, 0.1]) == 5))
    return worst(*errors, require(by_hand.best == 0.8 and by_hand.waited == 3))


# Augmentation ---------------------------------------------------------------------------------


def _numbered_images(count: int) -> Tensor:
    """Images whose pixels are all different and positive, so that each can be traced."""
    return torch.arange(1.0, 1 + count * 2 * 5 * 6).reshape(count, 2, 5, 6)


@entry(
    "regularise/augmentation-images",
    "Image augmentation: shift, crop, flip, cut-out",
    r"x'_{c,i,j} = x_{c,\,i+\delta,\,j+\epsilon}, \quad x'_{c,i,j} = x_{c,\,i,\,W-1-j}, \quad x' = m \odot x",
    code=(augment.random_shift, augment.random_crop, augment.random_flip, augment.cut_out),
    wrong=(
        lambda x, limit: x.roll(1, -1),
        lambda x, size: x[..., : size[0], : size[1]].flip(-1),
        lambda x, rate: x.flip(-2),
        lambda x, size: torch.where(torch.rand(x.shape) < 0.3, 0.0, x),
    ),
    tolerance=4.0,
)
def _(
    shift: Callable[..., Tensor],
    crop: Callable[..., Tensor],
    flip: Callable[..., Tensor],
    cut: Callable[..., Tensor],
) -> float:
    x = _numbered_images(400)
    padded = nn.functional.pad(x, [1, 1, 1, 1])

    def windows(source: Tensor, height: int, width: int) -> list[Tensor]:
        places = [
            (i, j) for i in range(source.shape[2] - height + 1) for j in range(source.shape[3] - width + 1)
        ]
        return [source[:, :, i : i + height, j : j + width] for i, j in places]

    def chosen(result: Tensor, candidates: list[Tensor]) -> Tensor:
        """(N, candidates) in {0, 1}: which of them each sample of the result is."""
        return torch.stack([(result == c).flatten(1).all(1) for c in candidates], 1).double()

    errors = []
    for result, candidates in (
        (shift(x, 1), windows(padded, 5, 6)),
        (crop(x, (4, 4)), windows(x, 4, 4)),
        (flip(x, 0.5), [x, x.flip(-1)]),
    ):
        picks = chosen(result, candidates)
        errors += [require((picks.sum(1) == 1).all()), standard_errors(picks, 1 / len(candidates))]
    remains = cut(x, 3)
    holes = (remains == 0).all(1)  # (N, H, W)
    errors.append(require(torch.equal(remains, x.masked_fill(holes[:, None], 0.0))))
    rows, columns = holes.any(2), holes.any(1)
    rectangle = rows[:, :, None] & columns[:, None, :]
    # A centre in a corner leaves 2×2 of the 3×3 square inside.
    sizes = holes.sum((1, 2))
    errors += [require((holes == rectangle).all()), require(sizes.min() >= 4 and sizes.max() == 9)]
    expected = (3 + 3 + 3 + 2 + 2) / 5 * (3 * 4 + 2 + 2) / 6  # mean height times mean width
    return worst(*errors, standard_errors(sizes.double(), expected))


@entry(
    "regularise/augmentation-tabular",
    "Tabular augmentation: column noise, mixup, swap noise",
    r"x' = x + \alpha \sigma_d \varepsilon, \qquad (x', y') = \lambda (x_i, y_i) + (1-\lambda)(x_j, y_j)",
    code=(augment.column_noise, augment.mixup, augment.swap_noise),
    wrong=(
        lambda x, scale: x + scale * torch.randn_like(x),
        lambda x, y, alpha: (x.lerp(x.flip(0), 0.5), y),
        lambda x, rate: torch.where(torch.rand_like(x) < rate, torch.randn_like(x), x),
    ),
    tolerance=4.0,
)
def _(noise: Callable[..., Tensor], mixup: Callable[..., Any], swap: Callable[..., Tensor]) -> float:
    scales = torch.tensor([0.1, 1.0, 30.0]).double()
    x = torch.randn(4000, 3).double() * scales
    added = (noise(x, 0.2) - x) / x.std(0, correction=0)
    slopes = torch.tensor([[1.0], [-2.0], [0.5]]).double()
    mixed, target = mixup(x, x @ slopes, 0.4)
    shares = mixup(torch.eye(1500).double(), torch.zeros(1500).double(), 0.4)[0].diagonal()  # λ of each row
    swapped = swap(x, 0.3)
    changed = (swapped != x).double()
    columns = [torch.isin(swapped[:, d], x[:, d]).all() for d in range(3)]
    return worst(
        standard_errors(added, 0.0),
        standard_errors(added.square(), 0.2**2),
        require(gap(target, mixed @ slopes) < 1e-12),  # the same λ mixes x and y
        require(gap(mixed, x) > 0.1),
        standard_errors((shares - 0.5).square(), 1 / (4 * (2 * 0.4 + 1))),  # the variance of Beta(α, α)
        require(all(columns)),
        standard_errors(changed, 0.3 * (1 - 1 / 4000)),
    )


@entry(
    "regularise/augmentation-text",
    "Text augmentation: token drop, swap and masking",
    r"P(\text{token } t \text{ dropped, swapped, masked}) = p, \text{ order and padding kept}",
    code=(augment.token_drop, augment.token_swap, augment.token_mask),
    wrong=(
        lambda tokens, rate, padding: torch.where(torch.rand(tokens.shape) < rate, padding, tokens),
        lambda tokens, rate, padding: tokens.flip(1),
        lambda tokens, rate, mask, padding: (tokens, torch.rand(tokens.shape) < rate),
    ),
    tolerance=4.0,
)
def _(drop: Callable[..., Tensor], swap: Callable[..., Tensor], mask: Callable[..., Any]) -> float:
    tokens = torch.arange(1, 9).repeat(1000, 1)  # 1…8, then padding 0 from a random length on
    lengths = torch.randint(2, 9, (1000, 1))
    tokens = torch.where(torch.arange(8) < lengths, tokens, 0)
    real = tokens != 0
    dropped = drop(tokens, 0.25, 0)
    left = (dropped != 0).sum(1)
    # Tokens are numbered, so "in order, padding at the end" is: rising, then zeros.
    rising = ((dropped[:, 1:] > dropped[:, :-1]) | (dropped[:, 1:] == 0)).all()
    # At least one stays, so a row of n loses n·p tokens less the chance p^n of having lost the last.
    lost = (lengths.squeeze(1) - left).double()
    expected = 0.25 * lengths.squeeze(1) - 0.25 ** lengths.squeeze(1).double()
    swapped = swap(tokens, 0.5, 0)
    moved = (swapped - tokens).abs()
    hidden_tokens, hidden = mask(tokens, 0.2, 99, 0)
    return worst(
        require(rising and left.min() >= 1),
        standard_errors(lost - expected, 0.0),
        require(torch.equal(swapped.sort(1).values, tokens.sort(1).values) and moved.max() == 1),
        require(((swapped == 0) == (tokens == 0)).all()),
        # A full row has 4 pairs with offset 0 and 3 with offset 1: half of them swap two tokens each.
        standard_errors((moved[lengths.squeeze(1) == 8] != 0).sum(1).double(), 3.5),
        require(torch.equal(hidden_tokens, tokens.masked_fill(hidden, 99)) and not hidden[~real].any()),
        standard_errors(hidden[real].double(), 0.2),
    )


# Noise and dropout ----------------------------------------------------------------------------


@entry(
    "regularise/noise",
    "Noise on inputs, activations and weights",
    r"\mathbb{E}\,(w^\top (x + \varepsilon) - y)^2 = (w^\top x - y)^2 + \sigma^2 \lVert w \rVert^2, \qquad "
    r"\mathbb{E}\,((w + \varepsilon)^\top x - y)^2 = (w^\top x - y)^2 + \sigma^2 \lVert x \rVert^2",
    code=(regularise.gaussian_noise, perturbed, install, GaussianNoise),
    wrong=(
        lambda x, std: x + std**2 * torch.randn_like(x),
        perturbed,
        lambda module, std: install(module, std**2),
        lambda std: GaussianNoise(std**2),
    ),
    tolerance=4.0,
)
def _(
    noise: Callable[..., Tensor],
    perturb: Callable[..., Any],
    hooks: Callable[..., Any],
    layer: Callable[..., nn.Module],
) -> float:
    w, x, y, std = torch.randn(5).double(), torch.randn(5).double(), 0.7, 0.4
    clean = float((w @ x - y) ** 2)
    penalty = std**2 * float(w @ w)
    on_inputs = (noise(x.expand(8000, 5), std) @ w - y).square()
    by_layer = (layer(std)(x.expand(8000, 5)) @ w - y).square()
    weights = w.repeat(8000, 1)
    before = weights.clone()
    with perturb([weights], std):
        on_weights = (weights @ x - y).square()
    restored = require(torch.equal(weights, before))
    last = nn.Linear(5, 1, bias=False)
    net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), last).double()
    rows = x.expand(8000, 5)
    quiet = net(x)
    handle = hooks(net, std)
    on_activations = (net(rows) - quiet).square().squeeze(1).detach()
    off_in_evaluation = require(torch.equal(net.eval()(x), quiet))
    handle.remove()
    removed = require(torch.equal(net.train()(x), quiet))
    readout = std**2 * last.weight.square().sum().item()
    return worst(
        standard_errors(on_inputs, clean + penalty),
        standard_errors(by_layer, clean + penalty),
        standard_errors(on_weights, clean + std**2 * float(x @ x)),
        standard_errors(on_activations, readout),
        restored,
        off_in_evaluation,
        removed,
    )


@entry(
    "regularise/dropout",
    "Dropout",
    r"x' = \frac{m \odot x}{1 - p}, \; m \sim \mathrm{Bernoulli}(1 - p); \qquad "
    r"\sum_m P(m) \, W (m \odot x) = (1 - p) \, W x",
    code=(regularise.keep_scaled, regularise.dropout_masks, regularise.dropout, monte_carlo_dropout),
    wrong=(
        lambda weight, rate: rate * weight,
        regularise.dropout_masks,
        regularise.dropout,
        monte_carlo_dropout,
    ),
    tolerance=1e-12,
    erratum="The test-time factor of the weights is often printed as the drop probability p. A unit is "
    "present with probability 1−p, so that the keep probability is what preserves the mean; the two agree "
    "at p = ½ only.",
)
def _(
    scale: Callable[..., Tensor],
    masks: Callable[..., Any],
    drop: Callable[..., Tensor],
    ensemble: Callable[..., Any],
) -> float:
    rate, weight, x = 0.2, torch.randn(3, 8).double(), torch.randn(8).double()
    every, probability = masks(8, rate)
    outputs = (every * x) @ weight.T  # (2^8, 3), one thinned network each
    average = probability @ outputs
    errors = [gap(probability.sum(), 1.0), gap(scale(weight, rate) @ x, average)]
    # Inverted: divided by 1−p while training, so that the weights stay as they are at test time.
    errors.append(gap(weight @ x, average / (1 - rate)))
    generator = torch.Generator().manual_seed(0)
    for sample in (drop(x.expand(5000, 8), rate), drop(x.expand(5000, 8), rate, True, generator)):
        errors.append(require(standard_errors(sample, x) < 4))
        values = torch.where(sample == 0, 0.0, x / (1 - rate))
        errors.append(gap(sample, values))
        errors.append(require(standard_errors((sample == 0).double(), rate) < 4))
    errors.append(gap(drop(x, rate, False), x))
    net = nn.Sequential(nn.Dropout(rate), nn.Linear(8, 3, bias=False)).double()
    net[1].weight.data = weight
    seen = ensemble(net, x, 500)
    errors.append(require(((seen.mean - weight @ x).abs() < 4 * seen.standard_error).all()))
    spread = (probability @ (outputs / (1 - rate) - weight @ x).square()).sqrt()  # of all masks
    errors.append(require(seen.samples == 500 and ((seen.std / spread - 1).abs() < 0.2).all()))
    return worst(*errors)


# Ensembles, shared and frozen parts -----------------------------------------------------------


@entry(
    "regularise/bagging",
    "Bagging",
    r"\operatorname{Var}\Big[\tfrac{1}{M} \sum_m f_m\Big] = \rho \sigma^2 + \frac{(1 - \rho) \sigma^2}{M}",
    code=(regularise.ensemble_variance, regularise.bootstrap),
    wrong=(
        lambda variance, correlation, members: variance / members,
        lambda rows, members: torch.stack([torch.randperm(rows) for _ in range(members)]),
    ),
    tolerance=1e-12,
)
def _(variance_of: Callable[..., float], bootstrap: Callable[..., Tensor]) -> float:
    errors = []
    for members, correlation, variance in ((1, 0.3, 2.0), (5, 0.0, 1.0), (10, 0.6, 3.0), (4, 1.0, 0.5)):
        covariance = torch.full((members, members), correlation * variance, dtype=torch.float64)
        covariance.fill_diagonal_(variance)
        errors.append(abs(covariance.sum().item() / members**2 - variance_of(variance, correlation, members)))
    common, own = torch.randn(20_000, 1), torch.randn(20_000, 10)  # correlation 0.6, variance 1
    average = (0.6**0.5 * common + 0.4**0.5 * own).mean(1)
    errors.append(require(standard_errors(average.square(), variance_of(1.0, 0.6, 10)) < 4))
    rows = bootstrap(50, 400)
    distinct = torch.tensor([len(member.unique()) / 50 for member in rows])
    errors.append(require(rows.shape == (400, 50) and standard_errors(distinct, 1 - (1 - 1 / 50) ** 50) < 4))
    times = torch.stack([(rows == row).sum(1) for row in range(50)], 1).double()  # each row once on average
    errors.append(require(times.sum() == rows.numel() and standard_errors(times, 1.0) < 4))
    return worst(*errors)


class _Unfrozen:
    def remove(self) -> None:
        pass


def _only_without_gradient(module: nn.Module) -> _Unfrozen:
    module.requires_grad_(False)  # batch norm's running averages still move in training mode
    return _Unfrozen()


@entry(
    "regularise/transfer",
    "Transfer learning",
    r"\min_{\theta_{\text{head}}} C(\theta_{\text{head}}, \theta_{\text{body}}), \qquad "
    r"\theta_{\text{body}} \text{ as pretrained}",
    code=regularise.freeze,
    wrong=_only_without_gradient,
    tolerance=0.0,
)
def _(freeze: Callable[..., Any]) -> float:
    first, head = nn.Linear(4, 8), nn.Linear(8, 1)
    body = nn.Sequential(first, nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
    model = nn.Sequential(body, head).double()
    x = torch.randn(64, 4).double()
    y = x.sum(1, keepdim=True)

    def train(steps: int) -> list[float]:
        model.train()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
        history = []
        for _ in range(steps):
            loss = (model(x) - y).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            history.append(loss.item())
        return history

    before = copy.deepcopy(model.state_dict())
    handle = freeze(body)
    history = train(20)
    errors = [require(torch.equal(value, before[f"0.{name}"])) for name, value in body.state_dict().items()]
    errors += [require(parameter.grad is None) for parameter in body.parameters()]
    errors += [
        require(history[-1] < 0.8 * history[0]),
        require(not torch.equal(head.weight, before["1.weight"])),
    ]
    handle.remove()
    train(2)
    return worst(*errors, require(not torch.equal(first.weight, before["0.0.weight"])))


@entry(
    "regularise/multi-task",
    "Multi-task learning",
    r"L = \sum_k w_k L_k, \qquad \nabla_{\text{shared}} L = \sum_k w_k \nabla_{\text{shared}} L_k",
    code=regularise.multi_task_loss,
    wrong=lambda parts, weights: torch.stack(list(parts.values())).mean(),
    tolerance=1e-12,
)
def _(combine: Callable[[Mapping[str, Tensor], Mapping[str, float]], Tensor]) -> float:
    body, price, kind = nn.Linear(4, 6).double(), nn.Linear(6, 1).double(), nn.Linear(6, 3).double()
    x, y, c = torch.randn(20, 4).double(), torch.randn(20, 1).double(), torch.randint(3, (20,))

    def parts() -> dict[str, Tensor]:
        z = torch.tanh(body(x))
        return {"price": losses.mse(price(z), y), "kind": losses.cross_entropy(kind(z), c)}

    together = torch.autograd.grad(combine(parts(), {"price": 0.3, "kind": 2.0}), list(body.parameters()))
    first = torch.autograd.grad(parts()["price"], list(body.parameters()))
    second = torch.autograd.grad(parts()["kind"], list(body.parameters()))
    sums = [0.3 * a + 2.0 * b for a, b in zip(first, second, strict=True)]
    return worst(*(gap(a, b) for a, b in zip(together, sums, strict=True)))


# Self- and semi-supervised --------------------------------------------------------------------


@entry(
    "regularise/masked",
    "Masked reconstruction",
    r"L = \frac{\sum_i m_i (\hat{x}_i - x_i)^2}{\sum_i m_i}, \qquad \hat{x} = f((1 - m) \odot x)",
    code=(regularise.random_mask, regularise.masked_reconstruction_loss),
    wrong=(
        lambda shape, rate: torch.rand(shape) < rate,
        lambda prediction, x, mask: (prediction - x).square().mean(),
    ),
    tolerance=1e-12,
)
def _(random_mask: Callable[..., Tensor], loss: Callable[..., Tensor]) -> float:
    mask = random_mask((3000, 10), 0.3)
    covered = standard_errors(mask.double(), 0.3)  # each place equally often
    x, prediction = torch.randn(6, 10).double(), torch.randn(6, 10).double().requires_grad_()
    hidden = mask[:6]
    value = loss(prediction, x, hidden)
    (gradient,) = torch.autograd.grad(value, prediction)
    places = [(i, j) for i in range(6) for j in range(10) if hidden[i, j]]
    by_loop = sum((prediction[i, j].item() - x[i, j].item()) ** 2 for i, j in places) / len(places)
    return worst(
        require((mask.sum(1) == 3).all() and covered < 4),
        abs(value.item() - by_loop),
        require((gradient[~hidden] == 0).all() and (gradient[hidden] != 0).all()),
    )


@entry(
    "regularise/contrastive",
    "Contrastive pairs",
    r"(t(x_i), t'(x_i)) \text{ positive}, \; (t(x_i), t'(x_j))_{j \ne i} \text{ negative}; \qquad "
    r"L = -\log \frac{e^{s_{ii}/\tau}}{\sum_j e^{s_{ij}/\tau}}",
    code=(augment.two_views, losses.info_nce),
    wrong=(
        lambda x, change: (change(x, None), change(x.roll(1, 0), None)),
        lambda query, key, temperature: (query - key).square().mean(),
    ),
    tolerance=1e-12,
)
def _(views: Callable[..., Any], loss: Callable[..., Tensor]) -> float:
    x, tau = torch.randn(12, 16).double(), 0.3
    one, other = views(x, lambda rows, generator: regularise.gaussian_noise(rows, 0.1, generator))
    aligned = loss(one, other, temperature=tau)
    shuffled = [loss(one, other.roll(shift, 0), temperature=tau) for shift in range(1, 12)]
    # Orthogonal vectors, each its own partner: every s_ii is 1 and every other s_ij is 0.
    perfect = loss(torch.eye(7).double(), 3 * torch.eye(7).double(), temperature=tau)
    return worst(
        require(not torch.equal(one, other) and gap(one, x) < 0.5 and gap(other, x) < 0.5),
        require(all(aligned < value for value in shuffled)),
        abs(perfect.item() - math.log(1 + 6 * math.exp(-1 / tau))),
    )


def _supervised_over_all_rows(
    logits: Tensor, target: Tensor, reconstruction: Tensor, x: Tensor, weight: float
) -> Tensor:
    supervised = nn.functional.cross_entropy(logits, target, reduction="sum") / len(target)
    return supervised + weight * nn.functional.mse_loss(reconstruction, x)


@entry(
    "regularise/semi-supervised",
    "Semi-supervised learning on a shared code",
    r"L = \frac{1}{|\mathcal{L}|} \sum_{i \in \mathcal{L}} -\log p(y_i | z_i) + "
    r"\frac{w}{n D} \sum_{i=1}^{n} \lVert \hat{x}(z_i) - x_i \rVert^2",
    code=regularise.semi_supervised_loss,
    wrong=_supervised_over_all_rows,
    tolerance=1e-12,
)
def _(loss: Callable[..., Tensor]) -> float:
    encode, decode, classify = nn.Linear(5, 3).double(), nn.Linear(3, 5).double(), nn.Linear(3, 4).double()
    x, target = torch.randn(10, 5).double(), torch.randint(4, (10,))
    target[3:] = -100  # three rows have labels
    parameters = [*encode.parameters()]

    def code() -> Tensor:
        return torch.tanh(encode(x))

    value = loss(classify(code()), target, decode(code()), x, 0.7)
    together = torch.autograd.grad(value, parameters)
    log_p = classify(code()).log_softmax(1)
    supervised = torch.stack([-log_p[i, target[i]] for i in range(3)]).sum() / 3
    rebuilt = decode(code())
    unsupervised = torch.stack([(rebuilt[i] - x[i]).square().sum() for i in range(10)]).sum() / 50
    apart = [
        a + 0.7 * b
        for a, b in zip(
            torch.autograd.grad(supervised, parameters, retain_graph=True),
            torch.autograd.grad(unsupervised, parameters),
            strict=True,
        )
    ]
    none = loss(classify(code()), torch.full((10,), -100), decode(code()), x, 1.0)
    return worst(
        gap(value, supervised + 0.7 * unsupervised),
        *(gap(a, b) for a, b in zip(together, apart, strict=True)),
        gap(none, unsupervised),
    )
