"""`quire explain MODEL`."""

from __future__ import annotations

import json as json_text
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from quire.cli.objects import is_object, typed_object
from quire.cli.parse import parse
from quire.cli.paths import require_run
from quire.cli.show import print_json, print_table
from quire.errors import InputError
from quire.recipes.outlines import by_name, empty, of_run, read_shape

if TYPE_CHECKING:
    from torch import nn

    from quire.doctor.costs.budget import Fit
    from quire.doctor.costs.table import Costs

SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


@dataclass(frozen=True)
class ExplainOptions:
    """What a model costs before it is trained: shapes, parameters, FLOPs, memory and time, by layer.

    quire explain resnet50 --input 3,224,224 --batch 32 --memory 16GiB
    quire explain ./net.py:make_model --input 128:int64
    """

    model: Positional[str]
    """A network such as resnet50, a family such as gpt, a run folder, or package.module:make_model, also
    ./file.py:make_model."""
    input: tuple[str, ...] = ()
    """Shape of one sample, such as 3,224,224, for each input; a type may follow: 128:int64. A single number
    means tokens where the model has an embedding. A run has its own; without one, a family is shown by a
    small example, and with one by its defaults."""
    batch: int = 1
    """Samples in a step."""
    set: tuple[str, ...] = ()
    """Options of a network or family, such as num_classes=10 or hidden=[64,64]."""
    loss: Literal["sum", "cross-entropy", "squared-error"] = "sum"
    """What is made of the output."""
    optimiser: Literal["adam", "adamw", "momentum", "sgd"] = "adam"
    memory: str | None = None
    """Say how large a batch may be in this much, such as 16GiB."""
    device: str | None = None
    """Where the step would be taken; without it where the model is, or the GPU if there is one."""
    time: bool = True
    """Measure this machine for a second to predict the time of a step."""
    json: bool = False
    """Print one object."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise InputError(f"--batch {self.batch}", expected="at least 1", fix="--batch 32")
        for text in self.input:
            read_shape(text)
        for text in self.set:
            if "=" not in text:
                raise InputError(f"--set {text}", expected="NAME=VALUE", fix="--set num_classes=10")
        if self.memory is not None:
            parse_memory(self.memory)


def parse_memory(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = match[2].upper() if match else ""
    if match is None or (unit not in SIZES and f"{unit}B" not in SIZES):
        raise InputError(f"--memory {text}", expected="a size such as 16GiB or 800MB", fix="--memory 16GiB")
    size = float(match[1]) * SIZES.get(unit, SIZES.get(f"{unit}B", 1))
    if not math.isfinite(size):
        raise InputError("--memory with a number of hundreds of digits", expected="a size such as 16GiB")
    return int(size)


def main(words: Sequence[str]) -> int:
    options = parse(ExplainOptions, words, prog="quire explain")
    model, inputs = find(options)
    from quire.doctor.costs.account import explain
    from quire.doctor.costs.budget import largest_batch
    from quire.doctor.costs.machine import measure_machine
    from quire.train.arguments import resolve_device

    if inputs is None:
        raise InputError(
            f"no shape of an input for {options.model}",
            expected="sizes of one sample, without the batch",
            fix=f"quire explain {options.model} --input 3,224,224",
        )
    device = None if options.device is None else resolve_device(options.device)
    settings: dict[str, Any] = {"loss": options.loss, "optimiser": options.optimiser, "device": device}
    costs = explain(model, inputs, **settings)
    if options.time:
        machine = measure_machine(costs.device, {operation.dtype for operation in costs.operations})
        costs = costs.on(machine)
    fit = None
    if options.memory is not None:
        fit = largest_batch(model, inputs, parse_memory(options.memory), **settings)
    show(options, costs, fit)
    return 0


def show(options: ExplainOptions, costs: Costs, fit: Fit | None) -> None:
    if options.json:
        print_json(as_plain(options, costs, fit))
        return
    columns, rows = costs.table()
    print_table(columns, rows)
    print()
    for name, text in costs.totals():
        print(f"{name.ljust(12)} {text}")
    if fit is not None:
        print(fit)


def as_plain(options: ExplainOptions, costs: Costs, fit: Fit | None) -> dict[str, Any]:
    sizes = ("parameters", "trained", "forward_flops", "backward_flops", "parameter_bytes", "buffer_bytes")
    more = ("input_bytes", "gradient_bytes", "optimiser_bytes", "activation_bytes", "peak_bytes")
    attention = ("attention_flops", "attention_bytes", "seconds", "optimiser", "device", "notes")
    found: dict[str, Any] = {"model": options.model, "batch": options.batch}
    found |= {name: getattr(costs, name) for name in (*sizes, *more, *attention)}
    found["peaks"] = {phase: {"bytes": size, "layer": layer} for phase, (size, layer) in costs.peaks.items()}
    found["layers"] = [vars(layer) for layer in costs.layers]
    if fit is not None:
        found["fit"] = vars(fit)
    return found


def find(options: ExplainOptions) -> tuple[nn.Module, Any]:
    """The model, and the inputs given or its own; None where there are neither."""
    word, given = options.model, [read_shape(text) for text in options.input]
    if is_object(word):
        refuse_options(options)
        model = from_object(word)
        return model, empty(given, model, options.batch) if given else None
    if Path(word).is_dir() or "/" in word:
        refuse_options(options)
        model, own = from_run(Path(word), options.batch)
        return model, empty(given, model, options.batch) if given else own
    named = {name: read_value(value) for name, _, value in (text.partition("=") for text in options.set)}
    return by_name(word, given, options.batch, named)


def refuse_options(options: ExplainOptions) -> None:
    if options.set:
        raise InputError(
            f"--set {options.set[0]} for {options.model}",
            expected="options for a network or family by its name alone",
            fix="leave --set out",
        )


def from_object(word: str) -> nn.Module:
    from torch import nn

    found = typed_object(word)
    made = found() if callable(found) and not isinstance(found, nn.Module) else found
    if not isinstance(made, nn.Module):
        raise InputError(
            f"{word} gives {type(made).__name__}",
            expected="a torch.nn.Module, or a function without arguments that returns one",
            fix="write a function that builds the model and name it here",
        )
    return made


def read_value(text: str) -> Any:
    """A JSON value, or the word itself."""
    try:
        return json_text.loads(text)
    except ValueError:
        return text


def from_run(folder: Path, batch: int) -> tuple[nn.Module, Any]:
    require_run(folder)
    from quire.runs import load

    run = load(folder)
    return of_run(run.task, run.preparation, batch, str(run.config["recipe"]))
