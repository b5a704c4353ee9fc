"""From an estimator's parameters to a trained network: the part that all network estimators share.

N rows, D features, O outputs. Training is `quire.fit`, as for every other network.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from torch import Tensor, nn

from quire.data.batch import TensorData
from quire.data.splits import split_rows
from quire.errors import InputError, unknown_name
from quire.estimators.base import Array, to_numpy, to_tensor
from quire.functional.regularise import EarlyStopping
from quire.nn.activation import ACTIVATION_LAYERS
from quire.options import Optim, Train, check
from quire.train import Callback, Task, fit
from quire.train.descent import Descent

RandomState = int | np.random.RandomState | None
Sizes = int | tuple[int, ...] | list[int]
SYNONYMS = {"identity": "linear", "logistic": "sigmoid"}
"""scikit-learn's names for two activations."""
PREDICT_ROWS = 65_536
"""Rows that are predicted at once, as a bound on memory."""


class Scaling(NamedTuple):
    """Columns to mean 0 and standard deviation 1; columns that do not vary are only shifted."""

    mean: Array
    scale: Array

    @classmethod
    def of(cls, values: Tensor, *, active: bool = True) -> Scaling:
        values = values.double()
        mean = values.mean(0)
        deviation = (values - mean).square().mean(0).sqrt()
        if not active:
            return cls(to_numpy(torch.zeros_like(mean)), to_numpy(torch.ones_like(mean)))
        # The rounding of the mean makes a constant column look as if it varied.
        varies = deviation > 10 * torch.finfo(torch.float64).eps * mean.abs()
        return cls(to_numpy(mean), to_numpy(torch.where(varies, deviation, 1.0)))

    def apply(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        mean, scale = (to_tensor(part).to(values.device) for part in self)
        return ((values.double() - mean) / scale).to(dtype)

    def factor(self, values: Tensor) -> Tensor:
        """What a difference of scaled values is multiplied by to be one of the original."""
        scale = to_tensor(self.scale).to(values)
        return scale if values.ndim > 1 else scale[0]

    def undo(self, values: Tensor) -> Tensor:
        """Values (N, O), or (N,) where there is one column."""
        mean = to_tensor(self.mean).to(values)
        return values * self.factor(values) + (mean if values.ndim > 1 else mean[0])


class _Plateau(Callback):
    """Stops training when the training loss has not fallen by `tol` for a number of epochs."""

    def __init__(self, patience: int, tol: float) -> None:
        self.stopping = EarlyStopping(patience, tol)

    def on_record(self, descent: Descent, record: dict[str, Any]) -> None:
        if record["split"] == "train" and self.stopping.update(float(record["values"]["loss"])):
            descent.stop()


def is_number(value: Any, low: float, high: float, *, whole: bool = False) -> bool:
    """Whether `value` is a (whole) number in [low, high)."""
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    return isinstance(value, kinds) and not isinstance(value, bool) and bool(low <= value < high)


def hidden_widths(sizes: Any) -> tuple[int, ...]:
    """``100`` or ``(100, 50)`` as a tuple of widths."""
    widths = tuple(sizes) if isinstance(sizes, tuple | list | np.ndarray) else (sizes,)
    good = all(is_number(width, 1, np.inf, whole=True) for width in widths)
    check(good, "hidden_layer_sizes", sizes, "an integer >= 1 or a tuple of such")
    return tuple(int(width) for width in widths)


def activation_name(name: Any) -> str:
    """Quire's name of an activation, from its own or scikit-learn's."""
    found = SYNONYMS.get(str(name), str(name))
    if found not in ACTIVATION_LAYERS:
        raise unknown_name("activation", str(name), [*ACTIVATION_LAYERS, *SYNONYMS])
    return found


def check_parameters(estimator: Any) -> None:
    """The parameters that all network estimators have."""
    least = float(np.finfo(np.float64).tiny)
    bounds = {
        "alpha": (0.0, np.inf, "a number >= 0"),
        "tol": (0.0, np.inf, "a number >= 0"),
        "momentum": (0.0, 1.0, "a number in [0, 1)"),
        "learning_rate_init": (least, np.inf, "a number > 0"),
        "validation_fraction": (least, 1.0, "a number in (0, 1)"),
    }
    for name, (low, high, expected) in bounds.items():
        value = getattr(estimator, name)
        check(is_number(value, low, high), name, value, expected)
    for name in ("batch_size", "max_iter", "n_iter_no_change"):
        value = getattr(estimator, name)
        check(is_number(value, 1, np.inf, whole=True), name, value, "an integer >= 1")
    check(estimator.solver in ("adam", "sgd"), "solver", estimator.solver, "'adam' or 'sgd'")


def resolve_device(device: Any, inputs: Tensor) -> torch.device:
    """ "auto" is where X lies if X is a tensor, and the CPU otherwise."""
    try:
        found = inputs.device if device == "auto" else torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or (found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count()):
        raise InputError(
            f"device is {device!r}",
            expected="'auto', or a device of this machine such as 'cpu' or 'cuda'",
            fix="leave it out: 'auto' is where X lies",
        )
    return found


class Training(NamedTuple):
    """The record of a training, epoch by epoch."""

    losses: list[float]
    validation_losses: list[float]
    """With early_stopping."""

    def keep(self, estimator: Any) -> None:
        """As the attributes that scikit-learn's networks have."""
        estimator.loss_curve_, estimator.validation_losses_ = self.losses, self.validation_losses
        estimator.best_loss_, estimator.n_iter_ = min(self.losses), len(self.losses)


def hold_out(
    estimator: Any, fields: dict[str, Tensor], seed: int, stratify: Tensor | None = None
) -> tuple[TensorData, TensorData | None]:
    """The rows to train on and, with early_stopping, those to judge by."""
    data = TensorData(fields)
    if not estimator.early_stopping:
        return data, None
    kept, held_out, _ = split_rows(len(data), float(estimator.validation_fraction), 0.0, seed, stratify)
    return data.subset(kept), data.subset(held_out)


def train_network(
    estimator: Any,
    make_task: Callable[[], Task],
    data: TensorData,
    validation: TensorData | None,
    *,
    seed: int,
    device: torch.device,
    members: int = 1,
) -> tuple[Task, Training]:
    """Train as the estimator's parameters say; the task comes back on the CPU, for evaluation.

    `members`: how many nets' losses the task adds up; curves and `tol` are those of one.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        task = make_task()
    batch_size = min(int(estimator.batch_size), len(data))
    optim = Optim(
        name=estimator.solver,
        lr=float(estimator.learning_rate_init),
        momentum=float(estimator.momentum) if estimator.solver == "sgd" else 0.0,
        # The penalty is ½·alpha·‖W‖² beside the *summed* loss of a batch, as in scikit-learn.
        weight_decay=float(estimator.alpha) / batch_size,
        decay="l2",
        decay_biases=not estimator.alpha,
    )
    patience, tol = int(estimator.n_iter_no_change), float(estimator.tol) * members
    options = Train(
        batch_size=batch_size,
        shuffle=bool(estimator.shuffle),
        patience=patience if validation else None,
        min_delta=tol if validation else 0.0,
    )
    plateau = _Plateau(patience, tol)
    result = fit(
        task, data, validation, epochs=int(estimator.max_iter), optim=optim, train=options, seed=seed,
        device=device, callbacks=() if validation else (plateau,), train_measures=False,
    )  # fmt: skip
    if result.stopped != "early" and patience < estimator.max_iter:
        warnings.warn(
            f"{type(estimator).__name__} still improved after max_iter={estimator.max_iter} epochs. Raise "
            "max_iter to train on, or set n_iter_no_change=max_iter to train for exactly that many.",
            ConvergenceWarning,
            stacklevel=4,
        )
    curves: dict[str, list[float]] = {"train": [], "validation": []}
    for record in result.history:
        curves[record["split"]].append(float(record["values"]["loss"]) / members)
    return task.cpu().eval(), Training(curves["train"], curves["validation"])


def draw_seed(random_state: Any) -> int:
    """The seed of a fit: the same for the same integer, the next for a generator."""
    return int(check_random_state(random_state).randint(2**31 - 1))


@torch.no_grad()
def raw_outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    """The model's outputs, computed in the type and on the device of `inputs`.

    float64 inputs are so predicted in float64, where a row's prediction does not depend on how
    many others are predicted with it.
    """
    model = copy.deepcopy(model).to(inputs)
    return torch.cat([model(part) for part in inputs.split(PREDICT_ROWS)])
