"""Bagging: many nets at once, each on its own bootstrap of the rows, judged by their average.

B rows of a batch, N rows of a data set, M members, O outputs of a member.

A bootstrap draws N rows with replacement, so for member m row n counts c_nm times (c_·m is
multinomial). Instead of a data set for each member, the field "counts" (B, M) weighs the losses:

    loss = Σ_m (1/B) Σ_n c_nm · ℓ(y_n, f_m(x_n))

It is the sum, not the mean, over members, so that each of them takes the steps it would take alone.
Rows with c_nm = 0 are *out of bag* for member m: predictions of such members are as honest as those
on a test set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from quire.backprop.ensemble import EnsembleEngine
from quire.data.batch import Batch, Data
from quire.errors import InputError
from quire.models.ensemble import MLPEnsemble
from quire.models.registry import build_model, model_spec
from quire.nn.heads import Categorical, Gaussian, Head, Heteroscedastic, Regression, build_head
from quire.tasks.common import rows_for_noise
from quire.tasks.supervised import engine_loss
from quire.train.sums import add_to
from quire.train.task import TASKS, Explicit, Task, Weight

COUNTS = "counts"


def bootstrap_counts(rows: int, members: int, seed: int) -> Tensor:
    """How often each row is drawn for each member, (N, M): N draws with replacement a member."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(rows, (members, rows), generator=generator)
    cells = drawn + rows * torch.arange(members)[:, None]
    return (
        torch.bincount(cells.flatten(), minlength=members * rows).view(members, rows).T.float().contiguous()
    )


