"""Text as a sequence of tokens: p(x) = Π p(x_n | x_{<n}).

B rows, T tokens of a row, V vocabulary. A batch holds "inputs" (B, T) and "target" (B, T), the tokens that
follow, `IGNORE` where nothing is to be predicted.

Where a recurrent model reads a text in streams, the state after a batch is where the next one goes on. It
travels as fields "state.N" (B, …) of the batch; the trainer takes it from `left` and hands it in again, and
"begin" (B,) says which rows start anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.data.batch import Batch
from quire.errors import InputError, unknown_name
from quire.functional.linear_loss import linear_cross_entropy
from quire.models.registry import build_model, model_spec
from quire.nn.head import full_precision
from quire.nn.heads import IGNORE
from quire.tasks.common import as_weight
from quire.train.task import TASKS, Task, Weight

CHUNK_NUMBERS = 2**24
"""Logits that are judged at once."""


@final
@TASKS.register("language")
class LanguageModel(Task):
    """−log p(next token), summed over the tokens that are not ignored."""

    higher_is_better: ClassVar[frozenset[str]] = frozenset({"accuracy"})
    evaluation_numbers: ClassVar[int] = 2**15

    def __init__(
        self,
        model: nn.Module,
        *,
        chunked: bool = False,
        step_factors: Mapping[str, float] | None = None,
        frozen: Mapping[str, float] | None = None,
    ) -> None:
        """`chunked` never holds the logits of all tokens, which a large vocabulary makes the largest array
        of a step; the model must have `features` and `head_weight`."""
        super().__init__()
        if chunked and not hasattr(model, "head_weight"):
            raise InputError(
                f"a chunked loss of {type(model).__name__}",
                expected="a model with `features` and `head_weight`, such as GPT",
                fix="leave chunked out",
            )
        self.model, self.chunked = model, chunked
        self.step_factors, self.frozen = dict(step_factors or {}), dict(frozen or {})
        self.left: list[dict[str, Tensor]] = []

    @property
    def carries_state(self) -> bool:
        return hasattr(self.model, "step")

    # -- Loss ----------------------------------------------------------------------------------

    def weigh(self, batch: Batch) -> dict[str, Weight]:
        if batch.complete:
            return {"target": float(batch.target.numel())}
        return {"target": as_weight((batch.target != IGNORE).sum())}

    def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
        if "begin" in batch.fields:
            return {"target": cross_entropy_sum(self._carry(batch), batch.target)}
        # On a GPU the loss and its gradient are made in one pass over the logits, also of all of them.
        if self.chunked or (batch.inputs.is_cuda and hasattr(self.model, "head_weight")):
            features = self.model.features(batch.inputs)  # type: ignore[operator]
            weight = self.model.head_weight
            assert isinstance(weight, Tensor)
            chunk = None if self.chunked else max(batch.target.numel(), 1)
            loss = linear_cross_entropy(features, weight, batch.target, reduction="sum", chunk=chunk)
            return {"target": loss}
        return {"target": cross_entropy_sum(self.model(batch.inputs), batch.target)}

    def _carry(self, batch: Batch) -> Tensor:
        """Logits of a batch that goes on from the state in it; the state after it is kept, detached, so
        that the gradient ends at the batch."""
        given = [batch.fields[name] for name in sorted(batch.fields) if name.startswith("state.")]
        begin = batch.fields["begin"]
        parts = tuple(
            state.masked_fill(begin.view(-1, *[1] * (state.dim() - 1)), 0.0).transpose(0, 1).contiguous()
            for state in given
        )
        before = None if not parts else parts[0] if len(parts) == 1 else parts
        logits, after = self.model.step(batch.inputs, before)  # type: ignore[operator]
        tensors = after if isinstance(after, tuple) else (after,)
        self.left.append({f"state.{i}": t.detach().transpose(0, 1) for i, t in enumerate(tensors)})
        return logits

    # -- Measures ------------------------------------------------------------------------------

    @torch.no_grad()
    def judge(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model: Any = self.model
        whole = not hasattr(model, "head_weight")
        found = model(batch.inputs) if whole else model.features(batch.inputs)
        rows, target = found.flatten(0, 1), batch.target.flatten()
        size = rows.shape[-1] if whole else len(model.head_weight)
        lost, right = rows.new_zeros((), dtype=torch.float64), target.new_zeros(())
        for part, wanted in zip(
            rows.split(max(1, CHUNK_NUMBERS // size)),
            target.split(max(1, CHUNK_NUMBERS // size)),
            strict=True,
        ):
            logits = full_precision(part if whole else F.linear(part, model.head_weight))
            lost += F.cross_entropy(logits, wanted, ignore_index=IGNORE, reduction="sum")
            right += ((logits.argmax(-1) == wanted) & (wanted != IGNORE)).sum()
        return {"target": lost}, {"lost": lost, "right": right, "tokens": (target != IGNORE).sum()}

    def tally(self, batch: Batch) -> dict[str, Tensor]:
        return self.judge(batch)[1]

    def measures(self, tallies: Mapping[str, Any]) -> dict[str, float]:
        """Perplexity exp(−mean log p), share of tokens that were the likeliest, bits a token."""
        count = max(float(tallies["tokens"]), 1.0)
        mean = float(tallies["lost"]) / count
        return {
            "perplexity": math.exp(min(mean, 700.0)),
            "accuracy": float(tallies["right"]) / count,
            "bits_per_token": mean / math.log(2),
        }

    @torch.no_grad()
    def loss_each(self, batch: Batch) -> dict[str, Tensor]:
        logits = full_precision(self.model(batch.inputs))
        each = F.cross_entropy(logits.transpose(1, 2), batch.target, ignore_index=IGNORE, reduction="none")
        return {"target": each.sum(1) / (batch.target != IGNORE).sum(1).clamp(min=1)}

    # -- Predictions ---------------------------------------------------------------------------

    @torch.no_grad()
    def predict(self, inputs: Tensor, mode: str = "mode") -> dict[str, Tensor]:
        """The token after each row's last one: the likeliest, and the probabilities (B, V) of all."""
        if mode != "mode":
            raise unknown_name("mode of a language model", mode, ("mode",))
        probabilities = full_precision(self.model(inputs)[:, -1]).softmax(-1)
        return {"token": probabilities.argmax(-1), "probabilities": probabilities}

    # -- Saving --------------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        return {
            "task": "language",
            "model": model_spec(self.model),
            "chunked": self.chunked,
            "step_factors": self.step_factors,
            "frozen": self.frozen,
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        return cls(
            build_model(spec["model"]), chunked=spec["chunked"], step_factors=spec["step_factors"],
            frozen=spec["frozen"],
        )  # fmt: skip


def cross_entropy_sum(logits: Tensor, target: Tensor) -> Tensor:
    """−log softmax(logits)_target over all tokens that are not ignored, in float32 at least."""
    rows = full_precision(logits.flatten(0, -2))
    return F.cross_entropy(rows, target.flatten(), ignore_index=IGNORE, reduction="sum")
