"""Output distributions for any backbone.

A head reads the numbers that a backbone gives as the parameters of a distribution p(y | x). It says
how many of them it needs, what they lose against a target (−log p), how to predict from them (mode,
mean, sample, interval) and how such predictions are judged.

Regression heads also own the target's standardisation: backbone and loss work in units of
(y − shift)/scale, predictions and measures come out in the target's own units.

B rows, C classes, D outputs; `raw` is (B, …, outputs_needed). Where D is 1, targets may be (B,) or
(B, 1), and predictions are (B,).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.errors import InputError, unknown_name
from quire.functional import losses, measures
from quire.functional.normalise import standardisation
from quire.nn.head import (
    HEADS,
    MODES,
    Head,
    Weight,
    align,
    build_head,
    check_width,
    columns,
    full_precision,
    rowwise,
)

__all__ = [
    "HEADS",
    "IGNORE",
    "MODES",
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Head",
    "Heteroscedastic",
    "Regression",
    "build_head",
]

IGNORE = losses.IGNORE_INDEX
"""The target that is not counted, as in `torch.nn.functional.cross_entropy`."""

LOG_VARIANCE_LIMIT = 12.0
"""|log σ²| stays below this: variances from 6e-6 to 2e5 of the target's, so that no loss overflows."""


@final
@HEADS.register("categorical")
class Categorical(Head):
    """p(y = c) = softmax(raw)_c; targets are class numbers (B, …), or `IGNORE`.

    Targets may also be shares y_c of the classes (B, …, C), in floating point, as mixed images have them; one
    without a positive share is ignored. Class weights scale each target's loss, w_y or w_c y_c log p_c, and
    its share in the mean, w_y or Σ_c w_c y_c: a one-hot row counts like its class number.
    """

    name = "categorical"
    class_weights: Tensor | None

    def __init__(
        self, dim: int, *, label_smoothing: float = 0.0, class_weights: list[float] | None = None
    ) -> None:
        super().__init__(dim)
        if not 0.0 <= label_smoothing < 1.0:
            raise InputError(
                f"label_smoothing is {label_smoothing!r}", expected="a share in [0, 1)", fix="try 0.1"
            )
        if class_weights is not None and len(class_weights) != dim:
            raise InputError(
                f"{len(class_weights)} class weights",
                expected=f"one for each of the {dim} classes",
                fix="leave class_weights out to weigh all alike",
            )
        self.label_smoothing = label_smoothing
        weights = None if class_weights is None else torch.tensor(list(class_weights))
        self.register_buffer("class_weights", weights)

    @property
    def counts_all(self) -> bool:
        return self.class_weights is None

    def options(self) -> dict[str, Any]:
        given: dict[str, Any] = {}
        if self.label_smoothing:
            given["label_smoothing"] = self.label_smoothing
        if self.class_weights is not None:
            given["class_weights"] = self.class_weights.tolist()
        return given

    def _loss(self, raw: Tensor, target: Tensor, reduction: str) -> Tensor:
        shared = target.is_floating_point()
        self._check(raw, target, shared)
        logits = full_precision(raw).reshape(-1, self.dim)
        weights = None if self.class_weights is None else self.class_weights.to(logits.dtype)
        each = losses.cross_entropy(
            logits,
            target.reshape(logits.shape).to(logits.dtype) if shared else target.reshape(-1),
            weight=weights,
            ignore_index=IGNORE,
            label_smoothing=self.label_smoothing,
            reduction="none" if shared else reduction,
        )
        if not shared:
            return each
        # Smoothing would make something of a row without shares.
        each = each * (target.amax(dim=-1) > 0).reshape(-1)
        return each.sum() if reduction == "sum" else each

    def loss_each(self, raw: Tensor, target: Tensor) -> Tensor:
        return rowwise(self._loss(raw, target, "none").reshape(raw.shape[:-1]))

    def loss_sum(self, raw: Tensor, target: Tensor) -> Tensor:
        return self._loss(raw, target, "sum")

    def weigh(self, target: Tensor) -> Weight:
        if not target.is_floating_point():
            return losses.weigh_classes(None, target, weight=self.class_weights, ignore_index=IGNORE)
        counted = target.amax(dim=-1) > 0
        if self.class_weights is None:
            return counted.sum()
        return ((target * self.class_weights).sum(dim=-1) * counted).sum()

    def _predict(
        self, raw: Tensor, mode: str, level: float, generator: torch.Generator | None
    ) -> dict[str, Tensor]:
        probabilities = torch.softmax(raw, dim=-1)
        if mode == "sample":
            rows = probabilities.reshape(-1, self.dim)
            drawn = torch.multinomial(rows, 1, generator=generator).reshape(raw.shape[:-1])
            return {"class": drawn, "probabilities": probabilities}
        answer = {"class": raw.argmax(dim=-1), "probabilities": probabilities}
        if mode == "interval":
            ordered, order = probabilities.sort(dim=-1, descending=True)
            # A class belongs to the set while those before it do not reach the level yet.
            inside = ordered.cumsum(dim=-1) - ordered < level
            answer["set"] = torch.zeros_like(inside).scatter(-1, order, inside)
        return answer

    @torch.no_grad()
    def tally(self, raw: Tensor, target: Tensor) -> dict[str, Tensor]:
        self._check(raw, target)
        confusion = measures.confusion_matrix(raw.argmax(dim=-1), target, self.dim, ignore_index=IGNORE)
        return {"confusion": confusion}

    def measures(self, tallies: Mapping[str, Tensor]) -> dict[str, float]:
        return measures.measures_from_confusion(tallies["confusion"])

    def _check(self, raw: Tensor, target: Tensor, shared: bool = False) -> None:
        check_width(self, raw)
        if target.is_floating_point() != shared or target.shape != (raw.shape if shared else raw.shape[:-1]):
            raise InputError(
                f"targets of shape {tuple(target.shape)} and type {target.dtype}",
                expected=f"class numbers (integers) of shape {tuple(raw.shape[:-1])}"
                + (f", or shares of the classes of shape {tuple(raw.shape)}" if shared else ""),
                fix="turn one-hot rows into class numbers with argmax(dim=-1)",
            )


