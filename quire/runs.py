"""Using a run: everything here reads the run folder and nothing else."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from quire.data.preparation import Preparation
from quire.errors import InputError
from quire.options import Table
from quire.tasks.loading import Trained, load_trained
from quire.tasks.predictions import prediction_columns
from quire.train.evaluate import evaluate
from quire.train.folder import read_config
from quire.train.task import Task

BATCH = 4096


class Run:
    """A run folder with its trained task and its preparation.

    run = quire.load("runs/mlp-…")
    run.predict("new.csv")          # a pyarrow table
    """

    def __init__(self, path: Path, device: torch.device | str = "cpu") -> None:
        self.path = path
        self.device = torch.device(device)
        self.config = read_config(path)

    @cached_property
    def trained(self) -> Trained:
        return load_trained(self.path)

    @cached_property
    def task(self) -> Task:
        return self.trained.task.to(self.device)

    @property
    def preparation(self) -> Preparation:
        return self.trained.preparation

    @property
    def result(self) -> dict[str, Any] | None:
        """The final result, None for a run that has not ended."""
        try:
            return json.loads((self.path / "result.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def evaluate(self, data: Path | None = None) -> dict[str, dict[str, float]]:
        """Measures by split on the data of the run, or on another file as a whole (split "data")."""
        from quire.recipes.plan import several_targets_of

        if data is not None:
            table = self.preparation.read(data, self._table_options())
            prepared = self.preparation.transform(table, need_target=True)
            fields = several_targets_of(prepared.data, self.preparation)
            return {"data": evaluate(self.task, fields.to(self.device))}
        from quire.recipes.base import RECIPES
        from quire.recipes.execute import hash_file

        options = self.options()
        if options.data is not None:
            if not options.data.exists():
                raise InputError(
                    f"the data of the run, {options.data}, is not there any more",
                    expected="the file that the run was trained on",
                    fix="give the file with --data",
                )
            if hash_file(options.data) != self.config["data_sha256"]:
                raise InputError(
                    f"{options.data} has changed since the run",
                    expected="the file as it was, whose split is known",
                    fix="judge on the whole new file with --data",
                )
        plan = RECIPES[self.config["recipe"]].build(options)
        parts = {"train": plan.data.train, "validation": plan.data.validation, "test": plan.data.test}
        return {
            name: evaluate(self.task, part.to(self.device))
            for name, part in parts.items()
            if part is not None
        }

    def options(self) -> Any:
        """The options that the run was made with."""
        import quire.recipes  # noqa: F401
        from quire.options import from_dict
        from quire.recipes.base import RECIPES

        return from_dict(RECIPES[self.config["recipe"]].options, self.config["options"])

    def _table_options(self) -> Table:
        from quire.options import from_dict

        return from_dict(Table, self.config["options"].get("table", {}))

    @torch.no_grad()
    def predict(self, path: Path | str, *, mode: str = "mode", level: float = 0.9, seed: int = 0) -> pa.Table:
        """A row of predictions for each row of a file, in its order."""
        table = self.preparation.read(path, self._table_options())
        prepared = self.preparation.transform(table)
        generator = torch.Generator(self.device).manual_seed(seed)
        parts = []
        for inputs in prepared.data.inputs.split(BATCH):
            predicted = self.task.predict(inputs.to(self.device), mode, level=level, generator=generator)
            parts.append(pa.table(prediction_columns(self.preparation, predicted)))
        self.notes = prepared.notes
        return pa.concat_tables(parts) if parts else pa.table({})

    def export(self, path: Path) -> dict[str, Any]:
        """The network with its preparation inside: ONNX or a torch.export program, by the ending."""
        from quire.export import export_run

        return export_run(self, path)


def load(path: Path | str, device: torch.device | str = "cpu") -> Run:
    """Open a run folder."""
    return Run(Path(path), device)
