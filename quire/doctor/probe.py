"""A short training on a copy, looked at in every step; the model itself, its optimiser and the stream of
random numbers stay as they are.

B rows of a batch, n parameters.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from quire.doctor.case import Case, Pair
from quire.doctor.course import Course, Noise, Trial
from quire.doctor.watch import RECURRENT, look
from quire.functional.modes import evaluating

HARDLY = 0.02
"""Share of the loss below which a few steps have taken hardly anything away."""
Optimiser = torch.optim.Optimizer


def probe(case: Case, *, steps: int = 30, seconds: float = 20.0) -> Course:
    """`steps` of training on a copy with the optimiser that is given (Adam's default without one), and as
    many with other step sizes where that one fails; fewer where `seconds` have passed."""
    began = time.perf_counter()
    course = Course(batches=len(case.batches))
    with case.drawing():
        model = copy.deepcopy(case.model)
        course.recurrent = recurrent_sizes(model)
        course.noise = gradient_noise(case, model)
        course.likeness = gradient_likeness(case, model)
    given = case.optimisers[0] if case.optimisers else None
    if given is not None:
        course.optimiser, course.step_size = type(given).__name__, float(given.param_groups[0]["lr"])
        course.momentum = float(given.param_groups[0].get("momentum", 0.0))
    train_copy(case, course, 1.0, steps, began + seconds / 2)
    if given is not None:
        until = began + seconds
        try_others(
            course, lambda factor: train_copy(case, Course(), factor, steps, until), until, len(case.batches)
        )
    return course


def try_others(course: Course, train: Callable[[float], Course], until: float, batches: int) -> None:
    """Train with other step sizes where the one that is given fails; each is judged by the mean of its first
    losses and that of its last, of so many `batches`."""
    course.trials.append(trial(course, 1.0, batches))
    for factor in factors(course.trials[0]):
        course.trials.append(trial(train(factor), factor, batches))
        learned = course.trials[-2].change > HARDLY
        worse = not course.trials[-1].after < course.trials[-2].after
        if (learned and worse) or time.perf_counter() > until:
            break


def factors(given: Trial) -> tuple[float, ...]:
    """Of the step size, to be tried beside the one that is given where that learns nothing."""
    if given.change < 0:
        return (0.1, 0.01, 0.001, 1e-4, 1e-5)
    return (10.0, 100.0, 1e3, 1e4, 1e5) if given.change < HARDLY else ()


def trial(course: Course, factor: float, batches: int) -> Trial:
    """Over the same rows at the beginning and at the end."""
    values = [value for _, value in course.train]
    few = max(1, min(batches, len(values) // 2))
    return Trial(factor, fmean(values[:few]), fmean(values[-few:]))


def train_copy(case: Case, course: Course, factor: float, steps: int, until: float) -> Course:
    """Each step is written into `course`, looks included where the factor is 1."""
    model = copy.deepcopy(case.model)
    optimiser = optimiser_of(case, model, factor)
    pairs = [case.placed(pair) for pair in case.batches]
    named = [p for p in model.parameters() if p.requires_grad]
    with case.drawing():
        for step in range(steps):
            if step >= 10 and time.perf_counter() > until:
                break
            pair = pairs[step % len(pairs)]
            found, gradients = look(model, partial(case.loss_of, model, pair), step)
            course.train.append((step, found.loss))
            course.norms.append((step, found.norm))
            if factor == 1.0:
                course.looks.append(found)
            if found.broken() is not None:
                break
            for p, gradient in zip(named, gradients, strict=True):
                p.grad = gradient
            optimiser.step()
    return course


def optimiser_of(case: Case, model: nn.Module, factor: float) -> Optimiser:
    """One like the optimiser that was given, for the parameters of a copy."""
    if not case.optimisers:
        return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3 * factor)
    copies = dict(model.named_parameters())
    # A deep copy that finds the copied parameters where it looks for those of the original.
    memo = {id(p): copies[name] for name, p in case.original.named_parameters()}
    optimiser: Optimiser = copy.deepcopy(case.optimisers[0], memo)
    for group in optimiser.param_groups:
        group["lr"] = group["lr"] * factor
    return optimiser


def gradient_noise(case: Case, model: nn.Module) -> Noise | None:
    """From the gradients of two or more batches of one size, at the same weights:

    |G|² ≈ |mean|² − tr S/P,   tr Σ ≈ B·tr S,   S the variance of P batches' gradients"""
    rows = case.batches[0].rows
    pairs = [pair for pair in case.batches if pair.rows == rows]
    if len(pairs) < 3 or not rows:
        return None
    gradients = []
    with evaluating(model):
        for pair in pairs:
            parts = gradient(case, model, case.placed(pair))
            if parts is None:
                return None
            gradients.append(parts)
    stacked = torch.stack(gradients).double()
    variance = float(stacked.var(0).sum())
    signal = float(stacked.mean(0).square().sum()) - variance / len(pairs)
    return Noise(max(signal, 0.0), rows * variance, rows)


def gradient(case: Case, model: nn.Module, pair: Pair) -> Tensor | None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.enable_grad():
        loss = case.loss_of(model, pair)
        if not loss.requires_grad:
            return None
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None]).detach()


def gradient_likeness(case: Case, model: nn.Module, points: int = 33, lines: int = 4) -> float | None:
    """Mean cosine between the gradients of the output with respect to the input at neighbouring points of
    lines from one row to another, a thirty-second of the way apart. In deep networks without a way around
    their layers it falls towards 0: the gradient says nothing of the places beside it (Balduzzi et al.,
    "The shattered gradients problem", 2017)."""
    pair = case.first
    x = pair.inputs[0]
    if pair.whole is not None or len(pair.inputs) > 1 or not isinstance(x, Tensor):
        return None
    if not x.is_floating_point() or len(x) < 2 * lines:
        return None
    share = torch.linspace(0, 1, points, device=x.device, dtype=x.dtype).view(-1, *[1] * (x.ndim - 1))
    along = torch.cat([a + share * (b - a) for a, b in zip(x[:lines], x[lines : 2 * lines], strict=True)])
    along = along.detach().requires_grad_()
    model = copy.deepcopy(model).train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    with torch.enable_grad():
        # Rows of the batch beside them, by which batch normalisation is as in training.
        output = model(torch.cat([along, x[: len(along)].detach()]))
        if not isinstance(output, Tensor) or not output.requires_grad or len(output) < len(along):
            return None
        weights = torch.randn(output.shape[1:], device=output.device, dtype=output.dtype)
        (slope,) = torch.autograd.grad((output[: len(along)] * weights).sum(), along)
    flat = slope.reshape(lines, points, -1)
    if not bool((flat.norm(dim=2) > 0).all()):
        return None
    return float(torch.cosine_similarity(flat[:, 1:], flat[:, :-1], dim=2).mean())


def recurrent_sizes(model: nn.Module) -> dict[str, float]:
    """The largest singular value of the weights by which a recurrent layer's state goes on; of a gated one,
    of each gate's block the largest."""
    sizes = {}
    for name, module in model.named_modules():
        if isinstance(module, RECURRENT) and not parametrize.is_parametrized(module):
            for key, weight in module.named_parameters(recurse=False):
                if key.startswith("weight_hh"):
                    blocks = weight.detach().split(weight.shape[1])
                    norms = [torch.linalg.matrix_norm(block.double(), 2) for block in blocks]
                    sizes[f"{name}.{key}" if name else key] = float(max(norms))
    return sizes