@final
@HEADS.register("bernoulli")
class Bernoulli(Head):
    """p(y = 1) = σ(raw), each label by itself; targets are 0 or 1 (B, dim), or `IGNORE`."""

    name = "bernoulli"

    def loss_each(self, raw: Tensor, target: Tensor) -> Tensor:
        target = align(self, raw, target)
        logits = full_precision(raw)
        counted = target != IGNORE
        wanted = (target * counted).to(logits.dtype)
        return rowwise(losses.binary_cross_entropy_with_logits(logits, wanted, reduction="none") * counted)

    def weigh(self, target: Tensor) -> Weight:
        return (target != IGNORE).sum()

    def _predict(
        self, raw: Tensor, mode: str, level: float, generator: torch.Generator | None
    ) -> dict[str, Tensor]:
        check_width(self, raw)
        probabilities = torch.sigmoid(raw)
        if mode == "sample":
            label = torch.bernoulli(probabilities, generator=generator).long()
        else:
            label = (raw > 0).long()
        answer = {"class": label, "probabilities": probabilities}
        if mode == "interval":
            unsure = torch.maximum(probabilities, 1 - probabilities) < level
            answer["low"] = torch.where(unsure, 0, label)
            answer["high"] = torch.where(unsure, 1, label)
        return {key: columns(self, value) for key, value in answer.items()}

    @torch.no_grad()
    def tally(self, raw: Tensor, target: Tensor) -> dict[str, Tensor]:
        target = align(self, raw, target)
        cells = torch.where(target == IGNORE, 4, target.long() * 2 + (raw > 0)).reshape(-1, self.dim)
        counts = F.one_hot(cells, 5).sum(dim=0)[:, :4]
        return {"confusion": counts.reshape(self.dim, 2, 2)}

    def measures(self, tallies: Mapping[str, Tensor]) -> dict[str, float]:
        """Accuracy over all labels; the others for each label by itself, then averaged over labels."""
        by_label = [measures.measures_from_confusion(confusion) for confusion in tallies["confusion"]]
        answer = {key: sum(one[key] for one in by_label) / self.dim for key in by_label[0]}
        pooled = tallies["confusion"].sum(dim=0)
        return {**answer, "accuracy": measures.measures_from_confusion(pooled)["accuracy"]}