@final
@TASKS.register("bagging")
class Bagging(Task):
    """Members of one shape under one head. Fields: inputs, target and counts (B, M); without counts
    each row counts once for each member."""

    def __init__(self, model: MLPEnsemble, head: Head) -> None:
        super().__init__()
        if not isinstance(head, Categorical | Regression):
            raise InputError(
                f"a {head.name} head for bagging", expected="a categorical, gaussian or heteroscedastic head"
            )
        self.model = model
        self.head = head
        self.out_of_bag: dict[str, float] = {}
        """Measures of out-of-bag predictions on the training rows; filled by `finish`."""

    @property
    def members(self) -> int:
        return self.model.config.members

    def is_bias(self, name: str, parameter: nn.Parameter) -> bool:
        return name.startswith("model.biases.")

    # -- Loss ----------------------------------------------------------------------------------

    def weigh(self, batch: Batch) -> dict[str, Weight]:
        return {"members": float(len(batch))}

    def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
        return {"members": self._loss(self.model(batch.inputs), batch)}

    def _loss(self, raw: Tensor, batch: Batch) -> Tensor:
        target = batch.target
        repeated = target.expand(self.members, *target.shape).flatten(0, 1)
        losses = self.head.loss_each(raw.flatten(0, 1), repeated).view(self.members, len(batch))
        counts = batch.fields.get(COUNTS)
        return losses.sum() if counts is None else (losses * counts.T.to(losses.dtype)).sum()

    def explicit(self) -> Explicit | None:
        head, loss = self.head, engine_loss(self.head)
        first = self.model.weights[0]
        if loss is None or first.device.type != "cpu" or not EnsembleEngine.supports(self.model, first.dtype):
            return None
        return EnsembleGradients(EnsembleEngine(self.model), head, loss)

    # -- Measures ------------------------------------------------------------------------------

    @torch.no_grad()
    def judge(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        raw = self.model(batch.inputs)
        head, combined = self.mixture(raw)
        return {"members": self._loss(raw, batch)}, head.tally(combined, batch.target)

    def tally(self, batch: Batch) -> dict[str, Tensor]:
        return self.judge(batch)[1]

    def measures(self, tallies: Mapping[str, Tensor]) -> dict[str, float]:
        return self.head.measures(tallies)

    @torch.no_grad()
    def finish(self, data: Data, validation: Data | None) -> None:
        """Judge on out-of-bag rows, and take the noise of a squared-error head from them: the mean of
        (error² − spread²), so that noise and spread together explain the error. Without bootstrap the
        validation rows serve, or the training rows if those are too few."""
        estimates_noise = isinstance(self.head, Gaussian) and self.head.loss == "squared"
        if estimates_noise:
            excess, count = self._excess(data, out_of_bag=True)
            if count < 2:
                excess, count = self._excess(rows_for_noise(data, validation), out_of_bag=False)
            assert isinstance(self.head, Gaussian)
            self.head.set_noise((excess / max(count, 1)).clamp_min(0.0))
        tallies: dict[str, Tensor] = {}
        for batch, raw, outside in self._outputs(data):
            seen = outside.any(0)
            if seen.any():
                head, combined = self.mixture(raw[:, seen], outside[:, seen])
                add_to(tallies, head.tally(combined, batch.target[seen]))
        self.out_of_bag = self.measures(tallies) if tallies else {}

    def _outputs(self, data: Data) -> Any:
        """Batches with the outputs (M, B, O) and which of them are out of bag, (M, B)."""
        for batch in data.batches(torch.arange(len(data)), 1024):
            inputs = batch.inputs.to(self.model.weights[0].device)
            batch = Batch({name: value.to(inputs.device) for name, value in batch.fields.items()}, batch.rows)
            counts = batch.fields.get(COUNTS)
            shape = (self.members, len(batch))
            outside = inputs.new_zeros(shape, dtype=torch.bool) if counts is None else counts.T == 0
            yield batch, self.model(inputs), outside

    def _excess(self, data: Data, *, out_of_bag: bool) -> tuple[Tensor, int]:
        """Σ over rows of error² − spread² of the average, in the head's units, and how many rows."""
        assert isinstance(self.head, Regression)
        total, count = self.head.scale.new_zeros(self.head.dim), 0
        for batch, raw, outside in self._outputs(data):
            used = outside if out_of_bag else torch.ones_like(outside)
            rows = used.sum(0) >= (2 if out_of_bag else 1)
            mean, spread2 = moments(self.head.distribution(raw[:, rows])[0], used[:, rows])
            target = self.head.standardise(batch.target[rows].reshape(-1, self.head.dim)).to(mean.dtype)
            total = total + ((target - mean).square() - spread2).sum(0).to(total.dtype)
            count += int(rows.sum())
        return total, count

    # -- Predictions ---------------------------------------------------------------------------

    def mixture(self, raw: Tensor, chosen: Tensor | None = None) -> tuple[Head, Tensor]:
        """The average distribution of the (`chosen` (M, B)) members, as a head and what it reads.

        Classes: p = mean_m p_m. Numbers: the normal with the mixture's moments, mean_m μ_m and
        mean_m σ²_m + var_m μ_m.
        """
        if chosen is None:
            chosen = torch.ones(raw.shape[:2], dtype=torch.bool, device=raw.device)
        if isinstance(self.head, Categorical):
            return self.head, moments(raw.softmax(-1), chosen)[0].log()
        assert isinstance(self.head, Regression)
        means, variances = self.head.distribution(raw)
        mean, spread2 = moments(means, chosen)
        variance = moments(variances, chosen)[0] + spread2
        head = Heteroscedastic(self.head.dim).to(raw)
        head.shift, head.scale = self.head.shift, self.head.scale
        return head, torch.cat([mean, variance.log()], -1)

    @torch.no_grad()
    def predict(
        self,
        inputs: Tensor,
        mode: str = "mode",
        *,
        level: float = 0.9,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        """Columns of the averaged head, and "spread", the standard deviation over members of the
        predicted number (in its units) or of the class probabilities."""
        raw = self.model(inputs)
        head, combined = self.mixture(raw)
        answer = head.predict(combined, mode, level=level, generator=generator)
        if isinstance(self.head, Regression):
            spread = self.head.distribution(raw)[0].std(0, correction=0) * self.head.scale
            answer["spread"] = spread.squeeze(-1) if self.head.dim == 1 else spread
        else:
            answer["spread"] = raw.softmax(-1).std(0, correction=0)
        return answer

    @torch.no_grad()
    def loss_each(self, batch: Batch) -> dict[str, Tensor]:
        head, combined = self.mixture(self.model(batch.inputs))
        return {"members": head.loss_each(combined, batch.target)}

    # -- Saving --------------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        return {"task": "bagging", "model": model_spec(self.model), "head": self.head.spec()}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        model = build_model(spec["model"])
        if not isinstance(model, MLPEnsemble):
            raise InputError(f"a {type(model).__name__} for bagging", expected="an mlp-ensemble")
        return cls(model, build_head(spec["head"]))


@final
class EnsembleGradients(Explicit):
    """The four equations for all members at once."""

    def __init__(self, engine: EnsembleEngine, head: Head, loss: str) -> None:
        self.engine, self.head, self.loss = engine, head, loss

    def gradients(self, batch: Batch, factors: Mapping[str, Weight]) -> dict[str, Tensor] | None:
        target, counts = batch.target, batch.fields.get(COUNTS)
        if self.loss == "cross_entropy" and not batch.complete and target.min().item() < 0:
            return None  # rows without a class are autograd's
        if isinstance(self.head, Gaussian):
            target = self.head.standardise(target.reshape(len(batch), -1))
        factor = factors["members"]
        return {"members": self.engine.gradients(batch.inputs, target, counts, factor, loss=self.loss)}


def moments(values: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over the chosen members; (M, B, O), (M, B) → twice (B, O)."""
    mask = chosen.unsqueeze(-1).to(values.dtype)
    count = mask.sum(0)
    mean = (mask * values).sum(0) / count
    return mean, (mask * (values - mean).square()).sum(0) / count
