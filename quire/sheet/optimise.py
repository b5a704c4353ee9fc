"""Chapter 6: updates, schedules, clipping, accumulation, checkpointing."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim import lr_scheduler

from quire.functional import optimise, schedules
from quire.functional.losses import LOSSES, Loss
from quire.report.style import figure
from quire.sheet.registry import entry, gap, require, worst

STEPS = 25
ETA = 0.05


# Updates against torch.optim, step by step ----------------------------------------------------


def _against(
    advance: Callable[[list[Tensor], list[Tensor], int], list[Tensor]],
    optimiser: Callable[[list[Tensor]], torch.optim.Optimizer],
    penalty: Callable[[list[Tensor]], Tensor] | None = None,
) -> float:
    """Largest gap over 25 steps of a small non-linear regression with weights and biases.

    `penalty` is added to the loss of torch's side only.
    """
    x, y = torch.randn(12, 4).double(), torch.randn(12, 3).double()
    mine = [torch.randn(3, 4).double(), torch.randn(3).double()]
    mine[0][0, 0] = 0.0  # where sign(w) and |w| have their corner
    theirs = [w.clone().requires_grad_() for w in mine]
    reference = optimiser(theirs)

    def loss(weights: list[Tensor]) -> Tensor:
        return (torch.tanh(x @ weights[0].T + weights[1]) - y).square().mean()

    errors = []
    for step in range(1, STEPS + 1):
        leaves = [w.detach().requires_grad_() for w in mine]
        gradients = list(torch.autograd.grad(loss(leaves), leaves))
        mine = advance(mine, gradients, step)
        reference.zero_grad()
        (loss(theirs) + (penalty(theirs) if penalty else 0.0)).backward()
        reference.step()
        errors += [gap(a, b) for a, b in zip(mine, theirs, strict=True)]
    return worst(*errors)


@entry(
    "optimise/gradient-descent",
    "Gradient descent",
    r"w \leftarrow w - \eta \, \nabla_w C, \qquad b \leftarrow b - \eta \, \nabla_b C",
    code=optimise.gradient_descent_step,
    wrong=lambda weights, gradients, step_size: [w - g for w, g in zip(weights, gradients, strict=True)],
    tolerance=1e-12,
    erratum="The update is often printed as w ← w − ∇C, without the step size η. That is the special "
    "case η = 1, which diverges wherever the curvature is above 2.",
)
def _(step: Callable[..., list[Tensor]]) -> float:
    return _against(lambda w, g, _: step(w, g, ETA), lambda p: torch.optim.SGD(p, lr=ETA))


def _bias_from_weight(weights: list[Tensor], gradients: list[Tensor], step_size: float) -> list[Tensor]:
    return [weights[0] - step_size * gradients[0], weights[0] - step_size * gradients[1]]


@entry(
    "optimise/sgd",
    "Minibatch SGD without replacement",
    r"w \leftarrow w - \frac{\eta}{|B|} \sum_{i \in B} \nabla_w C_i, \qquad "
    r"b \leftarrow b - \frac{\eta}{|B|} \sum_{i \in B} \nabla_b C_i, \qquad \bigsqcup B = \{1, \dots, n\}",
    code=(optimise.minibatches, optimise.gradient_descent_step),
    wrong=(optimise.minibatches, _bias_from_weight),
    tolerance=1e-12,
    erratum="The bias update is often printed with the weight on its right side, b ← w − η∂C/∂b. Each "
    "parameter moves from its own value: b ← b − η∂C/∂b.",
)
def _(minibatches: Callable[..., Any], step: Callable[..., list[Tensor]]) -> float:
    x = torch.randn(23).double()
    y = 3 * x - 2 + 0.1 * torch.randn(23).double()
    mine = [torch.zeros(1).double(), torch.ones(1).double()]  # w and b of y = wx + b
    theirs = [w.clone().requires_grad_() for w in mine]
    reference = torch.optim.SGD(theirs, lr=0.1)
    errors = []
    for _ in range(4):
        batches = list(minibatches(23, 5))
        errors += [gap(torch.cat(batches).sort().values, torch.arange(23))]  # each row once
        errors += [require([len(batch) for batch in batches] == [5, 5, 5, 5, 3])]
        for rows in batches:
            residual = mine[0] * x[rows] + mine[1] - y[rows]
            gradients = [2 * (residual * x[rows]).mean().reshape(1), 2 * residual.mean().reshape(1)]
            mine = step(mine, gradients, 0.1)
            reference.zero_grad()
            loss = nn.functional.mse_loss(theirs[0] * x[rows] + theirs[1], y[rows])
            loss.backward()
            reference.step()
            errors += [gap(a, b) for a, b in zip(mine, theirs, strict=True)]
    return worst(*errors)


def _averaged_velocity(
    w: list[Tensor], g: list[Tensor], v: list[Tensor], step_size: float, momentum: float
) -> tuple[list[Tensor], list[Tensor]]:
    v = [momentum * old + (1 - momentum) * new for old, new in zip(v, g, strict=True)]
    return [old - step_size * move for old, move in zip(w, v, strict=True)], v


@entry(
    "optimise/momentum",
    "Momentum",
    r"v \leftarrow \mu v + g, \qquad w \leftarrow w - \eta v, \qquad "
    r"\eta_{\text{effective}} = \eta \sum_k \mu^k = \frac{\eta}{1 - \mu}",
    code=(optimise.momentum_step, optimise.effective_step),
    wrong=(_averaged_velocity, lambda step_size, momentum: step_size / (1 + momentum)),
    tolerance=1e-12,
)
def _(step: Callable[..., Any], effective: Callable[[float, float], float]) -> float:
    velocity = [torch.zeros(3, 4).double(), torch.zeros(3).double()]

    def advance(w: list[Tensor], g: list[Tensor], _: int) -> list[Tensor]:
        nonlocal velocity
        w, velocity = step(w, g, velocity, ETA, 0.9)
        return w

    error = _against(advance, lambda p: torch.optim.SGD(p, lr=ETA, momentum=0.9))
    constant, place, v = [torch.tensor([2.0]).double()], [torch.zeros(1).double()], [torch.zeros(1).double()]
    before = place
    for _ in range(400):  # 0.9^400 is below rounding
        before = place
        place, v = step(place, constant, v, ETA, 0.9)
    return worst(error, gap(before[0] - place[0], effective(ETA, 0.9) * constant[0]))


def _uncorrected_adam(
    w: list[Tensor],
    g: list[Tensor],
    m: list[Tensor],
    s: list[Tensor],
    step: int,
    step_size: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    m = [beta1 * old + (1 - beta1) * new for old, new in zip(m, g, strict=True)]
    s = [beta2 * old + (1 - beta2) * new**2 for old, new in zip(s, g, strict=True)]
    moves = [step_size * a / (b.sqrt() + eps) for a, b in zip(m, s, strict=True)]
    return [old - move for old, move in zip(w, moves, strict=True)], m, s


def _with_adam(
    adam: Callable[..., Any], prepare: Callable[[list[Tensor], list[Tensor]], Any] = lambda w, g: (w, g)
) -> Callable[[list[Tensor], list[Tensor], int], list[Tensor]]:
    """An `advance` that carries Adam's moments; `prepare` may change weights and gradients first."""
    m, s = ([torch.zeros(3, 4).double(), torch.zeros(3).double()] for _ in range(2))

    def advance(w: list[Tensor], g: list[Tensor], step: int) -> list[Tensor]:
        nonlocal m, s
        w, g = prepare(w, g)
        w, m, s = adam(w, g, m, s, step, ETA)
        return w

    return advance


