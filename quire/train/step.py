"""One step of every player: weigh, differentiate, guard, clip, move.

Nothing here knows what a player is; clipping, noise, precision and the guard work alike for all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quire.data.batch import Batch
from quire.errors import NonFiniteError
from quire.functional.regularise import gaussian_noise
from quire.functional.schedules import step_size
from quire.nn.noise import install, perturbed
from quire.options import Optim, Train
from quire.train.capture import Rate, Recorder
from quire.train.gradients import Gradients, Sums, Weights, check_accumulation, loss_factors
from quire.train.guard import explain_non_finite, quick_norm
from quire.train.memory import Before, Elsewhere, free, shortage
from quire.train.pages import Row, alone
from quire.train.parts import Parts
from quire.train.peers import Peers
from quire.train.player import Player
from quire.train.replay import Answer
from quire.train.running import Numbers
from quire.train.sums import add_up
from quire.train.task import Task

INFINITY = math.inf


@dataclass(slots=True)
class Step:
    """A step that is being taken."""

    number: int
    batch: Batch
    micro: list[Batch]
    """The batch in parts; smaller ones where memory runs out."""
    factors: Weights
    rate: Rate
    movers: list[Player]


class Stepper:
    """Takes steps; raises `NonFiniteError` instead of applying one that is not finite.

    On the CPU every step is checked at once. On a GPU asking would stall the queue, so a flag stays
    on the device: from the first bad step on, nothing is applied. Every few steps it is looked at as it was a
    few steps ago, for which nothing waits, and `settle` finds out which step it was.

    Where memory runs out on the way to a gradient, smaller parts are tried (`quire.train.memory`).
    """

    LOOK_EVERY = 16

    def __init__(
        self,
        task: Task,
        optim: Optim,
        train: Train,
        device: torch.device,
        total_steps: int,
        steps_per_epoch: int = 1,
        peers: Peers | None = None,
        threads: int = 1,
    ) -> None:
        check_accumulation(task, train.micro_batches)
        self.task, self.optim, self.train, self.peers, self.device = task, optim, train, peers, device
        self.total_steps, self.threads = total_steps, threads
        self.parts = Parts(task, train.micro_batches, peers)
        shards = peers.meet_before_sending() if peers else None
        self.players = [Player(task, name, optim, steps_per_epoch, shards) for name in task.players]
        self.joining = any(group.joins for player in self.players for group in player.groups)
        mixed = train.precision == "bfloat16"
        autocast = partial(torch.autocast, device.type, dtype=torch.bfloat16) if mixed else None
        plain = not (mixed or train.compile or train.noise.activations)
        plain = plain and not (shards or (peers and peers.norms))
        self.gradients = Gradients(
            task, autocast=autocast, explicit=plain, compiled=train.compile, peers=peers
        )
        self.hooks = install(task, train.noise.activations) if train.noise.activations else None
        self.carried: dict[str, Tensor] = {}
        self.before = {player.name: Before(task, device) for player in self.players}
        self.input_noise, self.weight_noise = train.noise.inputs, train.noise.weights
        self.clips = optim.clip_norm is not None or optim.clip_value is not None
        self.on_host = device.type == "cpu"
        if self.on_host and not (self.clips or self.joining):
            for player in self.players:
                player.move = player.optimiser.at_once(threads=threads)
        self.skip = None if self.on_host else torch.zeros((), device=device)
        self.one = None if self.on_host else torch.ones((), device=device)
        self.suspects: list[tuple[int, tuple[str, ...], Batch, Row]] = []
        """Steps that the flag may be about: number, movers, batch, and what they have left."""
        self.asked: tuple[int, Answer] | None = None
        """How many of the suspects the flag was asked about, and what it says."""
        self.norm: float | Row = math.nan
        """Of the last gradient; of a step on a device its row, whose last number it is."""
        constant = optim.schedule.name == "constant" and not optim.schedule.warmup
        self.constant_lr = optim.lr if constant else None
        alike = train.micro_batches == 1 and not (train.carry or train.noise.activations or peers)
        self.recorder: Recorder | None = None
        if device.type == "cuda" and alike and train.capture:
            self.recorder = Recorder(task, device, compiled=train.compile)
        self.columns: dict[tuple[str, ...], dict[str, int]] = {}
        """Of the players that move: where each sum stands among the numbers that a step on the device leaves.
        The sums of each player are followed by the norm of its gradient."""

    def lr(self, step: int) -> float:
        if self.constant_lr is not None:
            return self.constant_lr
        return step_size(self.optim.schedule, self.optim.lr, step, self.total_steps)

    def _join(self, number: int) -> None:
        """Freeze what is still to wait at step `number`, and let in what has waited long enough."""
        groups = [group for player in self.players for group in player.groups]
        changed = [group for group in groups if group.active != (number >= group.joins)]
        for group in changed:
            group.set_active(number >= group.joins)
        if changed:
            self.task.train()  # batch norms follow their weights
            for before in self.before.values():
                before.forget()

    def step(self, batch: Batch, number: int) -> tuple[Numbers | Row, Weights]:
        """Step `number` (counted from 0) on `batch`; returns what was differentiated."""
        task, train = self.task, self.train
        if self.joining:
            self._join(number)
        if train.carry:
            task.left.clear()
            batch = batch.replace(**self.carried)
        batch = task.augment(batch)
        if self.input_noise:
            batch = batch.replace(inputs=gaussian_noise(batch.inputs, self.input_noise))
        micro = self.parts.split(batch)
        weights = task.weigh(batch) if len(micro) == 1 else add_up(task.weigh(part) for part in micro)
        if self.peers is not None:
            weights = self.peers.add_weights(weights)
        factors = loss_factors(task, weights)
        if self.peers is not None and self.peers.idle:  # nor may borrowed rows move another's moments
            factors = dict.fromkeys(factors, 0.0)
        movers = self.players
        if task.turns:
            movers = [p for p in movers if not (number + 1) % task.turns.get(p.name, 1)]
        step = Step(number, batch, micro, factors, self.constant_lr or self.lr(number), movers)
        shown = self._step_on_host(step) if self.on_host else self._step_on_device(step)
        if train.carry:
            self.carried = {name: torch.cat([part[name] for part in task.left]) for name in task.left[0]}
        if task.turns:  # who did not move has no sum to divide
            moved = shown.columns if isinstance(shown, Row) else shown
            weights = {name: weight for name, weight in weights.items() if name in moved}
        return shown, weights

    def _differentiate(self, micro: list[Batch], factors: Weights, player: Player) -> Sums:
        explicit = self.gradients.explicit is not None
        player.begin(explicit)
        sums = self.gradients(micro, factors, player.name)
        player.end(explicit)
        return sums

    def _step_on_host(self, step: Step) -> Numbers:
        """Each player's numbers are looked at before it moves."""
        shown: Numbers = {}
        rate = float(step.rate)
        for player in step.movers:
            sums = self._gradient(step, player)
            loss = 0.0  # any that is not finite spoils the sum
            for name, value in sums.items():
                shown[name] = number = value.item()
                loss += number
            if player.move is not None:
                self.norm = length = player.move(rate, loss)
                if length < INFINITY:
                    continue
            norm = player.norm() if self.clips or player.shards else None
            self.norm = length = quick_norm(player) if norm is None else norm.item()
            if not math.isfinite(length + loss):
                self.before[player.name].restore()
                raise self._explain(step.batch, step.number, player)
            self._move(player, norm, rate)
        return shown

    def _step_on_device(self, step: Step) -> Row:
        """Nothing waits: from the first step on that is not finite, a flag on the device holds all back."""
        who = tuple(player.name for player in step.movers)

        def work(batch: Batch, factors: Weights, rate: Rate) -> Tensor:
            return self._numbers(replace(step, batch=batch, micro=[batch], factors=factors, rate=rate))

        if self.recorder is None or len(step.micro) > 1:
            page, number = alone(self._numbers(step))
        else:
            course = (who, *(group.active for player in step.movers for group in player.groups))
            constant, rate = self.constant_lr is not None, self.lr(step.number)
            page, number = self.recorder(course, step.batch, step.factors, rate, constant, work)
        self.norm = row = Row(page, number, self.columns[who])
        self.suspects.append((step.number, who, step.batch, row))
        if len(self.suspects) % self.LOOK_EVERY == 0:
            self._look()
        return row

    def last_norm(self) -> float:
        return float(self.norm.values()[-1] if isinstance(self.norm, Row) else self.norm)

    def _numbers(self, step: Step) -> Tensor:
        """The step itself; leaves the sums and the gradient's norm of each player in one vector."""
        assert self.skip is not None
        assert self.one is not None
        found: list[Tensor] = []
        columns: dict[str, int] = {}
        for player in step.movers:
            sums = self._gradient(step, player)
            norm = player.norm()
            numbers = torch.stack([*sums.values(), norm])
            # One kernel that raises the flag where a number is not finite (and multiplies them by one).
            torch._amp_foreach_non_finite_check_and_unscale_([numbers], self.skip, self.one)
            self._move(player, norm, step.rate)
            start = sum(map(len, found))
            columns |= {name: start + i for i, name in enumerate(sums)}
            found.append(numbers)
        self.columns.setdefault(tuple(player.name for player in step.movers), columns)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _gradient(self, step: Step, player: Player) -> Sums:
        """Into the player's groups, with what is to be added to it, in parts that there is memory for."""
        before = self.before[player.name]
        if not self._recording():
            before.remember()
        sums, said = self._try(step, player)
        while sums is None:
            before.restore()
            if self.peers is not None and self.peers.shards is not None:
                self.peers.shards.give_up()
            if self.train.carry:
                self.task.left.clear()
            if not self.on_host:
                self.settle()  # which also lets the batches go that it keeps
            step.micro = self.parts.halve(step.number, step.batch, step.micro, said)
            sums, said = self._try(step, player)
        if not before.known and not self._recording():
            before.learn()
        if self.optim.l1:
            player.add_l1()
        return sums

    def _recording(self) -> bool:
        """Whether nothing runs at present, but is written down."""
        return self.recorder is not None and torch.cuda.is_current_stream_capturing()

    def _try(self, step: Step, player: Player) -> tuple[Sums | None, str]:
        """The sums of all processes; nothing where memory ran out, and what was said of it if it was here."""
        sums, said = None, ""
        try:
            if self.weight_noise:
                with perturbed([group.flat for group in player.groups], self.weight_noise):
                    sums = self._differentiate(step.micro, step.factors, player)
            else:
                sums = self._differentiate(step.micro, step.factors, player)
        except Elsewhere:
            return None, ""
        except Exception as error:
            if self._recording():
                raise
            said = shortage(error)
        if said:  # only here is the error gone, and with it the activations that it held
            self.recorder = None  # recordings have memory of their own
            free(self.device)
        if self.peers is not None:
            try:
                sums = self.peers.add_gradients(player.groups, sums or {}, short=bool(said))
            except Elsewhere:
                return None, said
        return sums, said

    def _move(self, player: Player, norm: Tensor | None, rate: Rate) -> None:
        """The norm is for clipping."""
        excess = player.clip(norm) if self.clips and norm is not None else None
        said = ""
        try:
            player.optimiser.step(rate, self.skip, excess)
        except Exception as error:
            if self._recording():
                raise
            said = shortage(error)
        if said:  # fewer rows would not help, but what lies idle may; it goes on where it stopped
            free(self.device)
            player.optimiser.step(rate, self.skip, excess)

    def _look(self) -> None:
        """At the flag as it was when last asked for, and ask for it as it is now."""
        assert self.skip is not None
        if self.asked is not None:
            count, answer = self.asked
            if any(answer.read()):
                self.settle()
            del self.suspects[:count]
        self.asked = len(self.suspects), Answer(self.skip.reshape(1))

    def settle(self) -> None:
        """Wait for the device and raise if any step since the last call was not finite."""
        suspects, self.suspects, self.asked = self.suspects, [], None
        if suspects and self.skip is not None and self.skip.item():
            number, who, batch, row = next(s for s in suspects if not s[3].values().isfinite().all())
            bad = next(i for i, value in enumerate(row.values().tolist()) if not math.isfinite(value))
            # A player's numbers end with its norm, which has no name.
            before = sum(column not in row.columns.values() for column in range(bad))
            # Nothing was applied since, so computing that batch's gradient again shows the same state.
            player = next(p for p in self.players if p.name == who[before])
            if self.peers is None:
                self._differentiate_alone(batch, player)
            raise self._explain(batch, number, player)

    def _explain(self, batch: Batch, number: int, player: Player) -> NonFiniteError:
        """Why a step is not finite. Of several processes each looks at its own rows."""
        parts, before = self.parts.alone(batch), Before(self.task, self.device)
        explain = partial(explain_non_finite, self.task, batch, number, player.name, parts)
        before.remember()
        if self.peers is None:
            found = explain()
            before.restore()
            return found
        error: NonFiniteError | None = None
        if self.peers.shards is not None:  # how often each computes from here on is its own affair
            self.peers.shards.release()
            self.peers.shards, self.gradients.terms = None, self.task.terms
            for each in self.players:
                each.regroup(self.task)
        with self.peers.alone():
            sums = self._differentiate_alone(batch, player)
            if not (player.norm().isfinite() and all(value.isfinite() for value in sums.values())):
                error = explain()
        before.restore()
        return self.peers.blame(error, number)

    def _differentiate_alone(self, batch: Batch, player: Player) -> Sums:
        peers, self.gradients.peers = self.gradients.peers, None
        try:
            factors = loss_factors(self.task, self.task.weigh(batch))
            return self._differentiate(self.parts.alone(batch), factors, player)
        finally:
            self.gradients.peers = peers

    def close(self) -> None:
        if self.peers is not None:
            self.peers.close()
        if self.hooks is not None:
            self.hooks.remove()
        for player in self.players:
            for group in player.groups:
                group.release()
