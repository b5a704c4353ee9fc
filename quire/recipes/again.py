"""A run's recipe trained anew on some of its training rows: what `quire study` judges.

Each fit begins with a fresh task, goes through the trainer that `quire train` goes through, and writes
nothing. On all rows and with the run's own seed it is the run again, bit by bit. What differs otherwise:

- Training takes as many steps as the run took, whatever the number of rows, and the part that chooses the
  weights is the run's validation part.
- The preparation (means and deviations, classes, vocabulary) and what a recipe read off its whole training
  part (a polynomial's degree, the sizes of default boxes, a step size) stay those of the run.
- What remembers training rows (kernels, references, labelled rows) remembers those it was given alone.

A network that starts from trained weights starts from the same in each fit; any other from weights of the
fit's own seed.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from quire.data.batch import Data, TensorData, as_judged, ordered, steps_per_epoch
from quire.data.images import fingerprint
from quire.data.streamed import StreamedRows
from quire.data.text import TextPreparation
from quire.data.text.windows import MappedTokens, TensorTokens, TokenWindows
from quire.doctor.studies.refit import Answers, Part, draw_rows
from quire.errors import InputError, unknown_name
from quire.models.nadaraya_watson import NadarayaWatson
from quire.nn.heads import IGNORE
from quire.options import from_dict
from quire.recipes.base import RECIPES, DescentOptions, SweepOptions
from quire.recipes.execute import check_descent, resolve_device
from quire.recipes.plan import Plan
from quire.recipes.pooling import best_width, candidate_widths, rule_of_thumb
from quire.recipes.tuned import attach
from quire.tasks.bagging import COUNTS, Bagging, bootstrap_counts
from quire.tasks.embedding import Embedding
from quire.tasks.kernel import OWN, LeaveOneOut
from quire.tasks.language import LanguageModel
from quire.tasks.predictions import class_probabilities, target_prefixes
from quire.tasks.semi import SemiSupervised, Teaching
from quire.train import StatisticsTask, evaluate, fit, fit_statistics
from quire.train.evaluate import evaluation_batch
from quire.train.folder import read_config
from quire.train.progress import Progress
from quire.train.task import Task, build_task

LEVEL = 0.9
MOST_WINDOWS = 64
"""Of a text, whose tokens are answered one by one."""
KINDS = ("folds", "learning-curve", "bias-variance", "calibration", "regions", "equivariance")


class TaskJudge:
    """A trained task with the data that it may be asked about."""

    def __init__(self, task: Task, again: Again, learned: Tensor | None = None) -> None:
        self.task, self.again, self.learned = task, again, learned

    def measures(self, part: Part) -> dict[str, float]:
        return evaluate(self.task, as_judged(self._data(part)).to(self.task.device))

    def _data(self, part: Part) -> Data:
        if isinstance(part, str):
            return self.again.part(part)
        data = self.again.subset(part)
        if isinstance(self.task, LeaveOneOut) and isinstance(data, TensorData):
            own = self._own(part)
            return data if own is None else TensorData({**data.fields, OWN: own})
        return data

    def _own(self, rows: Tensor) -> Tensor | None:
        """The numbers under which a kernel remembers these rows, None where it does not know them all."""
        learned = torch.arange(self.again.rows) if self.learned is None else self.learned
        known = {row: place for place, row in enumerate(learned.tolist())}
        places = [known.get(row, -1) for row in rows.tolist()]
        return None if min(places, default=-1) < 0 else torch.tensor(places)

    @torch.no_grad()
    def answers(self, part: Part) -> Answers:
        again, task = self.again, self.task
        number, prefix = again.answered
        data = as_judged(self._data(part))
        if isinstance(task, LanguageModel):
            return self._tokens(data)
        target = again.plan.data.preparation.targets[number]
        values = target.kind == "regression"
        asked: dict[str, Any] = {"mode": "interval", "level": LEVEL} if values else {}
        found: list[tuple[Tensor, ...]] = []
        for batch in ordered(data, evaluation_batch(task, data)):
            said = task.predict(batch.inputs.to(task.device), **asked)
            own = {
                key.removeprefix(prefix): value.cpu() for key, value in said.items() if key.startswith(prefix)
            }
            truth = batch.fields[f"target.{target.name}" if prefix else "target"].cpu()
            if values:
                found.append((truth.double(), own["value"].double(), (own["high"] - own["low"]).double()))
            else:
                kept = truth >= 0
                found.append((truth[kept], class_probabilities(own["probabilities"]).double()[kept]))
        truth, *said_of = (torch.cat(parts) for parts in zip(*found, strict=True))
        if not values:
            return Answers(truth.long(), probabilities=said_of[0])
        reach = 2 * math.sqrt(2) * float(torch.erfinv(torch.tensor(LEVEL, dtype=torch.float64)))
        return Answers(truth.flatten(), values=said_of[0].flatten(), deviations=said_of[1].flatten() / reach)

    def _tokens(self, data: Data) -> Answers:
        """Each token of some windows, by those before it."""
        rows = torch.linspace(0, len(data) - 1, min(len(data), MOST_WINDOWS)).long()
        targets, probabilities = [], []
        for batch in data.batches(rows, 8):
            said = self.task.model(batch.inputs.to(self.task.device)).float().softmax(-1).cpu()  # type: ignore[operator]
            real = batch.target.cpu() != IGNORE
            targets.append(batch.target.cpu()[real])
            probabilities.append(said[real])
        return Answers(torch.cat(targets), probabilities=torch.cat(probabilities))


class Again:
    """A `Refit` (see `quire.doctor.studies.refit`) of the run in a folder.

    again = Again(quire.load("runs/mlp-…"), epochs=5)
    print(quire.doctor.studies.folds(again))
    """

    def __init__(
        self,
        run: Any,
        *,
        epochs: float | None = None,
        steps: int | None = None,
        target: str | None = None,
        kind: str | None = None,
        device: str = "auto",
        progress: Progress | None = None,
    ) -> None:
        """`run` is a `quire.runs.Run`. `epochs` over the whole training part, or `steps`, make each fit
        shorter than the run was (sweeps of what learns by statistics). `target` is which of several is
        studied. With the `kind` of a study, what makes no sense for this run is refused before any work."""
        if epochs is not None and steps is not None:
            raise InputError("both epochs and steps", expected="one of them", fix="leave one out")
        self.run, self.epochs, self.steps = run, epochs, steps
        self.device = resolve_device(device)
        self.progress = progress or Progress()
        self.recipe = RECIPES[run.config["recipe"]]
        options = from_dict(self.recipe.options, run.config["options"])
        if kind is not None:
            self._refuse_recipe(kind)
        _check_data(run, options)
        self.plan: Plan = self.recipe.build(options)
        if isinstance(self.plan.options, DescentOptions):
            check_descent(self.plan, self.plan.options)
        self.seed: int = options.seed
        self._chance = torch.random.get_rng_state()
        """Where the run's random numbers stood when it laid adapters over its network."""
        self._target = target
        if kind is not None:
            self.check(kind)

    # -- What a study asks of it ---------------------------------------------------------------

    @property
    def rows(self) -> int:
        return len(self.plan.data.train)

    @property
    def least(self) -> int:
        options: Any = self.plan.options
        classes = 0 if self.stratify is None else len(self.stratify.unique())
        parts = getattr(options, "clusters", None) or classes
        return max(8, 2 * classes, 2 * parts, 1 + getattr(options, "components", 0))

    @property
    def apart(self) -> str | None:
        """The validation part; the test part is left for the end, and asked only where there is no other."""
        names = ("validation", "test")
        return next((name for name in names if getattr(self.plan.data, name) is not None), None)

    @property
    def measure(self) -> str:
        """What the run watched, or accuracy or rmse where it watched the loss and has one of them."""
        options = self.plan.options
        watched = options.train.monitor if isinstance(options, DescentOptions) else "loss"
        if watched != "loss":
            return watched
        known = self._measures
        return next((name for name in ("accuracy", "rmse") if name in known), "loss")

    @cached_property
    def _measures(self) -> dict[str, float]:
        return evaluate(copy.deepcopy(self.plan.task), as_judged(self.plan.data.train), rows=2)

    @property
    def higher(self) -> frozenset[str]:
        rising = self.plan.task.higher_is_better
        return rising | {name for name in self._measures if name.rpartition(".")[2] in rising}

    @cached_property
    def stratify(self) -> Tensor | None:
        """The class of each row; rows without one are a class of their own."""
        targets = self.plan.data.preparation.targets
        fields = getattr(self.plan.data.train, "fields", {})
        single = len(targets) == 1 and targets[0].kind == "classification"
        found = fields.get("target") if single else None
        return (
            found
            if isinstance(found, Tensor) and found.dim() == 1 and not found.is_floating_point()
            else None
        )

    def draw(self, count: int, seed: int) -> Tensor:
        """Rows at random; of a text one stretch from a random place on."""
        if not isinstance(self.plan.data.train, TokenWindows):
            return draw_rows(self.rows, count, seed, self.stratify)
        start = torch.randint(self.rows - count + 1, (), generator=torch.Generator().manual_seed(seed))
        return torch.arange(count) + int(start)

    def part(self, name: str) -> Data:
        part: Data | None = getattr(self.plan.data, name)
        assert part is not None
        return part

    def subset(self, rows: Tensor) -> Data:
        """Training rows without what only their training needs. Of a text they are a stretch, and nothing
        else of it can be read through them."""
        train = self.plan.data.train
        if isinstance(train, TokenWindows):
            if len(rows) > 1 and not bool((rows.diff() == 1).all()):
                raise InputError(
                    "single windows of a text", expected="a stretch", fix="take rows in their order"
                )
            if len(rows) == len(train):
                return train
            first = int(train.places(rows[:1]))
            stop = int(train.places(rows[-1:])) + train.context + 1
            tokens = train.tokens
            assert isinstance(tokens, TensorTokens | MappedTokens)
            cut = type(tokens)(tokens.values[first:stop], pinned=tokens.pinned)  # type: ignore[arg-type]
            return TokenWindows(cut, train.context, train.stride)
        found = train.subset(rows)
        if isinstance(found, TensorData) and {OWN, COUNTS} & found.fields.keys():
            return TensorData({name: v for name, v in found.fields.items() if name not in (OWN, COUNTS)})
        return found

    @property
    def twice(self) -> bool:
        """Whether a row may come twice; a kernel that leaves a row out would still see its double."""
        return not isinstance(self.plan.task, LeaveOneOut)

    # -- What makes no sense -------------------------------------------------------------------

    def _refuse_recipe(self, kind: str) -> None:
        """What the recipe alone tells, before any data is read."""
        if kind not in KINDS:
            raise unknown_name("study", kind, KINDS)
        name, learns = self.recipe.name, self.recipe.targets
        if kind == "folds" and learns == "text":
            raise InputError(
                f"folds of '{name}', which learns from one long text",
                expected="rows that do not overlap: windows of a text share their tokens",
                fix="quire study RUN learning-curve, or quire evaluate RUN --data OTHER_TEXT",
            )
        said = {"text": "the tokens of a text", "pairs": "texts", "scenes": "boxes"}.get(learns)
        refused = {"bias-variance": said, "calibration": said, "equivariance": said}.get(kind)
        if refused is None or (learns == "text" and kind != "bias-variance"):
            return
        wanted, fix = {
            "bias-variance": ("a value or a class for each row", "quire study RUN learning-curve"),
            "calibration": ("probabilities of classes, or values with intervals", "quire evaluate RUN"),
            "equivariance": ("one output for each image or sequence",
                             "study its network: quire.doctor.studies.equivariance(network, inputs)"),
        }[kind]  # fmt: skip
        raise InputError(f"{kind} of '{name}', whose answers are {refused}", expected=wanted, fix=fix)

    def check(self, kind: str) -> None:
        """InputError where a study makes no sense for this run."""
        self._refuse_recipe(kind)
        data, task, name = self.plan.data, self.plan.task, self.recipe.name
        if kind in ("folds", "learning-curve", "bias-variance") and isinstance(data.train, StreamedRows):
            raise InputError(
                f"{kind} of {len(data.train):,} rows that do not fit in memory",
                expected="rows in memory, which can be drawn anew",
                fix="train a run on a sample of the file, and study that",
            )
        if kind == "learning-curve" and isinstance(data.train, TokenWindows) and self.apart is None:
            raise InputError(
                "a text without a validation part",
                expected="a part to judge by",
                fix="train with --text.validation 0.1",
            )  # fmt: skip
        if kind in ("bias-variance", "calibration") and not isinstance(task, LanguageModel):
            if not task.answers_target or not data.preparation.targets:
                raise InputError(
                    f"{kind} of '{name}', which answers no target",
                    expected="a run that predicts values or classes",
                    fix="quire study RUN folds, or learning-curve",
                )
            self.answered  # noqa: B018  (an unknown --target is refused here)
        if kind == "regions" and not isinstance(getattr(task, "model", None), nn.Module):
            raise InputError(
                f"linear regions of '{name}', which has no network",
                expected="a piecewise linear network",
                fix="study a run of 'mlp' with --model.activation relu",
            )
        if (
            kind == "equivariance"
            and self._inputs(1).dim() != 4
            and self.recipe.targets not in ("labelled", "text")
        ):
            raise InputError(
                f"equivariance of '{name}' on a table",
                expected="images, sequences or sets: columns have no order and no places",
                fix="study a run on images or texts",
            )

    @property
    def answered(self) -> tuple[int, str]:
        """Number of the target that is studied, and what its columns begin with."""
        preparation = self.plan.data.preparation
        names = [target.name for target in preparation.targets]
        if isinstance(self.plan.task, LanguageModel) or len(names) < 2:
            return 0, ""
        if self._target is None:
            raise InputError(
                f"{len(names)} targets: {', '.join(names)}",
                expected="one to study",
                fix=f"add --target '{names[0]}'",
            )
        if self._target not in names:
            raise unknown_name("target", self._target, names)
        number = names.index(self._target)
        return number, target_prefixes(preparation)[number]

    # -- Training ------------------------------------------------------------------------------

    @cached_property
    def _first(self) -> Task:
        """The task as the run began with it, and what the run does first is done."""
        if self.plan.before is not None and not isinstance(self.plan.task, LeaveOneOut):
            self.plan.before(self.device, self.progress)
        return copy.deepcopy(self.plan.task).cpu()

    def _made(self, seed: int) -> dict[str, Tensor]:
        """First weights that the task's description gives with a seed."""
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            return dict(build_task(self._first.spec()).state_dict())

    @cached_property
    def _own(self) -> dict[str, Tensor]:
        return self._made(self.seed)

    def start(self, seed: int) -> Task:
        """A fresh task. Whatever of the run's first weights its seed had made is made by `seed` instead;
        weights that came from elsewhere stay."""
        task = copy.deepcopy(self._first)
        if seed != self.seed and not isinstance(task, StatisticsTask | LeaveOneOut):
            new = self._made(seed)
            for name, value in task.state_dict().items():  # which are the task's own tensors
                own = self._own.get(name)
                if own is not None and own.shape == value.shape and torch.equal(own, value):
                    value.copy_(new[name])
        return task

    def __call__(self, rows: Tensor | None, seed: int) -> TaskJudge:
        if rows is not None and not len(rows):
            raise InputError("no training rows", expected="at least one")
        task = self.start(seed)
        data = self.plan.data.train if rows is None else self.subset(rows)
        task, data = self._give(task, data, rows, seed)
        if isinstance(task, StatisticsTask):
            self._sweep(task, data, seed)
        else:
            self._descend(task, data, seed)
        return TaskJudge(task, self, rows)

    def _give(self, task: Task, data: Data, rows: Tensor | None, seed: int) -> tuple[Task, Data]:
        """Let what remembers training rows remember these alone."""
        options: Any = self.plan.options
        if isinstance(task, LeaveOneOut):
            plain = self.subset(torch.arange(self.rows)) if rows is None else data
            assert isinstance(plain, TensorData)
            count, features = len(plain), task.model.config.in_features
            middle = rule_of_thumb(count, features)
            config = replace(task.model.config, rows=count, width=options.model.width or middle)
            task = LeaveOneOut(NadarayaWatson(config), task.head)
            data = task.remember(plain)
            if self.plan.before is not None:  # the width is searched
                task.to(self.device)
                task.model.set_width(best_width(task, data.to(self.device), candidate_widths(middle), seed))
        elif isinstance(task, Bagging):
            assert isinstance(data, TensorData)
            counts = bootstrap_counts(len(data), task.members, seed).to(data.device)
            data = TensorData({**data.fields, COUNTS: counts})
        elif isinstance(task, Embedding) and rows is not None:
            kept = torch.isin(task.reference_rows, rows)
            if int(kept.sum()) < 2:
                raise _too_few_labels(int(kept.sum()), rows, "at least 2 to compare with")
            for name in ("inputs", "target", "rows"):
                task.register_buffer(f"reference_{name}", getattr(task, f"reference_{name}")[kept])
        elif isinstance(task, SemiSupervised) and rows is not None:
            assert task.views is not None
            target: Tensor = data.target  # type: ignore[attr-defined]
            known = data.take((target >= 0).nonzero().flatten())
            if len(known.target.unique()) < task.head.dim:
                raise _too_few_labels(len(known), rows, f"one of each of the {task.head.dim} classes")
            task._teach(Teaching(known.inputs, known.target, *task.views))
        return task, data

    def _sweep(self, task: StatisticsTask, data: Data, seed: int) -> None:
        options = self.plan.options
        assert isinstance(options, SweepOptions)
        asked = self.steps or (None if self.epochs is None else math.ceil(self.epochs))
        fit_statistics(
            task, data, self.plan.data.validation, sweeps=asked or options.sweeps, seed=seed,
            device=self.device, progress=self.progress,
        )  # fmt: skip

    def _descend(self, task: Task, data: Data, seed: int) -> None:
        options = self.plan.options
        assert isinstance(options, DescentOptions)
        plan = replace(self.plan, task=task, notes=[])
        if options.tune.lora.rank:
            with torch.random.fork_rng([]):
                torch.manual_seed(seed)
                if seed == self.seed:
                    torch.random.set_rng_state(self._chance)
                attach(plan, options)
        whole: Any = self.plan.data.train
        batch = options.train.batch_size
        epoch = steps_per_epoch(len(whole.streams(batch) if options.train.carry else whole), batch)
        usual = options.epochs if options.epochs is not None else self.plan.epochs
        epochs = self.epochs if self.epochs is not None else usual
        steps = (
            self.steps or (options.steps if self.epochs is None else None) or max(1, round(epochs * epoch))
        )
        train = replace(options.train, validate_every=options.train.validate_every or epoch)
        fit(
            task, data, self.plan.data.validation, steps=steps, optim=options.optim, train=train, seed=seed,
            device=self.device, progress=self.progress, train_measures=False,
        )  # fmt: skip

    # -- The run as it is ----------------------------------------------------------------------

    @cached_property
    def trained(self) -> TaskJudge:
        """The run's own trained task."""
        return TaskJudge(self.run.task.to(self.device), self)

    def _inputs(self, count: int) -> Tensor:
        data = as_judged(self.part(self.apart) if self.apart else self.plan.data.train)
        rows = torch.linspace(0, len(data) - 1, min(len(data), count)).long()
        return data.take(rows).inputs

    def network(self, count: int = 64) -> tuple[nn.Module, Tensor]:
        """The run's network and some rows of what it reads, scaled as it reads them."""
        task: Any = self.trained.task
        inputs = self._inputs(count).to(task.device)
        scale = getattr(task, "inputs", None)
        return task.model.eval(), inputs if scale is None else scale(inputs)

    def mapping(self, count: int = 64) -> tuple[Any, Tensor, Tensor | None]:
        """The run's network as a function of scaled inputs, some of them, and which places of a text are
        real."""
        network, inputs = self.network(count)
        preparation: Any = self.plan.data.preparation
        real = None
        if isinstance(preparation, TextPreparation) and self.recipe.targets == "labelled":
            real = inputs != preparation.tokeniser.specials["padding"]
        return network, inputs, real


def _too_few_labels(count: int, rows: Tensor, expected: str) -> InputError:
    fix = "train with more --labels, or take fewer folds or larger sizes"
    return InputError(f"{count} labelled rows among {len(rows)}", expected=expected, fix=fix)


def _check_data(run: Any, options: Any) -> None:
    """InputError where the file that the run learned from is gone or has changed."""
    if options.data is None:
        return
    if not options.data.exists():
        raise InputError(
            f"the data of the run, {options.data}, is not there any more",
            expected="the file that the run was trained on",
            fix="put it back, or train a new run",
        )
    if fingerprint(options.data) != read_config(run.path)["data_sha256"]:
        raise InputError(
            f"{options.data} has changed since the run",
            expected="the file as it was",
            fix="train a new run on it",
        )
