"""Kernel regression and classification on any table: the average of the training rows near by."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from quire.errors import InputError
from quire.options import Optim, Train, Tune, check_range
from quire.recipes.base import Expectation, TableRunOptions, recipe

if TYPE_CHECKING:
    import torch

    from quire.data.batch import TensorData
    from quire.recipes.plan import Plan
    from quire.tasks.kernel import LeaveOneOut
    from quire.train.progress import Progress

STEPS = 150
MOST_TRIED = 1000
"""Training rows that a width is judged by before training."""
WIDTHS = 25


@dataclass(frozen=True, kw_only=True)
class KernelWidth:
    """The kernel."""

    kernel: Literal["gaussian", "boxcar", "epanechnikov"] = "gaussian"
    """gaussian: its width is learned by descent. epanechnikov: the best of 25 widths in leave-one-out, and
    from there by descent. boxcar has no gradient: the best of 25 widths, and that is all."""
    width: float | None = None
    """Where learning begins, in standard deviations of a feature; a boxcar keeps it. Without it, as the
    kernel says; a gaussian begins at N^(−1/(D+4)) for N rows of D features."""
    per_feature: bool = False
    """A width for each feature, which tells what matters, but fits chance as well where rows are few."""

    def __post_init__(self) -> None:
        check_range(self, "--model.", width="> 0")
        if self.kernel == "boxcar" and self.per_feature:
            raise InputError(
                "--model.per_feature with --model.kernel boxcar",
                expected="a kernel with a gradient: widths of many features cannot be tried one by one",
                fix="use --model.kernel epanechnikov or gaussian",
            )


@dataclass(frozen=True, kw_only=True)
class KernelOptions(TableRunOptions):
    model: KernelWidth = field(default_factory=KernelWidth)
    optim: Optim = field(default_factory=lambda: Optim(lr=0.05))
    train: Train = field(default_factory=lambda: Train(batch_size=256))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tune != Tune():
            raise InputError(
                "--tune with nadaraya-watson",
                expected="a network with weights: this one is its training rows and a width",
                fix="train anew on all rows, which takes seconds",
            )


@recipe(
    "nadaraya-watson",
    summary="Kernel regression and classification; the kernel's width by leave-one-out",
    expected=Expectation("r2", at_least=0.39),
    targets="any",
    options=KernelOptions,
)
def nadaraya_watson(options: KernelOptions) -> Plan:
    from quire.data.batch import steps_per_epoch
    from quire.models.nadaraya_watson import NadarayaWatson, NadarayaWatsonConfig
    from quire.recipes.plan import Plan, make_head, open_data
    from quire.recipes.pooling_pictures import pooling_pictures
    from quire.tasks.kernel import LeaveOneOut

    data = open_data(options, "diabetes")
    chosen, rows, features = options.model, len(data.train), data.train.inputs.shape[1]
    if rows < 2:
        raise InputError(
            f"{rows} training row",
            expected="at least two: each is predicted from the others",
            fix="give more rows, or lower --table.validation and --table.test",
        )
    head = make_head(data.preparation.target, data.train.target)
    start = rule_of_thumb(rows, features)
    config = NadarayaWatsonConfig(
        features, head.outputs_needed, rows, chosen.kernel, chosen.per_feature, chosen.width or start
    )
    task = LeaveOneOut(NadarayaWatson(config), head)
    data = replace(data, train=task.remember(data.train))
    searched = chosen.kernel != "gaussian" and chosen.width is None

    def before(device: torch.device, progress: Progress) -> None:
        task.to(device)
        task.model.set_width(best_width(task, data.train.to(device), candidate_widths(start), options.seed))

    steps = 1 if chosen.kernel == "boxcar" else STEPS
    return Plan(
        task,
        data,
        options,
        epochs=steps / steps_per_epoch(rows, options.train.batch_size),
        pictures=lambda: pooling_pictures(task, data, candidate_widths(start), options.seed),
        notes=notes(chosen, searched),
        before=before if searched else None,
    )


def notes(chosen: KernelWidth, searched: bool) -> list[str]:
    found = []
    if searched:
        found.append(
            f"the {chosen.kernel} kernel began with the best of {WIDTHS} widths in leave-one-out, on at most "
            f"{MOST_TRIED:,} training rows"
        )
    if chosen.kernel == "boxcar":
        found.append("a boxcar has no gradient: descent leaves its width as it is")
    return found


def rule_of_thumb(rows: int, features: int) -> float:
    """N^(−1/(D+4)): how the best width for D features of deviation 1 falls with the number of rows."""
    return float(rows ** (-1 / (features + 4)))


def candidate_widths(middle: float) -> list[float]:
    """A sixteenth to sixteen times the middle, in equal ratios."""
    return [middle * 2 ** (8 * i / (WIDTHS - 1) - 4) for i in range(WIDTHS)]


def best_width(task: LeaveOneOut, train: TensorData, widths: list[float], seed: int) -> float:
    """The width with the smallest leave-one-out loss, the largest of equals."""
    losses = leave_one_out_losses(task, train, widths, seed)
    return max(width for width, loss in zip(widths, losses, strict=True) if loss == min(losses))


def leave_one_out_losses(
    task: LeaveOneOut, train: TensorData, widths: list[float], seed: int, most: int = MOST_TRIED
) -> list[float]:
    """The loss of some training rows, each answered by all others, for each width; the task's own width is
    left as it was."""
    import torch

    from quire.train.evaluate import evaluate

    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    part = train.subset(order[:most])
    before = task.model.log_width.detach().clone()
    losses = []
    for width in widths:
        task.model.set_width(width)
        losses.append(evaluate(task, part)["loss"])
    with torch.no_grad():
        task.model.log_width.copy_(before)
    return losses
