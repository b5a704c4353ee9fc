"""Taking a trained network elsewhere: ONNX, or a torch.export program.

What is exported contains the preparation, so that as little as possible has to be done outside. For
tables it takes cells as numbers (the columns of training, categories as their numbers, dates in days since
the day that the metadata name, NaN for missing); for images it takes pixels 0 … 255 of the size that training
had, and a detector gives boxes after suppression; for text it takes tokens. Of two players the generator is
exported, which takes noise and class numbers. Names of columns, categories and classes travel in the file's
metadata.
"""

from __future__ import annotations

import io
import json
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.data.images import ImagePreparation
from quire.data.loaded import Prepares
from quire.data.preparation import Preparation
from quire.data.text import TextPreparation
from quire.errors import InputError, QuireError
from quire.files import write_bytes
from quire.tasks.adversarial import Adversarial
from quire.tasks.translation import Translation

if TYPE_CHECKING:
    from quire.runs import Run

Tensors = tuple[Tensor, ...]
ENDINGS = (".onnx", ".pt2")
ROWS = 8  # of the sample that the exported file is compared on
TOLERANCE = 1e-4
FINE, LARGE = 2**14, 1e30
"""Deviations between zero and the mean of a column, and a deviation, for which float32 is too coarse."""
EPOCH = date(1970, 1, 1)


class Exported(nn.Module):
    """Table cells (N, columns) or pixels (N, C, H, W) to predictions: preparation, model and head in one."""

    def __init__(self, run: Run, sample: Tensor) -> None:
        super().__init__()
        preparation = run.preparation
        self.prepare = preparation.module() if isinstance(preparation, Preparation) else nn.Identity()
        self.task = run.task
        with torch.no_grad():
            example = self.task.predict(self.prepare(sample))
        self.names = [name for name, value in example.items() if isinstance(value, Tensor)]

    def forward(self, inputs: Tensor) -> Tensors:
        predicted = self.task.predict(self.prepare(inputs))
        return tuple(predicted[name] for name in self.names)


class ExportedGenerator(nn.Module):
    """Noise (N, Z), and class numbers (N,) of a conditional one, to pixels 0 … 255, or to features in the
    units of their columns: categories as scores, dates in days since the column's origin."""

    scale: Tensor
    center: Tensor

    def __init__(self, run: Run) -> None:
        super().__init__()
        assert isinstance(run.task, Adversarial)
        self.generator, self.pixels = run.task.generator, run.task.inputs
        self.names = ["rows" if self.pixels is None else "images"]
        if isinstance(run.preparation, Preparation):
            prepared = run.preparation.module()
            for name in ("scale", "center"):
                self.register_buffer(name, getattr(prepared, name).float())

    def forward(self, noise: Tensor, label: Tensor | None = None) -> tuple[Tensor]:
        made = self.generator(noise, label)
        if self.pixels is not None:
            return (self.pixels.undo(made).clamp(0, 255),)
        return (made * self.scale + self.center,)


Module = Exported | ExportedGenerator


def sample_noise(task: Adversarial, rows: int) -> Tensors:
    noise = torch.randn(rows, task.latent, generator=torch.Generator().manual_seed(0))
    return (noise, torch.arange(rows) % task.classes) if task.classes else (noise,)


def sample_inputs(run: Run, rows: int = ROWS) -> Tensor:
    """Plausible inputs of the exported network."""
    if isinstance(run.preparation, ImagePreparation):
        return sample_pixels(run.preparation, rows)
    if isinstance(run.preparation, TextPreparation):
        generator = torch.Generator().manual_seed(0)
        shape = (rows, run.preparation.length)
        return torch.randint(run.preparation.tokeniser.vocab_size, shape, generator=generator)
    assert isinstance(run.preparation, Preparation)
    return sample_cells(run.preparation, rows)


def sample_pixels(preparation: ImagePreparation, rows: int) -> Tensor:
    """Coarse blots of the training images' mean and spread."""
    generator = torch.Generator().manual_seed(0)
    shape = (rows, preparation.channels, *preparation.size)
    noise = torch.randn(rows, preparation.channels, 5, 5, generator=generator)
    blots = nn.functional.interpolate(noise, shape[2:], mode="bilinear")
    mean, std = (torch.tensor(v).reshape(1, -1, 1, 1) for v in (preparation.mean, preparation.std))
    return (mean + 2 * std * blots).clamp(0, 255).round().to(torch.uint8)


def sample_cells(preparation: Preparation, rows: int) -> Tensor:
    """Plausible cells: around the training mean, every category, some missing."""
    generator = torch.Generator().manual_seed(0)
    columns = []
    for column in preparation.inputs:
        if column.labels is not None:
            values = torch.arange(rows) % len(column.labels.values)
            columns.append(values.double())
        else:
            noise = torch.randn(rows, generator=generator, dtype=torch.float64)
            columns.append(column.center + column.scale * noise)
        if column.missing:
            columns[-1][-1] = torch.nan
    # Cells in float32, as other programs have them, unless that would merge what the network tells apart.
    varied = [column for column in preparation.inputs if not column.constant]
    fine = any(abs(column.center) > FINE * column.scale or column.scale > LARGE for column in varied)
    return torch.stack(columns, 1).to(torch.float64 if fine else torch.float32)


