"""Being one of several processes, from the beginning to the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from quire.train.lookout import LostTouch, leave_word

PATIENCE = timedelta(hours=1)
"""How long a process waits for another that is alive but silent, such as one that writes a report. Whether it
is alive is for whoever started it to see."""


@dataclass(frozen=True)
class Member:
    """One of several processes: its number among all, and among those of its machine."""

    number: int
    count: int
    local_number: int
    local_count: int
    meeting: str | None = None
    """URL of the file that they find each other by; None where the environment says how."""


def membership() -> Member | None:
    """What `torchrun` or the like has started this process as; None where it is the only one."""
    said = os.environ
    if "RANK" not in said or int(said.get("WORLD_SIZE", "1")) == 1:
        return None
    number, count = int(said["RANK"]), int(said["WORLD_SIZE"])
    return Member(
        number, count, int(said.get("LOCAL_RANK", number)), int(said.get("LOCAL_WORLD_SIZE", count))
    )


@contextmanager
def join(device: torch.device, member: Member) -> Iterator[None]:
    """One of several within the with-block: NCCL between GPUs, gloo between CPUs and for messages."""
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    given: dict[str, Any] = {}
    if member.meeting is not None:
        given = {"init_method": member.meeting, "rank": member.number, "world_size": member.count}
    distributed.init_process_group(backend, timeout=PATIENCE, **given)
    try:
        yield
    except BaseException as problem:
        if not isinstance(problem, LostTouch):
            leave_word(problem)
        if device.type == "cpu":  # NCCL would wait for those that no longer answer
            distributed.destroy_process_group()
        raise
    distributed.destroy_process_group()
