"""Classes from a few labelled rows and many without a label.

    loss = 1/B Σ_b −log p(y_b | x_b)        over labelled rows, B of them drawn for every step
         + w · what is asked of every row of the batch:

    autoencode    1/(B·D) Σ ‖x̂(z) − x‖²: the code z that classes are read from must also give back the row
    consistency   1/B Σ [max q ≥ t] −log p(argmax q | x″), q = p(· | x′): what is answered to a slightly
                  changed view of a row, where it is answered with trust, must be the answer to a strongly
                  changed one

The labelled rows travel beside the batch, in fields of their own, so that every step has as many of them as
of the others, however few there are. They come in slightly changed views too. Judging asks for the classes of
the rows themselves; a row without a class counts nothing there.

B rows of a batch, D values of a row, K numbers of a code, L labelled rows, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Self, final

import torch
from torch import Tensor, nn

from quire.data.batch import Batch
from quire.errors import InputError
from quire.functional import losses
from quire.functional.few_labels import pseudo_label
from quire.models.autoencoder import Autoencoder
from quire.models.embedding import Embedding
from quire.models.registry import build_model, model_spec
from quire.nn.heads import Categorical
from quire.nn.images import ImageInputs
from quire.nn.views import Views
from quire.options import check, check_range
from quire.tasks.common import as_weight, build_inputs, inputs_spec
from quire.train.task import TASKS, Task, Weight

LABELLED, LABELS, STRONG = "labelled", "labelled.target", "strong"
Method = Literal["autoencode", "consistency"]


@dataclass(frozen=True)
class SemiSupervisedRules:
    """What is asked of all rows."""

    method: Method = "consistency"
    weight: float = 1.0
    """Of what is asked of all rows, beside the cross-entropy of the labelled ones."""
    threshold: float = 0.95
    """Probability from which on an answer is trusted as a label."""

    def __post_init__(self) -> None:
        check(
            self.method in ("autoencode", "consistency"), "method", self.method, "autoencode or consistency"
        )
        check_range(self, "", weight=">= 0", threshold="(0, 1)")


class Teaching(NamedTuple):
    """What a task is trained with, and a trained one needs no more."""

    inputs: Tensor
    """The labelled rows, (L, *shape)"""
    target: Tensor
    """(L,)"""
    weak: Views
    """Slight changes."""
    strong: Views
    """Strong changes, for consistency."""


@final
@TASKS.register("semi-supervised")
class SemiSupervised(Task):
    """The term "target", and one named after the method while training."""

    taught_inputs: Tensor
    taught_target: Tensor

    def __init__(
        self,
        model: Autoencoder | Embedding,
        classes: int,
        rules: SemiSupervisedRules | None = None,
        *,
        teaching: Teaching | None = None,
        inputs: ImageInputs | None = None,
    ) -> None:
        """`inputs` is what scales pixels. Without `teaching` the task learns from the classes of its batches
        alone."""
        super().__init__()
        self.model, self.inputs = model, inputs
        self.rules = rules = rules or SemiSupervisedRules()
        self.head = Categorical(classes)
        self.classifier = nn.Linear(model.config.code, classes)
        self.scales = {rules.method: rules.weight}
        if rules.method == "autoencode" and not isinstance(model, Autoencoder):
            raise InputError(
                f"the method 'autoencode' with {type(model).__name__}",
                expected="an Autoencoder, which decodes",
            )
        self.views: tuple[Views, Views] | None = None
        if teaching is not None:
            self._teach(teaching)

    def _teach(self, teaching: Teaching) -> None:
        target, classes = teaching.target, self.head.dim
        if not len(target) or len(target) != len(teaching.inputs) or not (target >= 0).all():
            raise InputError(
                f"{len(teaching.inputs)} labelled rows with {len(target)} labels",
                expected="at least one row, each with its class",
            )
        missing = sorted(set(range(classes)) - set(target.tolist()))
        if missing:
            raise InputError(
                f"no labelled row of class number {missing[0]}",
                expected=f"one of each of the {classes} classes: what has no label cannot be learned",
            )
        self.views = teaching.weak, teaching.strong
        # A trained task answers without them: they are not saved with it.
        self.register_buffer("taught_inputs", teaching.inputs, persistent=False)
        self.register_buffer("taught_target", target, persistent=False)

    # -- Loss ----------------------------------------------------------------------------------

    @torch.no_grad()
    def augment(self, batch: Batch) -> Batch:
        """Labelled rows beside those of the batch, and changed views of both."""
        if self.views is None:
            return batch
        weak, strong = self.views
        drawn = torch.randint(len(self.taught_target), (len(batch),), device=self.taught_target.device)
        fields = {LABELLED: weak(self.taught_inputs[drawn]), LABELS: self.taught_target[drawn]}
        if self.rules.method == "consistency":
            fields |= {"inputs": weak(batch.inputs), STRONG: strong(batch.inputs)}
        return batch.replace(**fields)

    def weigh(self, batch: Batch) -> dict[str, Weight]:
        rows = float(len(batch))
        labels: Weight = rows
        if LABELLED not in batch.fields and not batch.complete:
            labels = as_weight((batch.target >= 0).sum())
        if self.rules.method == "autoencode":
            return {"target": labels, "autoencode": rows * math.prod(self.model.config.shape)}
        return {"target": labels, "consistency": rows}

    def scale(self, inputs: Tensor) -> Tensor:
        return inputs if self.inputs is None else self.inputs(inputs)

    def answer(self, inputs: Tensor) -> Tensor:
        """Logits of scaled inputs, (B, C)."""
        logits: Tensor = self.classifier(self.model.encode(inputs))
        return logits

    def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
        if LABELLED not in batch.fields:
            return self._judged(batch)[0]
        target = batch.fields[LABELS]
        labelled, rows = self.scale(batch.fields[LABELLED]), self.scale(batch.inputs)
        if self.rules.method == "consistency":
            views = torch.cat([labelled, rows, self.scale(batch.fields[STRONG])])
            known, weak, strong = self.answer(views).float().chunk(3)
            consistency = pseudo_label(strong, weak, threshold=self.rules.threshold, reduction="sum")
            return {"target": self.head.loss_sum(known, target), "consistency": consistency}
        codes, others = self.model.encode(torch.cat([labelled, rows])).chunk(2)
        return {
            "target": self.head.loss_sum(self.classifier(codes), target),
            "autoencode": self._reconstruction(others, rows),
        }

    def _reconstruction(self, codes: Tensor, rows: Tensor) -> Tensor:
        assert isinstance(self.model, Autoencoder)
        return losses.mse(self.model.decode(codes).to(rows.dtype), rows, reduction="sum")

    def _judged(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        rows = self.scale(batch.inputs)
        codes = self.model.encode(rows)
        logits = self.classifier(codes).float()
        sums = {"target": self.head.loss_sum(logits, batch.target)}
        if self.rules.method == "autoencode":
            sums["autoencode"] = self._reconstruction(codes, rows)
        return sums, logits

    # -- Measures ------------------------------------------------------------------------------

    @torch.no_grad()
    def judge(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        sums, logits = self._judged(batch)
        sure = logits.softmax(-1).amax(-1) >= self.rules.threshold
        tallies = {
            **self.head.tally(logits, batch.target),
            "sure": sure.sum(),
            "rows": torch.tensor(len(batch)),
        }
        return sums, tallies

    def tally(self, batch: Batch) -> dict[str, Tensor]:
        return self.judge(batch)[1]

    def measures(self, tallies: Mapping[str, Tensor]) -> dict[str, float]:
        """Accuracy and the like of the rows whose class is known, nothing where none is; `confident`, the
        share of all rows that are answered with the trust that makes a label."""
        found = self.head.measures(tallies) if int(tallies["confusion"].sum()) else {}
        return {**found, "confident": float(tallies["sure"]) / max(float(tallies["rows"]), 1.0)}

    # -- Predictions ---------------------------------------------------------------------------

    @torch.no_grad()
    def predict(
        self,
        inputs: Tensor,
        mode: str = "mode",
        *,
        level: float = 0.9,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        """`class` and `probabilities`, and `code` (B, K)."""
        codes = self.model.encode(self.scale(inputs))
        return {
            **self.head.predict(self.classifier(codes), mode, level=level, generator=generator),
            "code": codes,
        }

    @torch.no_grad()
    def loss_each(self, batch: Batch) -> dict[str, Tensor]:
        return {"target": self.head.loss_each(self.answer(self.scale(batch.inputs)), batch.target)}

    # -- Saving --------------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        return {
            "task": "semi-supervised",
            "model": model_spec(self.model),
            "classes": self.head.dim,
            "rules": asdict(self.rules),
            "inputs": inputs_spec(self.inputs),
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        model = build_model(spec["model"])
        if not isinstance(model, Autoencoder | Embedding):
            raise InputError(f"codes by {type(model).__name__}", expected="an Autoencoder or an Embedding")
        inputs = build_inputs(spec)
        return cls(model, spec["classes"], SemiSupervisedRules(**spec["rules"]), inputs=inputs)
