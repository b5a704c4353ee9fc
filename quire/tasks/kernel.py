"""Learning the width of a kernel from rows that do not answer for themselves.

B rows of a batch, N training rows, C classes.

The training part carries a field "own" (B,): the number under which the model remembers each row. A row that
has one is answered by all others, in a step and when it is judged; other data is answered by all rows. So the
loss of the training part is an honest one, the leave-one-out loss.

Regression: the values are targets in the head's units, their average is its mean, the loss ½(y − ŷ)².
Classes: each row votes (1 − 1/N) for its own class and 1/N for the classes' shares in the training part; the
average vote is p(class | x), the loss −ln p. That 1/N stands for a row that has nothing to do with its
neighbours, and keeps the loss finite where all rows in reach are of other classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, final

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.data.batch import Batch, Data, TensorData
from quire.errors import InputError
from quire.models.nadaraya_watson import NadarayaWatson
from quire.models.registry import build_model, model_spec
from quire.nn.heads import Categorical, Gaussian, Head, build_head
from quire.tasks.common import as_weight, rows_for_noise
from quire.train.evaluate import evaluation_batch
from quire.train.sums import add_up
from quire.train.task import TASKS, Task, Weight

OWN = "own"
"""The field with the number of a remembered row."""
TERM = "target"


@final
@TASKS.register("leave-one-out")
class LeaveOneOut(Task):
    """−log p(target | the other rows) of each training row, summed; a Categorical or Gaussian head."""

    def __init__(self, model: NadarayaWatson, head: Head) -> None:
        super().__init__()
        if not isinstance(head, Categorical | Gaussian):
            raise InputError(f"a {head.name} head for a kernel", expected="a categorical or gaussian head")
        if model.config.out_features != head.outputs_needed:
            raise InputError(
                f"values of width {model.config.out_features} for a {head.name} head",
                expected=f"a width of {head.outputs_needed}",
            )
        self.model, self.head = model, head

    def remember(self, data: TensorData) -> TensorData:
        """Let the model remember the training rows; they come back with their numbers in the field "own"."""
        self.model.remember(data.inputs, self.votes(data.target))
        return TensorData({**data.fields, OWN: torch.arange(len(data), device=data.device)})

    def votes(self, target: Tensor) -> Tensor:
        """What training rows say (N, V): their numbers in the head's units, or shares of the classes."""
        if isinstance(self.head, Gaussian):
            return self.head.standardise(target.reshape(len(target), -1))
        chosen = F.one_hot(target, self.head.dim).double()
        return ((1 - 1 / len(target)) * chosen + chosen.mean(0) / len(target)).float()

    # -- Loss ----------------------------------------------------------------------------------

    def weigh(self, batch: Batch) -> dict[str, Weight]:
        return {TERM: float(len(batch)) if batch.complete else as_weight(self.head.weigh(batch.target))}

    def output(self, batch: Batch) -> Tensor:
        """What the head reads: of remembered rows from the others, of new ones from all."""
        own = batch.fields.get(OWN)
        pooled = self.model(batch.inputs) if own is None else self.model.leave_one_out(batch.inputs, own)
        return self.read(pooled)

    def read(self, pooled: Tensor) -> Tensor:
        """Averages as the head takes them: the logarithms of shares, or numbers as they are."""
        if isinstance(self.head, Gaussian):
            return pooled
        return pooled.clamp(min=torch.finfo(pooled.dtype).tiny).log()

    def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
        return {TERM: self.head.loss_sum(self.output(batch), batch.target)}

    @torch.no_grad()
    def loss_each(self, batch: Batch) -> dict[str, Tensor]:
        return {TERM: self.head.loss_each(self.output(batch), batch.target)}

    # -- Measures and predictions --------------------------------------------------------------

    @torch.no_grad()
    def judge(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        raw = self.output(batch)
        return {TERM: self.head.loss_sum(raw, batch.target)}, self.head.tally(raw, batch.target)

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
        """Columns of the head's `predict`, from all remembered rows."""
        return self.head.predict(self.read(self.model(inputs)), mode, level=level, generator=generator)

    @torch.no_grad()
    def finish(self, data: Data, validation: Data | None) -> None:
        """The noise of a squared-error head: the mean squared residual of the validation rows, or of the
        training rows, each left out, where there are too few."""
        if not isinstance(self.head, Gaussian) or self.head.loss != "squared":
            return
        source = rows_for_noise(data, validation)
        parts = source.batches(torch.arange(len(source)), evaluation_batch(self, source))
        tallies = add_up(self.tally(batch.to(self.device)) for batch in parts)
        self.head.set_noise(tallies["error_squared"] / tallies["count"])

    # -- Saving --------------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        return {"task": "leave-one-out", "model": model_spec(self.model), "head": self.head.spec()}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        model = build_model(spec["model"])
        if not isinstance(model, NadarayaWatson):
            raise InputError(f"a {type(model).__name__} that leaves one out", expected="a nadaraya-watson")
        return cls(model, build_head(spec["head"]))
