"""Chapter 20: adversarial networks, on distributions so small that every player's best answer is known."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.data.batch import TensorData
from quire.functional.adversarial import (
    discriminator_loss,
    discriminator_value,
    minimax_generator_loss,
    non_saturating_generator_loss,
    optimal_discriminator,
    value_at_optimum,
)
from quire.functional.probability import js_divergence
from quire.models.gan import Discriminator, DiscriminatorConfig, Generator, GeneratorConfig
from quire.options import Optim, Train
from quire.sheet.registry import entry, gap, require, worst
from quire.tasks.adversarial import Adversarial
from quire.train import fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Code = Callable[..., Any]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _distributions(*shape: int) -> Tensor:
    return _random(*shape).softmax(-1)


def _best(objective: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Tensor:
    """The numbers that maximise a smooth objective, found by descent from 0."""
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS(
        [x], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        search.zero_grad()
        loss = -objective(x)
        loss.backward()
        return loss

    search.step(closure)
    return x.detach()


def _game(data: Tensor, model: Tensor, logits: Tensor) -> Tensor:
    """V of a discriminator that has a logit of its own for each outcome."""
    return (data * functional.logsigmoid(logits) + model * functional.logsigmoid(-logits)).sum(-1)


def _left(value: Code, data: Tensor, logits: Tensor) -> Tensor:
    """What a generator with a logit for each outcome wants most of."""
    return -cast(Tensor, value(data, logits.softmax(-1)))


# Losses ---------------------------------------------------------------------------------------


def _swapped_loss(real: Tensor, fake: Tensor, *, reduction: str = "mean") -> Tensor:
    """Rewards taking samples for data."""
    return discriminator_loss(fake, real, reduction=reduction)


@entry(
    "adversarial/discriminator",
    "Loss of the discriminator",
    r"J_D = -\sum_x \log D(x) - \sum_z \log\bigl(1 - D(G(z))\bigr)",
    code=discriminator_loss,
    wrong=_swapped_loss,
    tolerance=1e-12,
)
def _discriminator(loss: Code) -> float:
    real, fake = (4 * _random(7)).requires_grad_(), (4 * _random(5)).requires_grad_()
    wanted = 0.0
    for logit in real.tolist():
        wanted -= math.log(1 / (1 + math.exp(-logit)))
    for logit in fake.tolist():
        wanted -= math.log(1 - 1 / (1 + math.exp(-logit)))
    total = loss(real, fake, reduction="sum")
    slopes = torch.autograd.grad(total, [real, fake])
    even = torch.zeros(3, dtype=torch.float64)
    return worst(
        gap(total, wanted),
        gap(slopes[0], real.sigmoid() - 1),
        gap(slopes[1], fake.sigmoid()),
        gap(loss(even, even), 2 * math.log(2)),
    )


def _printed_the_other_way(fake: Tensor, *, reduction: str = "mean") -> Tensor:
    return -minimax_generator_loss(fake, reduction=reduction)


@entry(
    "adversarial/generator",
    "Losses of the generator: min-max and non-saturating",
    r"J_G = \sum_z \log\bigl(1 - D(G(z))\bigr) \quad\text{or}\quad J_G = -\sum_z \log D(G(z)); \qquad "
    r"\frac{\partial J_G}{\partial a} = -D \quad\text{or}\quad D - 1, \quad D = \sigma(a)",
    code=(minimax_generator_loss, non_saturating_generator_loss),
    wrong=(non_saturating_generator_loss, _printed_the_other_way),
    tolerance=1e-12,
)
def _generator(minimax: Code, better: Code) -> float:
    fake = (4 * _random(9)).requires_grad_()
    probability = [1 / (1 + math.exp(-logit)) for logit in fake.tolist()]
    values = minimax(fake, reduction="sum"), better(fake, reduction="sum")
    wanted = sum(math.log(1 - p) for p in probability), -sum(math.log(p) for p in probability)
    slopes = [torch.autograd.grad(value, fake)[0] for value in values]
    # Where the discriminator is sure, only one of the two still has a slope; both pull the same way.
    lost = torch.full((1,), -12.0, dtype=torch.float64, requires_grad=True)
    faded, kept = (torch.autograd.grad(loss(lost), lost)[0].item() for loss in (minimax, better))
    return worst(
        gap(values[0], wanted[0]),
        gap(values[1], wanted[1]),
        gap(slopes[0], -fake.sigmoid()),
        gap(slopes[1], fake.sigmoid() - 1),
        require(-1e-5 < faded < 0 and kept < -0.99),
    )


# The optimum ----------------------------------------------------------------------------------


def _picture() -> Figure:
    """The optimal discriminator of two Gaussians against a generator that has found one of them."""
    from quire.report.adversarial import surface_figure

    places = torch.linspace(-3.5, 3.5, 80)
    plane = torch.stack(torch.meshgrid(places, places, indexing="xy"), -1)

    def density(*centres: tuple[float, float]) -> Tensor:
        away = (plane[..., None, :] - torch.tensor(centres)).square().sum(-1)
        return (-away / (2 * 0.7**2)).exp().mean(-1)

    draw = torch.Generator().manual_seed(0)
    noise = 0.7 * torch.randn(2, 160, 2, generator=draw)
    sides = torch.tensor([[-1.5, -0.5], [1.5, 0.5]]).repeat(80, 1)
    best = optimal_discriminator(density((-1.5, -0.5), (1.5, 0.5)), density((1.5, 0.5)))
    return surface_figure(
        places.numpy(), places.numpy(), best.numpy(), (sides + noise[0]).numpy(),
        (torch.tensor([1.5, 0.5]) + noise[1]).numpy(), name="D* where G has found one of two modes",
    )  # fmt: skip


@entry(
    "adversarial/optimal-discriminator",
    "The best discriminator",
    r"D^*(x) = \frac{p_{\mathrm{data}}(x)}{p_{\mathrm{data}}(x) + p_G(x)}",
    code=(optimal_discriminator, discriminator_value),
    wrong=(
        lambda data, model: model / (data + model),
        lambda data, model, d: (data * d.log() + model * d.log()).sum(-1),
    ),
    tolerance=1e-6,
    picture=_picture,
)
def _optimal_discriminator(best: Code, value: Code) -> float:
    """Against the logits that a search over all discriminators of six outcomes ends with."""
    errors = []
    for _ in range(3):
        data, model = _distributions(6), _distributions(6)
        game = partial(_game, data, model)
        found = _best(game, (6,))
        errors += [
            gap(best(data, model), found.sigmoid()),
            gap(value(data, model, found.sigmoid()), game(found)),
        ]
    only_data = best(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    return worst(*errors, gap(only_data, torch.tensor([1.0, 0.0])))


@entry(
    "adversarial/jensen-shannon",
    "The value at the optimum is a Jensen–Shannon divergence",
    r"\max_D V(D, G) = 2\,\mathrm{JS}(p_{\mathrm{data}}, p_G) - 2\log 2, \qquad "
    r"\min_G \max_D V = -2 \log 2 \text{ where } p_G = p_{\mathrm{data}}",
    code=(value_at_optimum, js_divergence),
    wrong=(
        lambda data, model: js_divergence(data, model) - 2 * math.log(2),
        lambda p, q: (p * (p / q).log()).sum(-1),
    ),
    tolerance=1e-6,
)
def _jensen_shannon(value: Code, divergence: Code) -> float:
    errors = []
    for _ in range(3):
        data, model = _distributions(6), _distributions(6)
        game = partial(_game, data, model)
        reached = game(_best(game, (6,)))
        middle = (data + model) / 2
        js = sum((p * (p / m).log() / 2).sum() for p, m in ((data, middle), (model, middle)))
        errors += [gap(value(data, model), reached), gap(divergence(data, model), js)]
        # The generator's side of the game: the distribution that leaves the best discriminator least.
        chosen = _best(partial(_left, value, data), (6,)).softmax(-1)
        errors += [gap(chosen, data), gap(value(data, chosen), -2 * math.log(2))]
    return worst(*errors)


# Classes and players --------------------------------------------------------------------------


class _BlindDiscriminator(nn.Module):
    """Does not look at the class."""

    def __init__(self, config: DiscriminatorConfig) -> None:
        super().__init__()
        self.inner = Discriminator(config)

    def forward(self, inputs: Tensor, label: Tensor) -> Tensor:
        logits: Tensor = self.inner(inputs, torch.full_like(label, -1))
        return logits


class _BlindGenerator(nn.Module):
    def __init__(self, config: GeneratorConfig) -> None:
        super().__init__()
        self.inner = Generator(config)
        self.decoder = self.inner.decoder

    def forward(self, noise: Tensor, label: Tensor) -> Tensor:
        made: Tensor = self.inner(noise, torch.zeros_like(label))
        return made


@entry(
    "adversarial/conditional",
    "One game for each class",
    r"D^*(x \mid y) = \frac{p_{\mathrm{data}}(x \mid y)}{p_{\mathrm{data}}(x \mid y) + p_G(x \mid y)}, "
    r"\quad a(x, y) = w^\top \varphi(x) + b + \langle v_y, \varphi(x) \rangle, \quad G(z, y) = g([z, e_y])",
    code=(Discriminator, Generator),
    wrong=(_BlindDiscriminator, _BlindGenerator),
    tolerance=1e-5,
)
def _conditional(discriminator: Code, generator: Code) -> float:
    """A network that learns the whole game of four outcomes under three classes, and reaches the optimum."""
    share, data, model = _distributions(3), _distributions(3, 4), _distributions(3, 4)
    config = DiscriminatorConfig((4,), hidden=(16,), classes=3, activation="tanh", spectral=False)
    network = discriminator(config).double()
    outcomes, label = torch.eye(4, dtype=torch.float64).repeat(3, 1), torch.arange(3).repeat_interleave(4)

    def game() -> Tensor:
        return (share * _game(data, model, network(outcomes, label).view(3, 4))).sum()

    search = torch.optim.LBFGS(
        network.parameters(), max_iter=2000, tolerance_grad=1e-10, tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        search.zero_grad()
        loss = -game()
        loss.backward()
        return loss

    search.step(closure)
    with torch.no_grad():
        found, reached = network(outcomes, label).view(3, 4).sigmoid(), game()
    maker = generator(GeneratorConfig((2,), hidden=(), latent=3, classes=3, norm="none")).double()
    noise, asked = _random(6, 3), torch.tensor([0, 1, 2, 2, 1, 0])
    weight, bias = (parameter.detach() for parameter in maker.decoder.parameters())
    wanted = noise @ weight[:, :3].mT + weight[:, 3:].mT[asked] + bias
    return worst(
        gap(found, data / (data + model)),
        gap(reached, (share * value_at_optimum(data, model)).sum()),
        gap(maker(noise, asked), wanted),
    )


def _other_loss(generator: Generator, discriminator: Discriminator, loss: Any) -> Adversarial:
    swapped: Any = {"min-max": "non-saturating", "non-saturating": "min-max"}[loss]
    return Adversarial(generator, discriminator, loss=swapped)


@entry(
    "adversarial/players",
    "Two players of one trainer",
    r"\theta_D \leftarrow \theta_D - \eta \nabla_{\theta_D} J_D, \qquad "
    r"\theta_G \leftarrow \theta_G - \eta \nabla_{\theta_G} J_G",
    code=Adversarial,
    wrong=_other_loss,
    tolerance=1e-12,
)
def _players(build: Code) -> float:
    """One step of the trainer's, in micro-batches, against both gradients of the whole batch."""
    errors = []
    for loss in ("min-max", "non-saturating"):
        generator = Generator(GeneratorConfig((2,), hidden=(5,), latent=3, norm="none")).double()
        discriminator = Discriminator(DiscriminatorConfig((2,), hidden=(5,), spectral=False)).double()
        mine, yours = copy.deepcopy(generator), copy.deepcopy(discriminator)
        rows, noise = _random(10, 2), _random(10, 3)
        task = build(generator, discriminator, loss=loss)
        task.augment = lambda batch, noise=noise: batch.replace(noise=noise)
        options = Train(batch_size=10, micro_batches=3, shuffle=False)
        fit(task, TensorData({"inputs": rows}), steps=1, optim=Optim("sgd", lr=0.5), train=options)
        fake = yours(mine(noise))
        cost = -functional.logsigmoid(yours(rows)).mean() - functional.logsigmoid(-fake).mean()
        _descend(yours, cost)
        fake = yours(mine(noise))
        sign, logit = (1, -fake) if loss == "min-max" else (-1, fake)
        _descend(mine, sign * functional.logsigmoid(logit).mean())
        for network, peer in ((generator, mine), (discriminator, yours)):
            pairs = zip(network.parameters(), peer.parameters(), strict=True)
            errors += [gap(parameter, wanted) for parameter, wanted in pairs]
    return worst(*errors)


def _descend(network: nn.Module, cost: Tensor) -> None:
    parameters = list(network.parameters())
    slopes = torch.autograd.grad(cost, parameters)
    with torch.no_grad():
        for parameter, slope in zip(parameters, slopes, strict=True):
            parameter.sub_(slope, alpha=0.5)
