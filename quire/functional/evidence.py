"""Where in an image a network sees a class, and what its layers answer.

Class activation maps are of Zhou et al. (2016), Grad-CAM of Selvaraju et al. (2017). Maps are those of the
network's own grid, (H, W) of the layer; enlarge them to lay them over the image.

N images, K channels of a map of H×W places, C classes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.errors import InputError, unknown_name
from quire.functional.modes import evaluating

PLACES = 4
"""A map of fewer places a side says nothing about where."""


class Evidence(NamedTuple):
    """What `evidence_maps` finds: maps (N, H, W), the classes (N,) that they are of, logits (N, C)."""

    maps: Tensor
    classes: Tensor
    logits: Tensor


def class_activation_map(features: Tensor, weights: Tensor, classes: Tensor | int) -> Tensor:
    """M(i, j) = Σ_k w_ck A_k(i, j) for maps A (N, K, H, W) that are averaged over places and read by a
    linear layer of weights w (C, K); `classes` are one c for each image, or one for all. Gives (N, H, W).

    The mean of M is the logit of the class without its bias: M shares the logit out among the places.
    """
    _check_maps(features)
    if weights.dim() != 2 or weights.shape[1] != features.shape[1]:
        raise InputError(
            f"weights of shape {tuple(weights.shape)} for maps of shape {tuple(features.shape)}",
            expected=f"(classes, {features.shape[1]})",
            fix="give the weight of the linear layer that reads the averaged maps",
        )
    rows = _class_numbers(classes, len(features), weights)
    return torch.einsum("nk,nkhw->nhw", weights[rows], features)


def grad_cam(features: Tensor, logits: Tensor, classes: Tensor | int) -> Tensor:
    """ReLU(Σ_k α_k A_k) with α_k = (1/HW) Σ_ij ∂o_c/∂A_k(i, j): maps A (N, K, H, W) weighed by how much the
    logit o_c (N, C) of each image's class rises with them. Gives (N, H, W).

    The logits must have been computed from `features`, each image by itself. Of a network that averages the
    maps and reads them linearly, this is the positive part of its class activation map, divided by HW.
    """
    _check_maps(features)
    rows = _class_numbers(classes, len(features), logits.T)
    score = logits.gather(1, rows[:, None]).sum()
    gradient = None
    if score.requires_grad and features.requires_grad:
        (gradient,) = torch.autograd.grad(score, features, retain_graph=True, allow_unused=True)
    if gradient is None:
        raise InputError(
            "logits that were not computed from the maps",
            expected="maps and logits of one and the same pass, with gradients on",
            fix="use evidence_maps(model, x), which makes that pass",
        )
    return torch.einsum("nk,nkhw->nhw", gradient.mean((2, 3)), features.detach()).relu()


def evidence_maps(
    model: nn.Module, x: Tensor, classes: Tensor | int | None = None, *, layer: str | None = None
) -> Evidence:
    """`grad_cam` of a classifier for images x as it takes them, (N, …), in evaluation mode.

    The maps are what the module named `layer` gives; without one, the coarsest of ``model.stages(x)`` that
    still has `PLACES` a side, or the finest where none has. Without `classes`, each image's evidence is that
    for the class it is given.
    """
    with evaluating(model), torch.enable_grad():
        seen = x.detach().requires_grad_()  # otherwise nothing leads from frozen parameters to the logits
        name, call = (layer, -1) if layer is not None else _map_layer(model, seen)
        with recorded(model, [name]) as outputs:
            logits = model.forward(seen)
        features = _called(outputs, [name])[name][call]
        if classes is None:
            classes = logits.argmax(1)
        rows = _class_numbers(classes, len(x), logits.T)
        return Evidence(grad_cam(features, logits, rows), rows, logits.detach())


@torch.no_grad()
def activation_maps(model: nn.Module, x: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
    """The outputs of the modules of these names (as in ``model.named_modules()``) for inputs x, in evaluation
    mode; of a module that is called several times, the last one."""
    # Copies, because the network may go on to write into an output.
    with evaluating(model), recorded(model, layers, lambda output: output.clone()) as outputs:
        model.forward(x)
    return {name: calls[-1] for name, calls in _called(outputs, layers).items()}


# Watching a network ---------------------------------------------------------------------------


@contextmanager
def recorded(
    model: nn.Module, layers: Sequence[str], keep: Callable[[Tensor], Tensor] = lambda output: output
) -> Iterator[dict[str, list[Tensor]]]:
    """Collects what the named modules give at each of their calls while it is open."""
    modules = dict(model.named_modules())
    unknown = [name for name in layers if name not in modules]
    if unknown:
        raise unknown_name("layer", unknown[0], [name for name in modules if name])
    outputs: dict[str, list[Tensor]] = {}

    def note(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(_: nn.Module, __: object, output: object) -> None:
            if isinstance(output, Tensor):
                outputs.setdefault(name, []).append(keep(output))

        return hook

    handles = [modules[name].register_forward_hook(note(name)) for name in layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _called(outputs: dict[str, list[Tensor]], layers: Sequence[str]) -> dict[str, list[Tensor]]:
    missing = [name for name in layers if name not in outputs]
    if missing:
        raise InputError(
            f"layers that were never called: {', '.join(missing)}",
            expected="modules that a forward pass calls and that give one tensor",
            fix="name the module itself rather than a list that holds it",
        )
    return {name: outputs[name] for name in layers}


@torch.no_grad()
def _map_layer(model: nn.Module, x: Tensor) -> tuple[str, int]:
    """The module that gives the map to be weighed, and at which of its calls."""
    stages = getattr(type(model), "stages", None)
    if not callable(stages):
        raise _no_maps(model, "has no stages(x)")
    with recorded(model, [name for name, _ in model.named_modules()]) as outputs:
        maps: Sequence[Tensor] = stages(model, x)
    fine = [one for one in maps if min(one.shape[2:]) >= PLACES]
    wanted = fine[-1] if fine else maps[0]
    for name, calls in outputs.items():
        for call, output in enumerate(calls):
            if output is wanted:
                return name, call
    raise _no_maps(model, "makes the last map of its stages outside of any module")


def _no_maps(model: nn.Module, why: str) -> InputError:
    return InputError(
        f"a {type(model).__name__}, which {why}",
        expected="a classifier with stages(x), the outputs of its modules from fine to coarse",
        fix="name a layer that gives a map: evidence_maps(model, x, layer=…)",
    )


def _check_maps(features: Tensor) -> None:
    if features.dim() != 4:
        raise InputError(
            f"features of shape {tuple(features.shape)}",
            expected="maps (N, K, H, W)",
            fix="take the output of a layer before the places are averaged or flattened",
        )


def _class_numbers(classes: Tensor | int, count: int, rows: Tensor) -> Tensor:
    """One class for each of `count` images, among the rows of `rows`."""
    numbers = torch.as_tensor(classes, device=rows.device)
    if numbers.dim() == 0:
        numbers = numbers.expand(count)
    if numbers.shape != (count,) or numbers.is_floating_point():
        raise InputError(
            f"classes of shape {tuple(numbers.shape)} and type {numbers.dtype}",
            expected=f"one class number, or {count} of them",
            fix="give the class that each image's evidence is wanted for",
        )
    if count and not bool(((numbers >= 0) & (numbers < len(rows))).all()):
        raise InputError(
            f"classes from {int(numbers.min())} to {int(numbers.max())}",
            expected=f"numbers from 0 to {len(rows) - 1}",
            fix="number the classes as the network's outputs are",
        )
    return numbers.long()
