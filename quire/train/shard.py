"""Weights, gradients and the optimiser's state split among the processes, by PyTorch's FSDP2.

Each process keeps one n-th of every parameter: some of the slices along its first dimension. The blocks that
stand in a row in a model are put together from all processes one by one, just before they compute, and let go
after it; so are their gradients, which are added over the processes and split at once:

    gradient of a part = Σ_processes Σ_own rows ∂(scale · sum / weight of the whole batch), own slices of it

What is not in such a block, an embedding for instance, is whole from the beginning of a step to its end, and
parameters that are a single number always are. While a task is judged, and from the end of training on, every
process has the whole weights.

Before anything is sent, the processes meet (`Peers.meet`): one that has run out of memory says so at the next
of these meetings, whichever it is, and all give the step up at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor

from quire.data.batch import Batch
from quire.errors import InputError
from quire.train.blocks import rehearse, separate_blocks
from quire.train.checkpoints import Later
from quire.train.groups import Group
from quire.train.processes import processes
from quire.train.task import Task

STEPS = ("terms", "represent")
"""What a training step calls of a task."""
CALLS = ("_forward_pre_hooks", "_forward_hooks")
"""Where a module keeps what is called when it computes."""


class Piece(Group):
    """What this process has of one parameter, in place of a run of whole ones."""

    split = True

    def __init__(
        self,
        name: str,
        part: DTensor,
        *,
        decays: bool,
        step_factor: float,
        joins: int,
        counted_as: str,
    ) -> None:
        self.names, self.parameters = [name], [part]  # type: ignore[list-item]
        self.decays, self.step_factor, self.joins = decays, step_factor, joins
        self.counted_as = counted_as
        self.active = True
        self.part = part
        local = own(part)
        self.shape = local.shape
        self.flat = local.view(-1)
        self.grad = torch.zeros_like(self.flat)
        part.grad = self.named(self.grad)[name]

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        return {self.names[0]: part_of(flat.view(self.shape), self.part)}

    def loosen(self) -> None:
        """FSDP adds to the gradient that is there."""
        self.grad.zero_()

    def gather(self) -> None:
        pass

    def release(self) -> None:
        pass  # `Shards.release` does it for all


def own(part: DTensor) -> Tensor:
    """What this process has of it: the memory itself."""
    with torch.no_grad():
        return part.to_local()


def whole(part: DTensor) -> Tensor:
    """What all processes have of it, put together by all of them."""
    with torch.no_grad():
        return part.full_tensor()


def part_of(local: Tensor, like: DTensor) -> DTensor:
    """A tensor of which this process has `local`, split as `like` is."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def make_pieces(
    parameters: Mapping[str, nn.Parameter], *, decays: bool, step_factor: float, joins: int = 0
) -> list[Group]:
    """A group of parameters with the same rules, parameter by parameter; what is not split in one."""
    rules: dict[str, Any] = {"decays": decays, "step_factor": step_factor, "joins": joins}
    first = next(iter(parameters))
    groups: list[Group] = [
        Piece(name, part, **rules, counted_as=first)
        for name, part in parameters.items()
        if isinstance(part, DTensor)
    ]
    rest = {name: part for name, part in parameters.items() if not isinstance(part, DTensor)}
    if rest:
        groups.append(Group(rest, **rules))
        groups[-1].counted_as = first
    return groups


