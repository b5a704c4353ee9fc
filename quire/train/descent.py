"""Learning by descent: the one training loop of every network."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal

import torch

from quire.data.batch import Data, epoch_order, ordered, steps_per_epoch
from quire.errors import InputError
from quire.functional.regularise import EarlyStopping
from quire.options import Optim, Train
from quire.train.arguments import check_fit, resolve_device
from quire.train.average import Average
from quire.train.checkpoints import Checkpoint
from quire.train.evaluate import check_monitor, evaluate, losses
from quire.train.guard import non_finite_weights
from quire.train.keeping import (
    Fit,
    Interrupt,
    Interrupted,
    Record,
    State,
    Store,
    in_streams,
    make_record,
    place,
    place_task,
    snapshot,
)
from quire.train.memory import told_of_memory
from quire.train.peers import LEAST, make_peers
from quire.train.processes import (
    all_do,
    from_all,
    from_first,
    give_checkpoint_to_all,
    processes,
)
from quire.train.progress import Progress
from quire.train.randomness import random_state, restore_random_state, seed_everything, stream_seed
from quire.train.resuming import contents, restore
from quire.train.running import Running
from quire.train.step import Stepper
from quire.train.task import Task
from quire.train.threads import threads_for, threads_worth

if TYPE_CHECKING:
    from quire.train.shard import Shards


class Callback:
    """What others may do during training; override what is needed."""

    def on_start(self, descent: Descent) -> None: ...

    def on_step(self, descent: Descent, step: int) -> None: ...

    def on_record(self, descent: Descent, record: Record) -> None: ...

    def on_end(self, descent: Descent) -> None: ...


class Descent:
    """One training run in progress. `fit` is the way to make one."""

    def __init__(
        self,
        task: Task,
        data: Data,
        validation: Data | None,
        *,
        epochs: float | None,
        steps: int | None,
        optim: Optim,
        train: Train,
        seed: int,
        device: torch.device,
        store: Store | None,
        progress: Progress,
        callbacks: Sequence[Callback],
        train_measures: bool,
        shard: bool = False,
    ) -> None:
        if not len(data):
            raise InputError("no training rows", expected="at least one", fix="check the data and its split")
        self.task, self.train, self.seed = place_task(task, device, shard=shard), train, seed
        data = in_streams(task, data, train.batch_size) if train.carry else data
        self.data, self.validation = place(data, device), place(validation, device) if validation else None
        if self.validation is not None:
            check_monitor(self.task, self.validation, train.monitor)
        self.batch_size = min(train.batch_size or len(data), len(data))
        self.peers = make_peers(self.task, device, shard=shard)
        if self.peers is not None:
            self.peers.agree(self.task, len(data), self.batch_size, seed, carry=train.carry)
        self.shards = self._shard(device) if shard else None
        self.steps_per_epoch = steps_per_epoch(len(data), self.batch_size)
        self.total = steps if steps is not None else round((epochs or 1) * self.steps_per_epoch)
        first = self.peers is None or self.peers.number == 0
        self.device, self.store = device, store if first else None
        self.progress = progress if first else Progress()
        self.keeps = store is not None
        """Whether the run is kept, be it by another process."""
        self.callbacks = callbacks
        # On a GPU the loss is waited for, and meanwhile nothing new is launched.
        self.refresh = progress.REFRESH if device.type == "cpu" else 1.0
        self.step_callbacks = [c for c in callbacks if type(c).on_step is not Callback.on_step]
        self.validate_every = train.validate_every or self.steps_per_epoch
        # Of several targets a measure is called "TARGET.MEASURE".
        rises = train.monitor.rpartition(".")[2] in task.higher_is_better
        self.stopping = EarlyStopping(train.patience, train.min_delta, higher_is_better=rises)
        self.stepper = Stepper(
            task, optim, train, device, self.total, self.steps_per_epoch, self.peers,
            threads_worth(self.operations()),
        )  # fmt: skip
        self.staged = self.stepper.gradients.stage(self.data)
        self.running = Running()
        self.sample = self._training_sample() if train_measures else None
        groups = [group for player in self.stepper.players for group in player.groups]
        self.average = Average(groups, train.average) if train.average else None
        self.step = 0
        self.best_step = 0
        self.best: State | None = None
        self.history: list[Record] = []
        self.seconds_before = 0.0
        self.last_save = time.perf_counter()
        self.interrupt = Interrupt()
        self.asked_to_stop = False

    def _shard(self, device: torch.device) -> Shards:
        """Split the parameters among the processes."""
        from quire.train.shard import Shards  # PyTorch's own part of it takes a while to import

        assert self.peers is not None
        if self.train.compile:
            raise InputError(
                "--parallel.shard with --train.compile", expected="one of them", fix="leave one out"
            )
        batch = next(iter(ordered(self.data, LEAST, LEAST))).to(device)
        self.peers.shards = Shards(self.task, device, batch)
        return self.peers.shards

    def operations(self) -> int:
        """A step's floating-point operations: 6 a weight and sample, and as often for a filter as the
        input has places, which is an upper bound."""
        places = max(1, self.data.row_size // 4)
        weights = sum(p.numel() * (places if p.ndim > 2 else 1) for p in self.task.parameters())
        return 6 * self.batch_size * weights // processes()[1]

    # -- The loop ------------------------------------------------------------------------------

    def run(self) -> Fit:
        try:
            return self._run()
        finally:
            self.stepper.close()  # whatever happened, the model gets its own memory back

    def _run(self) -> Fit:
        checkpoint = all_do(lambda: self.store.resume() if self.store else None)
        if self.peers is not None:
            self.keeps = from_first(self.keeps)
            keep = self.shards.keep if self.shards else None
            checkpoint = give_checkpoint_to_all(checkpoint, self.device, keep)
        if checkpoint:
            restore(self, checkpoint)
        first, self.began = self.step, time.perf_counter()
        for callback in self.callbacks:
            callback.on_start(self)
        self.progress.start(self.total, self.step, len(self.data) / self.steps_per_epoch)
        self.task.train()
        stopped: Literal["finished", "early"] = "early" if self._out_of_patience() else "finished"
        try:
            with self.interrupt.listening(self.keeps):
                while self.step < self.total and stopped == "finished":
                    if self._run_epoch():
                        stopped = "early"
                self.stepper.settle()
                self._finish()
                self._heed_late()
        finally:
            self.progress.finish()
        for callback in self.callbacks:
            callback.on_end(self)
        seconds = self.seconds()
        speed = (self.step - first) * self.batch_size / max(time.perf_counter() - self.began, 1e-9)
        epochs = self.step / self.steps_per_epoch
        best = self.stopping.best
        return Fit(self.step, epochs, seconds, stopped, self.best_step, best, self.history, speed)

    def _run_epoch(self) -> bool:
        """The rest of the current epoch; True when it is time to stop early."""
        epoch, offset = divmod(self.step, self.steps_per_epoch)
        shuffle = self.train.shuffle and not self.train.carry
        order = epoch_order(len(self.data), self.seed, epoch, shuffle=shuffle)
        every = self.train.checkpoint_every
        peers = self.peers
        batches = (
            self.staged.batches(order, self.batch_size, start=offset)
            if peers is None
            else peers.batches(self.staged, order, self.batch_size, start=offset)
        )
        for batch in batches:
            if peers is not None:
                peers.tell(self.interrupt.number, self.asked_to_stop)
            self.running.add(*self.stepper.step(batch.to(self.device), self.step))
            self.step += 1
            if self.stepper.parts.shortages:
                self._tell(self.stepper.parts.told(len(batch)))
            if self.average is not None:
                self.average.update(self.step)
            for callback in self.step_callbacks:
                callback.on_step(self, self.step)
            if self.progress.due(self.refresh):
                self.progress.step(self.step, self._running_loss()["loss"])
            last = self.step == self.total
            early = False
            validated = last or self.step % self.validate_every == 0
            if validated:
                early = self._validate()
            early = early or (self.asked_to_stop if peers is None else peers.early)
            if last or early:
                return early
            if self.keeps and ((every and self.step % every == 0) or (validated and self._due())):
                self.save()
            if number := self.interrupt.number if peers is None else peers.signal:
                self._stop_now(number)
        return False

    def _due(self) -> bool:
        """Whether the last save is long ago, by the first process's clock."""
        due = time.perf_counter() - self.last_save > self.train.checkpoint_seconds
        return due if self.peers is None else from_first(due)

    def _finish(self) -> None:
        """Leave the task with the weights that are kept; save them beside those to go on from."""
        last = snapshot(self.task)
        if self.best is not None and self.train.restore == "best":
            self.task.load_state_dict(self.best)
        elif self.average is not None:
            self.average.load()
        if self.shards is not None:
            self.shards.release()
        self.task.eval()
        self.task.finish(self.data, self.validation)
        if self.keeps:
            self.save(weights=last, final=snapshot(self.task))

    def stop(self) -> None:
        """End training after the step under way, as if patience had run out; for callbacks."""
        self.asked_to_stop = True

    def _settle(self) -> None:
        """Before weights are judged or saved, they have to be there, and finite."""
        self.stepper.settle()
        error = non_finite_weights(self.stepper.players, self.step)
        if self.peers is not None and any(from_all(error is not None)):
            error = self.peers.blame(error, self.step)
        if error is not None:
            raise error

    # -- Judging -------------------------------------------------------------------------------

    def _validate(self) -> bool:
        """Judge, record, remember the best; True when patience has run out."""
        self._settle()
        train_values = self._running_loss()
        self.running.clear()
        penalty = sum(player.penalty() for player in self.stepper.players)
        if penalty:
            train_values["penalty"] = penalty
        train_values["lr"] = self.stepper.lr(self.step - 1)
        train_values["gradient_norm"] = self.stepper.last_norm()
        if self.stepper.parts.state() is not None:
            train_values["micro_batches"] = float(self.stepper.parts.count)
        judged: dict[str, float] | None = None
        with (
            self.average.in_place() if self.average else nullcontext(),
            self.shards.whole() if self.shards else nullcontext(),
        ):
            if self.sample is not None:
                train_values = {**evaluate(self.task, self.sample, together=True), **train_values}
            if self.validation is not None and len(self.validation):
                judged = evaluate(self.task, self.validation, together=True)
            out_of_patience = self._remember_best(judged) if judged else False
        splits = {"train": train_values} | ({"validation": judged} if judged else {})
        self.progress.records([self._record(split, values) for split, values in splits.items()])
        return out_of_patience

    def _remember_best(self, judged: Mapping[str, float]) -> bool:
        stop = self.stopping.update(judged[self.train.monitor])
        if self.stopping.improved:
            self.best = snapshot(self.task)
            self.best_step = self.step
        return stop

    def _out_of_patience(self) -> bool:
        patience = self.stopping.patience
        return patience is not None and self.stopping.updates > 0 and self.stopping.waited >= patience

    def _running_loss(self) -> dict[str, float]:
        sums, weights = self.running.numbers()
        return losses(self.task, sums, weights)

    def _tell(self, text: str) -> None:
        """What happened on the way, to whoever watches and in the log of the run."""
        self.progress.note(text)
        log = getattr(self.store, "log", None)
        if log is not None:
            log(text)

    def _record(self, split: str, values: Mapping[str, float]) -> Record:
        epoch = self.step / self.steps_per_epoch
        record = make_record(self.step, epoch, split, values, self.seconds())
        self.history.append(record)
        if self.store:
            self.store.record(record)
        for callback in self.callbacks:
            callback.on_record(self, record)
        return record

    def _training_sample(self) -> Data | None:
        """As many training rows as there are validation rows: measures on both cost the same."""
        if self.validation is None:
            return None
        rows = epoch_order(len(self.data), self.seed, -1)[: len(self.validation)]
        return self.data.subset(rows)

    # -- Saving and resuming -------------------------------------------------------------------

    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.began

    def save(self, *, weights: State | None = None, final: State | None = None) -> None:
        """A checkpoint of this moment; at the end also the `final` weights that the task is left with."""
        assert self.keeps
        self._settle()
        tensors, progress = contents(self, weights, final)
        if self.store is not None or self.shards is not None:  # otherwise another process writes
            with self.shards.gathering(tensors) if self.shards else nullcontext(tensors) as written:
                if self.store is not None:
                    checkpoint = Checkpoint(self.step, written, {"progress": progress})
                    self.store.save(checkpoint, keep=self.train.keep)
        self.last_save = time.perf_counter()

    def _heed_late(self) -> None:
        """Who asks in the last step, or while the end is saved, does not wait for what comes after."""
        number = self.interrupt.number
        if self.peers is not None and self.keeps:
            number = max(from_all(number))
        if number:
            raise self._interrupted(number)

    def _stop_now(self, number: int) -> None:
        all_do(self.save)  # nobody goes before all is saved
        raise self._interrupted(number)

    def _interrupted(self, number: int) -> Interrupted:
        message = f"interrupted after step {self.step} of {self.total}; everything is saved"
        return Interrupted(message, number=number)


