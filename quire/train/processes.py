"""Several processes that learn together: what they tell each other.

In learning by statistics each goes through its own share of the rows, the sums of all are added, and each
makes the same update of the same state. `quire.train.peers` does the like for the steps of descent.

Processes are started by whoever wants several, such as `quire train --nproc` or `torchrun`, and joined by
`quire.train.member` or by `torch.distributed.init_process_group`. Without that there is one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor, distributed, nn

from quire.data.batch import SWEEP_NUMBERS, Batch, Data, TensorData
from quire.errors import InputError, QuireError
from quire.train.checkpoints import Checkpoint

T = TypeVar("T")

_alone: ContextVar[bool] = ContextVar("alone", default=False)


def processes() -> tuple[int, int]:
    """The number of this process, and how many there are."""
    return (distributed.get_rank(), distributed.get_world_size()) if joined() else (0, 1)


def joined() -> bool:
    """Whether this process has joined others, or would: one that has been started as the only one may too."""
    return distributed.is_available() and distributed.is_initialized() and not _alone.get()


@contextmanager
def alone() -> Iterator[None]:
    """What happens in the with-block is this process's own affair: it trains and judges as if there were no
    other."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


# -- Messages --------------------------------------------------------------------------------------


def from_all(message: T) -> list[T]:
    """The messages of all processes, in each of them. Messages are made by these processes, never read from a
    file."""
    found: list[Any] = [None] * processes()[1]
    distributed.all_gather_object(found, message)
    return found


def from_first(message: T) -> T:
    """The message of the first process, in each of them."""
    found = [message]
    distributed.broadcast_object_list(found, 0)
    return found[0]


def all_do(work: Callable[[], T]) -> T:
    """Each process does it; where one fails, all raise the error of the first that did."""
    if processes()[1] == 1:
        return work()
    result: T | None = None
    problem: Exception | None = None
    try:
        result = work()
    except Exception as error:
        problem = error
    problems = from_all(_portable(problem))
    if any(problems):
        number = next(i for i, found in enumerate(problems) if found is not None)
        found = problem if number == processes()[0] else _heard(problems[number])
        assert found is not None
        raise found
    return result  # type: ignore[return-value]


def first_does(work: Callable[[], T]) -> T:
    """The first process does it on its own, and all have the result or the error."""
    number, count = processes()
    if count == 1:
        return work()
    result: T | None = None
    problem: Exception | None = None
    if number == 0:
        try:
            with alone():
                result = work()
        except Exception as error:
            problem = error
    result, told = from_first((result, _portable(problem)))
    if told is not None:
        raise problem or _heard(told)
    return result  # type: ignore[return-value]


def _portable(problem: Exception | None) -> QuireError | None:
    """An error that another process can raise: ours as it is, any other by its words."""
    if problem is None or isinstance(problem, QuireError):
        return problem
    return QuireError(f"process {processes()[0]}: {type(problem).__name__}: {problem}")


def _heard(problem: QuireError | None) -> QuireError:
    """Marked as another process's, which says it itself."""
    assert problem is not None
    problem.said_elsewhere = True  # type: ignore[attr-defined]
    return problem


def moved(value: Any, device: torch.device | str) -> Any:
    """Tensors, and whatever holds tensors, on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if hasattr(value, "__dict__"):
        other = copy.copy(value)
        for name, item in vars(value).items():
            object.__setattr__(other, name, moved(item, device))
        return other
    return value


# -- Tensors ---------------------------------------------------------------------------------------


def give_to_all(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Overwrite the tensors of all processes by those of the first, whatever their type."""
    for tensor in tensors:
        content = tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
        distributed.broadcast(content, 0)
        if processes()[0] and content.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(content.view(tensor.dtype).view(tensor.shape))


Keep = Callable[[str, str, Tensor], Tensor]
"""What a process keeps of a tensor of a checkpoint, by the names of set and tensor."""


def give_checkpoint_to_all(
    checkpoint: Checkpoint | None, device: torch.device, keep: Keep | None = None
) -> Checkpoint | None:
    """The checkpoint that the first process has read; the others may not even see its disk. Tensors are sent
    one by one, so that nobody but the first ever has more than what it is to `keep`."""
    outline = None
    if checkpoint is not None:
        shapes = {
            name: {key: (tuple(value.shape), value.dtype) for key, value in tensors.items()}
            for name, tensors in checkpoint.tensors.items()
        }
        outline = checkpoint.step, dict(checkpoint.documents), shapes
    outline = from_first(outline)
    if outline is None:
        return None
    step, documents, shapes = outline
    kept: dict[str, dict[str, Tensor]] = {}
    for name, entries in shapes.items():
        kept[name] = {}
        for key, (shape, dtype) in entries.items():
            value = torch.empty(shape, dtype=dtype) if checkpoint is None else checkpoint.tensors[name][key]
            give_to_all([value], device)
            kept[name][key] = value if keep is None else keep(name, key, value)
    return Checkpoint(step, kept, documents)


def rows_of_all(rows: Tensor) -> Tensor:
    """Rows of all processes one below the other; how many each has may differ."""
    counts = torch.zeros(processes()[1], dtype=torch.int64, device=rows.device)
    counts[processes()[0]] = len(rows)
    distributed.all_reduce(counts)
    sizes = counts.tolist()
    whole = torch.zeros(sum(sizes), *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    own = whole.split(sizes)[processes()[0]]
    own.copy_(rows)
    if rows.dtype == torch.bool:
        return _add(whole.to(torch.uint8)).bool()
    return _add(whole)


def _add(tensor: Tensor) -> Tensor:
    distributed.all_reduce(tensor)
    return tensor


# -- Learning by statistics ------------------------------------------------------------------------


def own_rows(data: Data, numbers: int = SWEEP_NUMBERS) -> Iterator[Batch]:
    """This process's share of the rows, in their order: what lies in memory as one batch that copies nothing,
    anything else in batches of about `numbers` inputs."""
    number, count = processes()
    if len(data) < count:
        raise InputError(
            f"{len(data)} rows for {count} processes",
            expected="at least one row for each",
            fix=f"start at most {len(data)} processes",
        )
    rows = max(1, numbers // max(data.row_size, 1))
    batches = 1 if isinstance(data, TensorData) else min(-(-len(data) // (count * rows)), len(data) // count)
    # All batches are of the same size, as nearly as can be, so that a row's number tells its batch.
    for part in range(number * batches, (number + 1) * batches):
        first, last = (-(-len(data) * edge // (count * batches)) for edge in (part, part + 1))
        if isinstance(data, TensorData):
            fields = {name: value[first:last] for name, value in data.fields.items()}
            yield Batch(fields, data.numbers[first:last], data.complete)
        else:
            yield from data.batches(torch.arange(first, last), last - first)


def add_over_processes(totals: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sums of all processes, in each of them."""
    found = {}
    for name in sorted(totals):
        found[name] = totals[name].clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(found[name])
    return found


def share_state(module: nn.Module, numbers: list[int], device: torch.device) -> list[int]:
    """Give all processes the buffers and the numbers of the first."""
    state = save({name: value.clone().contiguous() for name, value in module.state_dict().items()})
    sizes = torch.tensor([len(state), *numbers], device=device)
    distributed.broadcast(sizes, 0)
    length, *numbers = sizes.tolist()
    first = processes()[0] == 0
    content = torch.frombuffer(bytearray(state), dtype=torch.uint8) if first else torch.empty(length).byte()
    content = content.to(device)
    distributed.broadcast(content, 0)
    if not first:
        module.load_state_dict(load(content.cpu().numpy().tobytes()))
    return numbers