@entry(
    "optimise/adam",
    "Adam with bias correction",
    r"m \leftarrow \beta_1 m + (1-\beta_1) g, \quad s \leftarrow \beta_2 s + (1-\beta_2) g^2, \quad "
    r"w \leftarrow w - \eta \, \frac{m / (1-\beta_1^t)}{\sqrt{s / (1-\beta_2^t)} + \epsilon}",
    code=optimise.adam_step,
    wrong=_uncorrected_adam,
    tolerance=1e-11,
)
def _(adam: Callable[..., Any]) -> float:
    others = {"beta1": 0.7, "beta2": 0.95, "eps": 0.1}
    return worst(
        _against(_with_adam(adam), lambda p: torch.optim.Adam(p, lr=ETA)),
        _against(
            _with_adam(partial(adam, **others)),
            lambda p: torch.optim.Adam(p, lr=ETA, betas=(0.7, 0.95), eps=0.1),
        ),
    )


@entry(
    "optimise/weight-decay",
    "Weight decay, decoupled and as an L2 penalty",
    r"w \leftarrow (1 - \eta\lambda) w - \eta g \;=\; w - \eta (g + \lambda w) \quad "
    r"\text{for SGD, not for Adam}",
    code=(optimise.decay_weights, optimise.add_l2_gradient),
    wrong=(
        lambda weights, step_size, strength: [(1 - strength) * w for w in weights],
        lambda gradients, weights, strength: [
            g + 2 * strength * w for g, w in zip(gradients, weights, strict=True)
        ],
    ),
    tolerance=1e-11,
)
def _(decay: Callable[..., list[Tensor]], penalise: Callable[..., list[Tensor]]) -> float:
    strength, descend = 0.1, optimise.gradient_descent_step
    w, g = [torch.randn(3, 4).double()], [torch.randn(3, 4).double()]
    one = descend(decay(w, ETA, strength), g, ETA)
    other = descend(w, penalise(g, w, strength), ETA)
    zeros = [torch.zeros(3, 4).double()]
    decoupled = optimise.adam_step(decay(w, ETA, strength), g, zeros, zeros, 1, ETA)[0]
    coupled = optimise.adam_step(w, penalise(g, w, strength), zeros, zeros, 1, ETA)[0]
    return worst(
        gap(one[0], other[0]),
        require(gap(decoupled[0], coupled[0]) > 1e-3),
        _against(
            lambda w, g, _: descend(w, penalise(g, w, strength), ETA),
            lambda p: torch.optim.SGD(p, lr=ETA, weight_decay=strength),
        ),
        _against(
            _with_adam(optimise.adam_step, lambda w, g: (decay(w, ETA, strength), g)),
            lambda p: torch.optim.AdamW(p, lr=ETA, weight_decay=strength),
        ),
        _against(
            _with_adam(optimise.adam_step, lambda w, g: (w, penalise(g, w, strength))),
            lambda p: torch.optim.Adam(p, lr=ETA, weight_decay=strength),
        ),
    )


