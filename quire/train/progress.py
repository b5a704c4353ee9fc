"""What a person sees of a run: a live bar on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

Record = Mapping[str, Any]


class Progress:
    """Silent; the base of the two that speak."""

    REFRESH = 0.1  # seconds between updates of the bar
    SPEAKS = False  # whether `step` shows anything; asking a GPU for the loss makes it wait

    def start(self, total: int, step: int, samples_per_step: float) -> None:
        self.total, self.first, self.samples = total, step, samples_per_step
        self.began = self.shown = time.perf_counter()

    def step(self, step: int, loss: float) -> None:
        """After each step that is worth showing; the trainer calls it at most every REFRESH seconds."""

    def records(self, records: Sequence[Record]) -> None:
        """After each validation: the records of its splits."""

    def note(self, text: str) -> None:
        """Something that a person should know, between the steps."""

    def finish(self) -> None:
        """At the end, however it came."""

    def due(self, seconds: float) -> bool:
        """Whether `seconds` have passed since the bar was last brought up to date."""
        now = time.perf_counter()
        if not self.SPEAKS or now - self.shown < seconds:
            return False
        self.shown = now
        return True

    def speed(self, step: int) -> float:
        """Samples a second since the start."""
        return (step - self.first) * self.samples / max(time.perf_counter() - self.began, 1e-9)

    def left(self, step: int) -> str:
        done = step - self.first
        seconds = (time.perf_counter() - self.began) / max(done, 1) * (self.total - step)
        minutes, seconds = divmod(round(seconds), 60)
        return f"{minutes}:{seconds:02d}"


SHOWN = 3


def describe(records: Sequence[Record]) -> str:
    """The first few values of the last split (validation where there is one)."""
    record = records[-1]
    hidden = ("lr", "gradient_norm", "penalty", "micro_batches")
    values = [(k, v) for k, v in record["values"].items() if v is not None and k not in hidden]
    return f"{record['split']} " + "  ".join(f"{name} {value:.4g}" for name, value in values[:SHOWN])


class Plain(Progress):
    """A line for a validation, at most one every few seconds, for logs and pipes."""

    LINE_SECONDS = 2.0

    def start(self, total: int, step: int, samples_per_step: float) -> None:
        super().start(total, step, samples_per_step)
        self.last_line = self.began
        self.pending = ""

    def records(self, records: Sequence[Record]) -> None:
        step = records[-1]["step"]
        loss = records[0]["values"]["loss"]
        tail = f"{self.speed(step):.0f} samples/s  {self.left(step)} left"
        self.pending = f"step {step}/{self.total}  loss {loss:.4g}  {describe(records)}  {tail}"
        now = time.perf_counter()
        if now - self.last_line >= self.LINE_SECONDS:
            self._flush()
            self.last_line = now

    def note(self, text: str) -> None:
        print(f"note: {text}", file=sys.stderr, flush=True)

    def _flush(self) -> None:
        if self.pending:
            print(self.pending, file=sys.stderr, flush=True)
        self.pending = ""

    def finish(self) -> None:
        self._flush()


class Bar(Progress):
    """Loss, validation measures, speed and time left on one live line."""

    SPEAKS = True

    def start(self, total: int, step: int, samples_per_step: float) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        super().start(total, step, samples_per_step)
        self.measures = ""
        self.bar: RichProgress = RichProgress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self.line: TaskID = self.bar.add_task("", total=total, completed=step, note="")
        self.bar.start()

    def step(self, step: int, loss: float) -> None:
        note = f"loss {loss:.4g}  {self.measures}  {self.speed(step):.0f} samples/s  {self.left(step)} left"
        self.bar.update(self.line, completed=step, note=note)

    def records(self, records: Sequence[Record]) -> None:
        self.measures = describe(records)

    def note(self, text: str) -> None:
        self.bar.console.print(f"note: {text}", markup=False, highlight=False)

    def finish(self) -> None:
        self.bar.stop()


def make_progress(quiet: bool) -> Progress:
    if quiet:
        return Progress()
    return Bar() if sys.stderr.isatty() else Plain()
