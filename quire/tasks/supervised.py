"""Learning y from x: a model that gives numbers and one or more heads that read them as
distributions p(y | x).

Classification, regression with and without input-dependent noise, multi-label and multi-task
learning are this one task with other heads. With one head its target is the batch's field
"target"; with several, the head NAME reads "target.NAME" and the model's outputs are shared out in
the order of the heads.

Pixels come as they are stored; the task's `inputs` layer scales them, and in training they are
augmented first. A model with auxiliary classifiers gives a tuple while training, the main output
first; the others add the term "auxiliary".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from quire.backprop.fast import DenseEngine, LossFunction
from quire.data.batch import Batch, Data, TensorData
from quire.errors import InputError
from quire.functional.feedforward import one_hot
from quire.models.registry import build_model, model_spec
from quire.nn.heads import Categorical, Gaussian, Head, build_head
from quire.nn.images import Augmentation, ImageInputs
from quire.tasks.common import as_weight, build_inputs, inputs_spec, rows_for_noise
from quire.train.sums import add_up
from quire.train.task import TASKS, Explicit, Task, Weight

ALONE = "target"
AUXILIARY = "auxiliary"
AUXILIARY_SCALE = 0.3

STAGED = "target.staged"
"""The target as the engine wants it; there only while training, and only if no row is ignored."""
MOST_STAGED = 2**24
"""Numbers in staged targets: 64 MiB, beyond which class numbers are used as they are."""


@final
@TASKS.register("supervised")
class Supervised(Task):
    """−log p(target | inputs) of each head, summed over samples."""

    def __init__(
        self,
        model: nn.Module,
        heads: Head | Mapping[str, Head],
        scales: Mapping[str, float] | None = None,
        step_factors: Mapping[str, float] | None = None,
        *,
        frozen: Mapping[str, float] | None = None,
        inputs: ImageInputs | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        """`scales` are factors of the heads' losses; `step_factors` are factors of the step size and
        `frozen` the epochs to wait, both by the beginning of a parameter's name, such as
        {"model.body.": 0.1} for a pretrained body. `inputs` is what scales pixels."""
        super().__init__()
        self.step_factors, self.frozen = dict(step_factors or {}), dict(frozen or {})
        self.inputs, self.augmentation = inputs, augmentation
        self.model = model
        self._has_auxiliaries = bool(getattr(model, "has_auxiliaries", False))
        self.heads = nn.ModuleDict({ALONE: heads} if isinstance(heads, Head) else dict(heads))
        self._fields = {name: ALONE if name == ALONE else f"target.{name}" for name in self.heads}
        self._counts_all = all(head.counts_all for _, head in self.named_heads())
        self.scales = {AUXILIARY: AUXILIARY_SCALE} if self._has_auxiliaries else {}
        self.scales |= scales or {}
        unknown = sorted(self.scales.keys() - self.heads.keys() - {AUXILIARY})
        if unknown:
            raise InputError(
                f"scales for {', '.join(unknown)}", expected=f"names among {', '.join(self.heads)}"
            )

    @property
    def head(self) -> Head:
        """The only head."""
        (head,) = self.heads.values()
        assert isinstance(head, Head)
        return head

    # -- Loss ----------------------------------------------------------------------------------

    def augment(self, batch: Batch) -> Batch:
        if self.augmentation is None:
            return batch
        inputs, target = self.augmentation.images(batch.inputs, batch.target)
        return (
            batch.replace(inputs=inputs)
            if target is batch.target
            else batch.replace(inputs=inputs, target=target)
        )

    def weigh(self, batch: Batch) -> dict[str, Weight]:
        weights: dict[str, Weight] = {}
        if batch.complete and self._counts_all:
            weights = {name: float(batch.fields[field].numel()) for name, field in self._fields.items()}
        else:
            for name, head in self.named_heads():
                weights[name] = as_weight(head.weigh(batch.fields[self._fields[name]]))
        if self._has_auxiliaries:
            weights[AUXILIARY] = weights[ALONE]
        return weights

    def output(self, inputs: Tensor) -> Any:
        """What the model makes of a batch's inputs."""
        return self.model(inputs if self.inputs is None else self.inputs(inputs))

    def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
        raw = self.output(batch.inputs)
        if not isinstance(raw, tuple):
            return self._terms(raw, batch)
        main, *others = raw
        auxiliary = torch.stack([self.head.loss_sum(other, batch.target) for other in others]).sum()
        return {**self._terms(main, batch), AUXILIARY: auxiliary}

    def _terms(self, raw: Tensor, batch: Batch) -> dict[str, Tensor]:
        outputs = self.share(raw)
        return {
            name: head.loss_sum(outputs[name], batch.fields[self._fields[name]])
            for name, head in self.named_heads()
        }

    def explicit(self) -> Explicit | None:
        if len(self.heads) > 1 or self.inputs is not None or self.frozen:
            return None
        # Losses that the engine does not know are differentiated by autograd, but at the output only.
        loss = engine_loss(self.head) or self.head.loss_sum
        parameter = next(self.model.parameters())
        if not DenseEngine.supports(self.model, loss, parameter.device, parameter.dtype):
            return None
        return DenseGradients(DenseEngine(self.model), self.head, loss)

    # -- Measures ------------------------------------------------------------------------------

    @torch.no_grad()
    def judge(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        raw = self.output(batch.inputs)
        outputs = self.share(raw)
        tallies = {
            f"{name}/{key}": value
            for name, head in self.named_heads()
            for key, value in head.tally(outputs[name], batch.fields[self._fields[name]]).items()
        }
        return self._terms(raw, batch), tallies

    def tally(self, batch: Batch) -> dict[str, Tensor]:
        return self.judge(batch)[1]

    def measures(self, tallies: Mapping[str, Tensor]) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, head in self.named_heads():
            own = {
                key.removeprefix(f"{name}/"): value
                for key, value in tallies.items()
                if key.startswith(f"{name}/")
            }
            found |= {self._prefix(name) + key: value for key, value in head.measures(own).items()}
        return found

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
        """Columns of the head's `predict`; with several heads each under its name and a dot."""
        outputs = self.share(self.output(inputs))
        return {
            self._prefix(name) + key: value
            for name, head in self.named_heads()
            for key, value in head.predict(outputs[name], mode, level=level, generator=generator).items()
        }

    @torch.no_grad()
    def loss_each(self, batch: Batch) -> dict[str, Tensor]:
        """The loss of each row under each head, by which the largest mistakes are found."""
        outputs = self.share(self.output(batch.inputs))
        return {
            name: head.loss_each(outputs[name], batch.fields[self._fields[name]])
            for name, head in self.named_heads()
        }

    @torch.no_grad()
    def finish(self, data: Data, validation: Data | None) -> None:
        """Estimate the noise of squared-error heads from residuals, on rows that were not trained on
        where there are enough of them."""
        estimated = {
            name: head
            for name, head in self.named_heads()
            if isinstance(head, Gaussian) and head.loss == "squared"
        }
        if not estimated:
            return
        source = rows_for_noise(data, validation)
        tallies = add_up(self.tally(batch) for batch in source.batches(torch.arange(len(source)), 1024))
        for name, head in estimated.items():
            head.set_noise(tallies[f"{name}/error_squared"] / tallies[f"{name}/count"])

    # -- Shape ---------------------------------------------------------------------------------

    def named_heads(self) -> Iterable[tuple[str, Head]]:
        return self.heads._modules.items()  # type: ignore[return-value]

    def share(self, raw: Tensor) -> dict[str, Tensor]:
        """The model's outputs, shared out among the heads."""
        if len(self.heads) == 1:
            return {name: raw for name in self.heads}
        widths = [head.outputs_needed for _, head in self.named_heads()]
        return dict(zip(self.heads, raw.split(widths, dim=-1), strict=True))

    def _prefix(self, name: str) -> str:
        return "" if name == ALONE else f"{name}."

    # -- Saving --------------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        heads = {name: head.spec() for name, head in self.named_heads()}
        return {
            "task": "supervised",
            "model": model_spec(self.model),
            "heads": heads,
            "order": list(heads),  # JSON objects have none, and the outputs of the model are shared out by it
            "scales": dict(self.scales),
            "step_factors": self.step_factors,
            "frozen": self.frozen,
            "inputs": inputs_spec(self.inputs),
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        found = spec["heads"]
        heads = {name: build_head(found[name]) for name in spec.get("order", found)}
        inputs = build_inputs(spec)
        return cls(
            build_model(spec["model"]), heads, spec["scales"], spec["step_factors"],
            frozen=spec.get("frozen"), inputs=inputs,
        )  # fmt: skip


@final
class DenseGradients(Explicit):
    """The four equations for a task of one head."""

    def __init__(self, engine: DenseEngine, head: Head, loss: str | LossFunction) -> None:
        self.head, self.loss = head, loss
        self.step = engine.bound(loss)

    def stage(self, data: Data) -> Data:
        """Class numbers as one-hot rows and values in units of the head, made once."""
        if not isinstance(data, TensorData) or not isinstance(self.loss, str):
            return data
        target, head = data.target, self.head
        if isinstance(head, Gaussian):
            staged = head.standardise(target.reshape(len(target), -1))
        elif len(target) * head.dim <= MOST_STAGED and target.dim() == 1 and data.complete:
            staged = one_hot(target, head.dim).to(data.inputs.dtype)
        else:
            return data
        return TensorData({**data.fields, STAGED: staged})

    def gradients(self, batch: Batch, factors: Mapping[str, Weight]) -> dict[str, Tensor]:
        fields = batch.fields
        target = fields.get(STAGED)
        if target is None:
            target = fields[ALONE]
            if self.loss == "squared":
                assert isinstance(self.head, Gaussian)
                target = self.head.standardise(target.reshape(len(target), -1))
        inputs = fields["inputs"]
        return {ALONE: self.step(inputs if inputs.dim() == 2 else inputs.flatten(1), target, factors[ALONE])}


def engine_loss(head: Head) -> str | None:
    """The engine's name of a head's loss, where it has one."""
    if isinstance(head, Categorical) and not head.label_smoothing and head.class_weights is None:
        return "cross_entropy"
    if isinstance(head, Gaussian) and head.loss == "squared":
        return "squared"
    return None