@entry(
    "optimise/l1",
    "L1 penalty by sign",
    r"w \leftarrow w - \eta \, (g + \lambda \operatorname{sign} w)",
    code=optimise.add_l1_gradient,
    wrong=lambda gradients, weights, strength: [
        g + strength * w for g, w in zip(gradients, weights, strict=True)
    ],
    tolerance=1e-12,
)
def _(penalise: Callable[..., list[Tensor]]) -> float:
    return _against(
        lambda w, g, _: optimise.gradient_descent_step(w, penalise(g, w, 0.1), ETA),
        lambda p: torch.optim.SGD(p, lr=ETA),
        penalty=lambda weights: 0.1 * torch.stack([w.abs().sum() for w in weights]).sum(),
    )


# Schedules against torch's schedulers ---------------------------------------------------------


def _scheduled(make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler], steps: int) -> Tensor:
    """The step sizes that a scheduler of torch gives, from η₀ = 0.5."""
    optimiser = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    scheduler, values = make(optimiser), []
    for _ in range(steps):
        values.append(float(optimiser.param_groups[0]["lr"]))
        optimiser.step()
        scheduler.step()
    return torch.tensor(values, dtype=torch.float64)


def _values(schedule: Callable[[int], float], steps: int) -> Tensor:
    return torch.tensor([schedule(step) for step in range(steps)], dtype=torch.float64)


