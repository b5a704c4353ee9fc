"""Regularisation as pure functions: penalties, dropout, noise, early stopping, ensembles, shared and
frozen parts, masked reconstruction.

N rows, D features, M members of an ensemble, p drop rate, q = 1−p keep probability
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quire.errors import InputError
from quire.functional import losses
from quire.functional.reduction import require_same_shape

# Penalties ------------------------------------------------------------------------------------


def l1_penalty(parameters: Tensor | Iterable[Tensor], strength: float = 1.0) -> Tensor:
    """λ·Σ|w|, of half precision in float32."""
    return strength * torch.stack([w.abs().sum() for w in _as_list(parameters)]).sum()


def l2_penalty(parameters: Tensor | Iterable[Tensor], strength: float = 1.0) -> Tensor:
    """½·λ·Σw², of half precision in float32; the half makes its gradient λw."""
    return 0.5 * strength * torch.stack([w.square().sum() for w in _as_list(parameters)]).sum()


def max_norm(weight: Tensor, limit: float) -> Tensor:
    """Rows (all that feeds one unit) scaled down to the norm `limit` where they are longer."""
    length = weight.flatten(1).norm(dim=1).clamp(min=torch.finfo(weight.dtype).tiny)
    factor = (limit / length).clamp(max=1.0)
    return weight * factor.reshape(-1, *[1] * (weight.dim() - 1))


# Dropout and noise ----------------------------------------------------------------------------


def dropout(
    x: Tensor, rate: float = 0.5, training: bool = True, generator: torch.Generator | None = None
) -> Tensor:
    """m⊙x/q with m ~ Bernoulli(q) while training, x afterwards: the expectation is x either way."""
    check_rate(rate, "drop rate")
    if not training or rate == 0:
        return x
    if generator is None:  # torch's fused kernel draws from the global generator only
        return nn.functional.dropout(x, rate)
    keep = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - rate, generator=generator)
    return torch.where(keep, x / (1 - rate), 0.0)


def keep_scaled(weight: Tensor, rate: float) -> Tensor:
    """q·W: what replaces W at test time when the training masks were *not* divided by q.

    A unit is there with probability q = 1−p, so q and not p is the factor that keeps W·(m⊙x) in
    expectation.
    """
    check_rate(rate, "drop rate")
    return (1 - rate) * weight


def dropout_masks(units: int, rate: float) -> tuple[Tensor, Tensor]:
    """All 2^D masks of D units, (2^D, D), and their probabilities q^kept·p^dropped, (2^D,): the
    ensemble that dropout trains, in full."""
    check_rate(rate, "drop rate")
    if not 1 <= units <= 20:
        raise InputError(
            f"all masks of {units} units",
            expected="1 to 20 units, which have up to a million masks",
            fix="average over random masks instead: quire.nn.monte_carlo_dropout",
        )
    bits = torch.arange(2**units).unsqueeze(1) >> torch.arange(units) & 1
    kept = bits.sum(1).double()
    return bits.double(), (1 - rate) ** kept * rate ** (units - kept)


def gaussian_noise(x: Tensor, std: float, generator: torch.Generator | None = None) -> Tensor:
    """x + ε with ε ~ N(0, std²)."""
    if not (math.isfinite(std) and std >= 0):
        raise InputError(f"noise with standard deviation {std!r}", expected="a finite number >= 0")
    if std == 0:
        return x
    return x + std * torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)


# Early stopping -------------------------------------------------------------------------------


class EarlyStopping:
    """Stop after `patience` values in a row that are no improvement on the best one.

    An improvement differs from the best value by more than `min_delta`. A value that is not a number
    never improves. `patience` None never stops but still knows the best value.
    """

    def __init__(self, patience: int | None, min_delta: float = 0.0, higher_is_better: bool = False) -> None:
        if patience is not None and patience < 1:
            raise InputError(f"patience is {patience!r}", expected="at least 1, or None to never stop")
        if not min_delta >= 0:
            raise InputError(f"min_delta is {min_delta!r}", expected="a number >= 0")
        self.patience, self.min_delta, self.higher_is_better = patience, min_delta, higher_is_better
        self.best: float | None = None
        self.best_update: int | None = None
        self.updates = 0

    def improves(self, value: float) -> bool:
        """Whether `value` would be a new best; changes nothing."""
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = value - self.best if self.higher_is_better else self.best - value
        return gain > self.min_delta

    def update(self, value: float) -> bool:
        """Take the next value; True when it is time to stop."""
        if self.improves(value):
            self.best, self.best_update = float(value), self.updates
        self.updates += 1
        return self.patience is not None and self.waited >= self.patience

    @property
    def improved(self) -> bool:
        """Whether the last value was the best so far."""
        return self.updates > 0 and self.waited == 0

    @property
    def waited(self) -> int:
        """How many values came since the best one."""
        return self.updates if self.best_update is None else self.updates - 1 - self.best_update

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_update": self.best_update, "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.best_update = state["best"], state["best_update"]
        self.updates = state["updates"]


# Ensembles ------------------------------------------------------------------------------------


def bootstrap(rows: int, members: int, generator: torch.Generator | None = None) -> Tensor:
    """Row numbers drawn with replacement for each member, (M, N)."""
    if rows < 1 or members < 1:
        raise InputError(f"{members} resamples of {rows} rows", expected="at least one of each")
    return torch.randint(rows, (members, rows), generator=generator)


def ensemble_variance(variance: float, correlation: float, members: int) -> float:
    """Var[(1/M)·Σ f_m] = ρσ² + (1−ρ)σ²/M for members of variance σ² and pairwise correlation ρ."""
    if members < 1:
        raise InputError(f"an ensemble of {members} members", expected="at least 1")
    lowest = -1.0 if members == 1 else -1 / (members - 1)
    if not lowest <= correlation <= 1:
        raise InputError(
            f"a pairwise correlation of {correlation!r} between {members} members",
            expected=f"a number in [{lowest:g}, 1]; no joint distribution has another",
        )
    return correlation * variance + (1 - correlation) * variance / members


# Shared and frozen parts ----------------------------------------------------------------------


def multi_task_loss(parts: Mapping[str, Tensor], weights: Mapping[str, float] | None = None) -> Tensor:
    """Σ_k w_k·L_k; a task without a weight counts once."""
    weights = weights or {}
    unknown = sorted(set(weights) - set(parts))
    if not parts or unknown:
        raise InputError(
            f"weights for {unknown} and losses for {sorted(parts)}",
            expected="at least one loss, and weights under the names of the losses",
            fix="rename or drop the weights that belong to no loss",
        )
    return torch.stack([weights.get(name, 1.0) * loss for name, loss in parts.items()]).sum()


class Frozen:
    """What `freeze` did to a module; `remove()` undoes it."""

    def __init__(self, parameters: Sequence[nn.Parameter], hook: RemovableHandle) -> None:
        self.parameters, self.hook = parameters, hook

    def remove(self) -> None:
        self.hook.remove()
        for parameter in self.parameters:
            parameter.requires_grad_(True)


def freeze(module: nn.Module) -> Frozen:
    """Keep a pretrained part as it is: no gradient for its parameters, and evaluation mode in each
    forward pass, also after ``model.train()``, so that batch norm's averages and dropout rest too."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    return Frozen(parameters, module.register_forward_pre_hook(_rest))


