"""Taking a trained network elsewhere: ONNX, or a torch.export program.

What is exported takes a table's cells as numbers (the columns of training, categories as their
numbers, NaN for missing) and contains the preparation, so nothing has to be prepared outside. Names
of columns, categories and classes travel in the file's metadata.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.errors import InputError, QuireError

if TYPE_CHECKING:
    from quire.runs import Run

ENDINGS = (".onnx", ".pt2")
ROWS = 8  # of the sample that the exported file is compared on
TOLERANCE = 1e-4


class Exported(nn.Module):
    """Table cells (N, columns) to predictions: preparation, model and head in one."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.prepare = run.preparation.module()
        self.task = run.task
        with torch.no_grad():
            example = self.task.predict(self.prepare(sample_cells(run)))
        self.names = [name for name, value in example.items() if isinstance(value, Tensor)]

    def forward(self, table: Tensor) -> tuple[Tensor, ...]:
        predicted = self.task.predict(self.prepare(table))
        return tuple(predicted[name] for name in self.names)


def sample_cells(run: Run, rows: int = ROWS) -> Tensor:
    """Plausible cells: around the training mean, every category, some missing."""
    generator = torch.Generator().manual_seed(0)
    columns = []
    for column in run.preparation.inputs:
        if column.labels is not None:
            values = torch.arange(rows) % len(column.labels.values)
            columns.append(values.float())
        else:
            columns.append(column.center + column.scale * torch.randn(rows, generator=generator))
        if column.missing:
            columns[-1][-1] = torch.nan
    return torch.stack(columns, 1)


def export_run(run: Run, path: Path) -> dict[str, Any]:
    """Write `path`, read it back, compare its predictions with the run's."""
    check_ending(path)
    module = Exported(run).eval()
    cells = sample_cells(run)
    judged = torch.cat([cells, cells.flip(0)[:-1]])  # another number of rows than the one traced
    with torch.no_grad():
        expected = module(judged)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        write = _write_onnx if path.suffix == ".onnx" else _write_program
        actual = write(module, cells, judged, temporary, metadata(run))
        difference = max(
            float((torch.as_tensor(a).double() - e.double()).abs().max())
            for a, e in zip(actual, expected, strict=True)
        )
        if not difference <= TOLERANCE:
            raise QuireError(
                f"the exported file predicts differently, by {difference:.3g}",
                expected=f"a difference of at most {TOLERANCE:g}",
            )
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return {
        "path": str(path),
        "inputs": [column.name for column in run.preparation.inputs],
        "outputs": module.names,
        "largest_difference": difference,
    }


def check_ending(path: Path) -> None:
    if path.suffix not in ENDINGS:
        raise InputError(
            f"export to '{path.name}'",
            expected=f"a file that ends in {' or '.join(ENDINGS)}",
            fix=f"write {path.stem}.onnx",
        )


def metadata(run: Run) -> dict[str, str]:
    columns = [
        {"name": c.name, "kind": c.kind, "categories": list(c.labels.values) if c.labels else None}
        for c in run.preparation.inputs
    ]
    targets = [
        {"name": t.name, "kind": t.kind, "classes": list(t.classes) if t.kind == "classification" else None}
        for t in run.preparation.targets
    ]
    return {"columns": json.dumps(columns), "targets": json.dumps(targets), "recipe": run.config["recipe"]}


def _write_onnx(
    module: Exported, cells: Tensor, judged: Tensor, path: Path, facts: dict[str, str]
) -> list[Any]:
    try:
        import onnx
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
        (cells,),
        dynamo=True,
        verbose=False,
        input_names=["table"],
        output_names=module.names,
        dynamic_shapes=({0: torch.export.Dim("rows")},),
    )
    assert program is not None
    model = program.model_proto
    for key, value in facts.items():
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, path)
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    return list(session.run(None, {"table": judged.numpy()}))


def _write_program(
    module: Exported, cells: Tensor, judged: Tensor, path: Path, facts: dict[str, str]
) -> list[Any]:
    program = torch.export.export(module, (cells,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    torch.export.save(program, path, extra_files=facts)
    return list(torch.export.load(path).module()(judged))