def _curves(title: str, steps: int, **curves: Callable[[int], float]) -> Callable[[], Figure]:
    def draw() -> Figure:
        fig = figure()
        axes = fig.subplots()
        for label, curve in curves.items():
            axes.plot(range(steps), [curve(step) for step in range(steps)], label=label)
        axes.set(title=title, xlabel="step τ", ylabel="step size η")
        axes.legend()
        return fig

    return draw


@entry(
    "optimise/schedule-linear",
    "Linear schedule",
    r"\eta(\tau) = \left(1 - \tfrac{\tau}{K}\right) \eta_0 + \tfrac{\tau}{K} \, \eta_K, \qquad "
    r"\eta(\tau) = \eta_K \text{ for } \tau \ge K",
    code=schedules.linear,
    wrong=lambda step, initial, final, total: initial + step / total * (final - initial),
    tolerance=1e-12,
    picture=_curves(
        "Linear schedule, K = 100",
        130,
        **{
            "η₀ = 0.5, η_K = 0": lambda t: schedules.linear(t, 0.5, 0.0, 100),
            "η₀ = 0.5, η_K = 0.1": lambda t: schedules.linear(t, 0.5, 0.1, 100),
        },
    ),
)
def _(linear: Callable[..., float]) -> float:
    expected = _scheduled(lambda o: lr_scheduler.LinearLR(o, 1.0, 0.2, total_iters=30), 45)
    return gap(_values(lambda step: linear(step, 0.5, 0.1, 30), 45), expected)


@entry(
    "optimise/schedule-power",
    "Power schedule",
    r"\eta(\tau) = \eta_0 \left(1 + \tfrac{\tau}{s}\right)^{c}",
    code=schedules.power,
    wrong=lambda step, initial, scale, exponent: initial * (1 + step) ** exponent / scale,
    tolerance=1e-12,
    picture=_curves(
        "Power schedule, s = 20",
        130,
        **{
            "c = −0.5": lambda t: schedules.power(t, 0.5, 20, -0.5),
            "c = −1": lambda t: schedules.power(t, 0.5, 20, -1.0),
            "c = −2": lambda t: schedules.power(t, 0.5, 20, -2.0),
        },
    ),
)
def _(power: Callable[..., float]) -> float:
    errors = []
    for scale, exponent in ((20.0, -1.0), (7.0, -0.5), (3.0, -2.0), (5.0, 1.5)):
        factor = 1.0
        for step in range(50):
            errors.append(abs(power(step, 0.5, scale, exponent) - 0.5 * factor))
            # One step to the next: (s+τ+1)/(s+τ), so that the product of all is (1+τ/s)^c.
            factor *= math.exp(exponent * math.log((scale + step + 1) / (scale + step)))
    return worst(*errors, abs(power(20, 0.5, 20.0, -1.0) - 0.25), abs(power(60, 0.5, 20.0, -0.5) - 0.25))


@entry(
    "optimise/schedule-exponential",
    "Exponential schedule",
    r"\eta(\tau) = \eta_0 \, c^{\tau / s}",
    code=schedules.exponential,
    wrong=lambda step, initial, scale, rate: initial * rate**step / scale,
    tolerance=1e-12,
    picture=_curves(
        "Exponential schedule, s = 20",
        130,
        **{
            "c = 0.9": lambda t: schedules.exponential(t, 0.5, 20, 0.9),
            "c = 0.5": lambda t: schedules.exponential(t, 0.5, 20, 0.5),
            "c = 0.1": lambda t: schedules.exponential(t, 0.5, 20, 0.1),
        },
    ),
)
def _(exponential: Callable[..., float]) -> float:
    expected = _scheduled(lambda o: lr_scheduler.ExponentialLR(o, gamma=0.5 ** (1 / 20)), 60)
    values = _values(lambda step: exponential(step, 0.5, 20, 0.5), 60)
    return worst(gap(values, expected), gap(values[40], 0.125))


