"""The parts that a batch is computed in: as many as were asked for, or as memory demands.

The gradient is that of the whole batch however many there are. Batch norms alone tell the difference: theirs
are the moments of a part.
"""

from __future__ import annotations

from torch.nn.modules.batchnorm import _BatchNorm

from quire.data.batch import Batch
from quire.train.memory import OutOfMemory
from quire.train.peers import LEAST, Peers
from quire.train.processes import from_all, processes
from quire.train.task import Task

KEPT = "what was saved is whole, and the run can go on from it"


class Parts:
    """Splits batches, and into more parts when there was too little memory; all processes alike."""

    def __init__(self, task: Task, count: int, peers: Peers | None) -> None:
        self.task, self.count, self.peers = task, count, peers
        self.asked = count
        self.norms = any(isinstance(module, _BatchNorm) for module in task.modules())
        self.whole = task.couples_samples and type(task).represent is Task.represent
        self.shortages: list[str] = []
        """What was said when memory ran out; whoever tells of it takes it away."""

    def split(self, batch: Batch) -> list[Batch]:
        if self.count == 1:
            return [batch]
        if self.peers is not None:
            return self.peers.split(batch, self.count)
        return self.alone(batch)

    def alone(self, batch: Batch) -> list[Batch]:
        """The parts of a batch that this process has to do with alone."""
        # Batch norms need rows to compare.
        return batch.split(min(self.count, max(1, len(batch) // LEAST)) if self.norms else self.count)

    def halve(self, step: int, batch: Batch, micro: list[Batch], said: str) -> list[Batch]:
        """Parts of half the size, after this process (which has `said` so) or another was short of memory
        with `micro`. An error for all where one that was short cannot have smaller ones."""
        self.count *= 2
        smaller = self.split(batch)
        stuck = bool(said) and (self.whole or len(smaller) == len(micro))
        own = said, stuck, len(micro[0])
        facts = [own] if self.peers is None else from_all(own)
        number = next((i for i, fact in enumerate(facts) if fact[1]), None)
        if number is not None:
            self.count //= 2
            raise self._too_little(step, number, facts[number][0], facts[number][2])
        number = next(i for i, fact in enumerate(facts) if fact[0])
        self.shortages.append(f"step {step}{self._process(number)}: {facts[number][0]}")
        return smaller

    def _process(self, number: int) -> str:
        return "" if self.peers is None else f", process {number} of {self.peers.count}"

    def _too_little(self, step: int, number: int, said: str, rows: int) -> OutOfMemory:
        what = f"step {step}{self._process(number)}: out of memory with"
        if self.whole:
            error = OutOfMemory(
                f"{what} all {rows} rows at once: {said}",
                expected=f"memory for a whole batch, whose samples the loss compares; {KEPT}",
                fix="set a smaller --train.batch-size, or implement `represent` and `coupled_terms`",
            )
        else:
            why = "which batch norms need" if self.norms else "as another process has fewer"
            count = "one row" if rows == 1 else f"{rows} rows, {why},"
            error = OutOfMemory(
                f"{what} {count} at a time: {said}",
                expected=f"memory for a part of a batch this small; {KEPT}",
                fix="take a smaller model or shorter rows, --train.precision bfloat16, or more memory",
            )
        other = self.peers is not None and number != self.peers.number
        error.said_elsewhere = other  # type: ignore[attr-defined]
        return error

    # -- What a run remembers ------------------------------------------------------------------

    def told(self, rows: int) -> str:
        """What a person is told when parts have become smaller, for batches of `rows` rows here."""
        said, self.shortages = self.shortages[0], []
        size = -(-rows // self.count)
        norms = ", though batch norms have the moments of a part" if self.norms else ""
        return (
            f"out of memory in {said}\n  batches are computed in {self.count} parts from here on, of "
            f"{size} row{'s' if size > 1 else ''} at most; the step is that of the whole batch{norms}"
        )

    def state(self) -> dict[str, int] | None:
        """For a checkpoint: the number that memory demanded, and of how many processes."""
        return {"parts": self.count, "processes": processes()[1]} if self.count > self.asked else None

    def load(self, state: dict[str, int] | None) -> None:
        """Parts as small as those of the run that is gone on with, if fewer or more processes share them."""
        if state is not None and not self.whole:
            self.count = max(self.asked, -(-state["parts"] * state["processes"] // processes()[1]))
