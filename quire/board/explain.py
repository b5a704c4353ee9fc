"""What a model costs, by layer, for the page that explains: the worker's part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from quire.doctor.costs.account import explain
from quire.errors import InputError
from quire.models import BUILDERS, MODELS
from quire.recipes.outlines import IMAGENET, USUAL, Shape, by_name, empty, of_run, read_shape
from quire.runs import load

BATCH = 1024
NUMBERS = 1 << 28
"""Numbers that a batch may have: shapes alone cost nothing, but some models fall back on real ones."""


def models() -> dict[str, list[str]]:
    """Names to pick from, those of published networks and those of families."""
    return {"networks": sorted(BUILDERS), "families": sorted(set(MODELS) - set(BUILDERS))}


def costs(model: str, input: str, batch: int) -> dict[str, Any]:
    """What a model of that name costs; its usual input where none is given."""
    given, size = shapes(input), checked_batch(batch)
    if not given and model in BUILDERS:
        given = [Shape(USUAL.get(model, IMAGENET))]
    built, inputs = by_name(model, given, size)
    return described(built, inputs or ())


def costs_of_run(folder: str, input: str, batch: int) -> dict[str, Any]:
    """What the model of a run costs; with inputs as its data where none are given."""
    given, size = shapes(input), checked_batch(batch)
    run = load(Path(folder))
    model, own = of_run(run.task, run.preparation, size, str(run.config["recipe"]))
    return described(model, empty(given, model, size) if given else own)


def checked_batch(batch: int) -> int:
    if not 1 <= batch <= BATCH:
        raise InputError(f"a batch of {batch}", expected=f"from 1 to {BATCH} samples")
    return batch


def described(model: nn.Module, inputs: Sequence[Tensor]) -> dict[str, Any]:
    """The table and the totals of `quire explain`, and the layers as numbers."""
    check_size(inputs)
    found = explain(model, inputs)
    columns, rows = found.table()
    return {
        "columns": columns,
        "rows": rows,
        "totals": found.totals(),
        "notes": list(found.notes),
        "input": ["×".join(map(str, part.shape[1:])) for part in inputs if part.dim() > 1],
        "layers": [
            {
                "name": layer.name,
                "flops": layer.forward_flops + layer.backward_flops,
                "parameters": layer.parameters,
                "activations": layer.activation_bytes,
                "field": None if layer.receptive_field is None else max(layer.receptive_field),
            }
            for layer in found.layers
        ],
    }


def shapes(text: str) -> list[Shape]:
    """ "3,224,224" is one input, "10; 12" are two; nothing where nothing was written."""
    return [read_shape(part, "the input") for part in map(str.strip, text.split(";")) if part]


def check_size(inputs: Sequence[Tensor]) -> None:
    largest = max(tensor.numel() for tensor in inputs)
    if largest > NUMBERS:
        raise InputError(
            f"{largest:,} numbers in a batch",
            expected=f"at most {NUMBERS:,}",
            fix="take fewer samples in a step, or smaller ones",
        )