@entry(
    "optimise/schedule-cosine",
    "Cosine schedule",
    r"\eta(\tau) = \eta_K + \tfrac{1}{2} (\eta_0 - \eta_K) \left(1 + \cos \tfrac{\pi \tau}{K}\right)",
    code=schedules.cosine,
    wrong=lambda step, initial, final, total: final + (initial - final) * math.cos(math.pi * step / total),
    tolerance=1e-12,
    picture=_curves(
        "Cosine schedule, K = 100",
        130,
        **{
            "η_K = 0": lambda t: schedules.cosine(t, 0.5, 0.0, 100),
            "η_K = 0.1": lambda t: schedules.cosine(t, 0.5, 0.1, 100),
        },
    ),
)
def _(cosine: Callable[..., float]) -> float:
    expected = _scheduled(lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=30, eta_min=0.1), 31)
    values = _values(lambda step: cosine(step, 0.5, 0.1, 30), 40)
    return worst(gap(values[:31], expected), gap(values[31:], values.new_full((9,), 0.1)))


@entry(
    "optimise/schedule-warmup",
    "Warm-up",
    r"\eta(\tau) \cdot \min\left(1, \tfrac{\tau + 1}{W}\right)",
    code=schedules.warmup,
    wrong=lambda step, steps: min(1.0, step / steps) if steps else 1.0,
    tolerance=1e-12,
    picture=_curves(
        "Warm-up of 20 steps",
        130,
        **{
            "then constant": lambda t: 0.5 * schedules.warmup(t, 20),
            "then cosine": lambda t: (
                0.5 * schedules.warmup(t, 20) if t < 20 else schedules.cosine(t - 20, 0.5, 0.0, 110)
            ),
        },
    ),
)
def _(warmup: Callable[..., float]) -> float:
    expected = _scheduled(lambda o: lr_scheduler.LinearLR(o, 1 / 8, 1.0, total_iters=7), 20)
    values = _values(lambda step: 0.5 * warmup(step, 8), 20)
    return worst(gap(values, expected), abs(warmup(0, 0) - 1.0))


# Clipping, accumulation, checkpointing --------------------------------------------------------


@entry(
    "optimise/clipping",
    "Gradient clipping",
    r"g \leftarrow \frac{\gamma}{\lVert g \rVert} \, g \quad \text{if } \lVert g \rVert > \gamma",
    code=(optimise.clip_by_norm, optimise.clip_by_value),
    wrong=(
        lambda gradients, limit: [g * min(1.0, limit / g.norm()) for g in gradients],
        lambda gradients, limit: [g.clamp(max=limit) for g in gradients],
    ),
    tolerance=1e-12,
)
def _(by_norm: Callable[..., list[Tensor]], by_value: Callable[..., list[Tensor]]) -> float:
    long = [3 * torch.randn(3, 4).double(), torch.randn(5).double()]
    flat, limit = torch.cat([g.flatten() for g in long]), 1.5
    clipped = torch.cat([g.flatten() for g in by_norm(long, limit)])
    kept = by_norm(long, 1000.0)
    leaves = [torch.zeros_like(g).requires_grad_() for g in long]

    def with_torch(clip: Callable[..., Any]) -> Tensor:
        for leaf, gradient in zip(leaves, long, strict=True):
            leaf.grad = gradient.clone()
        clip(leaves, limit)
        return torch.cat([leaf.grad.flatten() for leaf in leaves if leaf.grad is not None])

    values = torch.cat([g.flatten() for g in by_value(long, limit)])
    return worst(
        gap(clipped.norm(), limit),
        gap(clipped / limit, flat / flat.norm()),  # one direction, over both tensors
        require(all(torch.equal(a, b) for a, b in zip(kept, long, strict=True))),
        require(gap(clipped, with_torch(nn.utils.clip_grad_norm_)) < 1e-6),  # torch divides by ‖g‖+1e-6
        gap(values, with_torch(nn.utils.clip_grad_value_)),
    )


