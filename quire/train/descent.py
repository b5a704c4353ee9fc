"""Learning by descent: the one training loop of every network.

The order of the data is a pure function of (seed, epoch), so the position in it is the number of
steps taken. A checkpoint holds that number, the weights, the best weights, the optimiser, the
running sums of the epoch, the record of early stopping and all random states; a run resumed from it
computes the same bits as one that was never interrupted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from quire.data.batch import Data, epoch_order, ordered, steps_per_epoch
from quire.errors import CheckpointError, InputError
from quire.functional.regularise import EarlyStopping
from quire.options import Optim, Train
from quire.train.checkpoints import Checkpoint
from quire.train.evaluate import check_monitor, evaluate, losses
from quire.train.gradients import Sums, Weights
from quire.train.groups import Group
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
    give_to_all,
    processes,
    rows_of_all,
)
from quire.train.progress import Progress
from quire.train.randomness import random_state, restore_random_state, seed_everything, stream_seed
from quire.train.step import Stepper
from quire.train.task import Task
from quire.train.threads import threads_for

if TYPE_CHECKING:
    from quire.train.shard import Shards


class Callback:
    """What others may do during training; override what is needed."""

    def on_start(self, descent: Descent) -> None: ...

    def on_step(self, descent: Descent, step: int) -> None: ...

    def on_record(self, descent: Descent, record: Record) -> None: ...

    def on_end(self, descent: Descent) -> None: ...


class Running:
    """Sums and weights since the last record: the training loss that is shown.

    On a GPU the numbers are left there, step by step, until somebody asks for their sum."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.weights: dict[str, float] = {}
        self._waiting: list[tuple[dict[str, float], str, Tensor]] = []

    def add(self, sums: Sums, weights: Weights) -> None:
        for total, new in ((self.sums, sums), (self.weights, weights)):
            for name, value in new.items():
                if not isinstance(value, Tensor):
                    total[name] = total.get(name, 0.0) + value
                elif value.is_cuda:
                    self._waiting.append((total, name, value))
                else:
                    total[name] = total.get(name, 0.0) + value.item()

    def numbers(self) -> tuple[dict[str, float], dict[str, float]]:
        waiting, self._waiting = self._waiting, []
        if waiting:
            values = torch.stack([value.double() for _, _, value in waiting]).tolist()
            for (total, name, _), value in zip(waiting, values, strict=True):
                total[name] = total.get(name, 0.0) + value
        return dict(self.sums), dict(self.weights)

    def clear(self) -> None:
        self.sums, self.weights, self._waiting = {}, {}, []


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
            self._meet()
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
        self.stopping = EarlyStopping(
            train.patience, train.min_delta, higher_is_better=train.monitor in task.higher_is_better
        )
        self.stepper = Stepper(task, optim, train, device, self.total, self.steps_per_epoch, self.peers)
        self.staged = self.stepper.gradients.stage(self.data)
        self.running = Running()
        self.sample = self._training_sample() if train_measures else None
        self.average = self._start_average() if train.average else None
        self.step = 0
        self.best_step = 0
        self.best: State | None = None
        self.history: list[Record] = []
        self.seconds_before = 0.0
        self.last_save = time.perf_counter()
        self.interrupt = Interrupt()
        self.asked_to_stop = False

    def _meet(self) -> None:
        """Processes that have just met begin with the weights of the first."""
        assert self.peers is not None
        facts = from_all((len(self.data), self.batch_size, self.seed))
        if len(set(facts)) > 1:
            raise InputError(
                f"processes with rows, batch size and seed of {' and '.join(map(str, sorted(set(facts))))}",
                expected="the same in each",
                fix="give every process the same data and options",
            )
        if self.train.carry and self.peers.sizes(self.batch_size)[-1] == 0:
            raise InputError(
                f"--train.carry with {self.batch_size} streams for {self.peers.count} processes",
                expected="two streams for each at least",
                fix=f"set --train.batch-size {2 * self.peers.count} or more",
            )
        give_to_all(itertools.chain(self.task.parameters(), self.task.buffers()), self.task.device)

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
            self.restore(checkpoint)
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
                self._update_average()
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
            self._load_average()
        if self.shards is not None:
            self.shards.release()
        self.task.eval()
        self.task.finish(self.data, self.validation)
        if self.keeps:
            self.save(weights=last, final=snapshot(self.task))

    def stop(self) -> None:
        """End training after the step under way, as if patience had run out; for callbacks."""
        self.asked_to_stop = True

    # -- Judging -------------------------------------------------------------------------------

    def _validate(self) -> bool:
        """Judge, record, remember the best; True when patience has run out."""
        self.stepper.settle()
        train_values = self._running_loss()
        self.running.clear()
        penalty = sum(player.penalty() for player in self.stepper.players)
        if penalty:
            train_values["penalty"] = penalty
        train_values["lr"] = self.stepper.lr(self.step - 1)
        train_values["gradient_norm"] = float(self.stepper.last_norm)
        if self.stepper.parts.state() is not None:
            train_values["micro_batches"] = float(self.stepper.parts.count)
        judged: dict[str, float] | None = None
        with self._average_in_place(), self.shards.whole() if self.shards else nullcontext():
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

    # -- Moving average of weights -------------------------------------------------------------

    def _groups(self) -> list[Group]:
        return [group for player in self.stepper.players for group in player.groups]

    def _flats(self) -> list[Tensor]:
        return [group.flat for group in self._groups()]

    def _named_average(self) -> State:
        assert self.average is not None
        found = zip(self._groups(), self.average, strict=True)
        return {name: value for group, flat in found for name, value in group.named(flat).items()}

    def _start_average(self) -> list[Tensor]:
        return [flat.detach().clone() for flat in self._flats()]

    def _update_average(self) -> None:
        assert self.average is not None
        assert self.train.average is not None
        # The early average leans on the newest weights: a decay of n/(n+10) until it reaches the wanted one.
        decay = min(self.train.average, self.step / (self.step + 10))
        for average, flat in zip(self.average, self._flats(), strict=True):
            average.lerp_(flat, 1 - decay)

    def _load_average(self) -> None:
        assert self.average is not None
        for average, flat in zip(self.average, self._flats(), strict=True):
            flat.copy_(average)

    @contextmanager
    def _average_in_place(self) -> Iterator[None]:
        if self.average is None:
            yield
            return
        flats = self._flats()
        current = [flat.clone() for flat in flats]
        self._load_average()
        try:
            yield
        finally:
            for flat, value in zip(flats, current, strict=True):
                flat.copy_(value)

    # -- Saving and resuming -------------------------------------------------------------------

    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.began

    def save(self, *, weights: State | None = None, final: State | None = None) -> None:
        """A checkpoint of this moment; at the end also the `final` weights that the task is left with."""
        assert self.keeps
        self.stepper.settle()
        sums, sum_weights = self.running.numbers()
        carried = self.stepper.carried
        states = [random_state()]
        if self.peers is not None:
            carried = {name: rows_of_all(value) for name, value in carried.items()}
            states = from_all(states[0])
        if self.store is None and self.shards is None:  # another process writes
            self.last_save = time.perf_counter()
            return
        tensors: dict[str, Mapping[str, Tensor]] = {"weights": weights or self.task.state_dict()}
        for number, state in enumerate(states):
            tensors[random_name(number)] = state
        if final is not None:
            tensors["final"] = final
        for player in self.stepper.players:
            tensors[f"optimiser-{player.name}"] = player.optimiser.state()
        if self.best is not None:
            tensors["best"] = self.best
        if carried:
            tensors["carried"] = {name: t.contiguous() for name, t in carried.items()}
        if self.average is not None:
            tensors["average"] = self._named_average()
        progress = {
            "step": self.step,
            "best_step": self.best_step,
            "sums": sums,
            "weights": sum_weights,
            "stopping": self.stopping.state_dict(),
            "history": self.history,
            "seconds": self.seconds(),
            "plan": self._plan(),
            "parts": self.stepper.parts.state(),
        }
        with self.shards.gathering(tensors) if self.shards else nullcontext(tensors) as written:
            if self.store is not None:
                self.store.save(Checkpoint(self.step, written, {"progress": progress}), keep=self.train.keep)
        self.last_save = time.perf_counter()

    def _plan(self) -> dict[str, int]:
        """What must be the same for a resumed run to be the same run."""
        return {"rows": len(self.data), "batch_size": self.batch_size, "seed": self.seed}

    def restore(self, checkpoint: Checkpoint) -> None:
        progress = checkpoint.documents["progress"]
        if "weights" not in checkpoint.tensors:
            raise InputError(
                "resuming a run whose adapters are merged",
                expected="the run as it was trained",
                fix="take them out again with 'quire adapter unmerge RUN'",
            )
        check_plan(progress["plan"], self._plan())
        self.task.load_state_dict(dict(checkpoint.tensors["weights"]))
        for player in self.stepper.players:
            player.optimiser.load(checkpoint.tensors[f"optimiser-{player.name}"])
        if "best" in checkpoint.tensors:
            best = checkpoint.tensors["best"]
            self.best = {name: value.to(self.device) for name, value in best.items()}
        if self.average is not None:
            kept = checkpoint.tensors.get("average", {})
            for name, value in self._named_average().items():
                if name not in kept:
                    raise CheckpointError(
                        f"no moving average of '{name}' in the checkpoint",
                        expected="averages by the names of parameters, as this version saves them",
                        fix="start again, or resume with the version of Quire that began the run",
                    )
                value.copy_(kept[name])
        carried = checkpoint.tensors.get("carried", {})
        first, last = (0, self.batch_size) if self.peers is None else self.peers.share(self.batch_size)
        self.stepper.carried = {name: value[first:last].to(self.device) for name, value in carried.items()}
        self.step, self.best_step = progress["step"], progress["best_step"]
        self.running.sums, self.running.weights = dict(progress["sums"]), dict(progress["weights"])
        self.stopping.load_state_dict(progress["stopping"])
        self.history = list(progress["history"])
        self.seconds_before = progress["seconds"]
        self.stepper.parts.load(progress.get("parts"))
        number = processes()[0]
        if random_name(number) in checkpoint.tensors:
            restore_random_state(checkpoint.tensors[random_name(number)])
        else:  # a run that fewer processes began
            seed_everything(stream_seed(self.seed, number, self.step))

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


