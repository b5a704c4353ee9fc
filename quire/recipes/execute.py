"""From options to a finished run folder: build, train, judge, write the report."""

from __future__ import annotations

import dataclasses
import json
import platform
import resource
import sys
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

import quire
from quire.data.batch import Batch, Data, as_judged, ordered
from quire.data.images import fingerprint
from quire.data.loaded import LoadedData
from quire.errors import InputError, QuireError
from quire.files import json_number, make_folder, replacing, write_bytes, write_json
from quire.options import to_dict
from quire.recipes.base import DescentOptions, Recipe, RunOptions, SweepOptions
from quire.recipes.plan import Plan, announce
from quire.recipes.tuned import attach, check_adapters, take_over
from quire.report import write as write_report
from quire.report.style import to_svg
from quire.report.summary import flatten
from quire.tasks.generating import Generates
from quire.tasks.loading import TUNING
from quire.tasks.predictions import (
    detection_columns,
    plain_columns,
    prediction_columns,
    target_prefixes,
    truth_columns,
)
from quire.train import Fit, Interrupted, StatisticsTask, evaluate, fit, fit_statistics
from quire.train.checkpoints import list_checkpoints
from quire.train.evaluate import check_monitor, evaluation_batch
from quire.train.folder import CHECKPOINTS, RunFolder, check_free, read_config
from quire.train.lookout import attended
from quire.train.processes import all_do, alone, first_does, joined, processes
from quire.train.progress import Progress, make_progress
from quire.train.task import Task

Measures = dict[str, dict[str, float]]

# What may differ between a run and its resumption without its being another run.
MAY_CHANGE = {"epochs", "steps", "sweeps", "out", "resume", "overwrite", "device", "json", "quiet", "debug"}
LEVEL = 0.9
MOST_PREDICTIONS = 200_000
"""Rows whose predictions are kept with a run; `quire predict` gives those of any file."""
PARAMETRISED = "parametrizations"
"""Where PyTorch keeps what a layer's weights are computed by, such as their norm."""


@dataclass(frozen=True)
class Outcome:
    run: Path
    measures: Measures
    seconds: float
    expected_met: bool | None
    """None where the recipe promises nothing: on the user's own data."""
    report: Path
    warnings: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    """Those of the warnings that were shown before training began."""


def execute(recipe: Recipe, options: RunOptions, *, command: str = "", shard: bool = False) -> Outcome:
    """Train `recipe` as `options` say and leave a complete run folder.

    Everything that can be wrong with the options or the data is found before the folder is made. Where
    several processes have joined, each calls this; the first keeps the run folder, and all have the outcome.
    With `shard` they split the model among them.
    """
    if shard:
        all_do(lambda: check_shard(recipe, options))
    device = resolve_device(options.device)
    path = first_does(lambda: choose_path(recipe, options))
    plan = all_do(lambda: build(recipe, options))
    learn = sweep if isinstance(plan.task, StatisticsTask) else partial(descend, shard=shard)
    folder = all_do(lambda: open_folder(path, recipe, options, command))
    again = f"quire train {recipe.name} --resume {path}"
    said = announce(plan) if folder and not options.quiet else ()
    log = folder.log if folder else None
    try:
        with attended(device, f"see what that one says; go on with: {again}", log):
            result = learn(plan, folder, device)
            return dataclasses.replace(conclude(recipe, plan, folder, result, device), said=said)
    except Interrupted as stop:
        raise Interrupted(stop.got, fix=f"go on with: {again}", number=stop.number) from None
    except QuireError as problem:
        if log:
            log(f"failed: {problem.got}")
        raise
    finally:
        if folder:
            folder.close()


def check_shard(recipe: Recipe, options: RunOptions) -> None:
    """Refuse to split what has nothing to split, or nobody to split it among."""
    if not isinstance(options, DescentOptions):
        raise InputError(
            f"--parallel.shard with '{recipe.name}', which learns from sums over the data",
            expected="a recipe that learns by descent",
            fix="leave it out: the rows are shared out among the processes as it is",
        )
    if options.tune.lora.rank:
        raise InputError(
            f"--parallel.shard with --tune.lora.rank {options.tune.lora.rank}",
            expected="weights that are trained themselves",
            fix="leave it out; of the frozen weights there are neither gradients nor moments to split",
        )
    if options.train.compile:
        raise InputError("--parallel.shard with --train.compile", expected="one of them", fix="leave one out")
    if not joined():
        raise InputError(
            "--parallel.shard in one process",
            expected="several to split the model among",
            fix="add --nproc 2, or start with torchrun",
        )


