"""Several processes that learn by statistics together: each goes through its own share of the rows, the sums
of all are added, and each makes the same update of the same state.

Processes are started by whoever wants several, such as `torchrun`, and joined by
`torch.distributed.init_process_group`. Without that there is one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from safetensors.torch import load, save
from torch import Tensor, distributed, nn

from quire.data.batch import SWEEP_NUMBERS, Batch, Data, TensorData
from quire.errors import InputError


def processes() -> tuple[int, int]:
    """The number of this process, and how many there are."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


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
