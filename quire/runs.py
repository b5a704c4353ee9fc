"""Using a run: everything here reads the run folder and nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch

from quire.data.batch import as_judged, ordered
from quire.data.columns import Label
from quire.data.images import ImagePreparation, fingerprint
from quire.data.loaded import Prepared, Prepares
from quire.data.preparation import Preparation
from quire.data.streamed import is_large, scaled_rows
from quire.data.text import TextPreparation
from quire.errors import CheckpointError, InputError, unknown_name
from quire.files import check_sums, names_its_file
from quire.options import Images as ImageOptions
from quire.options import Rows as RowOptions
from quire.report.reading import read_metrics, read_result
from quire.tasks.generating import Generates
from quire.tasks.language import LanguageModel
from quire.tasks.loading import Trained, load_trained
from quire.tasks.predictions import detection_columns, plain_columns, prediction_columns
from quire.tasks.samples import Made, sample_data, sample_text, stream_text
from quire.tasks.translation import Translation
from quire.train.arguments import resolve_device
from quire.train.checkpoints import list_checkpoints
from quire.train.evaluate import evaluate, evaluation_batch
from quire.train.folder import CHECKPOINTS, read_config
from quire.train.task import Task
from quire.tuning import Adapters

if TYPE_CHECKING:
    from quire.doctor import Spectrum, Verdict
    from quire.doctor.curvature import StepAdvice
    from quire.recipes.plan import Plan

BATCH = 4096
ASKED = {"level": "level", "score": "score_threshold", "seed": "generator"}
"""What can be asked of predictions, and the option of a task that it becomes."""


class Run:
    """A run folder with its trained task and its preparation.

    run = quire.load("runs/mlp-…")
    run.predict("new.csv")          # a pyarrow table
    """

    def __init__(self, path: Path, device: torch.device | str = "cpu") -> None:
        self.path = path
        self.device = resolve_device(device)
        self.notes: tuple[str, ...] = ()
        """On the file that was last read: cells and columns that training did not have."""
        self.config = read_config(path)
        check_sums(path, "result.json")

    @cached_property
    def trained(self) -> Trained:
        return load_trained(self.path)

    @cached_property
    def task(self) -> Task:
        return self.trained.task.to(self.device)

    @property
    def saved(self) -> bool:
        """Whether it has left weights: one that fails in its first steps has not."""
        return bool(list_checkpoints(self.path / CHECKPOINTS))

    @property
    def adapters(self) -> Adapters | None:
        """The adapters of a tuned run: more can be loaded beside them and chosen, on the one base."""
        return self.trained.adapters

    @property
    def preparation(self) -> Prepares:
        return self.trained.preparation

    @property
    def result(self) -> dict[str, Any] | None:
        """The final result, None for a run that has not ended."""
        return read_result(self.path / "result.json")

    def evaluate(self, data: Path | None = None, *, broken: str | None = None) -> dict[str, dict[str, float]]:
        """Measures by split on the data of the run, or on another file as a whole (split "data"). `broken`
        says what becomes of images that cannot be read, "refuse" or "skip"; None as in training."""
        from quire.recipes.plan import several_targets_of

        if data is not None:
            prepared = self._prepare(data, need_target=self.task.needs_target, broken=broken)
            fields = several_targets_of(prepared.data, self.preparation)
            return {"data": evaluate(self.task, fields.to(self.device))}
        plan = self.plan
        parts = {"train": plan.data.train, "validation": plan.data.validation, "test": plan.data.test}
        return {
            name: evaluate(self.task, as_judged(part).to(self.device))
            for name, part in parts.items()
            if part is not None
        }

    @property
    def records(self) -> list[dict[str, Any]]:
        """The lines of its metrics; the last one is left out where the run was killed while it wrote it."""
        return read_metrics(self.path / "metrics.jsonl")[0]

    def diagnose(self, silence: Sequence[str] = ()) -> Verdict:
        """How training went and what stands in its way: the verdict on the run's records, on its network as
        it was at first and as it was left, and on its data. Where it has left none, its first steps are taken
        again."""
        from quire.recipes.checkup import check_up, check_up_again, failure

        failed = failure(self.path)
        if not self.saved:
            return check_up_again(self.begun, self.device, self.records, failed, silence=silence)
        return check_up(self.begun, self.task, self.records, self.result, failed, silence=silence)

    def curvature(self, seconds: float = 10.0) -> Spectrum | None:
        """The curvature of the training loss where the run was left, or begins where it has left no weights;
        None for what has no gradient, or several players."""
        from quire.doctor.case import TaskCase
        from quire.doctor.curvature.bounded import case_spectrum
        from quire.recipes.checkup import batches
        from quire.train import StatisticsTask

        plan = self.begun
        task = self.task if self.saved else plan.task
        if isinstance(task, StatisticsTask) or len(task.players) > 1:
            return None
        few = batches(plan, self.device)
        return case_spectrum(TaskCase(task, few, seed=plan.options.seed), seconds)

    def advise_step(self, steps: int) -> StepAdvice | None:
        """The step size with which the first `steps` of this run would have ended lowest, with its own kind
        of optimiser; None for what has no gradient, or several players."""
        from quire.doctor.case import TaskCase
        from quire.doctor.curvature.bounded import case_step
        from quire.recipes.checkup import batches
        from quire.train import StatisticsTask

        plan = self.begun
        options: Any = plan.options
        if isinstance(plan.task, StatisticsTask) or len(plan.task.players) > 1:
            return None
        few = batches(plan, self.device)
        momentum = options.optim.momentum if options.optim.name == "sgd" else options.optim.beta1
        case = TaskCase(plan.task.to(self.device), few, seed=options.seed)
        return case_step(case, steps, options.optim.name, momentum)

    @cached_property
    def plan(self) -> Plan:
        """Task, data and options as they were before training, on the file that the run was trained on."""
        from quire.recipes.base import RECIPES

        options = self.options()
        if options.data is not None:
            if not options.data.exists():
                raise InputError(
                    f"the data of the run, {options.data}, is not there any more",
                    expected="the file that the run was trained on",
                    fix="put it back; a file of yours can be judged with quire evaluate RUN --data FILE",
                )
            if fingerprint(options.data) != self.config["data_sha256"]:
                raise InputError(
                    f"{options.data} has changed since the run",
                    expected="the file as it was, whose split is known",
                    fix="judge on the whole new file with quire evaluate RUN --data FILE",
                )
        tune = getattr(options, "tune", None)
        if tune is not None and tune.base is not None and self.saved:
            # The run has the base's preparation itself, and needs the base no more.
            options = replace(options, tune=replace(tune, base=self.path))
        return RECIPES[self.config["recipe"]].build(options)

    @cached_property
    def begun(self) -> Plan:
        """The plan; of a run that has left no weights, with its task as the first step found it."""
        from quire.recipes.checkup import begin

        return self.plan if self.saved else begin(self.plan, self.device)

    def options(self) -> Any:
        """The options that the run was made with."""
        import quire.recipes  # noqa: F401
        from quire.options import from_dict
        from quire.recipes.base import RECIPES

        @names_its_file
        def options_in(path: Path) -> Any:
            recipe = RECIPES[self.config["recipe"]]
            try:
                return from_dict(recipe.options, self.config["options"])
            except InputError as problem:
                raise CheckpointError(f"{path}: {problem.got}", expected=problem.expected) from None

        return options_in(self.path / "config.toml")

    def _prepare(self, path: Path | str, *, need_target: bool, broken: str | None = None) -> Prepared:
        """The rows of a file, ready for the task; of a large one read in pieces."""
        options, preparation = self._reading(), self.preparation
        if broken is not None and isinstance(options, ImageOptions):
            options = replace(options, broken=broken)  # type: ignore[arg-type]
        in_file = isinstance(path, str | Path)
        if not in_file and not isinstance(preparation, Preparation):
            raise InputError(
                f"a {type(path).__name__}", expected="a path: rows in memory are taken by runs on tables"
            )
        large = in_file and isinstance(options, RowOptions) and is_large(path, options)
        if large and isinstance(preparation, Preparation) and not (preparation.targets and need_target):
            prepared: Prepared = scaled_rows(Path(path), preparation)
        else:
            prepared = preparation.transform(preparation.read(path, options), need_target=need_target)
        self.notes = prepared.notes
        return prepared

    def _reading(self) -> Any:
        """How the run read its data: options of tables, images, scenes or text."""
        options = self.options()
        kinds = {"table": Preparation, "images": ImagePreparation, "text": TextPreparation}
        found = (name for name, kind in kinds.items() if isinstance(self.preparation, kind))
        return getattr(options, next(found), None)

    def predict(self, path: Path | str, **options: Any) -> pa.Table:
        """All of `predict_parts`, whose options these are, in one table."""
        known = inspect.signature(self.predict_parts).parameters.keys() - {"path"}
        for name in options:
            if name not in known:
                raise unknown_name("prediction option", name, known)
        parts = list(self.predict_parts(path, **options))
        return pa.concat_tables(parts) if parts else pa.table({})

    @torch.no_grad()
    def predict_parts(
        self,
        path: Path | str,
        *,
        mode: str = "mode",
        level: float | None = None,
        score: float | None = None,
        seed: int | None = None,
        broken: str | None = None,
    ) -> Iterator[pa.Table]:
        """A row of predictions for each row of a file, in its order; for each image, which is named; or for
        each object that is found on an image with at least the given score, 0.3 unless you say. Part by part,
        so that neither a large file nor its predictions have to fit into memory. `level` is the probability
        of an interval, `seed` that of a draw; what the task has no use for is refused before the file is
        read. `broken` as for `evaluate`."""
        if isinstance(self.task, LanguageModel):
            raise InputError(
                f"predictions of '{self.config['recipe']}', a language model",
                expected="text: quire sample",
                fix=f"quire sample {self.path} --prompt 'The '",
            )
        options = self._prediction_options(level=level, score=score, seed=seed)
        prepared = self._prepare(path, need_target=False, broken=broken)
        images = isinstance(self.preparation, ImagePreparation)
        done = 0
        rows = min(BATCH, evaluation_batch(self.task, prepared.data)) if images else BATCH
        for batch in ordered(prepared.data, rows):
            batch = batch.to(self.device)
            names = prepared.lines[done : done + len(batch)]
            done += len(batch)
            predicted = self.task.predict(batch.inputs, mode, **options)
            if isinstance(self.task, Translation):
                assert isinstance(self.preparation, TextPreparation)
                said = self.preparation.decode(predicted["tokens"])
                likely = predicted["log_probability"].cpu().double().numpy()
                columns: dict[str, Any] = {"prediction": pa.array(said), "log_probability": likely}
            elif "boxes" in predicted:
                extent = batch.fields["target.extent"]
                columns = detection_columns(self.preparation, predicted, names, extent)
            else:
                columns = {"image": pa.array([str(name) for name in names])} if images else {}
                told = self.task.answers_target
                columns |= (prediction_columns if told else plain_columns)(self.preparation, predicted)
            yield pa.table(columns)

    def _prediction_options(
        self, *, level: float | None, score: float | None, seed: int | None
    ) -> dict[str, Any]:
        """What the task takes of this; what was asked for in vain is named."""
        taken = {name for name, option in ASKED.items() if option in self.task.predict_options}
        for name, value in {"level": level, "score": score, "seed": seed}.items():
            if value is not None and name not in taken:
                raise InputError(
                    f"{name} {value!r} for predictions of '{self.config['recipe']}', which have none",
                    expected=f"one of {', '.join(['mode', *sorted(taken)])}",
                    fix="leave it out",
                )
        options: dict[str, Any] = {}
        if level is not None:
            options["level"] = level
        if "score" in taken:
            options["score_threshold"] = 0.3 if score is None else score
        if "seed" in taken:
            options["generator"] = torch.Generator(self.device).manual_seed(seed or 0)
        return options

    def sample(self, prompts: Sequence[str], *, length: int = 300, **options: Any) -> list[str]:
        """Texts that begin with the prompts; the options are those of `quire.models.generate.stream`."""
        return sample_text(*self._language(), prompts, length=length, **options)

    def stream(self, prompt: str, *, length: int = 300, **options: Any) -> Iterator[str]:
        """The text after a prompt, piece by piece as it is made."""
        return stream_text(*self._language(), prompt, length=length, **options)

    def generate(
        self, count: int = 1, *, label: Label | None = None, temperature: float = 1.0, seed: int = 0
    ) -> Made:
        """New images or rows, in the form of the data that the run was trained on. `label` is a class of a
        conditional model by its own name; without it all classes come in turn."""
        if not isinstance(self.task, Generates):
            raise InputError(
                f"{self.path} is a run of '{self.config['recipe']}', which makes no images and no rows",
                expected="a run of a generative model",
                fix="train one, such as 'quire train vae'",
            )
        return sample_data(
            self.task, self.preparation, count, label=label, temperature=temperature, seed=seed
        )

    def _language(self) -> tuple[LanguageModel, TextPreparation]:
        if not isinstance(self.task, LanguageModel) or not isinstance(self.preparation, TextPreparation):
            raise InputError(
                f"{self.path} is a run of '{self.config['recipe']}', which makes no text",
                expected="a run of a language model",
                fix="train one with 'quire train gpt'",
            )
        return self.task, self.preparation

    def export(self, path: Path) -> dict[str, Any]:
        """The network with its preparation inside: ONNX or a torch.export program, by the ending."""
        from quire.export import export_run

        return export_run(self, path)


def load(path: Path | str, device: torch.device | str = "cpu") -> Run:
    """Open a run folder."""
    return Run(Path(path), device)
