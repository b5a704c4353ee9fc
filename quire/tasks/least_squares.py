"""Least squares from sums over the rows, for data of any length.

B rows of a batch, N rows of a data set, D features, O outputs.

    minimise Σ ‖y − Wᵀ(x − μ) − ν‖²:   S = Σ (x − μ)(x − μ)ᵀ,   C = Σ (x − μ)(y − ν)ᵀ,   W = S⁺C

One sweep adds up the moments of the rows (x, y). The normal equations square the condition of the rows, so
where features nearly depend on each other a further sweep takes the sums in rounder coordinates (see
`quire.functional.components`), which is as accurate as a QR factorisation of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, final

import torch
from torch import Tensor

from quire.data.batch import Batch, Data
from quire.errors import InputError
from quire.functional.components import project, sharper_view, spectrum
from quire.functional.scatter import View, first_view, moments, slab_rows
from quire.nn.heads import Gaussian
from quire.options import check
from quire.tasks.components import adopt_lengths, first_rows
from quire.train.statistics import StatisticsTask, Swept
from quire.train.sums import add_to
from quire.train.task import TASKS, Weight


@final
@TASKS.register("least-squares")
class LinearLeastSquares(StatisticsTask):
    """ŷ = Wᵀx + b with normal noise, W of the smallest norm where several are as good.

    Fields: inputs (B, …) of D numbers a row, and target (B,) or (B, O).
    """

    shift: Tensor
    """(D + O,), of features and outputs."""
    basis: Tensor
    scale: Tensor
    coefficients: Tensor
    """(D, O)"""
    centre: Tensor
    """μ (D,), zeros without an intercept."""
    level: Tensor
    """ν (O,), zeros without an intercept."""
    rank: Tensor

    def __init__(self, features: int, outputs: int = 1, *, intercept: bool = True) -> None:
        super().__init__()
        check(features >= 1, "features", features, "a number >= 1")
        check(outputs >= 1, "outputs", outputs, "a number >= 1")
        self.features, self.outputs, self.has_intercept = features, outputs, intercept
        self.head = Gaussian(outputs).double()
        zeros = torch.zeros(features + outputs, dtype=torch.float64)
        self.register_buffer("shift", zeros)
        self.register_buffer("basis", zeros.new_zeros(0, features))
        self.register_buffer("scale", zeros.new_zeros(0))
        self.register_buffer("coefficients", zeros.new_zeros(features, outputs))
        self.register_buffer("centre", zeros.new_zeros(features))
        self.register_buffer("level", zeros.new_zeros(outputs))
        self.register_buffer("rank", torch.tensor(0))

    @property
    def intercept(self) -> Tensor:
        """b = ν − Wᵀμ, (O,)."""
        return self.level - self.centre @ self.coefficients

    # -- Learning ------------------------------------------------------------------------------

    def start(self, data: Data, generator: torch.Generator) -> None:
        head = self._rows(first_rows(data))
        if self.has_intercept:
            self.shift = first_view(head.double()).shift.to(self.shift)

    def _rows(self, batch: Batch) -> Tensor:
        """(x, y) of each row, (B, D + O)."""
        inputs, target = batch.inputs.flatten(1), batch.target.reshape(len(batch), -1)
        if inputs.shape[1] != self.features or target.shape[1] != self.outputs:
            raise InputError(
                f"rows of {inputs.shape[1]} features and {target.shape[1]} outputs",
                expected=f"{self.features} features and {self.outputs} outputs, which the task was made for",
                fix=f"make it with features={inputs.shape[1]}, outputs={target.shape[1]}",
            )
        return torch.cat([inputs, target], 1)

    def _view(self) -> View:
        """Of the features; outputs are taken as they are."""
        shift = self.shift[: self.features]
        return View(shift, self.basis, self.scale) if len(self.basis) else View(shift)

    def statistics(self, batch: Batch) -> dict[str, Tensor]:
        view = View(self.shift)
        if len(self.basis):
            outputs = self.scale.new_ones(self.outputs)
            basis = torch.block_diag(self.basis, outputs.diag())
            view = View(self.shift, basis, torch.cat([self.scale, outputs]))
        totals: dict[str, Tensor] = {}
        size = slab_rows(batch.inputs.flatten(1))
        for start in range(0, len(batch), size):  # a few rows at a time are put side by side, not all
            fields = {name: batch.fields[name][start : start + size] for name in ("inputs", "target")}
            add_to(totals, moments(self._rows(Batch(fields, batch.rows[start : start + size])), view))
        return totals

    def update(self, totals: Mapping[str, Tensor]) -> Swept:
        if not bool(totals["gram"].isfinite().all()):
            return Swept(float("nan"), True)
        view, size = self._view(), self.features
        count, total, gram = totals["count"], totals["total"], totals["gram"]
        centred = gram - torch.outer(total, total) / count if self.has_intercept else gram
        if not self.has_intercept:
            # Nothing is centred, so that N rows can have the rank N and their mean is not asked for.
            count, total = count + 1, torch.zeros_like(total)
        features = {"count": count, "total": total[:size], "gram": gram[:size, :size]}
        found = spectrum(features, view, left=True)
        assert found.left is not None
        centred, total, count = (part.to(found.left.device) for part in (centred, total, count))
        cross = found.left @ centred[:size, size:]
        rows = int(totals["count"])
        largest = found.singular_values[0]
        kept = found.singular_values > torch.finfo(torch.float64).eps * max(rows, size) * largest
        inverse = torch.where(kept, found.singular_values, torch.inf).reciprocal()
        self.coefficients = (found.axes.mT @ (inverse[:, None] * cross)).to(self.shift)
        self.rank.fill_(int(kept.sum()))
        if self.has_intercept:
            self.centre = found.mean.to(self.shift)
            self.level = self.shift[size:] + (total[size:] / count).to(self.shift)
        spread = centred.diagonal()[size:]
        residual = (spread - (kept[:, None] * cross).square().sum(0)).clamp_min(0)
        self._fit_head(spread / rows, residual / max(rows - int(self.rank) - self.has_intercept, 1))
        loss = float((residual.to(self.shift) / self.head.scale.square()).sum()) / (2 * rows * self.outputs)
        closer = sharper_view(features, view, found, size)
        if closer is not None:
            self._look(closer)
        return Swept(loss, closer is None)

    def _fit_head(self, variance: Tensor, noise: Tensor) -> None:
        """The head judges in units of the outputs' standard deviation."""
        scale = torch.where(variance > 0, variance, torch.ones_like(variance)).sqrt()
        self.head.scale.copy_(scale)
        self.head.shift.copy_(self.level)
        self.head.set_noise(noise / scale.square())

    def _look(self, view: View) -> None:
        assert view.basis is not None
        assert view.scale is not None
        self.basis, self.scale = view.basis.to(self.shift).contiguous(), view.scale.to(self.shift)
        if self.has_intercept:
            self.shift = torch.cat([view.shift.to(self.shift), self.level])

    def finish(self, data: Data, validation: Data | None) -> None:
        """Nothing that sweeps needed stays."""
        self.basis, self.scale = self.basis[:0].clone(), self.scale[:0].clone()

    @property
    def learned(self) -> int:
        return self.coefficients.numel() + self.level.numel()

    # -- Judging and predicting ----------------------------------------------------------------

    def output(self, inputs: Tensor) -> Tensor:
        """What the head reads: Wᵀ(x − μ) + ν in units of the outputs' standard deviation, (B, O)."""
        value = project(inputs.flatten(1), self.centre, self.coefficients.mT)
        return self.head.standardise(value + self.level.to(value)).to(value)

    def weigh(self, batch: Batch) -> dict[str, Weight]:
        return {"squared": self.head.weigh(batch.target)}

    def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
        return {"squared": self.head.loss_sum(self.output(batch.inputs), batch.target)}

    def loss_each(self, batch: Batch) -> dict[str, Tensor]:
        return {"squared": self.head.loss_each(self.output(batch.inputs), batch.target)}

    @torch.no_grad()
    def judge(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        raw = self.output(batch.inputs)
        return {"squared": self.head.loss_sum(raw, batch.target)}, self.head.tally(raw, batch.target)

    def tally(self, batch: Batch) -> dict[str, Tensor]:
        return self.judge(batch)[1]

    def measures(self, tallies: Mapping[str, Tensor]) -> dict[str, float]:
        return self.head.measures(tallies)

    @torch.no_grad()
    def predict(
        self,
        inputs: Tensor,
        mode: str = "mode",
        *,
        level: float = 0.9,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        """ "value", and "low" and "high" for the mode "interval"; (B,), or (B, O) for several outputs."""
        return self.head.predict(self.output(inputs), mode, level=level, generator=generator)

    # -- Saving --------------------------------------------------------------------------------

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        adopt_lengths(self, state, prefix)
        super()._load_from_state_dict(state, prefix, *rest)

    def spec(self) -> dict[str, Any]:
        return {
            "task": "least-squares",
            "features": self.features,
            "outputs": self.outputs,
            "intercept": self.has_intercept,
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        return cls(spec["features"], spec["outputs"], intercept=spec["intercept"])