class Shards:
    """A task whose parameters are split, until `release`."""

    make_pieces = staticmethod(make_pieces)

    def __init__(self, task: Task, device: torch.device, batch: Batch) -> None:
        """`batch` is of few rows, to see what a step does with the modules of the task."""
        check_shardable(task)
        self.device, self.number = device, processes()[0]
        single = {parameter for parameter in task.parameters() if parameter.dim() == 0}
        before = dict(task.named_parameters())
        blocks = separate_blocks(task, lambda: rehearse(task, batch))
        self._before = [_Module(module) for module in task.modules()]
        mesh = init_device_mesh(device.type, (processes()[1],))
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True, ignored_params=single)
        fully_shard(task, mesh=mesh, reshard_after_forward=False, ignored_params=single)
        self.blocks = [block for block in blocks if isinstance(block, FSDPModule)]
        assert isinstance(task, FSDPModule)
        self.modules: list[FSDPModule] = [task, *self.blocks]
        for module in self.modules:
            module.set_gradient_divide_factor(1.0)  # sums, as everywhere
            module.set_force_sum_reduction_for_comms(True)
            module.unshard()  # once, so that FSDP has hooked in wherever it will
            module.reshard()
        represent = task.represent
        # FSDP hooks into what a step returns, so this must not be a view of something else.
        vars(task)["represent"] = lambda batch: represent(batch).clone()
        for name in STEPS:
            register_fsdp_forward_method(task, name)
        for each in self._before:
            each.note_what_is_new()
        self.parts = {name: p for name, p in task.named_parameters() if isinstance(p, DTensor)}
        self.originals = {name: parameter for name, parameter in before.items() if name in self.parts}
        for parameter in self.originals.values():
            parameter.data = parameter.data.new_empty(0)

    def meet_before_sending(self, meet: Callable[[], object]) -> None:
        """From here on nothing is put together or added up before `meet` has returned in all processes."""
        for module in self.modules:
            module.set_custom_all_gather(_AllGather(meet))
            module.set_custom_reduce_scatter(_ReduceScatter(meet))

    def give_up(self) -> None:
        """End a step that has failed halfway, in all processes at the same place: gradients that were not
        added up yet are forgotten, and what was put together is let go."""
        states = [module._get_fsdp_state() for module in self.modules]
        for state in states:
            group = state._fsdp_param_group
            for part in group.fsdp_params if group else []:
                part.unsharded_accumulated_grad = None
                if hasattr(part, "_unsharded_param"):
                    part._unsharded_param.grad = None
        root = states[0]
        root._state_ctx.iter_forward_root = None
        root._root_post_backward_final_callback()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All weights put together, for what not all processes do equally often; FSDP looks away, as it would
        expect them to."""
        for module in self.modules:
            module.unshard()
        for each in self._before:
            each.pause()
        try:
            yield
        finally:
            for each in self._before:
                each.resume()
            for module in self.modules:
                module.reshard()

    def add(self, number: float) -> float:
        """The sum of what every process has of a number."""
        total = torch.tensor(number, dtype=torch.float64, device=self.device)
        distributed.all_reduce(total)
        return float(total)

    def counted(self, groups: Sequence[Group]) -> list[Group]:
        """What of all processes together is everything once."""
        return [group for group in groups if group.split or not self.number]

    def norm(self, groups: Sequence[Group], norms: Sequence[Tensor]) -> Tensor:
        """√Σ ‖group‖² over all processes."""
        counted = [norm for group, norm in zip(groups, norms, strict=True) if group.split or not self.number]
        total = torch.stack(counted or [torch.zeros_like(norms[0])]).double().square().sum()
        distributed.all_reduce(total)
        return total.sqrt().to(norms[0].dtype)

    @torch.no_grad()
    def release(self) -> None:
        """Leave the task as it was before, with the weights it has now; all processes together."""
        for module in self._before:
            module.restore()
        for name, part in self.parts.items():
            self.originals[name].data = whole(part)
        self._before, self.modules, self.blocks = [], [], []

    # -- Checkpoints ---------------------------------------------------------------------------

    @contextmanager
    def gathering(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> Iterator[Mapping[str, Any]]:
        """The tensors of a checkpoint, those that are split put together one after the other, when the writer
        in the first process asks for the next. Putting together takes all processes, so at the end of the
        with-block the rest is done whether anybody wants it or not."""
        gathering = Gathering(tensors)
        try:
            yield gathering.tensors
        finally:
            gathering.rest()

    def keep(self, name: str, key: str, value: Tensor) -> Tensor:
        """What this process keeps of a tensor of a checkpoint: its part of everything that is split."""
        if name.startswith("optimiser-"):
            key = key.partition(":")[2]
        elif name not in ("weights", "best", "final", "average"):
            return value
        part = self.parts.get(key)
        if part is None or part.shape != value.shape:
            return value
        number, count = processes()
        chunks = value.chunk(count)  # as FSDP does it: the last have fewer slices or none
        mine = chunks[number] if number < len(chunks) else value[:0]
        return part_of(mine.to(self.device, copy=True).contiguous(), part)


class Gathering:
    """See `Shards.gathering`."""

    def __init__(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._parts = [v for values in tensors.values() for v in values.values() if isinstance(v, DTensor)]
        self._done = 0
        numbers = iter(range(len(self._parts)))
        self.tensors: dict[str, Mapping[str, Tensor | Later]] = {
            name: {
                key: self._later(next(numbers), value) if isinstance(value, DTensor) else value
                for key, value in values.items()
            }
            for name, values in tensors.items()
        }

    def _later(self, number: int, value: DTensor) -> Later:
        return Later(tuple(value.shape), value.dtype, lambda: self._fetch(number))

    def _fetch(self, number: int) -> Tensor:
        if number != self._done:
            raise AssertionError(f"tensor {number} of a checkpoint asked for when {self._done} was due")
        self._done += 1
        return whole(self._parts[number])

    def rest(self) -> None:
        """What was not asked for, so that nobody waits."""
        while self._done < len(self._parts):
            self._fetch(self._done)


# -- What is sent ----------------------------------------------------------------------------------


class _Meeting:
    """Sends what it is given once all processes have come so far."""

    def __init__(self, meet: Callable[[], object]) -> None:
        self.meet = meet

    def __call__(self, *given: Any, **options: Any) -> Any:
        self.meet()
        return super().__call__(*given, **options)  # type: ignore[misc]


class _AllGather(_Meeting, DefaultAllGather): ...


class _ReduceScatter(_Meeting, DefaultReduceScatter): ...


# -- Modules ---------------------------------------------------------------------------------------


def check_shardable(task: nn.Module) -> None:
    """Refuse weights that FSDP would mistake for others: those that a module computes when it is asked for
    its parameter, as one with adapters does."""
    for where, module in task.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and hasattr(type(module), name):
                raise InputError(
                    f"--parallel.shard with '{where}.{name}', which is computed from other parameters",
                    expected="parameters that are used as they are",
                    fix="leave it out; with --tune.lora little besides the frozen weights takes memory",
                )


class _Module:
    """A module as it was before FSDP came in, so that it can be so again."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.kind = module, type(module)
        self.parameters = dict(module._parameters)
        self.attributes = set(vars(module))
        self.entries = {k: set(v) for k, v in vars(module).items() if isinstance(v, dict)}

    def note_what_is_new(self) -> None:
        now = vars(self.module)
        self.attributes = set(now) - self.attributes
        self.entries = {name: set(now[name]) - before for name, before in self.entries.items()}
        self.paused: dict[str, dict[Any, Any]] = {}

    def pause(self) -> None:
        """Take out what FSDP does when the module computes."""
        now = vars(self.module)
        self.paused = {name: {key: now[name].pop(key) for key in self.entries[name]} for name in CALLS}
        self.paused[""] = {name: now.pop(name) for name in self.attributes.intersection(STEPS)}

    def resume(self) -> None:
        now = vars(self.module)
        now.update(self.paused.pop(""))
        for name, taken in self.paused.items():
            now[name].update(taken)
            for key in taken:
                now[name].move_to_end(key, last=False)

    def restore(self) -> None:
        module = self.module
        module.__class__ = self.kind
        _module_state_mapping.pop(module, None)
        for name, new in self.entries.items():
            for entry in new:
                vars(module)[name].pop(entry, None)
        for name in self.attributes:
            vars(module).pop(name, None)
        for name, parameter in self.parameters.items():
            setattr(module, name, parameter)  # as FSDP does it: some modules keep a list of them besides
