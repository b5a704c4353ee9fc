"""Learning y from x: a model that gives numbers and one or more heads that read them as
distributions p(y | x).

Classification, regression with and without input-dependent noise, multi-label and multi-task
learning are this one task with other heads. With one head its target is the batch's field
"target"; with several, the head NAME reads "target.NAME" and the model's outputs are shared out in
the order of the heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from quire.backprop.fast import DenseEngine
from quire.data.batch import Batch, Data
from quire.errors import InputError
from quire.models.registry import build_model, model_spec
from quire.nn.heads import Categorical, Gaussian, Head, build_head
from quire.train.task import TASKS, Task, Weight

ALONE = "target"


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
    ) -> None:
        """`scales` are factors of the heads' losses; `step_factors` are factors of the step size by
        the beginning of a parameter's name, such as {"model.body.": 0.1} for a pretrained body."""
        super().__init__()
        self.step_factors = dict(step_factors or {})
        self.model = model
        self.heads = nn.ModuleDict({ALONE: heads} if isinstance(heads, Head) else dict(heads))
        self.scales = dict(scales or {})
        unknown = sorted(self.scales.keys() - self.heads.keys())
        if unknown:
            raise InputError(
                f"scales for {', '.join(unknown)}", expected=f"names among {', '.join(self.heads)}"
            )
        self._engine: DenseEngine | None = None

    @property
    def head(self) -> Head:
        """The only head."""
        (head,) = self.heads.values()
        assert isinstance(head, Head)
        return head

    def step_factor(self, name: str) -> float:
        return next((f for prefix, f in self.step_factors.items() if name.startswith(prefix)), 1.0)

    # -- Loss ----------------------------------------------------------------------------------

    def weigh(self, batch: Batch) -> dict[str, Weight]:
        weights: dict[str, Weight] = {}
        for name, head in self.named_heads():
            weight = head.weigh(batch.fields[self._field(name)])
            # On the CPU a number costs less than the tensor arithmetic that would follow.
            on_host = isinstance(weight, Tensor) and weight.device.type == "cpu"
            weights[name] = float(weight) if on_host else weight
        return weights

    def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
        return self._terms(self.model(batch.inputs), batch)

    def _terms(self, raw: Tensor, batch: Batch) -> dict[str, Tensor]:
        outputs = self.share(raw)
        return {
            name: head.loss_sum(outputs[name], batch.fields[self._field(name)])
            for name, head in self.named_heads()
        }

    def explicit_gradients(self, batch: Batch, factors: Mapping[str, Weight]) -> dict[str, Tensor] | None:
        if len(self.heads) > 1 or batch.inputs.device.type != "cpu":
            return None
        head = self.head
        loss = _explicit_loss(head)
        if self._engine is None:
            dtype = batch.inputs.dtype
            if loss is None or not DenseEngine.supports(self.model, loss, "cpu", dtype):
                return None
            self._engine = DenseEngine(self.model)
        target = batch.target
        if isinstance(head, Gaussian):
            target = head.standardise(target.unsqueeze(-1) if target.dim() == 1 else target)
        assert loss is not None
        factor = factors[ALONE]
        return {ALONE: self._engine.gradients(batch.inputs, target, factor, loss=loss)}

    # -- Measures ------------------------------------------------------------------------------

    @torch.no_grad()
    def judge(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        raw = self.model(batch.inputs)
        outputs = self.share(raw)
        tallies = {
            f"{name}/{key}": value
            for name, head in self.named_heads()
            for key, value in head.tally(outputs[name], batch.fields[self._field(name)]).items()
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
    def predict(self, inputs: Tensor, mode: str = "mode", **options: Any) -> dict[str, Tensor]:
        """Columns of the head's `predict`; with several heads each under its name and a dot."""
        outputs = self.share(self.model(inputs))
        return {
            self._prefix(name) + key: value
            for name, head in self.named_heads()
            for key, value in head.predict(outputs[name], mode, **options).items()
        }

    @torch.no_grad()
    def loss_each(self, batch: Batch) -> dict[str, Tensor]:
        """The loss of each row under each head, by which the largest mistakes are found."""
        outputs = self.share(self.model(batch.inputs))
        return {
            name: head.loss_each(outputs[name], batch.fields[self._field(name)])
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
        source = validation if validation is not None and len(validation) >= 30 else data
        tallies: dict[str, Tensor] = {}
        for batch in source.batches(torch.arange(len(source)), 1024):
            for key, value in self.tally(batch).items():
                tallies[key] = tallies[key] + value if key in tallies else value
        for name, head in estimated.items():
            head.set_noise(tallies[f"{name}/error_squared"] / tallies[f"{name}/count"])

    # -- Shape ---------------------------------------------------------------------------------

    def named_heads(self) -> list[tuple[str, Head]]:
        return list(self.heads.items())  # type: ignore[arg-type]

    def share(self, raw: Tensor) -> dict[str, Tensor]:
        """The model's outputs, shared out among the heads."""
        if len(self.heads) == 1:
            return {name: raw for name in self.heads}
        widths = [head.outputs_needed for _, head in self.named_heads()]
        return dict(zip(self.heads, raw.split(widths, dim=-1), strict=True))

    def _field(self, name: str) -> str:
        return ALONE if name == ALONE else f"target.{name}"

    def _prefix(self, name: str) -> str:
        return "" if name == ALONE else f"{name}."

    # -- Saving --------------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        heads = {name: head.spec() for name, head in self.named_heads()}
        return {
            "task": "supervised",
            "model": model_spec(self.model),
            "heads": heads,
            "scales": dict(self.scales),
            "step_factors": self.step_factors,
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        heads = {name: build_head(head) for name, head in spec["heads"].items()}
        return cls(build_model(spec["model"]), heads, spec["scales"], spec["step_factors"])


def _explicit_loss(head: Head) -> str | None:
    """The engine's name of a head's loss, where it has one."""
    if isinstance(head, Categorical) and not head.label_smoothing and head.class_weights is None:
        return "cross_entropy"
    if isinstance(head, Gaussian) and head.loss == "squared":
        return "squared"
    return None