class Regression(Head):
    """What both Gaussian heads share: units of the target, intervals, measures."""

    shift: Tensor
    scale: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.register_buffer("shift", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(dim))

    @abstractmethod
    def distribution(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance in standardised units, each (B, D)."""

    @torch.no_grad()
    def fit_target(self, target: Tensor) -> None:
        """shift ← mean, scale ← standard deviation of the training targets (1 where they are constant)."""
        values = target.reshape(-1, self.dim)
        if not len(values) or not torch.isfinite(values).all():
            raise InputError(
                "targets that are empty or not finite",
                expected="at least one row of numbers",
                fix="drop the rows whose target is missing",
            )
        mean, deviation = standardisation(values)
        self.shift.copy_(mean)
        self.scale.copy_(deviation)

    def standardise(self, target: Tensor) -> Tensor:
        return (target - self.shift) / self.scale

    def restore(self, value: Tensor) -> Tensor:
        return value * self.scale + self.shift

    def _standard_target(self, raw: Tensor, target: Tensor) -> Tensor:
        return self.standardise(align(self, raw, target)).to(full_precision(raw).dtype)

    def weigh(self, target: Tensor) -> Weight:
        return float(target.numel())

    def _predict(
        self, raw: Tensor, mode: str, level: float, generator: torch.Generator | None
    ) -> dict[str, Tensor]:
        check_width(self, raw)
        mean, variance = self.distribution(raw)
        if mode == "sample":
            noise = torch.empty_like(mean).normal_(generator=generator)
            mean = mean + variance.sqrt() * noise
        answer = {"value": self.restore(mean)}
        if mode == "interval":
            reach = normal_reach(level) * variance.sqrt()
            answer["low"], answer["high"] = self.restore(mean - reach), self.restore(mean + reach)
        return {key: columns(self, value) for key, value in answer.items()}

    @torch.no_grad()
    def tally(self, raw: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Sums in float64 and in standardised units, where Σy² loses nothing to a large mean."""
        wanted = self._standard_target(raw, target).reshape(-1, self.dim).double()
        mean, variance = self.distribution(full_precision(raw))
        error = mean.reshape(-1, self.dim).double() - wanted
        reach = normal_reach(0.9) * variance.double().sqrt().expand(mean.shape).reshape(-1, self.dim)
        return {
            "count": wanted.new_tensor(float(len(wanted))),
            "error_squared": error.square().sum(dim=0),
            "error_absolute": error.abs().sum(dim=0),
            "target_sum": wanted.sum(dim=0),
            "target_squared": wanted.square().sum(dim=0),
            "covered": (error.abs() <= reach).double().sum(dim=0),
        }

    def measures(self, tallies: Mapping[str, Tensor]) -> dict[str, float]:
        """rmse, mae and r2 in the target's units, averaged over outputs."""
        scale = self.scale.to(tallies["count"])
        found = measures.measures_from_sums(
            {
                "n": tallies["count"],
                "sum": tallies["target_sum"] * scale,
                "squares": tallies["target_squared"] * scale**2,
                "squared_errors": tallies["error_squared"] * scale**2,
                "absolute_errors": tallies["error_absolute"] * scale,
            }
        )
        return {key: found[key] for key in ("rmse", "mae", "r2")}


@final
@HEADS.register("gaussian")
class Gaussian(Regression):
    """p(y) = N(raw, σ²) with one σ² for each output.

    loss="squared": ½(y − raw)², whose minimiser does not depend on σ²; σ² is then estimated from the
    residuals (`set_noise`). loss="nll": σ² is a parameter and learned with the rest.
    """

    name = "gaussian"
    noise_variance: Tensor

    def __init__(self, dim: int, *, loss: Literal["squared", "nll"] = "squared") -> None:
        super().__init__(dim)
        if loss not in ("squared", "nll"):
            raise unknown_name("loss of the gaussian head", loss, ("squared", "nll"))
        self.loss = loss
        if loss == "nll":
            self.log_variance = nn.Parameter(torch.zeros(dim))
        else:
            self.register_buffer("noise_variance", torch.ones(dim))

    def options(self) -> dict[str, Any]:
        return {"loss": self.loss}

    def loss_each(self, raw: Tensor, target: Tensor) -> Tensor:
        wanted, raw = self._standard_target(raw, target), full_precision(raw)
        if self.loss == "squared":
            return rowwise(losses.half_squared_error(raw, wanted, reduction="none"))
        variance = soft_clamp(self.log_variance).exp()
        return rowwise(losses.gaussian_nll(raw, wanted, variance, full=True, reduction="none"))

    def distribution(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        if self.loss == "nll":
            return raw, soft_clamp(self.log_variance).exp().to(raw.dtype).expand_as(raw)
        return raw, self.noise_variance.to(raw.dtype).expand_as(raw)

    @torch.no_grad()
    def set_noise(self, residual_variance: Tensor | float) -> None:
        """σ² of each output, in standardised units: the mean squared residual after training."""
        value = torch.as_tensor(residual_variance, dtype=self.scale.dtype, device=self.scale.device)
        if not torch.isfinite(value).all() or (value < 0).any():
            raise InputError(
                f"a residual variance of {value.tolist()}",
                expected="finite numbers >= 0",
                fix="check the residuals for NaN",
            )
        if self.loss == "nll":
            self.log_variance.copy_(
                value.log().clamp(-LOG_VARIANCE_LIMIT, LOG_VARIANCE_LIMIT).expand(self.dim)
            )
        else:
            self.noise_variance.copy_(value.expand(self.dim))


@final
@HEADS.register("heteroscedastic")
class Heteroscedastic(Regression):
    """p(y) = N(μ, σ²) with raw = (μ, log σ²), D of each: the noise may depend on the input."""

    name = "heteroscedastic"

    @property
    def outputs_needed(self) -> int:
        return 2 * self.dim

    def loss_each(self, raw: Tensor, target: Tensor) -> Tensor:
        wanted = self._standard_target(raw, target)
        mean, variance = self.distribution(full_precision(raw))
        return rowwise(losses.gaussian_nll(mean, wanted, variance, full=True, reduction="none"))

    def distribution(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = raw.split(self.dim, dim=-1)
        return mean, soft_clamp(log_variance).exp()

    def measures(self, tallies: Mapping[str, Tensor]) -> dict[str, float]:
        """Also `coverage`: the share of targets inside the 90% interval."""
        coverage = (tallies["covered"] / tallies["count"]).mean().item()
        return {**super().measures(tallies), "coverage": coverage}


# Parts of the distributions ------------------------------------------------------------------


def soft_clamp(log_variance: Tensor, limit: float = LOG_VARIANCE_LIMIT) -> Tensor:
    """Smooth clamp to (−limit, limit): the identity up to 1e-9 where |x| < limit − 5, no kink outside."""
    upper = limit - F.softplus(limit - log_variance, beta=4.0)
    return F.softplus(upper + limit, beta=4.0) - limit


def normal_reach(level: float) -> float:
    """Half the width, in standard deviations, of the central interval that holds `level` of a normal."""
    return math.sqrt(2.0) * torch.erfinv(torch.tensor(level, dtype=torch.float64)).item()
