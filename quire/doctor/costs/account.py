"""What training a model will cost, before it is trained: by layer and in all.

A step is taken on a copy whose tensors have shapes and no numbers, so that a model which fits into no memory
can be explained as well; meanwhile every operation is booked, and the bytes that are alive are counted. What
an operation takes inside of itself is estimated on a CPU and left out on a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from quire.doctor.costs.machine import Machine
from quire.doctor.costs.operations import MODEL, OUTSIDE, Watch, tensors_of
from quire.doctor.costs.table import Costs, LayerCost
from quire.errors import InputError, QuireError, unknown_name

OPTIMISER = "(optimiser)"
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
NUMBERS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What a step raises that cannot go on without numbers."""
UNITS = {"cuda": 512}
"""Bytes that an allocator rounds up to."""


def explain(
    model: nn.Module,
    inputs: Any,
    *,
    loss: Callable[[Any], Tensor] | str | None = None,
    optimiser: str | Make = "adam",
    device: torch.device | str | None = None,
    machine: Machine | None = None,
) -> Costs:
    """What a training step of `model` on `inputs` costs.

    `inputs` is a tensor, a sequence of arguments or a mapping of named ones, each a whole batch; tensors on
    the device "meta" serve as well as real ones. `loss(output)` is a number, or one of "sum",
    "cross-entropy", "squared-error"; without it the output's own `loss`, or its sum. `optimiser` is a name or
    a function from parameters to an optimiser. The model may be on any device, "meta" too; `device` is where
    the step is to be taken. The model and random numbers stay as they are.

        print(explain(model, torch.empty(32, 3, 224, 224, device="meta")))
    """
    if isinstance(optimiser, str) and optimiser not in OPTIMISERS:
        raise unknown_name("optimiser", optimiser, OPTIMISERS)
    if isinstance(loss, str) and loss not in LOSSES:
        raise unknown_name("loss", loss, LOSSES)
    reduce = LOSSES[loss or "sum"] if loss is None or isinstance(loss, str) else loss
    where = _device(model, device)
    named = inputs if isinstance(inputs, Mapping) else {}
    listed = () if isinstance(inputs, Mapping) else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    notes: list[str] = []
    try:
        taken = _take(_Fake(where), model, listed, named, reduce)
    except Exception as problem:
        if any(p.is_meta for p in model.parameters()) and not isinstance(problem, NUMBERS):
            raise _refused(problem) from problem  # what has no numbers may be too large to get some
        try:
            taken = _take(_Real(where), model, listed, named, reduce)
        except Exception as second:
            raise _refused(second) from second
        notes.append(
            f"computed with real numbers, as the model's own course depends on them ({_short(problem)})"
        )
    costs = _summary(taken, optimiser, where, notes)
    return costs if machine is None else costs.on(machine)


@dataclass
class _Taken:
    """A step that was taken, and what it was taken on."""

    model: nn.Module
    watch: Watch
    saved: dict[str, int]
    after: int
    """Bytes besides weights and inputs that are alive when the optimiser is called."""
    weights: int
    buffers: int
    inputs: int


