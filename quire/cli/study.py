"""`quire study RUN KIND`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from quire.cli.parse import parse
from quire.cli.paths import require_run
from quire.cli.show import plain, print_json, print_table
from quire.errors import InputError

Kind = Literal["folds", "learning-curve", "bias-variance", "calibration", "regions", "equivariance"]
OWN = {
    "folds": ("folds",),
    "repeats": ("folds", "learning-curve", "bias-variance"),
    "sizes": ("learning-curve",),
    "measure": ("learning-curve",),
    "noise": ("bias-variance",),
    "target": ("bias-variance", "calibration"),
    "epochs": ("folds", "learning-curve", "bias-variance"),
    "steps": ("folds", "learning-curve", "bias-variance"),
}
"""Which studies an option is for."""
REPEATS = {"folds": 1, "learning-curve": 3, "bias-variance": 20}


@dataclass(frozen=True)
class StudyOptions:
    """How well a run does on rows it has not seen, and what would help.

    folds: measures on rows left out, with intervals. learning-curve: more data, or a bigger model?
    bias-variance: is it the rows that were drawn, or the model? calibration: are probabilities what they say?
    regions: linear pieces of a ReLU network. equivariance: outputs for moved, mirrored, reordered inputs.
    The first three train anew, many times; --epochs makes that shorter.
    """

    run: Positional[Path]
    """Run folder."""
    kind: Positional[Kind]
    """folds, learning-curve, bias-variance, calibration, regions or equivariance."""
    folds: int | None = None
    """Parts that are left out in turn; 5 without it."""
    repeats: int | None = None
    """Rounds of folds (1), curves (3), or resamples of bias-variance (20)."""
    sizes: tuple[int, ...] = ()
    """Numbers of training rows of a curve; without it six in equal ratios up to all."""
    measure: str | None = None
    """What a curve is of; without it what the run watched, or accuracy or rmse."""
    noise: float | None = None
    """Standard deviation of the targets' noise, if it is known: then bias² stands without it."""
    target: str | None = None
    """Which target, of a run with several."""
    seed: int = 0
    epochs: float | None = None
    """Shorter training: so many epochs of the whole training part (sweeps of pca, kmeans, gmm)."""
    steps: int | None = None
    """Shorter training: so many steps."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    out: Path | None = None
    """Folder for KIND.json, KIND.png and KIND.svg."""
    overwrite: bool = False
    """Replace those files if they exist."""
    json: bool = False
    """Print one object: run, kind, verdict, numbers."""
    quiet: bool = False
    """Show no progress."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        for name, kinds in OWN.items():
            value = getattr(self, name)
            if value not in (None, ()) and self.kind not in kinds:
                raise InputError(
                    f"--{name} with {self.kind}",
                    expected=f"an option of {', '.join(kinds)}",
                    fix="leave it out",
                )
        least = {"folds": 2, "repeats": 2 if self.kind == "bias-variance" else 1, "steps": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise InputError(f"--{name} {value}", expected=f"{low} or more", fix=f"give at least {low}")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise InputError(f"--epochs {self.epochs:g}", expected="a number above 0", fix="leave it out")
        if self.epochs is not None and self.steps is not None:
            raise InputError("both --epochs and --steps", expected="one of them", fix="leave one out")
        if self.noise is not None and not 0 <= self.noise < math.inf:
            raise InputError(f"--noise {self.noise:g}", expected="a standard deviation, at least 0")
        if self.sizes and (len(set(self.sizes)) < 3 or min(self.sizes) < 1):
            raise InputError(
                f"--sizes {' '.join(map(str, self.sizes))}",
                expected="three or more different numbers of rows: the law of a curve has three numbers",
                fix="leave --sizes out, or give more",
            )
        if not 0 <= self.seed < 2**32:
            raise InputError(f"--seed {self.seed}", expected="a whole number from 0 to 4294967295")


def main(words: Sequence[str]) -> int:
    options = parse(StudyOptions, words, prog="quire study")
    require_run(options.run)
    check_out(options)
    from quire.recipes.again import Again
    from quire.runs import load

    again = Again(
        load(options.run), epochs=options.epochs, steps=options.steps, target=options.target,
        kind=options.kind, device=options.device,
    )  # fmt: skip
    study = carry_out(options, again)
    found = {"run": str(options.run), "kind": options.kind, "verdict": study.verdict, **plain(study.numbers)}
    if options.out is not None:
        write(options, study, found)
    if options.json:
        print_json(found)
        return 0
    print_table(*study.table)
    print(study.verdict)
    if options.out is not None:
        print(f"written: {options.out / f'{options.kind}.png'}")
    return 0


def carry_out(options: StudyOptions, again: Any) -> Any:
    from quire.doctor import studies

    progress = None if options.quiet or options.json else show_progress
    repeats = options.repeats or REPEATS.get(options.kind, 1)
    common: dict[str, Any] = {"seed": options.seed, "progress": progress}
    if options.kind == "folds":
        return studies.folds(again, options.folds or 5, repeats=repeats, **common)
    if options.kind == "learning-curve":
        return studies.learning_curve(
            again, options.sizes or None, repeats=repeats, measure=options.measure, **common
        )
    if options.kind == "bias-variance":
        return studies.bias_variance(
            again, resamples=repeats, noise_std=options.noise or 0.0, twice=again.twice, **common
        )
    if options.kind == "calibration":
        data = again.plan.data
        parts = [name for name in ("test", "validation") if getattr(data, name) is not None]
        given = [again.trained.answers(name) for name in parts]
        if not given:
            raise InputError(
                "a run without a validation and a test part", expected="rows that were not learned from",
                fix="train with a validation or a test part",
            )  # fmt: skip
        return studies.calibration(given[0], given[1] if len(given) > 1 else None, seed=options.seed)
    if options.kind == "regions":
        return studies.linear_regions(*again.network(), seed=options.seed)
    network, inputs, real = again.mapping()
    return studies.equivariance(network, inputs, real=real, seed=options.seed)


def show_progress(done: int, total: int) -> None:
    """A line that is written over on a terminal, lines elsewhere."""
    end = "\n" if done == total or not sys.stderr.isatty() else "\r"
    print(f"fit {done} of {total}", end=end, file=sys.stderr, flush=True)


def check_out(options: StudyOptions) -> None:
    """InputError, before any work, where the files could not be written at the end."""
    if options.out is None:
        return
    if options.out.exists() and not options.out.is_dir():
        raise InputError(f"--out {options.out} is a file", expected="a folder", fix="choose another name")
    there = [name for name in names(options) if (options.out / name).exists()]
    if there and not options.overwrite:
        raise InputError(
            f"{options.out / there[0]} exists already", expected="a folder without it",
            fix="choose another folder, or add --overwrite",
        )  # fmt: skip


def names(options: StudyOptions) -> list[str]:
    return [f"{options.kind}.{ending}" for ending in ("json", "png", "svg")]


def write(options: StudyOptions, study: Any, found: dict[str, Any]) -> None:
    """Numbers and picture, all of them or none."""
    import io

    from quire.files import canonical_json, write_files
    from quire.report.style import to_svg

    assert options.out is not None
    picture = study.figure()
    image = io.BytesIO()
    picture.savefig(image, format="png", dpi=150)
    parts = (canonical_json({"format": 1, **found}), image.getvalue(), to_svg(picture).encode())
    write_files(options.out, dict(zip(names(options), parts, strict=True)))
