"""`quire doctor RUN` and `quire doctor package.module:make_model`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from quire.cli.objects import is_object, typed_object
from quire.cli.parse import parse
from quire.cli.paths import require_file, require_run
from quire.cli.show import print_json
from quire.errors import InputError

if TYPE_CHECKING:
    from quire.doctor import Verdict
    from quire.doctor.curvature import Spectrum, StepAdvice

LOSSES = ("cross-entropy", "squared-error", "absolute-error", "binary-cross-entropy")


@dataclass(frozen=True)
class DoctorOptions:
    """Why a model does not learn, and what would help.

    quire doctor runs/mlp-…
    quire doctor ./net.py:make_model --data house.csv --target price --lr 0.1

    A function such as make_model takes no arguments and returns a model; with its own loss and batches it
    returns (model, loss, batches), and perhaps an optimiser behind them.
    """

    subject: Positional[str]
    """A run folder, or package.module:make_model, also ./file.py:make_model."""
    data: Path | None = None
    """A table or a folder of images to try a model of yours on."""
    target: str | None = None
    """Column of the table that is to be predicted."""
    loss: Literal["auto", "cross-entropy", "squared-error", "absolute-error", "binary-cross-entropy"] = "auto"
    """For a model without one; auto: cross-entropy of classes, squared error of values."""
    optimiser: Literal["adam", "sgd"] = "adam"
    lr: float | None = None
    """Step size that is meant for it: it is tried, and others beside it."""
    batch: int = 64
    """Rows of a batch of --data."""
    steps: int = 30
    """Steps of the probe; 0 looks before the first step alone."""
    seconds: float = 20.0
    """How long the probe may take."""
    curvature: bool = True
    """Look at the curvature of the loss as well."""
    advise: int | None = None
    """Advise a step size for this many steps, by the curvature and by trials."""
    silence: tuple[str, ...] = ()
    """Codes of findings that are not wanted."""
    out: Path | None = None
    """Page to write; the default is doctor.html in the run folder, and none for a model."""
    strict: bool = False
    """End with exit code 1 where anything above a note is found."""
    seed: int = 0
    json: bool = False
    """Print one object: verdict and findings."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        for name, value, least in (("batch", self.batch, 1), ("steps", self.steps, 0)):
            if value < least:
                raise InputError(f"--{name} {value}", expected=f"at least {least}")
        if self.advise is not None and self.advise < 8:
            raise InputError(f"--advise {self.advise}", expected="at least 8 steps", fix="--advise 100")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise InputError(f"--lr {self.lr:g}", expected="a number above 0")
        if not self.seconds > 0:
            raise InputError(f"--seconds {self.seconds:g}", expected="a number above 0")


def main(words: Sequence[str]) -> int:
    options = parse(DoctorOptions, words, prog="quire doctor")
    if options.out is not None and not options.out.parent.is_dir():
        raise InputError(
            f"--out {options.out}: there is no folder {options.out.parent}",
            expected="a file in a folder that exists",
            fix=f"mkdir -p {options.out.parent}",
        )
    began = time.perf_counter()
    if is_object(options.subject):
        if options.data is not None:
            require_file(options.data)
        verdict, spectrum, advice = of_object(options)
        out = options.out
    else:
        require_run(Path(options.subject))
        refuse_for_runs(options)
        verdict, spectrum, advice = of_run(options)
        out = options.out or Path(options.subject) / "doctor.html"
    if out is not None:
        from quire.report.diagnosis import write

        write(out, page(options, verdict, spectrum))
    show(options, verdict, spectrum, advice, out, time.perf_counter() - began)
    return 1 if options.strict and verdict.findings.codes("error", "warning") else 0


def refuse_for_runs(options: DoctorOptions) -> None:
    """Options that a run has answered already."""
    given = {"--data": options.data, "--target": options.target, "--lr": options.lr}
    for name, value in given.items():
        if value is not None:
            raise InputError(
                f"{name} {value} for a run",
                expected="a run alone: it knows its data, loss and step size",
                fix=f"leave {name} out, or name a model: ./file.py:make_model",
            )


Found = tuple["Verdict", "Spectrum | None", "StepAdvice | None"]


def of_run(options: DoctorOptions) -> Found:
    from quire.doctor.verdict import check_silenced
    from quire.runs import load

    check_silenced(options.silence)
    run = load(Path(options.subject))
    verdict = run.diagnose(options.silence)
    bent = run.curvature(seconds=options.seconds) if options.curvature else None
    return verdict, bent, None if options.advise is None else run.advise_step(options.advise)


def of_object(options: DoctorOptions) -> Found:
    from quire.doctor.verdict import check_silenced, diagnose
    from quire.recipes.strangers import batches_of, optimiser_for, subject_of

    check_silenced(options.silence)
    subject = subject_of(typed_object(options.subject), options.subject)
    if options.data is not None:
        kind, train, validation = batches_of(options.data, options.target, options.batch, options.seed)
        subject = subject.on(train, validation, kind)
    subject = subject.with_loss(options.loss)
    if options.lr is not None or not subject.optimisers:
        subject = subject.by(optimiser_for(subject.model, options.optimiser, options.lr or 1e-3))
    verdict = diagnose(
        subject.model, subject.loss, subject.batches, optimisers=subject.optimisers,
        validation=subject.validation, steps=options.steps, seconds=options.seconds,
        silence=options.silence, seed=options.seed,
    )  # fmt: skip
    bent = subject.curvature(seconds=options.seconds) if options.curvature else None
    advice = None if options.advise is None else subject.step(options.advise, options.optimiser)
    return verdict, bent, advice