def export_run(run: Run, path: Path) -> dict[str, Any]:
    """Make the file in memory, read it there, compare its predictions with the run's, and write it to `path`.
    Adapters are merged."""
    check_ending(path)
    if isinstance(run.task, Translation):
        raise InputError(
            f"export of '{run.config['recipe']}', which decodes token by token for as long as it takes",
            expected="a network that answers in one pass",
            fix=f"quire predict {run.path} FILE",
        )
    if run.adapters is not None and run.adapters.active:
        run = type(run)(run.path, run.device)  # the caller's run stays as it is
        assert run.adapters is not None
        run.adapters.merge(dequantise=True)
    sample: Tensors
    if isinstance(run.task, Adversarial):
        sample = sample_noise(run.task, ROWS)
        module: Module = ExportedGenerator(run)
    else:
        sample = (sample_inputs(run),)
        module = Exported(run, *sample)
    # Another number of rows than the one traced.
    judged = tuple(torch.cat([part, part.flip(0)[:-1]]) for part in sample)
    with torch.no_grad():
        expected = module.eval()(*judged)
    make = _make_onnx if path.suffix == ".onnx" else _make_program
    content, actual = make(module, sample, judged, metadata(run))
    difference = max(largest_difference(a, e) for a, e in zip(actual, expected, strict=True))
    if not difference <= TOLERANCE:
        raise QuireError(
            f"the exported file predicts differently, by {difference:.3g}",
            expected=f"a difference of at most {TOLERANCE:g}",
        )
    write_bytes(path, content)
    return {
        "path": str(path),
        "inputs": describe_inputs(run),
        "outputs": module.names,
        "largest_difference": difference,
    }


def largest_difference(actual: Any, expected: Tensor) -> float:
    """Of numbers that are larger than 1, such as pixels, in relation to the largest."""
    wanted = expected.double()
    return float((torch.as_tensor(actual).double() - wanted).abs().max() / wanted.abs().max().clamp(min=1))


def check_ending(path: Path) -> None:
    if path.suffix not in ENDINGS:
        raise InputError(
            f"export to '{path.name}'",
            expected=f"a file that ends in {' or '.join(ENDINGS)}",
            fix=f"write {path.stem}.onnx",
        )


def describe_inputs(run: Run) -> list[str]:
    preparation: Prepares = run.preparation
    if isinstance(run.task, Adversarial):
        label = [f"class number 0…{run.task.classes - 1}"] if run.task.classes else []
        return [f"{run.task.latent} numbers of noise with mean 0 and deviation 1", *label]
    if isinstance(preparation, Preparation):
        return [column.name for column in preparation.inputs]
    if isinstance(preparation, TextPreparation):
        return [f"{preparation.length} tokens, 0…{preparation.tokeniser.vocab_size - 1}"]
    assert isinstance(preparation, ImagePreparation)
    height, width = preparation.size
    return [f"pixels {preparation.channels}×{height}×{width}, 0…255"]


def metadata(run: Run) -> dict[str, str]:
    preparation = run.preparation
    if isinstance(preparation, Preparation):
        columns = [
            {"name": c.name, "kind": c.kind, "categories": list(c.labels.values) if c.labels else None}
            | ({"days_since": str(EPOCH + timedelta(c.origin))} if c.kind == "date" else {})
            for c in preparation.inputs
        ]
        inputs = {"columns": json.dumps(columns)}
    elif isinstance(preparation, TextPreparation):
        inputs = {"text": json.dumps(preparation.to_json())}
    else:
        assert isinstance(preparation, ImagePreparation)
        shape = [preparation.channels, *preparation.size]
        facts = {"shape": shape, "range": [0, 255], "fit": preparation.fit}
        inputs = {"images": json.dumps(facts)}
    targets = [
        {"name": t.name, "kind": t.kind, "classes": list(t.classes) if t.kind == "classification" else None}
        for t in preparation.targets
    ]
    facts = {**inputs, "targets": json.dumps(targets), "recipe": run.config["recipe"]}
    if isinstance(run.task, Adversarial):
        facts["features"] = json.dumps(preparation.feature_names)
    return facts


def input_names(sample: Tensors, module: Module) -> list[str]:
    if isinstance(module, ExportedGenerator):
        return ["noise", "label"][: len(sample)]
    if not sample[0].is_floating_point() and sample[0].dim() == 2:
        return ["tokens"]
    return ["table" if sample[0].dim() == 2 else "images"]


def any_rows(sample: Tensors) -> tuple[dict[int, Any], ...]:
    rows = torch.export.Dim("rows")
    return tuple({0: rows} for _ in sample)


def _make_onnx(
    module: Module, sample: Tensors, judged: Tensors, facts: dict[str, str]
) -> tuple[bytes, list[Any]]:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as missing:
        raise InputError(
            f"export to ONNX without the package '{missing.name}'",
            expected="the extra 'export'",
            fix="pip install 'quire[export]'",
        ) from None
    program = torch.onnx.export(
        module,
        sample,
        dynamo=True,
        verbose=False,
        input_names=(names := input_names(sample, module)),
        output_names=module.names,
        dynamic_shapes=any_rows(sample),
    )
    assert program is not None
    model = program.model_proto
    for key, value in facts.items():
        model.metadata_props.add(key=key, value=value)
    content: bytes = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    inputs = {name: part.numpy() for name, part in zip(names, judged, strict=True)}
    return content, list(session.run(None, inputs))


def _make_program(
    module: Module, sample: Tensors, judged: Tensors, facts: dict[str, str]
) -> tuple[bytes, list[Any]]:
    program = torch.export.export(module, sample, dynamic_shapes=any_rows(sample))
    file = io.BytesIO()
    torch.export.save(program, file, extra_files=facts)
    content = file.getvalue()
    with torch.no_grad():
        return content, list(torch.export.load(io.BytesIO(content)).module()(*judged))