def _mean_of_means(loss: Any, parts: Any, parameters: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    means = [part_sum / max(float(weight), 1.0) for part_sum, weight in map(loss, parts)]
    value = torch.stack(means).mean()
    return value, list(torch.autograd.grad(value, parameters))


def _last_part_only(
    represent: Any, loss: Any, parts: Any, parameters: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    pieces = [represent(part) for part in parts]
    value = loss(torch.cat([*(piece.detach() for piece in pieces[:-1]), pieces[-1]]))
    return value, list(torch.autograd.grad(value, parameters))


def _accumulation_gap(loss: Loss, accumulate: Callable[..., Any], coupled: Callable[..., Any]) -> float:
    """Gradients of a small model in front of `loss`: 1, 3 and 7 parts against the whole batch."""
    generator = torch.Generator().manual_seed(1)
    (base, *others), options = loss.example(generator, 17, torch.float64)
    features = torch.randn(17, 3, generator=generator, dtype=torch.float64)
    width = base[0].numel()
    weight = torch.randn(3, width, generator=generator, dtype=torch.float64).requires_grad_()
    bias = torch.randn(width, generator=generator, dtype=torch.float64).requires_grad_()

    def predict(rows: Tensor) -> Tensor:
        # Factors in (0, 1) keep probabilities probabilities; one for each entry, because a common one
        # would not change the cosines that some losses compare.
        factor = torch.sigmoid(features[rows] @ weight + bias)
        return base[rows] * factor.reshape(base[rows].shape)

    def sums(rows: Tensor) -> tuple[Tensor, Any]:
        inputs = [predict(rows), *(other[rows] for other in others)]
        return loss.function(*inputs, reduction="sum", **options), loss.weigh(*inputs, **options)

    everything = torch.arange(17)
    full = loss.function(predict(everything), *others, reduction="mean", **options)
    expected = torch.autograd.grad(full, [weight, bias])
    errors = []
    for sizes in ([17], [1, 11, 5], [3, 1, 2, 1, 6, 2, 2]):
        parts = everything.split(sizes)
        if loss.couples_samples:
            whole = lambda rows: loss.function(rows, *others, reduction="mean", **options)  # noqa: E731
            value, gradients = coupled(predict, whole, parts, [weight, bias])
        else:
            value, gradients = accumulate(sums, parts, [weight, bias])
        errors += [gap(value, full), *(gap(a, b) for a, b in zip(gradients, expected, strict=True))]
    return worst(*errors)


@entry(
    "optimise/accumulation",
    "Gradient accumulation",
    r"\nabla \frac{\sum_p S_p}{\sum_p W_p} = \frac{\sum_p \nabla S_p}{\sum_p W_p} \;\ne\; "
    r"\frac{1}{P} \sum_p \nabla \frac{S_p}{W_p}",
    code=(optimise.accumulate, optimise.accumulate_coupled),
    wrong=(_mean_of_means, _last_part_only),
    tolerance=1e-12,
)
def _(accumulate: Callable[..., Any], coupled: Callable[..., Any]) -> float:
    return worst(*(_accumulation_gap(loss, accumulate, coupled) for _, loss in LOSSES.items()))


@entry(
    "optimise/checkpointing",
    "Activation checkpointing",
    r"\text{keep the input of } f \text{ only; recompute } f \text{ in the backward pass: the same } \nabla",
    code=(optimise.checkpointed, optimise.saved_bytes),
    wrong=(lambda function: function, lambda function, *args: 0),
    tolerance=0.0,
)
def _(checkpointed: Callable[..., Any], saved_bytes: Callable[..., int]) -> float:
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.3)) for _ in range(6)]
    plain = nn.Sequential(*layers).double()
    x = torch.randn(32, 16).double()

    def gradients(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(1)  # the same dropout masks
        return list(torch.autograd.grad(function(x).square().sum(), list(plain.parameters())))

    pairs = zip(gradients(plain), gradients(checkpointed(plain)), strict=True)
    y = torch.randn(10).double().requires_grad_()
    return worst(
        *(gap(a, b) for a, b in pairs),
        require(saved_bytes(lambda v: (v * v).exp(), y) == 2 * 10 * 8),  # v, and e^(v²)
        require(saved_bytes(checkpointed(plain), x) == x.nbytes),
        require(saved_bytes(plain, x) > 10 * x.nbytes),
    )
