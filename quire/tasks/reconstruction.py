"""Learning a code by giving back the input: plain, sparse, contractive, denoising and masked autoencoders.

    loss = 1/(N·D) Σ_n [ Σ_d ℓ(x̂_d, x_d) + λ_s Σ_i |h_i| + λ_c Σ_i ‖∇_x h_i‖² ]

with ℓ = (x̂ − x)², or −x log σ(x̂) − (1−x) log σ(−x̂) for values in [0, 1]. All terms are divided by the same
number of values, so that the λ are those of the formula. Where places are hidden, only they are summed and
counted.

While training, noise damages what the network reads, and the batch's field "clean" is what it must give back;
it is judged on clean inputs. Hidden places, the field "hidden", are drawn anew for every step. Judging needs
them too: there a row's number decides, so that every evaluation hides the same places.

Values are those of the prepared rows, or pixels scaled by the task's `inputs` layer. What is hidden or masked
is 0 in these units.

N, B rows of a batch, D values of a row (C, H, W of an image), K numbers of a code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self, final

import torch
from torch import Tensor

from quire.data.batch import Batch
from quire.errors import InputError, unknown_name
from quire.functional import losses
from quire.functional.autoencode import CORRUPTIONS, code_sparsity, corrupt, hide_places
from quire.models.autoencoder import Autoencoder
from quire.models.mlp import check_positive_integer
from quire.models.registry import build_model, model_spec
from quire.nn.images import ImageInputs
from quire.options import check, check_range
from quire.tasks.common import as_weight, build_inputs, inputs_spec
from quire.train.task import TASKS, Task, Weight

CLEAN, HIDDEN = "clean", "hidden"
PATTERNS = 64
"""Sets of hidden places that rows are judged with, in turn."""
ACTIVE = 0.01
"""Size from which on a number of a code counts as active."""


@dataclass(frozen=True)
class ReconstructionRules:
    """What is to be given back, and what makes that harder than copying."""

    loss: Literal["squared", "bernoulli"] = "squared"
    """bernoulli: for values in [0, 1], of which the network gives the logits."""
    sparsity: float = 0.0
    """λ of Σ|h|."""
    contraction: float = 0.0
    """λ of Σ‖∇_x h‖²."""
    noise: Literal["none", "gaussian", "masking", "salt_and_pepper"] = "none"
    """What damages the inputs while training."""
    amount: float = 0.3
    """Deviation of Gaussian noise, or the share of values that the other kinds replace."""
    masked: float = 0.0
    """Share of the features or patches that are hidden, and alone reconstructed."""
    patch: int = 4
    """Side of a hidden patch of an image, in pixels."""

    def __post_init__(self) -> None:
        check_range(self, "", sparsity=">= 0", contraction=">= 0", amount=">= 0", masked="[0, 1)")
        check_positive_integer("patch", self.patch)
        if self.loss not in ("squared", "bernoulli"):
            raise unknown_name("reconstruction loss", self.loss, ("squared", "bernoulli"))
        if self.noise not in ("none", *CORRUPTIONS):
            raise unknown_name("kind of noise", self.noise, ("none", *CORRUPTIONS))
        share = self.noise in ("none", "gaussian") or self.amount <= 1
        check(share, "amount", self.amount, f"a share in [0, 1] for {self.noise} noise")


@final
@TASKS.register("reconstruction")
class Reconstruction(Task):
    """The terms "reconstruction" and, where the rules ask for them, "sparsity" and "contraction"."""

    answers_target: ClassVar[bool] = False
    patterns: Tensor

    def __init__(
        self,
        model: Autoencoder,
        rules: ReconstructionRules | None = None,
        *,
        inputs: ImageInputs | None = None,
    ) -> None:
        """`inputs` is what scales pixels; with the loss "bernoulli" it must scale them to [0, 1]."""
        super().__init__()
        self.model, self.inputs = model, inputs
        self.rules = rules = rules or ReconstructionRules()
        self.shape = model.config.shape
        self.scales = {
            name: getattr(rules, name) for name in ("sparsity", "contraction") if getattr(rules, name)
        }
        if rules.contraction and model.config.norm == "batch":
            raise InputError(
                "a contraction penalty on an encoder with batch norm",
                expected="an encoder in which a row's code does not depend on the other rows",
                fix='build the model with norm="none"',
            )
        if rules.masked:
            chosen = hide_places(
                PATTERNS, self.shape, rules.masked, rules.patch, torch.Generator().manual_seed(0)
            )
            if not chosen.any() or chosen.all():
                raise InputError(
                    f"masked={rules.masked} of rows of shape {self.shape} in patches of {rules.patch}",
                    expected="at least one place that is hidden and one that is seen",
                    fix="choose a share nearer to a half, or smaller patches",
                )
            self.register_buffer("patterns", chosen, persistent=False)

    # -- Damage --------------------------------------------------------------------------------

    def scale(self, inputs: Tensor) -> Tensor:
        """Inputs as the network reads them."""
        return inputs if self.inputs is None else self.inputs(inputs)

    def unscale(self, values: Tensor) -> Tensor:
        """The network's values in the units of the inputs: pixels from 0 to 255 where it sees images."""
        return values if self.inputs is None else self.inputs.undo(values)

    def _corrupt(self, values: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Scaled values with noise. Pepper and salt are black and white pixels, 0 and 1, or the least and
        greatest value of a feature in the batch."""
        assert self.rules.noise != "none"
        if self.inputs is not None:
            low, high = (self.inputs(torch.full_like(values[:1], end)) for end in (0.0, 255.0))
        elif self.rules.loss == "bernoulli":
            low, high = torch.zeros_like(values[:1]), torch.ones_like(values[:1])
        else:
            low, high = values.aminmax(dim=0, keepdim=True)
        return corrupt(values, self.rules.noise, self.rules.amount, low, high, generator)

    @torch.no_grad()
    def damage(self, inputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Inputs in their own units with noise, and with the places hidden that `predict` would hide: what
        the network is given to work from."""
        values = self.scale(inputs)
        if self.rules.noise != "none":
            values = self._corrupt(values, generator)
        if self.rules.masked:
            values = values.masked_fill(self._pattern(torch.arange(inputs.shape[0])), 0.0)
        return self.unscale(values)

    @torch.no_grad()
    def augment(self, batch: Batch) -> Batch:
        """Noise on the inputs, whose clean values stay beside them, and places to hide."""
        changed = {CLEAN: batch.inputs}
        if self.rules.noise != "none":
            changed["inputs"] = self.unscale(self._corrupt(self.scale(batch.inputs)))
        if self.rules.masked:
            changed[HIDDEN] = hide_places(
                len(batch), self.shape, self.rules.masked, self.rules.patch, device=batch.inputs.device
            )
        return batch.replace(**changed)

    def _pattern(self, rows: Tensor) -> Tensor:
        return self.patterns[(rows % PATTERNS).to(self.patterns.device)]

    def _hidden(self, batch: Batch) -> Tensor | None:
        """(B, D) or (B, 1, H, W), None where all is seen."""
        if not self.rules.masked:
            return None
        return batch.fields[HIDDEN] if HIDDEN in batch.fields else self._pattern(batch.rows)

    # -- Loss ----------------------------------------------------------------------------------

    def weigh(self, batch: Batch) -> dict[str, Weight]:
        """How many values are given back, for all terms."""
        hidden = self._hidden(batch)
        weight: Weight = float(len(batch) * math.prod(self.shape))
        if hidden is not None:
            channels = self.shape[0] if len(self.shape) == 3 else 1
            weight = as_weight(hidden.sum(dtype=torch.float64) * channels)
        return {name: weight for name in ("reconstruction", *self.scales)}

    def _run(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What is to be given back, what the network reads, its code and its output."""
        read = self.scale(batch.inputs)
        truth = batch.fields.get(CLEAN, batch.inputs)
        clean = read if truth is batch.inputs else self.scale(truth)
        hidden = self._hidden(batch)
        read = read if hidden is None else read.masked_fill(hidden, 0.0)
        codes = self.model.encode(read)
        return clean, read, codes, self.model.decode(codes).to(clean.dtype)

    def _losses(self, output: Tensor, clean: Tensor, hidden: Tensor | None) -> Tensor:
        """ℓ of every value, 0 where it does not count."""
        if self.rules.loss == "squared":
            values = losses.mse(output, clean, reduction="none")
        else:
            self._check_shares(clean)
            values = losses.binary_cross_entropy_with_logits(output, clean, reduction="none")
        return values if hidden is None else values.masked_fill(~hidden, 0.0)

    def _check_shares(self, clean: Tensor) -> None:
        # On a GPU this would wait for the device, in every step; there it is left to the evaluation.
        if (clean.is_cuda and self.training) or not clean.numel():
            return
        low, high = (float(end) for end in clean.aminmax())
        if not (low >= 0 and high <= 1):
            raise InputError(
                f"the loss 'bernoulli' of values from {low:g} to {high:g}",
                expected="values in [0, 1]",
                fix="scale them to [0, 1], or use the loss 'squared'",
            )

    def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
        clean, read, codes, output = self._run(batch)
        return self._terms(clean, read, codes, output, self._hidden(batch))

    def _terms(
        self, clean: Tensor, read: Tensor, codes: Tensor, output: Tensor, hidden: Tensor | None
    ) -> dict[str, Tensor]:
        sums = {"reconstruction": self._losses(output, clean, hidden).sum()}
        if self.rules.sparsity:
            sums["sparsity"] = code_sparsity(codes.to(clean.dtype)).sum()
        if self.rules.contraction:
            sums["contraction"] = self.model.contraction(read).to(clean.dtype).sum()
        return sums

    # -- Measures ------------------------------------------------------------------------------

    @torch.no_grad()
    def judge(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        clean, read, codes, output = self._run(batch)
        hidden = self._hidden(batch)
        sums = self._terms(clean, read, codes, output, hidden)
        counted = torch.ones_like(clean[:1]).expand_as(clean) if hidden is None else hidden.expand_as(clean)
        values, counted = clean.double(), counted.double()
        tallies = {
            "squared": (counted * (self._mean(output) - clean).square()).sum(),
            "count": counted.sum(0),
            "sum": (counted * values).sum(0),
            "sum_squared": (counted * values.square()).sum(0),
        }
        if self.rules.sparsity:
            tallies |= {"active": (codes.abs() > ACTIVE).sum(), "codes": torch.tensor(codes.numel())}
        if self.rules.noise != "none":
            # The same noise in every evaluation, whatever was drawn before it.
            generator = torch.Generator(clean.device).manual_seed(int(batch.rows[0]))
            restored = self._mean(self.model(self._corrupt(clean, generator)))
            tallies["restored"] = (restored - clean).square().sum()
        return sums, tallies

    def tally(self, batch: Batch) -> dict[str, Tensor]:
        return self.judge(batch)[1]

    def measures(self, tallies: Mapping[str, Tensor]) -> dict[str, float]:
        """`mse` of a value; `r2`, the share of the variance about each feature's mean that is given back;
        `active`, the share of a code's numbers that are not near 0; `restored_mse` from noisy inputs."""
        count = tallies["count"]
        spread = (tallies["sum_squared"] - tallies["sum"].square() / count.clamp(min=1)).clamp(min=0).sum()
        squared, number = float(tallies["squared"]), float(count.sum())
        found = {"mse": squared / number, "r2": 1 - squared / float(spread) if spread > 0 else math.nan}
        if "active" in tallies:
            found["active"] = float(tallies["active"]) / float(tallies["codes"])
        if "restored" in tallies:
            found["restored_mse"] = float(tallies["restored"]) / number
        return found

    @torch.no_grad()
    def loss_each(self, batch: Batch) -> dict[str, Tensor]:
        """The mean reconstruction loss of each row."""
        clean, _, _, output = self._run(batch)
        hidden = self._hidden(batch)
        return {"reconstruction": _mean_of_rows(self._losses(output, clean, hidden), hidden)}

    # -- Predictions ---------------------------------------------------------------------------

    def _mean(self, output: Tensor) -> Tensor:
        return output if self.rules.loss == "squared" else output.sigmoid()

    @torch.no_grad()
    def predict(self, inputs: Tensor, mode: str = "mode") -> dict[str, Tensor]:
        """`code` (B, K), `reconstruction` (B, *shape) in the units of the inputs, and `error` (B,), the mean
        squared error of a row in the network's units.

        The code is that of all of the row. Where the task hides places, the reconstruction fills them in
        and leaves the others, and the error is theirs.
        """
        if mode not in ("mode", "mean"):
            raise unknown_name("mode of reconstruction", mode, ("mode", "mean"))
        clean = self.scale(inputs)
        codes = self.model.encode(clean)
        hidden = None
        if self.rules.masked:
            hidden = self._pattern(torch.arange(inputs.shape[0]))
            output = self._mean(self.model(clean.masked_fill(hidden, 0.0)))
            output = torch.where(hidden, output, clean)
        else:
            output = self._mean(self.model.decode(codes))
        error = _mean_of_rows((output - clean).square(), hidden)
        pixels = self.unscale(output)
        return {
            "code": codes,
            "reconstruction": pixels if self.inputs is None else pixels.clamp(0, 255),
            "error": error,
        }

    # -- Saving --------------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        return {
            "task": "reconstruction",
            "model": model_spec(self.model),
            "rules": asdict(self.rules),
            "inputs": inputs_spec(self.inputs),
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        model = build_model(spec["model"])
        if not isinstance(model, Autoencoder):
            raise InputError(f"a reconstruction by {type(model).__name__}", expected="an autoencoder")
        inputs = build_inputs(spec)
        return cls(model, ReconstructionRules(**spec["rules"]), inputs=inputs)


def _mean_of_rows(values: Tensor, hidden: Tensor | None) -> Tensor:
    """The mean over the values of each row that count; the others are 0."""
    if hidden is None:
        return values.flatten(1).mean(1)
    return values.flatten(1).sum(1) / hidden.expand_as(values).flatten(1).sum(1)
