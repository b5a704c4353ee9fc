"""Learning codes by comparison, and answering by the rows whose class is known.

    info_nce   two views of a row are each other's partners among all rows of the batch; no class is needed
    siamese    rows of one class within the batch are drawn together, rows of two classes apart
    cosine     likewise, by angle
    triplet    the farthest row of the same class must be nearer than the nearest row of another, by a margin

Every row is seen in two views, made when the batch is augmented. Losses compare the rows of a batch, so the
representations of its parts are put together before they are compared. Judging makes its views by the number
of the batch's first row, the same ones each time.

*References* are training rows with their classes, kept with the task. A class is predicted from their codes:
by the votes of the nearest, or by softmax regression on the codes, fitted whenever the weights have changed.
Retrieval is judged by the classes of the nearest references; a row is never its own neighbour there.

B rows of a batch, K numbers of a code, R references, C classes, k neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self, final, get_args

import torch
from torch import Tensor
from torch.nn import functional

from quire.data.batch import Batch
from quire.errors import InputError, unknown_name
from quire.functional import few_labels
from quire.functional.losses import info_nce
from quire.models.embedding import Embedding as EmbeddingNet
from quire.models.mlp import check_positive_integer
from quire.models.registry import build_model, model_spec
from quire.nn.heads import IGNORE, Categorical
from quire.nn.images import ImageInputs
from quire.nn.views import Views, build_views
from quire.options import check, check_range
from quire.tasks.common import as_weight, build_inputs, inputs_spec
from quire.train.task import TASKS, Task, Weight

OTHER = "other"
"""The field of second views."""
MARGINS = {"siamese": 1.0, "triplet": 0.5, "cosine": 0.5, "info_nce": 0.0}
EmbeddingLoss = Literal["info_nce", "siamese", "triplet", "cosine"]


@dataclass(frozen=True)
class EmbeddingRules:
    """What is compared, and how a class is read from codes."""

    loss: EmbeddingLoss = "info_nce"
    margin: float | None = None
    """Of siamese and triplet a distance, of cosine a likeness; without it 1, 0.5 and 0.5."""
    temperature: float = 0.2
    """τ of info_nce."""
    answer: Literal["neighbours", "linear"] = "neighbours"
    """neighbours: the votes of the nearest references. linear: softmax regression on their codes."""
    neighbours: int = 5
    """k of votes and of precision_at_k."""
    penalty: float = 0.01
    """λ of the regression's weights."""
    compared: int = 256
    """Rows that are compared with each other when the loss is judged, as many as in a training batch."""

    def __post_init__(self) -> None:
        if self.loss not in get_args(EmbeddingLoss):
            raise unknown_name("loss of embeddings", self.loss, get_args(EmbeddingLoss))
        good = self.answer in ("neighbours", "linear")
        check(good, "answer", self.answer, "neighbours or linear")
        check_range(self, "", margin=">= 0", temperature="> 0", penalty="> 0")
        check_positive_integer("neighbours", self.neighbours)
        check_positive_integer("compared", self.compared)


class References(NamedTuple):
    """Rows that a class is read from."""

    inputs: Tensor
    """(R, *shape), as the task is given them."""
    target: Tensor
    """Their classes, (R,)"""
    rows: Tensor
    """Their numbers in the training part, (R,)"""


class Known(NamedTuple):
    """What the weights make of the references."""

    codes: Tensor
    weight: Tensor
    bias: Tensor


