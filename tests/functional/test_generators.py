"""Everything that takes a generator draws from it, and from nothing else."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quire.functional
import quire.nn
from quire import functional as F
from quire.functional import image_augment, reduction
from quire.functional.augment import two_views
from quire.functional.mixtures import make_mixture, sample_mixture
from quire.functional.warp import draw_warps
from quire.nn.heads import Bernoulli, Categorical, Gaussian
from quire.nn.noise import install, noisy_activations, perturbed

X, Y = torch.arange(24.0).reshape(8, 3).sin(), torch.eye(8)
LINE = torch.linspace(-1, 1, 20, dtype=torch.float64)
IMAGES = torch.arange(6 * 3 * 8 * 8.0).reshape(6, 3, 8, 8)
TOKENS = torch.arange(1, 61).reshape(5, 12)
MIXTURE = make_mixture(torch.tensor([0.5, 0.5]), torch.tensor([[0.0], [5.0]]), torch.ones(2, 1))
CONVOLUTION = nn.Conv1d(1, 1, 3)
Draw = Callable[[torch.Generator], Any]


def fitted(x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    return F.fit_polynomial(x, y, 1)


def noisy(generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    return LINE, LINE + torch.randn(20, generator=generator, dtype=torch.float64)


def shown(net: nn.Module, g: torch.Generator) -> Tensor:
    with noisy_activations(net, 1.0, g):
        return net(X)


def moved(g: torch.Generator) -> Tensor:
    weight = torch.zeros(5)
    with perturbed([weight], 1.0, g):
        return weight.clone()


def seen(g: torch.Generator) -> Tensor:
    """What an output depends on is the same for every draw, so what is left of the generator is looked at."""
    F.receptive_field_of(CONVOLUTION, (1, 9), probes=1, generator=g)
    return g.get_state()


DRAWS: dict[str, Draw] = {
    "cut_out": lambda g: F.cut_out(IMAGES, 3, g),
    "colour_jitter": lambda g: F.colour_jitter(IMAGES, 0.5, g),
    "column_noise": lambda g: F.column_noise(X, 0.5, g),
    "swap_noise": lambda g: F.swap_noise(X, 0.5, g),
    "token_drop": lambda g: F.token_drop(TOKENS, 0.5, 0, g),
    "token_swap": lambda g: F.token_swap(TOKENS, 0.5, 0, g),
    "token_mask": lambda g: F.token_mask(TOKENS, 0.5, 99, 0, g),
    "mixup": lambda g: F.mixup(X, Y, 0.4, g),
    "cutmix": lambda g: F.cutmix(IMAGES, Y[:6], 1.0, g),
    "two_views": lambda g: two_views(X, lambda x, own: F.gaussian_noise(x, 1.0, own), g),
    "masking_noise": lambda g: F.masking_noise(X, 0.5, g),
    "salt_and_pepper": lambda g: F.salt_and_pepper(X, 0.5, generator=g),
    "corrupt": lambda g: [F.corrupt(X, kind, 0.5, generator=g) for kind in ("gaussian", "masking")],
    "hide_places": lambda g: [F.hide_places(4, shape, 0.5, 2, g) for shape in ((9,), (1, 8, 8))],
    "kmeans_plusplus": lambda g: F.kmeans_plusplus(X, 4, g, starts=3),
    "random_rows": lambda g: F.random_rows(50, 4, g),
    "pca_randomised": lambda g: F.pca_randomised(
        torch.arange(400.0).reshape(20, 20).mul(1.7).sin(), 2, oversamples=0, power_iterations=0, generator=g
    ),
    "convexity_violation": lambda g: F.convexity_violation(torch.sin, -3.0, 3.0, pairs=50, generator=g),
    "convex_set_violation": lambda g: F.convex_set_violation(
        lambda x: x.abs() > 1, -3.0, 3.0, pairs=50, generator=g
    ),
    "k_fold": lambda g: F.k_fold(20, 4, g),
    "cross_validate": lambda g: (
        F.cross_validate(fitted, LINE, LINE.square(), folds=4, generator=g).validation
    ),
    "bias_variance": lambda g: (
        F.bias_variance(fitted, noisy, LINE, LINE, noise_std=0.5, resamples=3, generator=g).total.value
    ),
    "degree_curve": lambda g: F.degree_curve(LINE, LINE.square(), [1], folds=4, generator=g).validation,
    "draw_windows": lambda g: F.draw_windows(IMAGES, smallest=0.3, generator=g),
    "random_window": lambda g: F.random_window(IMAGES, smallest=0.3, generator=g),
    "random_crop": lambda g: F.random_crop(IMAGES, (3, 3), 1, g),
    "random_shift": lambda g: F.random_shift(IMAGES, 3, g),
    "random_flip": lambda g: F.random_flip(IMAGES.repeat(4, 1, 1, 1), 0.5, g),
    "integers": lambda g: image_augment.integers(X, (9,), 0, 1000, g),
    "chosen": lambda g: image_augment.chosen(X, (99,), 0.5, g),
    "he_": lambda g: F.he_(torch.empty(4, 4), generator=g),
    "xavier_": lambda g: F.xavier_(torch.empty(4, 4), distribution="uniform", generator=g),
    "orthogonal_": lambda g: F.orthogonal_(torch.empty(4, 4), generator=g),
    "initialise_": lambda g: [F.initialise_(torch.empty(4, 4), name, g) for name in ("relu", "tanh")],
    "variance_by_layer": lambda g: F.variance_by_layer([torch.eye(3)], "tanh", X, g).backward,
    "simulated_distance_spread": lambda g: F.simulated_distance_spread(3, 50, generator=g),
    "sample_mixture": lambda g: sample_mixture(MIXTURE, 9, g),
    "minibatches": lambda g: list(F.minibatches(20, 6, g)),
    "receptive_field_of": seen,
    "orthogonal_gates_": lambda g: F.orthogonal_gates_(torch.empty(6, 3), generator=g),
    "normal": lambda g: reduction.normal(g, torch.float64, 5),
    "uniform": lambda g: reduction.uniform(g, torch.float64, 5),
    "dropout": lambda g: F.dropout(X, 0.5, True, g),
    "gaussian_noise": lambda g: F.gaussian_noise(X, 1.0, g),
    "bootstrap": lambda g: F.bootstrap(20, 3, g),
    "random_mask": lambda g: F.random_mask((4, 9), 0.5, g),
    "sample": lambda g: F.sample(torch.zeros(20, 9), generator=g),
    "draw_warps": lambda g: draw_warps(IMAGES, shift=0.2, rotate=10.0, bend=0.1, generator=g),
    "install": lambda g: (lambda net, _: net(X))(net := nn.Sequential(nn.Tanh()), install(net, 1.0, g)),
    "noisy_activations": lambda g: shown(nn.Tanh(), g),
    "perturbed": moved,
    "Head.predict": lambda g: [
        head.predict(torch.zeros(40, head.outputs_needed), "sample", generator=g)
        for head in (Categorical(4), Bernoulli(2), Gaussian(1))
    ],
}


def takers() -> Iterator[str]:
    """Read from the source, because importing every part takes seconds."""
    for package in (quire.functional, quire.nn):
        for path in Path(package.__path__[0]).glob("*.py"):
            for item in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(item, ast.FunctionDef) and item.name[0] != "_":
                    arguments = [*item.args.args, *item.args.kwonlyargs]
                    if any(argument.arg == "generator" for argument in arguments):
                        yield item.name


def numbers(drawn: Any) -> list[Tensor]:
    if isinstance(drawn, dict):
        return numbers(list(drawn.values()))
    if isinstance(drawn, list | tuple):
        return [tensor for part in drawn for tensor in numbers(part)]
    return [torch.as_tensor(drawn)]


def test_none_is_left_out() -> None:
    assert set(takers()) - set(DRAWS) == set()


@pytest.mark.parametrize("name", list(DRAWS))
def test_draws_come_from_the_generator_alone(name: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = numbers(DRAWS[name](torch.Generator().manual_seed(5)))
    assert torch.equal(torch.get_rng_state(), before), "drew from the global generator"
    torch.manual_seed(2)
    again = numbers(DRAWS[name](torch.Generator().manual_seed(5)))
    other = numbers(DRAWS[name](torch.Generator().manual_seed(6)))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), "does not repeat"
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, other, strict=True))
