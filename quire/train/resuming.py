"""What a checkpoint of a descent holds, and how a run goes on from it.

The order of the data is a pure function of (seed, epoch), so the position in it is the number of steps taken.
With that number a checkpoint holds the weights, the best weights, the optimiser, the running sums of the
epoch, the record of early stopping and all random states; a run resumed from it computes the same bits as one
that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quire.errors import InputError
from quire.train.checkpoints import Checkpoint
from quire.train.keeping import State, check_plan
from quire.train.processes import from_all, processes, rows_of_all
from quire.train.randomness import random_state, restore_random_state, seed_everything, stream_seed

if TYPE_CHECKING:
    from quire.train.descent import Descent

Tensors = dict[str, Mapping[str, Tensor]]


def contents(descent: Descent, weights: State | None, final: State | None) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and numbers of this moment, of all processes; called by each of them. `weights` are those to go
    on from, the task's own unless given, and `final` those that the task is left with."""
    stepper = descent.stepper
    sums, sum_weights = descent.running.numbers()
    carried = stepper.carried
    states = [random_state()]
    if descent.peers is not None:
        carried = {name: rows_of_all(value) for name, value in carried.items()}
        states = from_all(states[0])
    tensors: Tensors = {"weights": weights or descent.task.state_dict()}
    for number, state in enumerate(states):
        tensors[random_name(number)] = state
    if final is not None:
        tensors["final"] = final
    for player in stepper.players:
        tensors[f"optimiser-{player.name}"] = player.optimiser.state()
    if descent.best is not None:
        tensors["best"] = descent.best
    if carried:
        tensors["carried"] = {name: value.contiguous() for name, value in carried.items()}
    if descent.average is not None:
        tensors["average"] = descent.average.named()
    progress = {
        "step": descent.step,
        "best_step": descent.best_step,
        "sums": sums,
        "weights": sum_weights,
        "stopping": descent.stopping.state_dict(),
        "history": descent.history,
        "seconds": descent.seconds(),
        "plan": plan(descent),
        "parts": stepper.parts.state(),
    }
    return tensors, progress


def restore(descent: Descent, checkpoint: Checkpoint) -> None:
    """Stand where the checkpoint was made."""
    tensors, progress, stepper = checkpoint.tensors, checkpoint.documents["progress"], descent.stepper
    if "weights" not in tensors:
        raise InputError(
            "resuming a run whose adapters are merged",
            expected="the run as it was trained",
            fix="take them out again with 'quire adapter unmerge RUN'",
        )
    check_plan(progress["plan"], plan(descent))
    descent.task.load_state_dict(dict(tensors["weights"]))
    for player in stepper.players:
        player.optimiser.load(tensors[f"optimiser-{player.name}"])
    if "best" in tensors:
        descent.best = {name: value.to(descent.device) for name, value in tensors["best"].items()}
    if descent.average is not None:
        descent.average.restore(tensors.get("average", {}))
    rows, peers, carried = descent.batch_size, descent.peers, tensors.get("carried", {})
    first, last = (0, rows) if peers is None else peers.share(rows)
    stepper.carried = {name: value[first:last].to(descent.device) for name, value in carried.items()}
    descent.step, descent.best_step = progress["step"], progress["best_step"]
    descent.running.load(progress["sums"], progress["weights"])
    descent.stopping.load_state_dict(progress["stopping"])
    descent.history = list(progress["history"])
    descent.seconds_before = progress["seconds"]
    stepper.parts.load(progress.get("parts"))
    number = processes()[0]
    if random_name(number) in tensors:
        restore_random_state(tensors[random_name(number)])
    else:  # a run that fewer processes began
        seed_everything(stream_seed(descent.seed, number, descent.step))


def plan(descent: Descent) -> dict[str, int]:
    """What must be the same for a resumed run to be the same run."""
    return {"rows": len(descent.data), "batch_size": descent.batch_size, "seed": descent.seed}


def random_name(process: int) -> str:
    """What the random states of a process are called in a checkpoint."""
    return f"random-{process}" if process else "random"
