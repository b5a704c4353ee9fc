"""Whether one batch can be learned by heart, and whether everything fits into memory."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from quire.doctor.case import Case, Pair
from quire.doctor.costs.table import as_bytes
from quire.doctor.findings import CHECKS, Finding

ROWS = 8
STEPS = 60
SECONDS = 1.5
LEAST_STEPS = 20
STEP_SIZES = (1e-3, 1e-2)
ENOUGH = 0.8
"""Of the first loss: what has come down to this is being learned."""


@CHECKS.register("one-batch")
def one_batch(case: Case) -> Iterator[Finding]:
    """A model that cannot even learn a few rows by heart has a fault, and no lack of data or size."""
    loss = case.step.loss
    if not case.trains or loss is None or not bool(loss.isfinite()):
        return
    pair = case.first.head(ROWS)
    best, started, taken = math.inf, math.inf, 0
    for step_size in STEP_SIZES:
        values = learn(case, pair, step_size)
        if values:
            started, taken = values[0], max(taken, len(values))
            best = min(best, min(values))
        if best < ENOUGH * started or best < 1e-3:
            return
    # What is already learned, or has a floor of its own (a likelihood), may well stay where it is.
    if taken >= LEAST_STEPS and best > started - 0.02 * abs(started) and abs(started) > 1e-3:
        yield Finding(
            "warning",
            "one batch cannot be learned by heart",
            "model",
            f"{taken} steps of Adam on {pair.rows or 'some'} rows take the loss from {started:.4g} to "
            f"{best:.4g}",
            "look for targets that do not belong to their inputs, a loss that cannot fall, or layers that "
            "pass nothing on",
        )


def learn(case: Case, pair: Pair, step_size: float) -> list[float]:
    """The loss before each of a few steps."""
    model = copy.deepcopy(case.model)
    model.zero_grad(set_to_none=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(parameters, lr=step_size)
    values: list[float] = []
    until = time.perf_counter() + SECONDS
    with case.drawing(), torch.enable_grad():
        for step in range(STEPS):
            if step >= LEAST_STEPS and time.perf_counter() > until:
                break
            try:
                value = case.loss_of(model, pair)
                optimiser.zero_grad()
                value.backward()
            except Exception:  # rows that cannot be cut like this
                return []
            values.append(float(value.detach()))
            if not math.isfinite(values[-1]) or time.perf_counter() > until + 2 * SECONDS:
                return values[:-1]
            if values[-1] < ENOUGH * values[0]:
                break
            optimiser.step()
    return values


@CHECKS.register("memory")
def memory(case: Case) -> Iterator[Finding]:
    free = free_bytes(case.device)
    if free is None:
        return
    held = sum(p.nbytes for p in case.original.parameters())
    trained = sum(p.nbytes for p in case.original.parameters() if p.requires_grad)
    needed = trained * 3  # gradients, and two moments of Adam; the weights are there already
    if needed > free:
        yield Finding(
            "warning",
            "weights, gradients and Adam's moments do not fit into memory",
            "model",
            f"{as_bytes(held + needed)} in all, and {as_bytes(free)} are free beside the weights",
            "train fewer parameters (LoRA), in half precision, or on several devices",
        )
    pair, rows = case.batches[0], case.rows
    if rows and pair.rows:
        each = sum(v.nbytes / len(v) for v in pair.inputs if isinstance(v, Tensor) and v.ndim)
        if rows * each > free:
            yield Finding(
                "note",
                "the data do not fit into memory",
                "inputs",
                f"{rows:,} rows of {each:,.0f} bytes are {as_bytes(rows * each)}; {as_bytes(free)} are free",
                "keep reading them batch by batch, and never list(loader)",
            )


def free_bytes(device: torch.device) -> float | None:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return float(found[0][1]) * 1024 if found else None
