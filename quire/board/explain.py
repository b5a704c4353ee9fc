"""What a model costs, by layer, for the page that explains: the worker's part."""

from __future__ import annotations

import math
import re
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import Tensor, nn

from quire.doctor.costs.account import explain
from quire.errors import InputError, unknown_name
from quire.models import BUILDERS, MODELS, build_model

BATCH = 1024
NUMBERS = 1 << 28
"""Numbers that a batch may have: shapes alone cost nothing, but some models fall back on real ones."""

INPUTS = {"lenet5": (1, 32, 32)} | {f"resnet{depth}": (3, 32, 32) for depth in (20, 32, 44, 56)}
"""Of networks that were made for other images than ImageNet's."""


def models() -> dict[str, list[str]]:
    """Names to pick from, those of published networks and those of families."""
    return {"networks": sorted(BUILDERS), "families": sorted(set(MODELS) - set(BUILDERS))}


def costs(model: str, input: str, batch: int) -> dict[str, Any]:
    """The table and the totals of `quire explain`, and the layers as numbers."""
    if not 1 <= batch <= BATCH:
        raise InputError(f"a batch of {batch}", expected=f"from 1 to {BATCH} samples")
    built, example = build(model, shapes(input), batch)
    found = explain(built, example)
    columns, rows = found.table()
    return {
        "columns": columns,
        "rows": rows,
        "totals": found.totals(),
        "notes": list(found.notes),
        "input": ["×".join(map(str, part.shape[1:])) for part in example],
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


def shapes(text: str) -> list[tuple[int, ...]]:
    """ "3,224,224" is one input, "10; 12" are two; nothing where nothing was written."""
    found = []
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        if not re.fullmatch(r"[0-9]{1,9}([,x×][0-9]{1,9}){0,5}", part):
            raise InputError(
                f"the input {part[:40]!r}",
                expected="sizes of one sample",
                fix="write 3,224,224, or 128 for tokens",
            )
        found.append(tuple(int(size) for size in re.split("[,x×]", part)))
    return found


def build(name: str, given: list[tuple[int, ...]], batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model without numbers, and inputs for it: those given, or those of its small example."""
    if name not in BUILDERS and name not in MODELS:
        raise unknown_name("model", name, {*BUILDERS, *MODELS})
    with torch.device("meta"):
        if name in BUILDERS:
            model, example, words = BUILDERS[name](), None, 0
            given = given or [INPUTS.get(name, (3, 224, 224))]
        else:
            known, config = MODELS[name], dict(MODELS[name].example.config)
            if given:  # the example's other options belong to its own small input
                bare = (
                    f for f in fields(known.config) if f.default is MISSING and f.default_factory is MISSING
                )
                config = {field.name: config[field.name] for field in bare if field.name in config}
            model, example = build_model({"model": name, **config}), known.example.input_shape
            words = sum(name in config for name in ("vocab_size", "source_vocab", "target_vocab"))
    sizes = given or [example or ()] * max(words, 1)
    if max(math.prod(size) for size in sizes) * batch > NUMBERS:
        raise InputError(
            f"inputs of {sizes[0]} in batches of {batch}", expected=f"at most {NUMBERS:,} numbers"
        )
    reads = words > 0 or any(isinstance(module, nn.Embedding) for module in model.modules())
    kinds = [torch.int64 if reads and len(size) == 1 else torch.float32 for size in sizes]
    return model, tuple(
        torch.empty((batch, *size), dtype=kind, device="meta")
        for size, kind in zip(sizes, kinds, strict=True)
    )