def show(
    options: DoctorOptions,
    verdict: Verdict,
    spectrum: Spectrum | None,
    advice: StepAdvice | None,
    out: Path | None,
    seconds: float,
) -> None:
    if options.json:
        found = {
            "subject": options.subject, "verdict": verdict.sentence,
            "findings": [as_plain(finding) for finding in verdict.findings],
            "curvature": None if spectrum is None else curvature_facts(spectrum),
            "advice": None if advice is None else {"step": advice.step, "text": str(advice)},
            "page": None if out is None else str(out), "seconds": seconds,
        }  # fmt: skip
        print_json(found)
        return
    print(verdict.sentence)
    for finding in verdict.findings:
        print(f"\n{finding}")
    if spectrum is not None:
        course = verdict.course
        plain = course.optimiser is not None and course.optimiser.upper() == "SGD"
        print(f"\ncurvature: {spectrum.advice(course.step_size if plain else None, course.momentum)}")
    if advice is not None:
        print(f"\nadvice: {advice}")
    if out is not None:
        print(f"\n{out}")


def as_plain(finding: Any) -> dict[str, str]:
    return {name: str(value) for name, value in vars(finding).items()}


def curvature_facts(spectrum: Spectrum) -> dict[str, float]:
    return {
        "largest": spectrum.largest,
        "smallest": spectrum.smallest,
        "trace": spectrum.trace,
        "condition_number": spectrum.condition_number,
        "best_first_step": spectrum.best_first_step,
        "stable_step": spectrum.stable_step,
    }


def page(options: DoctorOptions, verdict: Verdict, spectrum: Spectrum | None) -> Any:
    from quire.report.diagnosis import Page

    name = Path(options.subject).resolve().name if not is_object(options.subject) else options.subject
    facts: list[tuple[str, Any]] = []
    course = verdict.course
    if course.optimiser and course.step_size is not None:
        facts.append(("optimiser", f"{course.optimiser}, step size {course.step_size:g}"))
    if course.noise is not None and math.isfinite(course.noise.scale):
        facts.append(("batch at which signal equals noise", f"{course.noise.scale:,.0f} rows"))
    if spectrum is not None:
        names = {
            "largest": "λmax", "smallest": "λmin", "trace": "trace of the Hessian",
            "condition_number": "condition number", "best_first_step": "1/λmax",
            "stable_step": "limit of gradient descent, 2/λmax",
        }  # fmt: skip
        facts += [(names[key], f"{value:.4g}") for key, value in curvature_facts(spectrum).items()]
    findings: list[Mapping[str, str]] = [as_plain(finding) for finding in verdict.findings]
    good = not verdict.findings.codes("error", "warning")
    return Page(f"Doctor: {name}", verdict.sentence, good, findings, drawings(verdict, spectrum), facts)


def drawings(verdict: Verdict, spectrum: Spectrum | None) -> list[Any]:
    from quire.report import diagnosis as draw

    course = verdict.course
    moments = [
        (step, finding.severity, finding.what)
        for finding in verdict.findings
        if (step := step_of(finding.where)) is not None
    ]
    found = [
        ("Loss", "Dotted lines stand where something was found", draw.course_figure(
            course.train, course.validation, moments)),
        ("Size of the gradient", "Of all parameters together", draw.norms_figure(course.norms)),
    ]  # fmt: skip
    whole = [seen for seen in course.looks if seen.broken() is None]
    if whole:
        ends = [whole[0]] if len(whole) == 1 else [whole[0], whole[-1]]
        flows = [
            draw.Flow(
                f"step {seen.step}", [layer.name for layer in seen.layers],
                [layer.size for layer in seen.layers],
                [math.nan if layer.gradient is None else layer.gradient for layer in seen.layers],
            )
            for seen in ends
        ]  # fmt: skip
        last = whole[-1].layers
        shares = [
            [-1.0 if value is None else value for value in column]
            for column in ([layer.dead for layer in last], [layer.saturated for layer in last])
        ]
        found += [
            ("Activations", "Sizes should neither fade nor grow with depth", draw.flow_figure(flows)),
            ("Gradients", "Likewise on the way back", draw.flow_figure(flows, "gradients")),
            ("Units", "At the last look", draw.units_figure([y.name for y in last], *shares)),
        ]
    if spectrum is not None:
        grid, density = spectrum.grid.tolist(), spectrum.density.tolist()
        words = f"Gradient descent is stable below a step of {spectrum.stable_step:.3g}"
        bent = draw.density_figure(grid, density, spectrum.largest, spectrum.smallest)
        found.append(("Curvature", words, bent))
    return [draw.Shown(title, caption, fig) for title, caption, fig in found if fig is not None]


def step_of(where: str) -> int | None:
    """The first number of "step 120" or "from step 120" or "steps 10 to 60"."""
    words = where.split()
    for place, word in enumerate(words[:-1]):
        if word in ("step", "steps") and words[place + 1].rstrip(",").isdigit():
            return int(words[place + 1].rstrip(","))
    return None