def _rest(module: nn.Module, args: tuple[Any, ...]) -> None:
    if module.training:
        module.eval()


# Self- and semi-supervised --------------------------------------------------------------------


def random_mask(
    shape: Sequence[int],
    rate: float,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """A boolean mask with ⌊rate·n+½⌋ of the n entries of the last dimension true in each row."""
    check_rate(rate, "share to mask", allow_one=True)
    entries = shape[-1]
    scores = torch.rand(tuple(shape), generator=generator, device=device)
    rank = scores.argsort(-1).argsort(-1)
    return rank < int(rate * entries + 0.5)


def masked_reconstruction_loss(prediction: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    """Σ m(x̂−x)²/Σ m: the mean squared error over the hidden entries alone; 0 when none is hidden.

    The mask broadcasts: one of (N, 1, H, W) hides all channels of a pixel, each of which counts.
    """
    require_same_shape("masked_reconstruction_loss", prediction, x)
    # Chosen, not multiplied: what is missing among the seen entries is no number. Sums of half precision
    # would overflow.
    wide = torch.promote_types(prediction.dtype, torch.float32)
    hidden = mask.bool().expand_as(prediction)
    errors = torch.where(hidden, prediction - x, 0.0).to(wide)
    return (errors.square().sum() / hidden.sum().clamp(min=1)).to(prediction.dtype)


def semi_supervised_loss(
    logits: Tensor,
    target: Tensor,
    reconstruction: Tensor,
    x: Tensor,
    weight: float = 1.0,
    ignore_index: int = -100,
) -> Tensor:
    """Mean cross-entropy of the labelled rows + w · mean squared reconstruction error of all rows.

    Rows without a label carry `ignore_index`. The code z that `logits` and `reconstruction` come from
    is thereby shaped by every row and classified from the labelled ones.
    """
    supervised = losses.cross_entropy(logits, target, ignore_index=ignore_index)
    return supervised + weight * losses.mse(reconstruction, x)


def check_rate(rate: float, name: str, allow_one: bool = False) -> None:
    """Refuse a share outside [0, 1), or [0, 1] where one is meaningful."""
    if not 0 <= rate <= 1 or (rate == 1 and not allow_one):
        bounds = "[0, 1]" if allow_one else "[0, 1)"
        raise InputError(f"{name} {rate!r}", expected=f"a number in {bounds}", fix="0.1 means one in ten")


def _as_list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not tensors:
        raise InputError("no parameters", expected="a tensor or several", fix="pass model.parameters()")
    # A sum over the weights of a layer is soon above 65504, where float16 ends.
    return [w.float() if w.dtype in (torch.float16, torch.bfloat16) else w for w in tensors]
