"""Learning by statistics: the second way to learn, beside descent.

A task maps a batch to statistics that add up over rows, and updates itself from their sum:

    totals = Σ_batches statistics(batch),   state ← update(totals)

One pass over the data is a *sweep*. Nothing but the sum is kept, so data larger than memory needs no second
code path. Rows are read in their order; a checkpoint after a sweep holds the state and its number, and a run
resumed from it computes the same bits as one that was never interrupted. Chance is asked only where a run
begins, and from a generator of its own.
"""

from __future__ import annotations

import math
import signal
import time
from abc import abstractmethod
from collections.abc import Hashable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quire.data.batch import Batch, Data, TensorData, in_order
from quire.errors import DataError, InputError, QuireError
from quire.train.checkpoints import Checkpoint
from quire.train.evaluate import evaluate
from quire.train.keeping import (
    Fit,
    Interrupt,
    Interrupted,
    Record,
    State,
    Store,
    check_plan,
    make_record,
    place,
    snapshot,
)
from quire.train.memory import Before, told_of_memory
from quire.train.processes import (
    add_over_processes,
    all_do,
    from_all,
    from_first,
    own_rows,
    processes,
    share_state,
)
from quire.train.progress import Progress
from quire.train.replay import Answer, Replay
from quire.train.sums import add_to
from quire.train.task import Task

KEEP = 2
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def as_rows(inputs: Tensor) -> Tensor:
    """What is learned from, (B, D) in float32 or float64: numbers as they are, pixels as shares of 255."""
    flat = inputs.flatten(1)
    if flat.dtype == torch.uint8:
        return flat.float() / 255
    return flat if flat.dtype in (torch.float32, torch.float64) else flat.float()


class Swept(NamedTuple):
    """What a sweep found out."""

    loss: float
    """Mean loss of a row under the state before the update."""
    done: bool
    """Whether another sweep would change nothing worth having."""


class StatisticsTask(Task):
    """A task whose state is buffers, and which learns from sums instead of gradients.

    `weigh`, `terms`, `tally`, `measures`, `predict`, `spec` and `from_spec` are those of every task; the
    terms are what validation judges by, and need no gradient.
    """

    answers_target = False
    rests = False
    """Whether a sweep after the last one changes nothing. Then a GPU begins each before the one before it has
    been looked at."""
    steady = False
    """Whether a sweep over finite rows cannot fail; then one over rows that were seen is not undone."""
    evaluation_rows = 2**16
    evaluation_numbers = 2**22

    @property
    @abstractmethod
    def learned(self) -> int:
        """How many numbers it has learned, for a table of sizes."""

    def start(self, data: Data, generator: torch.Generator) -> None:
        """Choose where a new run begins, such as the first centres; called once, on the data's device."""

    @abstractmethod
    def statistics(self, batch: Batch) -> dict[str, Tensor]:
        """Sums over the rows of a batch, under the present state; in float64 where sums are long."""

    def update(self, totals: Mapping[str, Tensor]) -> Swept:
        """Take in the sums over all rows, and say how the sweep went."""
        return self.swept(self.advance(totals).tolist())

    def advance(self, totals: Mapping[str, Tensor]) -> Tensor:
        """Take in the sums, without waiting for a GPU; what has to be known of the sweep, in one tensor."""
        raise NotImplementedError

    def swept(self, numbers: list[float]) -> Swept:
        """Say how the sweep went, from what `advance` gave."""
        raise NotImplementedError

    def course(self, batch: Batch) -> Hashable:
        """Whether `statistics` and `advance` only change buffers in place and never wait for a GPU, so that
        they can be recorded and replayed: then what else they depend on, otherwise None."""
        return None