def choose_path(recipe: Recipe, options: RunOptions) -> Path:
    """The folder of the run, which must be there to resume and free otherwise."""
    path = options.resume or options.out or _new_path(recipe.name)
    if options.resume:
        check_same_run(recipe, options)
    else:
        check_free(path, overwrite=options.overwrite)
    return path


def build(recipe: Recipe, options: RunOptions) -> Plan:
    """The plan of the run, checked. Each process makes it for itself, from the same seed."""
    with alone():
        plan: Plan = recipe.build(options)
        if isinstance(plan.options, DescentOptions):
            check_descent(plan, plan.options)
    return plan


def open_folder(path: Path, recipe: Recipe, options: RunOptions, command: str) -> RunFolder | None:
    """The run folder, for the process that writes to it."""
    if processes()[0]:
        return None
    if options.resume:
        return RunFolder.reopen(path)
    config = run_config(recipe.name, options, command)
    return RunFolder.create(path, config, overwrite=options.overwrite)


def check_descent(plan: Plan, options: DescentOptions) -> None:
    """Refuse what cannot be computed at all, before anything is written."""
    take_over(plan, options)
    check_adapters(plan, options)
    evaluate(plan.task, plan.data.train, rows=2)
    if plan.data.validation is not None:
        check_monitor(plan.task, plan.data.validation, options.train.monitor)


def descend(plan: Plan, folder: RunFolder | None, device: torch.device, *, shard: bool = False) -> Fit:
    options = plan.options
    assert isinstance(options, DescentOptions)
    progress = make_progress(options.quiet) if folder else Progress()
    if plan.before and first_does(lambda: not (folder and list_checkpoints(folder.path / CHECKPOINTS))):
        with alone():
            plan.before(device, progress)
    adapters = attach(plan, options)
    if folder:
        folder.documents = {"task": plan.task.spec(), "preparation": plan.data.preparation.to_json()}
        if adapters:
            folder.documents[TUNING] = adapters.spec()
    epochs = options.epochs if options.epochs is not None else plan.epochs
    return fit(
        plan.task,
        plan.data.train,
        plan.data.validation,
        epochs=None if options.steps else epochs,
        steps=options.steps,
        optim=options.optim,
        train=options.train,
        seed=options.seed,
        device=device,
        store=folder,
        progress=progress,
        shard=shard,
    )


def sweep(plan: Plan, folder: RunFolder | None, device: torch.device) -> Fit:
    options = plan.options
    assert isinstance(options, SweepOptions)
    assert isinstance(plan.task, StatisticsTask)
    if folder:
        folder.documents = {"task": plan.task.spec(), "preparation": plan.data.preparation.to_json()}
    return fit_statistics(
        plan.task,
        plan.data.train,
        plan.data.validation,
        sweeps=options.sweeps,
        seed=options.seed,
        device=device,
        store=folder,
        progress=make_progress(options.quiet),
    )


def conclude(
    recipe: Recipe, plan: Plan, folder: RunFolder | None, result: Fit, device: torch.device
) -> Outcome:
    """Judge the trained task on every part and write result, predictions, pictures and report."""
    parts = {"train": plan.data.train, "validation": plan.data.validation, "test": plan.data.test}
    measures = {
        name: evaluate(plan.task, as_judged(part).to(device), together=True)
        for name, part in parts.items()
        if part is not None
    }
    count = processes()[1]

    def write() -> Outcome:
        assert folder is not None
        return write_up(recipe, plan, folder, result, device, measures, count)

    return first_does(write)


