"""Models to be explained, and inputs that have shapes and no numbers: by name, or of a run.

    model, inputs = by_name("resnet18", [Shape((3, 224, 224))], batch=32)
    model, inputs = of_run(run.task, run.preparation, batch=32)

N rows of a batch · C, H, W channels, height and width of an image · L tokens of a text · D features of a row
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.errors import InputError, unknown_name

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quire.data.loaded import Prepares

    Outline = tuple[nn.Module, tuple[Tensor, ...]]

TYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "bool")
VOCABULARIES = ("vocab_size", "source_vocab", "target_vocab")
"""Options of families that read tokens, one for each text they read."""
USUAL = {"lenet5": (1, 32, 32)} | {f"resnet{depth}": (3, 32, 32) for depth in (20, 32, 44, 56)}
"""Images of the networks that were not made for ImageNet's."""
IMAGENET = (3, 224, 224)
MOST = 1 << 40
"""Numbers of one sample; no machine holds more."""


class Shape(NamedTuple):
    """Sizes of one sample, and the name of a type; empty for the one that the model reads."""

    sizes: tuple[int, ...]
    type: str = ""


def read_shape(text: str, where: str = "--input") -> Shape:
    """ "3,224,224", "3x224x224" or "128:int64"."""
    sizes, _, kind = text.partition(":")
    if not re.fullmatch(r"\d{1,9}([,x×]\d{1,9}){0,5}|", sizes, re.ASCII) or (kind and kind not in TYPES):
        raise InputError(
            f"{where} {text[:40]}",
            expected=f"sizes of one sample, then perhaps one of {', '.join(TYPES)}",
            fix=f"{where} 3,224,224 or {where} 128:int64",
        )
    found = tuple(int(size) for size in re.split("[,x×]", sizes) if size)
    if math.prod(found) > MOST:
        raise InputError(f"{where} {text[:40]}", expected=f"at most {MOST:,} numbers in one sample")
    return Shape(found, kind)


def by_name(
    name: str, given: Sequence[Shape], batch: int, options: Mapping[str, Any] | None = None
) -> tuple[nn.Module, tuple[Tensor, ...] | None]:
    """A network such as resnet50, or a family such as gpt, without numbers.

    Its inputs are those given. A family has inputs of its own small example besides, a network none.
    """
    import torch

    from quire.models import BUILDERS, MODELS, build_model

    if name not in BUILDERS and name not in MODELS:
        raise unknown_name("model", name, {*BUILDERS, *MODELS})
    with torch.device("meta"):
        if name in BUILDERS:
            model = BUILDERS[name](**(options or {}))
            return model, empty(given, model, batch) if given else None
        known, config = MODELS[name], dict(MODELS[name].example.config)
        if given:  # the example's other options belong to its own small input
            config = {key: config[key] for key in _required(known.config) if key in config}
        config |= options or {}
        model = build_model({"model": name, **config})
    texts = sum(name in config for name in VOCABULARIES)
    own = Shape(known.example.input_shape, "int64" if texts else "float32")
    return model, empty(given or [own] * max(texts, 1), model, batch)


def of_run(task: Any, preparation: Prepares, batch: int, recipe: str = "") -> Outline:
    """The network of a run, and a batch in the shape of its data."""
    from torch import nn

    model = getattr(task, "model", None)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"a run of '{recipe}' has no single network",
            expected="a run with one model",
            fix="name one of its networks: quire explain NAME",
        )
    inputs = list(_prepared(preparation))
    if getattr(getattr(model, "config", None), "classes", 0):
        inputs.append(Shape((), "int64"))  # a conditional model is told the class of each row
    return model, empty(inputs, model, batch)


def empty(given: Sequence[Shape], model: nn.Module, batch: int) -> tuple[Tensor, ...]:
    """Inputs without numbers. A single size means tokens where the model has an embedding."""
    import torch
    from torch import nn

    reads = any(isinstance(module, nn.Embedding) for module in model.modules())
    kinds = [kind or ("int64" if reads and len(sizes) == 1 else "float32") for sizes, kind in given]
    return tuple(
        torch.empty((batch, *shape.sizes), dtype=getattr(torch, kind), device="meta")
        for shape, kind in zip(given, kinds, strict=True)
    )


def _required(config: type[Any]) -> Iterator[str]:
    """Fields without a default."""
    for field in fields(config):
        if field.default is MISSING and field.default_factory is MISSING:
            yield field.name


def _prepared(preparation: Prepares) -> Iterator[Shape]:
    """What a preparation hands to a model: (C, H, W), (L,) or (D,)."""
    from quire.data.images import ImagePreparation
    from quire.data.text import TextPreparation

    if isinstance(preparation, ImagePreparation):
        yield Shape((preparation.channels, *preparation.size), "float32")
    elif isinstance(preparation, TextPreparation):
        yield Shape((preparation.length,), "int64")
        if preparation.target_tokeniser is not None:
            yield Shape((preparation.target_length,), "int64")
    else:
        yield Shape((len(preparation.feature_names),), "float32")