@final
@TASKS.register("embedding")
class Embedding(Task):
    """The term is named after the loss."""

    couples_samples: ClassVar[bool] = True
    higher_is_better: ClassVar[frozenset[str]] = frozenset(
        {"accuracy", "precision", "recall", "f1", "precision_at_1", "precision_at_k"}
    )
    reference_inputs: Tensor
    reference_target: Tensor
    reference_rows: Tensor

    def __init__(
        self,
        model: EmbeddingNet,
        classes: int,
        references: References,
        views: Views,
        rules: EmbeddingRules | None = None,
        *,
        inputs: ImageInputs | None = None,
    ) -> None:
        """`inputs` is what scales pixels."""
        super().__init__()
        self.model, self.views, self.inputs = model, views, inputs
        self.rules = rules or EmbeddingRules()
        self.head = Categorical(classes)
        if len(references.inputs) < 2 or references.target.shape != references.rows.shape:
            raise InputError(
                f"{len(references.inputs)} references with {len(references.target)} classes",
                expected="at least 2 rows, each with its class and its number",
            )
        for name, value in references._asdict().items():
            self.register_buffer(f"reference_{name}", value)
        self._known: Known | None = None
        self.register_load_state_dict_post_hook(lambda task, _: task._forget())

    @property
    def neighbours(self) -> int:
        """k, which leaves one reference out: the row itself may be among them."""
        return min(self.rules.neighbours, len(self.reference_rows) - 1)

    # -- References ----------------------------------------------------------------------------

    def _forget(self) -> None:
        self._known = None

    def train(self, mode: bool = True) -> Self:
        if mode:  # weights are about to change
            self._forget()
        return super().train(mode)

    def known(self) -> Known:
        """Codes of the references under the weights of now, and the regression on them."""
        if self._known is not None and self._known.codes.device == self.device:
            return self._known
        with torch.no_grad():
            found = self._read_references()
        if not self.training:
            self._known = found
        return found

    def _read_references(self) -> Known:
        codes = torch.cat([self.embed(part) for part in self.reference_inputs.split(1024)])
        if self.rules.answer == "linear":
            line = few_labels.softmax_regression(
                codes, self.reference_target, self.head.dim, penalty=self.rules.penalty
            )
            return Known(codes, *line)
        return Known(codes, codes.new_zeros(self.head.dim, codes.shape[1]), codes.new_zeros(self.head.dim))

    def embed(self, inputs: Tensor) -> Tensor:
        """Unit codes of inputs as they come, (B, K)."""
        codes: Tensor = self.model(self.scale(inputs))
        return codes

    def scale(self, inputs: Tensor) -> Tensor:
        return inputs if self.inputs is None else self.inputs(inputs)

    # -- Loss ----------------------------------------------------------------------------------

    def augment(self, batch: Batch) -> Batch:
        """Two views of every row."""
        return batch.replace(**{"inputs": self.views(batch.inputs), OTHER: self.views(batch.inputs)})

    def _judged_views(self, batch: Batch) -> Batch:
        """The same two views in every evaluation, whatever was drawn before it."""
        device = batch.inputs.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int(batch.rows[0]))
            return self.augment(batch)

    def weigh(self, batch: Batch) -> dict[str, Weight]:
        """Rows, or those whose class is known where classes are compared."""
        if self.rules.loss == "info_nce" or batch.complete:
            return {self.rules.loss: float(len(batch))}
        return {self.rules.loss: as_weight((batch.target >= 0).sum())}

    def represent(self, batch: Batch) -> Tensor:
        """Both views of each row, (B, 2, P)."""
        views = torch.cat([batch.inputs, batch.fields[OTHER]])
        compared: Tensor = self.model.compare(self.scale(views))
        return compared.unflatten(0, (2, -1)).transpose(0, 1)

    def coupled_terms(self, representations: Tensor, batch: Batch) -> dict[str, Tensor]:
        rules = self.rules
        if rules.loss == "info_nce":
            one, other = representations.unbind(1)
            sums = [
                info_nce(a, b, temperature=rules.temperature, reduction="sum")
                for a, b in ((one, other), (other, one))
            ]
            return {rules.loss: (sums[0] + sums[1]) / 2}
        margin = MARGINS[rules.loss] if rules.margin is None else rules.margin
        target = batch.target.repeat_interleave(2)
        each = few_labels.pair_losses_each(representations.flatten(0, 1), target, rules.loss, margin)
        return {rules.loss: each.sum() / 2}

    def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
        if OTHER not in batch.fields:
            batch = self._judged_views(batch)
        return self.coupled_terms(self.represent(batch), batch)

    # -- Measures ------------------------------------------------------------------------------

    @torch.no_grad()
    def judge(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        parts = batch.split(-(-len(batch) // self.rules.compared))
        sums = torch.stack([self.terms(part)[self.rules.loss] for part in parts]).sum()
        return {self.rules.loss: sums}, self.tally(batch)

    @torch.no_grad()
    def tally(self, batch: Batch) -> dict[str, Tensor]:
        target, counted = batch.target, batch.target >= 0
        codes = self.embed(batch.inputs)
        likeness, places = self._others(batch.inputs, codes)
        right = (self.reference_target[places] == target[:, None]) & counted[:, None]
        wanted = torch.where(counted, target, IGNORE)
        return {
            **self.head.tally(self._log_probabilities(codes, likeness, places), wanted),
            "first_right": right[:, 0].sum(),
            "right": right.sum(),
            "asked": counted.sum(),
        }

    def _others(self, inputs: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """The k nearest references that are not the row itself: likeness and places, (B, k)."""
        likeness, places = few_labels.nearest_codes(codes, self.known().codes, self.neighbours + 1)
        itself = (inputs == self.reference_inputs[places[:, 0]]).flatten(1).all(1)
        first = torch.arange(self.neighbours, device=codes.device) + itself[:, None]
        return likeness.gather(1, first), places.gather(1, first)

    def _log_probabilities(self, codes: Tensor, likeness: Tensor, places: Tensor) -> Tensor:
        """log p of each class, (B, C)."""
        if self.rules.answer == "linear":
            known = self.known()
            return functional.linear(codes, known.weight, known.bias).log_softmax(1)
        classes = self.reference_target[places]
        return few_labels.neighbour_votes(likeness, classes, self.head.dim).log()

    def measures(self, tallies: Mapping[str, Tensor]) -> dict[str, float]:
        """Accuracy and the like of the predicted class; precision_at_1 and precision_at_k, the share of the
        nearest and of the k nearest references that are of a row's own class. Nothing where no class is
        known."""
        asked = float(tallies["asked"])
        if not asked:
            return {}
        return {
            **self.head.measures(tallies),
            "precision_at_1": float(tallies["first_right"]) / asked,
            "precision_at_k": float(tallies["right"]) / (asked * self.neighbours),
        }

    @torch.no_grad()
    def loss_each(self, batch: Batch) -> dict[str, Tensor]:
        """−log p of each row's class."""
        codes = self.embed(batch.inputs)
        raw = self._log_probabilities(codes, *self._others(batch.inputs, codes))
        return {"class": self.head.loss_each(raw, batch.target)}

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
        """`class` and `probabilities`; `code` (B, K); and of the nearest references, best first (B, k), their
        numbers in the training part, their classes and their likeness, from −1 to 1."""
        codes = self.embed(inputs)
        likeness, places = few_labels.nearest_codes(codes, self.known().codes, self.neighbours)
        return {
            **self.head.predict(
                self._log_probabilities(codes, likeness, places), mode, level=level, generator=generator
            ),
            "code": codes,
            "neighbour": self.reference_rows[places],
            "neighbour_class": self.reference_target[places],
            "likeness": likeness,
        }

    # -- Saving --------------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        return {
            "task": "embedding",
            "model": model_spec(self.model),
            "classes": self.head.dim,
            "references": len(self.reference_rows),
            "views": self.views.spec(),
            "rules": asdict(self.rules),
            "inputs": inputs_spec(self.inputs),
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        model = build_model(spec["model"])
        if not isinstance(model, EmbeddingNet):
            raise InputError(f"an embedding by {type(model).__name__}", expected="an embedding network")
        inputs = build_inputs(spec)
        count, kind = spec["references"], torch.float32 if inputs is None else torch.uint8
        references = References(
            torch.zeros(count, *model.config.shape, dtype=kind),
            torch.zeros(count, dtype=torch.int64),
            torch.zeros(count, dtype=torch.int64),
        )
        rules = EmbeddingRules(**spec["rules"])
        return cls(model, spec["classes"], references, build_views(spec["views"]), rules, inputs=inputs)