def write_up(
    recipe: Recipe,
    plan: Plan,
    folder: RunFolder,
    result: Fit,
    device: torch.device,
    measures: Measures,
    count: int,
) -> Outcome:
    """What one process writes at the end of a run that `count` have trained."""
    task, data = plan.task, plan.data
    plan.history = result.history
    parts = {"train": data.train, "validation": data.validation, "test": data.test}
    shown = "test" if data.test is not None else "validation" if data.validation is not None else "train"
    if plan.extra_measures:
        measures[shown] |= plan.extra_measures()
    met = None
    if plan.options.data is None and recipe.expected.split in measures:
        met = recipe.expected.met(measures)

    part = parts[shown]
    assert part is not None
    if data.preparation.targets or not task.answers_target:
        write_predictions(folder.path, task, data, part.to(device), data.lines(shown))  # type: ignore[arg-type]
    if plan.samples:
        write_json(folder.path / "samples.json", [sample._asdict() for sample in plan.samples()])
    pictures = list(plan.pictures()) if plan.pictures else []
    if pictures:
        make_folder(folder.path / "figures", parents=False)
        captions = {}
        for picture in pictures:
            write_bytes(folder.path / "figures" / f"{picture.name}.svg", to_svg(picture.figure).encode())
            captions[f"{picture.name}.svg"] = {"title": picture.title, "caption": picture.caption}
        write_json(folder.path / "figures" / "captions.json", captions)

    warnings = [*plan.notes, *data.warnings, *task.warnings(result.history)]
    layers, parameters = describe_layers(task, data.train.take(torch.arange(1)), device)
    write_json(
        folder.path / "result.json",
        {
            "format": 1,
            "recipe": recipe.name,
            "summary": recipe.summary,
            "measures": {
                split: {k: json_number(v) for k, v in values.items()} for split, values in measures.items()
            },
            "seconds": result.seconds,
            "steps": result.steps,
            "epochs": None if isinstance(task, StatisticsTask) else result.epochs,
            "best_step": result.best_step,
            "samples_per_second": result.samples_per_second,
            "peak_memory_bytes": peak_memory(device),
            "device": str(device),
            "processes": count,
            "threads": torch.get_num_threads(),
            "layers": layers,
            "parameters": parameters,
            "expected": {"text": str(recipe.expected) if plan.options.data is None else "", "met": met},
            "targets": describe_targets(data) if task.answers_target else [],
            "rows": {name: len(part) if part is not None else 0 for name, part in parts.items()},
            "features": data.preparation.feature_names,
            "warnings": warnings,
            "stopped": result.stopped,
            "data": data.source,
        },
    )
    folder.log(f"finished: {json.dumps(measures[shown])}")  # before the sums over all files are taken
    report = write_report(folder.path)
    return Outcome(folder.path, measures, result.seconds, met, report, tuple(warnings))


# -- Before training -------------------------------------------------------------------------------


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda"):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        number = int(name.removeprefix("cuda").removeprefix(":") or 0)
        if number >= count:
            raise InputError(
                f"--device {name} on a machine with {count} CUDA devices",
                expected="a device that is there",
                fix="use --device cpu or leave it out",
            )
    return torch.device(name)


def _new_path(recipe: str) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    path = Path("runs") / f"{recipe}-{stamp}"
    number = 2
    while path.exists():
        path = Path("runs") / f"{recipe}-{stamp}-{number}"
        number += 1
    return path


