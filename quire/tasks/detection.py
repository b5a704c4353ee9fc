"""Finding objects: where they are, and of which class.

N images, A default boxes, G true boxes and D detections of an image, C classes of objects. A batch holds
"inputs" (N, channels, H, W) and

    "target.boxes"   (N, G, 4)   corners in shares of the image, 0 where there is no box
    "target.labels"  (N, G)      class 0 … C − 1, −1 where there is no box
    "target.crowd"   (N, G)      neither learned nor counted as missed
    "target.extent"  (N, 2)      width and height of the original image in pixels, in which it is judged

Which default box learns which true box depends on the batch alone. It is decided once for a training step, in
`augment`, and kept in the batch as "target.matched" (N, A); elsewhere it is found when it is needed.

The loss is a sum over matched default boxes, of which there are as many as the weight says, so that parts of
a batch add up. Negatives are mined image by image. An image without objects has no matched box and so no
weight, but still `least_negatives` negatives: it teaches what nothing looks like.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple, Self, final

import numpy as np
import torch
from torch import Tensor, nn

from quire.data.batch import Batch
from quire.errors import InputError, unknown_name
from quire.functional.coco import RECALLS, THRESHOLDS, CocoCurves, Detections, Truth, coco_curves
from quire.functional.detect import leave_out_crowds, match_boxes, multibox_parts, multibox_targets
from quire.functional.suppression import read_detections
from quire.models.registry import build_model, model_spec
from quire.nn.images import Augmentation, ImageInputs
from quire.tasks.common import as_weight, build_inputs, inputs_spec
from quire.train.task import TASKS, Task, Weight

MATCHED = "target.matched"
FOUND = "found"
EVERY_AREA = {"all": (0.0, math.inf)}
MOST_COUNTED = 100
"""Detections of an image and class that are judged, as COCO does."""


@dataclass(frozen=True)
class DetectionRules:
    """What default boxes learn, and which detections are kept."""

    match: float = 0.5
    """IoU from which on a default box learns an object."""
    negatives: float = 3.0
    """Background boxes that are learned for each matched one, the hardest of an image."""
    least_negatives: int = 8
    """Background boxes that are learned in an image with few objects or none."""
    overlap: float = 0.45
    """IoU above which the lesser of two detections of a class is dropped."""
    score: float = 0.01
    """Least probability of a detection."""
    candidates: int = 200
    """Detections of an image before any is dropped for its overlap."""
    most: int = 100
    """Detections of an image."""

    def __post_init__(self) -> None:
        for name in ("match", "overlap", "score"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name)!r}", expected="a number in (0, 1]")
        for name, least in (("negatives", 0), ("least_negatives", 0), ("candidates", 1), ("most", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)!r}", expected=f"a number >= {least}")


class Judged(NamedTuple):
    """Detections and true boxes of some images; boxes in pixels of the original image."""

    images: Tensor
    boxes: Tensor
    scores: Tensor
    labels: Tensor
    true_boxes: Tensor
    true_labels: Tensor
    crowd: Tensor


@final
class Collected:
    """What was found and what was there, batch by batch; adding joins the lists and computes nothing."""

    def __init__(self, parts: tuple[Judged, ...]) -> None:
        self.parts = parts

    def __add__(self, other: Collected) -> Collected:
        return Collected(self.parts + other.parts)

    def flat(self) -> tuple[Detections, Truth]:
        """All images together, without the places that hold nothing."""
        found, there = [], []
        for part in self.parts:
            row, place = (part.labels >= 0).nonzero(as_tuple=True)
            found.append([part.images[row], *(t[row, place] for t in (part.boxes, part.scores, part.labels))])
            row, place = (part.true_labels >= 0).nonzero(as_tuple=True)
            true = (part.true_boxes, part.true_labels, part.crowd)
            there.append([part.images[row], *(t[row, place] for t in true)])
        images, boxes, scores, labels = (torch.cat(columns) for columns in zip(*found, strict=True))
        detections = Detections(boxes, scores, labels, images)
        images, boxes, labels, crowd = (torch.cat(columns) for columns in zip(*there, strict=True))
        return detections, Truth(boxes, labels, images, crowd)


@final
@TASKS.register("detection")
class Detection(Task):
    """Multibox loss: L_cls + α L_loc over matched default boxes, as the terms "classes" and "boxes".

    The model gives logits (N, A, C + 1), background first, and coded offsets (N, A, 4), and holds the
    `defaults` (A, 4) that they are relative to.
    """

    higher_is_better: ClassVar[frozenset[str]] = frozenset({"map50", "map75", "map", "recall100"})

    def __init__(
        self,
        model: nn.Module,
        rules: DetectionRules | None = None,
        scales: Mapping[str, float] | None = None,
        step_factors: Mapping[str, float] | None = None,
        *,
        frozen: Mapping[str, float] | None = None,
        inputs: ImageInputs | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        """`scales` are factors of the terms, α = scales["boxes"]; the others are those of `Supervised`."""
        super().__init__()
        self.model, self.inputs, self.augmentation = model, inputs, augmentation
        self.rules = rules or DetectionRules()
        self.step_factors, self.frozen = dict(step_factors or {}), dict(frozen or {})
        self.scales = dict(scales or {})
        for name in self.scales:
            if name not in ("classes", "boxes"):
                raise unknown_name("term of detection", name, ("classes", "boxes"))

    @property
    def defaults(self) -> Tensor:
        defaults = self.model.defaults
        assert isinstance(defaults, Tensor)
        return defaults

    @property
    def num_classes(self) -> int:
        return int(self.model.config.num_classes)  # type: ignore[union-attr, arg-type]

    # -- Loss ----------------------------------------------------------------------------------

    @torch.no_grad()
    def augment(self, batch: Batch) -> Batch:
        """Images and boxes changed at random, and the default boxes matched for the whole step."""
        if self.augmentation is not None:
            fields = batch.fields
            inputs, boxes, labels = self.augmentation.scenes(
                batch.inputs, fields["target.boxes"], fields["target.labels"]
            )
            changed = {"inputs": inputs, "target.boxes": boxes, "target.labels": labels}
            batch = batch.replace(**changed)
        return batch.replace(**{MATCHED: self.match(batch)})

    @torch.no_grad()
    def match(self, batch: Batch) -> Tensor:
        """(N, A): the true box that a default box learns, −1 for background, −2 for what is left out."""
        fields = batch.fields
        if MATCHED in fields:
            return fields[MATCHED]
        boxes, there, crowd = fields["target.boxes"], fields["target.labels"] >= 0, fields["target.crowd"]
        index = match_boxes(
            self.defaults.float(),
            boxes,
            threshold=self.rules.match,
            present=there & ~crowd,
            degenerate="zero",
        )
        return leave_out_crowds(index, self.defaults, boxes, there & crowd)

    def weigh(self, batch: Batch) -> dict[str, Weight]:
        """How many default boxes are matched, for both terms."""
        weight = as_weight((self.match(batch) >= 0).sum(dtype=torch.float64))
        return {"classes": weight, "boxes": weight}

    def output(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and offsets in float32, whatever the model computes in."""
        logits, offsets = self.model(inputs if self.inputs is None else self.inputs(inputs))
        return logits.float(), offsets.float()

    def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
        return self._terms(*self.output(batch.inputs), batch)

    def _terms(self, logits: Tensor, offsets: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {name: each.sum() for name, each in self._terms_each(logits, offsets, batch).items()}

    def _terms_each(self, logits: Tensor, offsets: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Both terms of each image (N,)."""
        boxes, labels = batch.fields["target.boxes"], batch.fields["target.labels"]
        # Objects are 1 … C where 0 is the background.
        classes, targets = multibox_targets(
            self.match(batch), self.defaults, boxes, labels + 1, degenerate="zero"
        )
        rules = self.rules
        both = multibox_parts(
            logits, offsets, classes, targets,
            negatives=rules.negatives, least_negatives=rules.least_negatives,
        )  # fmt: skip
        return dict(zip(("classes", "boxes"), both, strict=True))

    @torch.no_grad()
    def loss_each(self, batch: Batch) -> dict[str, Tensor]:
        """The loss of each image over its own number of matched boxes."""
        each = self._terms_each(*self.output(batch.inputs), batch)
        count = (self.match(batch) >= 0).sum(1).clamp(min=1)
        return {"loss": sum(self.scales.get(name, 1.0) * value for name, value in each.items()) / count}

    # -- Measures ------------------------------------------------------------------------------

    @torch.no_grad()
    def judge(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Any]]:
        logits, offsets = self.output(batch.inputs)
        boxes, scores, labels = self._read(logits, offsets)
        fields = batch.fields
        pixels = fields["target.extent"].repeat(1, 2)[:, None]  # N, 1, 4: width, height, width, height
        judged = Judged(
            batch.rows.to(boxes.device, non_blocking=True),
            boxes * pixels,
            scores,
            labels,
            fields["target.boxes"] * pixels,
            fields["target.labels"],
            fields["target.crowd"],
        )
        return self._terms(logits, offsets, batch), {FOUND: Collected((judged,))}

    def tally(self, batch: Batch) -> dict[str, Any]:
        return self.judge(batch)[1]

    def measures(self, tallies: Mapping[str, Any]) -> dict[str, float]:
        """Mean average precision by COCO's rules at IoU 0.5, at 0.75 and over 0.5 … 0.95, and the mean
        recall of 100 detections over these; NaN where there is nothing to find."""
        curves = self._curves(tallies)
        values = {
            "map50": curves.average_precision(0.5),
            "map75": curves.average_precision(0.75),
            "map": curves.average_precision(),
            "recall100": curves.average_recall(),
        }
        return {name: value if value >= 0 else math.nan for name, value in values.items()}

    def curves(self, tallies: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """At IoU 0.5: precision (C, R) at each `recall` (R,), and the average precision (C,); NaN for a
        class with nothing to find."""
        curves = self._curves(tallies, (0.5,))
        precision = curves.precision[0, :, :, 0, -1].T.cpu().numpy()
        precision = np.where(precision < 0, np.nan, precision)
        return {
            "recall": np.asarray(RECALLS),
            "precision": precision,
            "average_precision": precision.mean(1),
        }

    def _curves(self, tallies: Mapping[str, Any], thresholds: tuple[float, ...] = THRESHOLDS) -> CocoCurves:
        detections, truth = tallies[FOUND].flat()
        return coco_curves(
            detections, truth, classes=self.num_classes,
            thresholds=thresholds, areas=EVERY_AREA, limits=(MOST_COUNTED,),
        )  # fmt: skip

    # -- Predictions ---------------------------------------------------------------------------

    @torch.no_grad()
    def predict(
        self, inputs: Tensor, mode: str = "mode", score_threshold: float | None = None
    ) -> dict[str, Tensor]:
        """By falling score: `boxes` (N, D, 4) in shares of the image, `scores` (N, D) and `labels` (N, D).

        Where an image has fewer than D detections the rest are 0, with label −1. D is the rules' `most`.
        """
        if mode != "mode":
            raise unknown_name("mode of detection", mode, ("mode",))
        boxes, scores, labels = self._read(*self.output(inputs), score_threshold)
        return {"boxes": boxes, "scores": scores, "labels": labels}

    def _read(
        self, logits: Tensor, offsets: Tensor, least_score: float | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        rules = self.rules
        return read_detections(
            logits, offsets, self.defaults.float(), threshold=rules.overlap,
            least_score=rules.score if least_score is None else least_score,
            candidates=rules.candidates, most=rules.most,
        )  # fmt: skip

    # -- Saving --------------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        return {
            "task": "detection",
            "model": model_spec(self.model),
            "rules": asdict(self.rules),
            "scales": dict(self.scales),
            "step_factors": self.step_factors,
            "frozen": self.frozen,
            "inputs": inputs_spec(self.inputs),
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        inputs = build_inputs(spec)
        return cls(
            build_model(spec["model"]), DetectionRules(**spec["rules"]), spec["scales"], spec["step_factors"],
            frozen=spec.get("frozen"), inputs=inputs,
        )  # fmt: skip