def random_name(process: int) -> str:
    """What the random states of a process are called in a checkpoint."""
    return f"random-{process}" if process else "random"


def in_streams(task: Task, data: Data, batch_size: int) -> Data:
    """The text of `data` in as many parallel streams as a batch has rows."""
    streams = getattr(data, "streams", None)
    if not task.carries_state or streams is None:
        raise InputError(
            f"--train.carry with {type(task).__name__} on {type(data).__name__}",
            expected="a recurrent model that reads a text",
            fix="leave --train.carry out",
        )
    carried: Data = streams(batch_size)
    return carried


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
    if (epochs is None) == (steps is None):
        raise InputError(f"epochs {epochs} and steps {steps}", expected="one of the two", fix="give one")
    before = random_state()  # training has its own stream of random numbers and leaves the caller's alone
    seed_everything(stream_seed(seed, processes()[0]))
    try:
        with told_of_memory("beside the gradient of a step"):
            descent = Descent(
                task, data, validation, epochs=epochs, steps=steps, optim=optim or Optim(),
                train=train or Train(), seed=seed, device=torch.device(device), store=store,
                progress=progress or Progress(), callbacks=callbacks, train_measures=train_measures,
                shard=shard,
            )  # fmt: skip
            with threads_for(descent.operations()):
                return descent.run()
    finally:
        restore_random_state(before)