def run_config(recipe: str, options: RunOptions, command: str) -> dict[str, Any]:
    """Everything needed to repeat the run."""
    config: dict[str, Any] = {
        "format": 1,
        "recipe": recipe,
        "command": command,
        "date": datetime.now().strftime("%Y-%m-%d %H:%M"),
        "versions": {
            "quire": quire.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    if options.data is not None:
        config["data_sha256"] = fingerprint(options.data)
    stored = dataclasses.replace(options, data=options.data.resolve()) if options.data else options
    return {**config, "options": to_dict(stored)}


def check_same_run(recipe: Recipe, options: RunOptions) -> None:
    """Refuse to resume with options that would make it another run."""
    assert options.resume is not None
    config = read_config(options.resume)
    if config["recipe"] != recipe.name:
        raise InputError(
            f"{options.resume} is a run of the recipe '{config['recipe']}'",
            expected=f"a run of '{recipe.name}'",
            fix=f"quire train {config['recipe']} --resume {options.resume}",
        )
    given = to_dict(
        dataclasses.replace(options, data=options.data.resolve()) if options.data is not None else options
    )
    now, then = flatten(given), flatten(config["options"])
    differing = sorted(
        key
        for key in now.keys() | then.keys()
        if key.split(".")[0] not in MAY_CHANGE and now.get(key) != then.get(key)
    )
    if differing:
        raise InputError(
            f"resuming with other values of {', '.join('--' + key for key in differing)}",
            expected="the options that the run was started with",
            fix="leave these options out, or start a new run",
        )
    if options.data is not None and config.get("data_sha256") not in (None, fingerprint(options.data)):
        raise InputError(
            f"{options.data} has changed since the run was started",
            expected="the same file",
            fix="start a new run on the new data",
        )


# -- After training --------------------------------------------------------------------------------


def write_predictions(path: Path, task: Task, data: LoadedData, part: Data, lines: Any) -> None:
    """predictions.parquet: truth, prediction, probability or interval, and loss of each row; of scenes a
    row for each object that was found; without a target whatever the task says of a row."""
    values = task.answers_target and any(t.kind == "regression" for t in data.preparation.targets)
    asked: dict[str, Any] = {"mode": "interval", "level": LEVEL} if values else {}
    tables = []
    done = 0
    for batch in ordered(part, evaluation_batch(task, part), MOST_PREDICTIONS):
        batch = batch.to(task.device)
        predicted = task.predict(batch.inputs, **asked)
        names = lines[done : done + len(batch)]
        done += len(batch)
        if "boxes" in predicted:
            found = detection_columns(data.preparation, predicted, names, batch.fields["target.extent"])
            tables.append(pa.table(found))
            continue
        columns: dict[str, Any] = {"row": names}
        if not task.answers_target:
            columns |= plain_columns(data.preparation, predicted)
            tables.append(pa.table({name: pa.array(values) for name, values in columns.items()}))
            continue
        columns |= truth_columns(data.preparation, batch.fields, predicted)
        columns |= prediction_columns(data.preparation, predicted, every_class=False)
        losses = list(task.loss_each(batch).values())
        for prefix, loss in zip(target_prefixes(data.preparation), losses, strict=False):
            columns[f"{prefix}loss"] = loss.cpu().double().numpy()
        tables.append(pa.table({name: pa.array(values) for name, values in columns.items()}))
    table = pa.concat_tables(tables).replace_schema_metadata({"level": str(LEVEL)})
    with replacing(path / "predictions.parquet") as file:
        pq.write_table(table, file)


def describe_targets(data: LoadedData) -> list[dict[str, Any]]:
    return [
        {
            "name": target.name,
            "kind": "boxes" if getattr(data.preparation, "boxes", False) else target.kind,
            "classes": [str(c) for c in target.classes] if target.kind == "classification" else None,
            "prefix": prefix,
        }
        for target, prefix in zip(data.preparation.targets, target_prefixes(data.preparation), strict=True)
    ]


def describe_layers(task: Task, sample: Batch, device: torch.device) -> tuple[list[dict[str, Any]], int]:
    """Each layer with its output's shape (one row) and its parameters, in the order of the forward pass."""
    rows: list[dict[str, Any]] = []
    listed: set[str] = set()
    handles = []
    model = getattr(task, "model", task)
    for name, module in model.named_modules():
        inner = {child for child, _ in module.named_children()}
        if inner - {PARAMETRISED} or PARAMETRISED in name.split("."):
            continue

        def note(module: nn.Module, inputs: object, output: object, name: str = name) -> None:
            if name in listed:
                return
            listed.add(name)
            shape = list(output.shape[1:]) if isinstance(output, Tensor) else []
            parameters = sum(p.numel() for p in module.parameters())
            rows.append(
                {
                    "name": name or "model",
                    "kind": type(module).__name__,
                    "output_shape": shape,
                    "parameters": parameters,
                }
            )

        handles.append(module.register_forward_hook(note))
    try:
        task.predict(sample.inputs.to(device))
        if isinstance(task, Generates):
            task.sample(1)
    finally:
        for handle in handles:
            handle.remove()
    learned = task.learned if isinstance(task, StatisticsTask) else sum(p.numel() for p in task.parameters())
    return rows, learned


def peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