class Sweeps:
    """One run in progress. `fit_statistics` is the way to make one."""

    def __init__(
        self,
        task: StatisticsTask,
        data: Data,
        validation: Data | None,
        *,
        sweeps: int,
        seed: int,
        device: torch.device,
        store: Store | None,
        progress: Progress,
        started: bool,
        checkpoint_seconds: float,
    ) -> None:
        if not len(data):
            raise InputError("no training rows", expected="at least one", fix="check the data and its split")
        self.task, self.total, self.seed, self.device = task.to(device), sweeps, seed, device
        self.data, self.validation = place(data, device), place(validation, device) if validation else None
        self.store, self.progress, self.started = store, progress, started
        self.checkpoint_seconds = checkpoint_seconds
        self.interrupt = Interrupt()
        self.replay = Replay()
        self.ahead: Answer | None = None
        """Of a sweep that has begun before the last one was looked at."""
        self.before = Before(self.task, device, all_buffers=True)
        self.seen = False
        """Whether no sweep can fail any more: rows that are in memory and were finite once stay so."""
        number, count = processes()
        self.several = count > 1
        if number:
            self.store, self.progress = None, Progress()
        self.keeps = store is not None
        self.signal = 0
        """The signal that this or another process was sent, once all know of it."""
        self.sweep = 0
        self.done = False
        self.history: list[Record] = []
        self.seconds_before = 0.0
        self.began = self.last_save = time.perf_counter()

    @torch.no_grad()
    def run(self) -> Fit:
        all_do(self._begin)
        if self.several:
            self.keeps = from_first(self.keeps)
            numbers = share_state(self.task, [self.sweep, int(self.done)], self.device)
            self.sweep, self.done = numbers[0], bool(numbers[1])
        first = self.sweep
        self.progress.start(self.total, self.sweep, len(self.data))
        self.task.train()
        try:
            with self.interrupt.listening(self.keeps):
                while self.sweep < self.total and not self.done:
                    self._take_sweep()
                last = snapshot(self.task) if self.store else None
                self.task.eval()
                self.task.finish(self.data, self.validation)
                if self.store:
                    self._save(weights=last, final=snapshot(self.task))
                self._heed_late()
        finally:
            self.progress.finish()
        stopped: Literal["finished", "converged"] = "converged" if self.done else "finished"
        seconds = self._seconds()
        speed = (self.sweep - first) * len(self.data) / max(time.perf_counter() - self.began, 1e-9)
        return Fit(self.sweep, float(self.sweep), seconds, stopped, self.sweep, None, self.history, speed)

    def _begin(self) -> None:
        """Where the run was, or where a new one starts; of several processes the first one's word counts."""
        checkpoint = self.store.resume() if self.store else None
        if checkpoint:
            self._restore(checkpoint)
        elif not self.started:
            try:
                self.task.start(self.data, torch.Generator(self.device).manual_seed(self.seed))
            except QuireError as problem:
                raise self._bad_row() or problem from None

    def _take_sweep(self) -> None:
        swept = self._finite_sweep()
        self.sweep, self.done = self.sweep + 1, swept.done
        records = [self._record("train", {"loss": swept.loss})]
        if self.validation is not None:
            records.append(self._record("validation", evaluate(self.task, self.validation, together=True)))
        self.progress.records(records)
        if self.progress.due(self.progress.REFRESH):
            self.progress.step(self.sweep, swept.loss)
        if self.ahead is not None and not self.done:  # the state is that after the next sweep
            return
        if self.store and self._due():
            self._save()
        number = self.signal if self.several else self.interrupt.number
        if number and self.sweep < self.total and not self.done:
            all_do(lambda: self._save() if self.store else None)
            raise self._interrupted(number)

    def _heed_late(self) -> None:
        """Who asks in the last sweep, or while the end is saved, does not wait for what comes after."""
        number = self.interrupt.number
        if self.several and self.keeps:
            number = max(from_all(number))
        if number:
            raise self._interrupted(number)

    def _interrupted(self, number: int) -> Interrupted:
        message = f"interrupted after sweep {self.sweep} of {self.total}; everything is saved"
        return Interrupted(message, number=number)

    def _finite_sweep(self) -> Swept:
        """A sweep that makes something of the rows; of one that does not, nothing is left."""
        undo = not self.seen and self.replay.graph is None
        if undo:
            self.before.remember()
        problem: QuireError | None = None
        try:
            swept = self._sweep()
            if math.isfinite(swept.loss):
                self.seen = self.task.steady and isinstance(self.data, TensorData)
                return swept
            problem = self._too_large(swept.loss)
        except QuireError as error:
            problem = error
        if undo:
            self.before.restore()
            self.task.load_state_dict(self.task.state_dict())  # what it knows of its state is known anew
        raise self._bad_row() or problem

    def _due(self) -> bool:
        return time.perf_counter() - self.last_save > self.checkpoint_seconds

    def _ask(self) -> Answer | None:
        """Begin a sweep that can be recorded; None where it cannot be."""
        if self.several or not isinstance(self.data, TensorData):
            return None
        task, (batch,) = self.task, in_order(self.data)
        course = task.course(batch)
        if course is None:
            return None
        return Answer(self.replay(course, lambda: task.advance(task.statistics(batch))))

    def _goes_ahead(self) -> bool:
        """Whether nobody will ask for the state after the sweep that has just begun."""
        busy = self.validation is not None or self.interrupt.asked or (self.store is not None and self._due())
        recorded = self.replay.graph is not None
        return self.task.rests and recorded and not busy and self.sweep + 2 <= self.total

    def _sweep(self) -> Swept:
        task = self.task
        answer, self.ahead = self.ahead or self._ask(), None
        if answer is not None:
            self.ahead = self._ask() if self._goes_ahead() else None
            return task.swept(answer.read())
        totals: dict[str, Tensor] = {}
        for batch in own_rows(self.data) if self.several else in_order(self.data):
            add_to(totals, task.statistics(batch.to(self.device)))
        return task.update(self._add(totals) if self.several else totals)

    def _add(self, totals: dict[str, Tensor]) -> dict[str, Tensor]:
        """Over processes; who was asked to stop says so on the way."""
        asked = [float(self.interrupt.number == number) for number in SIGNALS]
        totals = add_over_processes({**totals, "": torch.tensor(asked, device=self.device)})
        heard = zip(SIGNALS, totals.pop("").tolist(), strict=True)
        self.signal = next((number for number, count in heard if count), 0)
        return totals

    def _record(self, split: str, values: Mapping[str, float]) -> Record:
        record = make_record(self.sweep, float(self.sweep), split, values, self._seconds())
        self.history.append(record)
        if self.store:
            self.store.record(record)
        return record

    def _bad_row(self) -> DataError | None:
        """The first row that is not finite, if there is one."""
        seen = 0
        for batch in in_order(self.data):
            rows = (~batch.inputs.flatten(1).isfinite()).any(1).nonzero().flatten()
            if len(rows):
                return DataError(
                    f"row {seen + int(rows[0])} has a value that is not a finite number",
                    expected="finite numbers",
                    fix="remove the row, or fill in its missing values",
                )
            seen += len(batch)
        return None

    def _too_large(self, loss: float) -> InputError:
        return InputError(
            f"the loss became {loss} in sweep {self.sweep + 1}",
            expected="finite numbers from finite rows",
            fix="scale the inputs: values this large cannot be squared and added",
        )

    # -- Saving and resuming -------------------------------------------------------------------

    def _seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.began

    def _plan(self) -> dict[str, int]:
        return {"rows": len(self.data), "seed": self.seed}

    def _save(self, *, weights: State | None = None, final: State | None = None) -> None:
        assert self.store
        tensors = {"weights": weights or snapshot(self.task)}
        if final is not None:
            tensors["final"] = final
        progress = {
            "step": self.sweep,
            "done": self.done,
            "history": self.history,
            "seconds": self._seconds(),
            "plan": self._plan(),
        }
        self.store.save(Checkpoint(self.sweep, tensors, {"progress": progress}), keep=KEEP)
        self.last_save = time.perf_counter()

    def _restore(self, checkpoint: Checkpoint) -> None:
        progress = checkpoint.documents["progress"]
        check_plan(progress["plan"], self._plan())
        self.task.load_state_dict(dict(checkpoint.tensors["weights"]))
        self.sweep, self.done = progress["step"], progress["done"]
        self.history = list(progress["history"])
        self.seconds_before = progress["seconds"]


def fit_statistics(
    task: StatisticsTask,
    data: Data,
    validation: Data | None = None,
    *,
    sweeps: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
    store: Store | None = None,
    progress: Progress | None = None,
    started: bool = False,
    checkpoint_seconds: float = 60.0,
) -> Fit:
    """Sweep over `data` until the task is done, or `sweeps` times.

    Where several processes have joined (`torch.distributed`), each goes through its own share of the rows;
    each is called with the same arguments, but the store is given to the first alone.

    `started` says that the task already stands where it should begin. With a `store`, metrics and checkpoints
    are kept, and a run that the store has already begun goes on from where it was.

        task = KMeansTask(clusters=3, features=4)
        fit_statistics(task, TensorData({"inputs": x}), sweeps=100)
    """
    with told_of_memory(
        "in learning by statistics",
        "memory for what is learned and for the sums over some of the rows",
        "fewer clusters or components, --starts 1, fewer columns",
    ):
        return Sweeps(
            task, data, validation, sweeps=sweeps, seed=seed, device=torch.device(device), store=store,
            progress=progress or Progress(), started=started, checkpoint_seconds=checkpoint_seconds,
        ).run()  # fmt: skip