class _Fake:
    """Tensors without numbers that say they are on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def active(self) -> Any:
        return self.mode

    def like(self, tensor: Tensor) -> Tensor:
        with self.mode, torch.no_grad():
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self.device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)


class _Real:
    """Real ones; what has no numbers gets small ones, and tokens are 0."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def active(self) -> Any:
        return nullcontext()

    def like(self, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            if not tensor.is_meta:
                made = tensor.detach().to(self.device, copy=True)
            elif tensor.is_floating_point():
                made = torch.randn(tensor.shape, device=self.device).mul_(0.02).to(tensor.dtype)
            else:
                made = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _take(
    kind: _Fake | _Real,
    model: nn.Module,
    listed: Sequence[Any],
    named: Mapping[str, Any],
    loss: Callable[[Any], Tensor],
) -> _Taken:
    unit = UNITS.get(kind.device.type, 1)
    with _apart(kind.device):
        twin = _copy(model, kind.like)
        args, kwargs = tree_map_only(Tensor, kind.like, (tuple(listed), dict(named)))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        parameters, buffers = list(twin.parameters()), list(twin.buffers())
        with kind.active(), torch.enable_grad():
            watch = Watch(twin, [*parameters, *buffers, *given], unit)
            for tensor in given:
                watch.maps.start(tensor)
            with watch, watch.layers():
                output = twin(*args, **kwargs)
                value = loss(output)
                saved = watch.alive()
                watch.phase = "backward"
                if value.requires_grad:
                    value.backward()
        return _Taken(
            twin,
            watch,
            saved,
            watch.now,
            _bytes(parameters, unit),
            _bytes(buffers, unit),
            _bytes(given, unit),
        )


def _copy(model: nn.Module, like: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy in training mode, its tensors replaced by others of the same shapes."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]:
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = like(value)
    twin = copy.deepcopy(model, memo)
    return twin if twin.training else twin.train()


def _summary(taken: _Taken, optimiser: str | Make, device: torch.device, notes: list[str]) -> Costs:
    watch, twin = taken.watch, taken.model
    unit = UNITS.get(device.type, 1)
    states, stepping = _optimise(twin, optimiser, device)
    base = taken.weights + taken.buffers + taken.inputs + sum(states.values())
    peaks = {phase: (base + size, layer) for phase, (size, layer) in watch.peaks.items()}
    peaks["optimiser"] = base + taken.after + stepping.peak, OPTIMISER
    operations = (*watch.operations, *(op._replace(layer=OPTIMISER) for op in stepping.operations))
    kept = taken.saved
    rows: list[LayerCost] = []
    known: set[int] = set()
    kinds = {name or MODEL: module for name, module in twin.named_modules()}
    for name in [*kinds, OUTSIDE, OPTIMISER]:
        module = kinds.get(name)
        mine = [op for op in operations if op.layer == name]
        own = [p for p in module.parameters(recurse=False) if id(p) not in known] if module else []
        known.update(map(id, own))
        if not (mine or own or kept.get(name)) and (module is None or any(True for _ in module.children())):
            continue
        field = watch.fields.get(name)
        rows.append(
            LayerCost(
                name=name,
                kind=type(module).__name__ if module else "",
                output=watch.shapes.get(name),
                parameters=sum(p.numel() for p in own),
                forward_flops=sum(op.flops for op in mine if op.phase == "forward"),
                backward_flops=sum(op.flops for op in mine if op.phase == "backward"),
                activation_bytes=kept.get(name, 0),
                gradient_bytes=_bytes([p.grad for p in own if p.grad is not None], unit),
                optimiser_bytes=sum(states.get(id(p), 0) for p in own),
                receptive_field=tuple(one.size for one in field) if field else None,
                attention_flops=sum(op.attention for op in mine),
                attention_bytes=watch.attention_bytes.get(name, 0),
            )
        )
    parameters = list(twin.parameters())
    return Costs(
        layers=tuple(rows),
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_bytes=taken.weights,
        buffer_bytes=taken.buffers,
        input_bytes=taken.inputs,
        gradient_bytes=sum(row.gradient_bytes for row in rows),
        optimiser_bytes=sum(states.values()),
        activation_bytes=sum(kept.values()),
        peaks=peaks,
        operations=operations,
        optimiser=optimiser if isinstance(optimiser, str) else "optimiser",
        device=str(device),
        notes=tuple(notes),
    )


def _optimise(twin: nn.Module, optimiser: str | Make, device: torch.device) -> tuple[dict[int, int], Watch]:
    """Bytes that the optimiser keeps for each parameter, and its second step, when it has its state."""
    unit = UNITS.get(device.type, 1)
    owners: dict[int, Tensor] = {}
    stand_ins: list[nn.Parameter] = []
    for parameter in twin.parameters():
        if parameter.requires_grad and parameter.grad is not None:
            made = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
            made.grad = torch.empty_like(made)
            owners[id(made)] = parameter
            stand_ins.append(made)
    if not stand_ins:
        return {}, Watch(nn.Module(), [], unit)
    if isinstance(optimiser, str):
        # What PyTorch chooses by itself on a GPU: one operation for all parameters, with room for all.
        stepping = OPTIMISERS[optimiser](stand_ins, foreach=device.type == "cuda")
    else:
        stepping = optimiser(stand_ins)
    stepping.step()
    states = {
        id(owners[id(made)]): _bytes(
            [v for v in kept.values() if isinstance(v, Tensor) and (v.is_meta or device.type == "cpu")], unit
        )
        for made, kept in stepping.state.items()
    }
    known = [leaf for made in stand_ins for leaf in (made, made.grad, *stepping.state[made].values())]
    watch = Watch(nn.Module(), [leaf for leaf in known if isinstance(leaf, Tensor)], unit)
    watch.phase = "optimiser"
    with watch:
        stepping.step()
    return states, watch


# Losses ---------------------------------------------------------------------------------------


def _outputs(output: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]


def _sum(output: Any) -> Tensor:
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    tensors = _outputs(output)
    if not tensors:
        raise InputError("an output without numbers", expected="a tensor", fix="give a loss(output)")
    return sum((tensor.sum() for tensor in tensors[1:]), tensors[0].sum())


def _cross_entropy(output: Any) -> Tensor:
    """Classes are in dimension 1 of maps, and in the last of everything else."""
    scores = _outputs(output)[0]
    scores = scores.movedim(1, -1) if scores.dim() > 3 else scores
    scores = scores.flatten(0, -2)
    return F.cross_entropy(scores, torch.zeros(scores.shape[0], dtype=torch.long, device=scores.device))


def _squared_error(output: Any) -> Tensor:
    values = _outputs(output)[0]
    return F.mse_loss(values, torch.zeros_like(values))


LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "sum": _sum,
    "cross-entropy": _cross_entropy,
    "squared-error": _squared_error,
}


# Small helpers --------------------------------------------------------------------------------


def _device(model: nn.Module, wanted: torch.device | str | None) -> torch.device:
    if wanted is None:
        first = next(iter(model.parameters()), None)
        here = "cpu" if first is None else first.device
        if torch.device(here).type == "meta":
            here = "cuda" if torch.cuda.is_available() else "cpu"
        wanted = here
    device = torch.device(wanted)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {device}", expected="a device of this machine", fix="leave device out")
    return device


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def _bytes(tensors: Sequence[Tensor], unit: int) -> int:
    """Of their storages, each once, rounded up one by one."""
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(-(-size // unit) * unit for size in found.values())


def _refused(problem: Exception) -> InputError:
    if isinstance(problem, QuireError):
        said = f"the model cannot take a step on these inputs: {problem.got}"
        return InputError(said, expected=problem.expected, fix=problem.fix)
    return InputError(
        f"the model cannot take a step on these inputs: {type(problem).__name__}: {_short(problem)}",
        expected="inputs that model(inputs) takes, and a loss of its output",
        fix="check shapes and types of the inputs; tokens are integers",
    )


def _short(problem: Exception) -> str:
    return " ".join(str(problem).split())[:160]