def fit(
    task: Task,
    data: Data,
    validation: Data | None = None,
    *,
    epochs: float | None = None,
    steps: int | None = None,
    optim: Optim | None = None,
    train: Train | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    store: Store | None = None,
    progress: Progress | None = None,
    callbacks: Sequence[Callback] = (),
    train_measures: bool = True,
    shard: bool = False,
) -> Fit:
    """Train `task` on `data` for a number of epochs or steps.

    With `validation`, the weights that did best there (by ``train.monitor``) are the ones the task
    is left with. With a `store`, metrics and checkpoints are kept, and a run that the store has
    already begun goes on from where it was.

    Where several processes have joined (`torch.distributed`), each is called with the same arguments, but the
    store is given to the first alone. They share out the rows of each batch and learn what one would learn;
    see `quire.train.peers`. With `shard` they also split the model among them; see `quire.train.shard`.

        model = MLP(MLPConfig(in_features=64, out_features=10))
        fit(Supervised(model, Categorical(10)), TensorData({"inputs": x, "target": y}), epochs=20)
    """
    check_fit(task, {"data": data, "validation": validation}, epochs, steps, optim, train, callbacks)
    before = random_state()  # training has its own stream of random numbers and leaves the caller's alone
    seed_everything(stream_seed(seed, processes()[0]))
    try:
        with told_of_memory("beside the gradient of a step"):
            descent = Descent(
                task, data, validation, epochs=epochs, steps=steps, optim=optim or Optim(),
                train=train or Train(), seed=seed, device=resolve_device(device), store=store,
                progress=progress or Progress(), callbacks=callbacks, train_measures=train_measures,
                shard=shard,
            )  # fmt: skip
            with threads_for(descent.operations()):
                return descent.run()
    finally:
        restore_random_state(before)
