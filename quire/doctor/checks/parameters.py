"""Parameters, their gradients and their optimisers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from quire.doctor.case import Case
from quire.doctor.findings import CHECKS, Finding


@CHECKS.register("parameter-without-gradient")
def parameter_without_gradient(case: Case) -> Iterator[Finding]:
    if case.step.stage != "done" or case.step.loss is None or not case.step.loss.requires_grad:
        return
    without = [name for name, p in case.model.named_parameters() if p.requires_grad and p.grad is None]
    if without:
        yield Finding(
            "warning",
            "parameters take no part in the loss",
            without[0],
            f"{len(without)} tensors: {', '.join(without[:4])}{' …' if len(without) > 4 else ''}",
            "use them in forward, or remove them; a list of layers must be an nn.ModuleList",
        )


@CHECKS.register("nothing-to-train")
def nothing_to_train(case: Case) -> Iterator[Finding]:
    parameters = list(case.original.parameters())
    frozen = [name for name, p in case.original.named_parameters() if not p.requires_grad]
    if parameters and len(frozen) == len(parameters):
        yield Finding(
            "error",
            "all parameters are frozen",
            frozen[0],
            f"{len(frozen)} of {len(frozen)}",
            "set requires_grad for those that should learn",
        )
    elif frozen:
        yield Finding(
            "note",
            "some parameters are frozen",
            frozen[0],
            f"{len(frozen)} of {len(parameters)} tensors",
            "nothing, if that is meant",
        )


@CHECKS.register("parameters-shared")
def parameters_shared(case: Case) -> Iterator[Finding]:
    places: dict[int, list[str]] = {}
    kinds: dict[int, set[type[nn.Module]]] = {}
    for path, module in case.original.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
            kinds.setdefault(id(parameter), set()).add(type(module))
    shared = [(names, len(kinds[key]) == 1) for key, names in places.items() if len(names) > 1]
    if shared:
        names, alike = shared[0]
        # A word's vector that is also the weight of its output is shared on purpose.
        yield Finding(
            "warning" if alike and repeated(names) else "note",
            "one tensor is the parameter of several layers",
            names[1],
            f"the same as {names[0]}; {len(shared)} tensors are at {sum(len(n) for n, _ in shared)} places",
            "make a layer for each place: [layer] * n holds one layer n times",
        )


def repeated(names: list[str]) -> bool:
    """Whether the places are numbers of one list: blocks.0.weight and blocks.1.weight."""
    first, second = (name.split(".") for name in names[:2])
    apart = [(a, b) for a, b in zip(first, second, strict=False) if a != b]
    return len(first) == len(second) and len(apart) == 1 and all(part.isdigit() for part in apart[0])


@CHECKS.register("parameter-outside-optimiser")
def parameter_outside_optimiser(case: Case) -> Iterator[Finding]:
    if not case.optimisers:
        return
    held = Counter(id(p) for o in case.optimisers for group in o.param_groups for p in group["params"])
    named = [(name, p) for name, p in case.original.named_parameters() if p.requires_grad]
    outside = [name for name, p in named if id(p) not in held]
    if outside:
        yield Finding(
            "error",
            "parameters that no optimiser moves",
            outside[0],
            f"{len(outside)} of {len(named)} tensors: {', '.join(outside[:4])}",
            "make the optimiser after the model is complete and on its device, from all of its parameters",
        )
    twice = [name for name, p in named if held[id(p)] > 1]
    if twice:
        yield Finding(
            "error",
            "parameters that two optimisers move",
            twice[0],
            f"{len(twice)} tensors: {', '.join(twice[:4])}",
            "give each to one optimiser",
        )
