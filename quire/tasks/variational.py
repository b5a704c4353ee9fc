"""Learning the distribution of the inputs through codes: the variational autoencoder.

    loss of a row = −E_q[log p(x | z)] + β KL(q(z | x) ‖ N(0, I)),   which is −ELBO where β = 1

A Bernoulli decoder reads the model's numbers as logits of values in [0, 1], a Gaussian one as means with one
standard deviation for all, which is learned unless it is given.

Grey values are no outcomes of a coin. With `binarise` they are its probabilities: a training step sees fresh
zeros and ones, and a row that is judged sees always the same, drawn by its own number; so is the noise of its
codes. A judgement is therefore a pure function of weights and data. The noise of a step is a field of its
batch, which is split into micro-batches with it.

B rows, M samples of each row's code, d latent dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, final, get_args

import torch
from torch import Tensor, nn

from quire.data.batch import Batch, Data
from quire.errors import InputError, unknown_name
from quire.functional.variational import (
    bernoulli_log_likelihood,
    elbo,
    gaussian_log_likelihood,
    importance_weighted_bound,
    latent_kl,
    latent_kl_by_dimension,
    log_importance_weights,
    reparameterise,
    row_normal,
    row_uniform,
    traversal,
)
from quire.models.conditional import Labels, asked_classes
from quire.models.registry import build_model, model_spec
from quire.models.vae import VAE
from quire.nn.head import full_precision
from quire.nn.images import ImageInputs
from quire.options import check_range
from quire.tasks.common import build_inputs, inputs_spec
from quire.tasks.generating import check_asked, in_parts, label_of
from quire.train.evaluate import evaluation_batch
from quire.train.sums import add_up
from quire.train.task import TASKS, Task, Weight

DecoderName = Literal["bernoulli", "gaussian"]

OPTIONS = ("decoder", "binarise", "samples", "importance", "warmup", "beta", "noise")
NOISE = "noise"
VALUES, CODES = 0, 1
"""Seeds of the noise that belongs to a row: of its values, and of its codes, where draw m has CODES + m."""
DEAD = 0.01
"""Nats below which a latent dimension carries nothing; it is active if its mean varies by more than this."""
COLLAPSED = 0.5
"""Share of dead dimensions that is worth a warning."""


@final
@TASKS.register("variational")
class Variational(Task):
    """−log p(x | z) and KL(q ‖ p), summed over rows."""

    answers_target: ClassVar[bool] = False
    higher_is_better: ClassVar[frozenset[str]] = frozenset({"elbo", "importance_bound", "active_units"})

    steps: Tensor
    """Training steps so far."""
    threshold: Tensor
    code_noise: Tensor

    def __init__(
        self,
        model: VAE,
        *,
        decoder: DecoderName = "bernoulli",
        binarise: bool = True,
        samples: int = 1,
        importance: int = 10,
        warmup: int = 0,
        beta: float = 1.0,
        noise: float | None = None,
        inputs: ImageInputs | None = None,
    ) -> None:
        """`samples` is M of the ELBO, `importance` the draws of the importance-weighted bound by which rows
        are judged as well, 0 to leave it out. The divergence's factor grows from 0 to `beta` over the first
        `warmup` steps. `noise` is the standard deviation of a Gaussian decoder; `binarise` is for Bernoulli
        decoders alone. `inputs` scales pixels, and back."""
        super().__init__()
        if decoder not in get_args(DecoderName):
            raise unknown_name("decoder", decoder, get_args(DecoderName))
        if decoder == "bernoulli" and inputs is not None and (inputs.mean.any() or (inputs.std != 255).any()):
            raise InputError(
                f"a Bernoulli decoder of pixels scaled by {inputs.extra_repr()}",
                expected="mean 0 and std 255 in each channel, so that pixels are in [0, 1]",
                fix='use ImageInputs([0.0], [255.0]), or decoder="gaussian"',
            )
        self.model, self.decoder, self.inputs = model, decoder, inputs
        self.binarise = binarise and decoder == "bernoulli"
        self.samples, self.importance, self.warmup = samples, importance, warmup
        self.beta, self.noise = beta, noise
        check_range(self, "", samples=">= 1", importance=">= 0", warmup=">= 0", beta=">= 0", noise="> 0")
        self.classes, self.latent = model.config.classes, model.config.latent
        self.scales = {"kl": beta}
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        if decoder == "gaussian":
            start = torch.tensor(math.log(noise or 1.0))
            self.log_noise = nn.Parameter(start, requires_grad=noise is None)
        # Of an arbitrary row, for `predict`: what it finds of a row depends on that row alone.
        row, shape = torch.zeros(1, dtype=torch.int64), model.config.shape
        threshold = row_uniform(row, math.prod(shape), VALUES).view(1, *shape)
        codes = torch.stack([row_normal(row, self.latent, CODES + m) for m in range(samples)])
        self.register_buffer("threshold", threshold, persistent=False)
        self.register_buffer("code_noise", codes, persistent=False)

    # -- Loss ----------------------------------------------------------------------------------

    @property
    def needs_target(self) -> bool:
        return self.classes > 0

    def augment(self, batch: Batch) -> Batch:
        if self.training:
            self.steps += 1
        self._check(batch)
        values = self._scaled(batch.inputs)
        noise = torch.randn(len(batch), self.samples, self.latent, device=values.device, dtype=self._dtype())
        if not self.binarise:
            return batch.replace(noise=noise)
        return batch.replace(inputs=self._as_inputs(torch.rand_like(values) < values), noise=noise)

    def weigh(self, batch: Batch) -> dict[str, Weight]:
        rows = float(len(batch))
        return {"reconstruction": rows, "kl": rows}

    def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
        drawn = batch.fields.get(NOISE)
        noise = self._row_noise(batch) if drawn is None else drawn.transpose(0, 1)
        likelihood, kl = self._explain(self._values(batch), label_of(batch, self.classes), noise)
        divergence = kl.sum()
        if self.training and self.warmup:
            # The factor is a tensor, so that neither a GPU nor a compiled step has to stop for it.
            divergence = divergence * ((self.steps - 1) / self.warmup).clamp(0.0, 1.0)
        return {"reconstruction": -likelihood.mean(0).sum(), "kl": divergence}

    def _explain(self, values: Tensor, label: Tensor | None, noise: Tensor) -> tuple[Tensor, Tensor]:
        """log p(x | z) (M, B) of codes drawn with the noise (M, B, d), and KL (B,)."""
        mean, log_std = self._encode(values, label)
        codes = reparameterise(mean, log_std, noise.to(mean.dtype))
        return self._log_likelihood(values, codes, label), latent_kl(mean, log_std)

    def _encode(self, values: Tensor, label: Tensor | None) -> tuple[Tensor, Tensor]:
        mean, log_std = self.model.encode(values, label)
        return full_precision(mean), full_precision(log_std)

    def _log_likelihood(self, values: Tensor, codes: Tensor, label: Tensor | None) -> Tensor:
        """(M, B) for codes (M, B, d)."""
        draws = len(codes)
        raw = self.model.decode(codes.flatten(0, 1), None if label is None else label.repeat(draws))
        raw = full_precision(raw).view(draws, *values.shape)
        if self.decoder == "bernoulli":
            return bernoulli_log_likelihood(raw, values)
        return gaussian_log_likelihood(raw, values, self.log_noise)

    # -- What is seen of a batch ---------------------------------------------------------------

    def _values(self, batch: Batch) -> Tensor:
        """The values that are to be explained, binarised by row where a step has not done so already."""
        values = self._scaled(batch.inputs)
        if not self.binarise or NOISE in batch.fields:
            return values
        drawn = row_uniform(batch.rows.to(values.device), values[:1].numel(), VALUES, values.dtype)
        return (drawn.view_as(values) < values).to(values.dtype)

    def _row_noise(self, batch: Batch, first: int = 0, draws: int | None = None) -> Tensor:
        """The noise (M, B, d) that belongs to the rows."""
        rows = batch.rows.to(batch.inputs.device)
        which = range(first, first + (draws or self.samples))
        return torch.stack([row_normal(rows, self.latent, CODES + m, self._dtype()) for m in which])

    def _scaled(self, inputs: Tensor) -> Tensor:
        if self.inputs is not None:
            return self.inputs(inputs)
        if not inputs.is_floating_point():
            raise InputError(
                f"inputs of type {inputs.dtype}",
                expected="floating-point numbers, or pixels with the layer that scales them",
                fix="give the task inputs=ImageInputs([0.0], [255.0])",
            )
        return inputs

    def _unscaled(self, values: Tensor) -> Tensor:
        """Values in the units of the inputs."""
        return values.to(self._dtype()) if self.inputs is None else self.inputs.undo(values).clamp(0, 255)

    def _as_inputs(self, values: Tensor) -> Tensor:
        """In their form as well: bytes where pixels are scaled."""
        return self._unscaled(values) if self.inputs is None else self.inputs.pixels(values)

    def _check(self, batch: Batch) -> None:
        """Refuse values that no coin has; bytes that are scaled to [0, 1] need no look."""
        if self.decoder != "bernoulli" or batch.inputs.dtype == torch.uint8:
            return
        values = self._scaled(batch.inputs).flatten(1)
        wrong = ~((values >= 0) & (values <= 1))
        if wrong.any():
            row, place = wrong.nonzero()[0].tolist()
            raise InputError(
                f"the value {values[row, place].item():.6g} in row {int(batch.rows[row])}",
                expected="values in [0, 1] for a Bernoulli decoder",
                fix='scale the columns to [0, 1], or use decoder="gaussian"',
            )

    def _dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    # -- Measures ------------------------------------------------------------------------------

    @torch.no_grad()
    def judge(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        self._check(batch)
        values, label = self._values(batch), label_of(batch, self.classes)
        mean, log_std = self._encode(values, label)
        likelihoods, weights = [], []
        for m in range(max(self.samples, self.importance)):  # one by one: memory for a single draw
            codes = reparameterise(mean, log_std, self._row_noise(batch, m, 1).to(mean.dtype))
            found = self._log_likelihood(values, codes, label)
            likelihoods.append(found)
            weights.append(log_importance_weights(found, codes, mean, log_std))
        likelihood, kl = torch.cat(likelihoods[: self.samples]), latent_kl(mean, log_std)
        tallies = {"elbo": elbo(likelihood, kl).sum(), **_latent_tally(mean, log_std)}
        if self.importance:
            bound = importance_weighted_bound(torch.cat(weights[: self.importance]))
            tallies["importance_bound"] = bound.sum()
        return {"reconstruction": -likelihood.mean(0).sum(), "kl": kl.sum()}, tallies

    def tally(self, batch: Batch) -> dict[str, Tensor]:
        return self.judge(batch)[1]

    def measures(self, tallies: Mapping[str, Any]) -> dict[str, float]:
        """`elbo` and `importance_bound` in nats a row, `active_units` whose mean differs from row to row, and
        the share `collapsed` of dimensions whose posterior is the prior."""
        count = int(tallies["count"])
        found = {n: float(tallies[n]) / count for n in ("elbo", "importance_bound") if n in tallies}
        variance = tallies["square"] / count - (tallies["mean"] / count).square()
        dead = tallies["kl"] / count < DEAD
        return found | {
            "active_units": float((variance > DEAD).sum()),
            "collapsed": float(dead.double().mean()),
        }

    @torch.no_grad()
    def kl_by_dimension(self, data: Data) -> Tensor:
        """KL(q ‖ p) of each latent dimension (d,) in nats, a mean over rows."""
        tallies = []
        for batch in data.batches(torch.arange(len(data)), evaluation_batch(self, data)):
            batch = batch.to(self.device)
            tallies.append(_latent_tally(*self._encode(self._values(batch), label_of(batch, self.classes))))
        total = add_up(tallies)
        return (total["kl"] / int(total["count"])).cpu()

    def warnings(self, history: Sequence[Mapping[str, Any]]) -> list[str]:
        """What has gone wrong by the last validation of a run's records: codes that say nothing of a row."""
        values = [record["values"] for record in history if record["split"] == "validation"]
        share = values[-1].get("collapsed") if values else None
        if share is None or share < COLLAPSED:
            return []
        dead = round(share * self.latent)
        return [
            f"the posterior has collapsed: {dead} of {self.latent} latent dimensions have a divergence below "
            f"{DEAD} nats and carry nothing; let the divergence in slowly (warmup), or take fewer dimensions"
        ]

    @torch.no_grad()
    def loss_each(self, batch: Batch) -> dict[str, Tensor]:
        """−ELBO of each row: those that the model finds strangest come first."""
        label = label_of(batch, self.classes)
        return {"elbo": -elbo(*self._explain(self._values(batch), label, self._row_noise(batch)))}

    # -- Predictions ---------------------------------------------------------------------------

    @torch.no_grad()
    def predict(self, inputs: Tensor, mode: str = "mode", *, label: Labels = None) -> dict[str, Tensor]:
        """`code` μ (B, d), the `reconstruction` from it in the units of the inputs, and the `elbo` in nats,
        with the same noise for every row. A conditional model takes the option `label` (B,), or finds the
        `class` under which each row is likeliest."""
        if mode not in ("mode", "mean"):
            raise unknown_name("mode of a variational autoencoder", mode, ("mode", "mean"))
        if self.classes and label is None:
            return self._likeliest(inputs)
        rows = inputs.shape[0]  # len() would be a constant of an exported program
        label = asked_classes(self.classes, rows, label)
        return self._described(inputs, None if label is None else label.to(inputs.device))

    def _described(self, inputs: Tensor, label: Tensor | None) -> dict[str, Tensor]:
        values = self._scaled(inputs)
        # A code is that of the values as they came: which coins fell how is noise to whoever uses it.
        mean, _ = self._encode(values, label)
        seen = (self.threshold < values).to(values.dtype) if self.binarise else values
        noise = self.code_noise.expand(-1, inputs.shape[0], -1)
        return {
            "code": mean,
            "reconstruction": self._unscaled(self._decoded(mean, label)),
            "elbo": elbo(*self._explain(seen, label, noise)),
        }

    def _likeliest(self, inputs: Tensor) -> dict[str, Tensor]:
        """By Bayes' rule with classes that are equally frequent, and the bound in place of log p(x | y)."""
        rows = inputs.shape[0]
        best: dict[str, Tensor] = {}
        for number in range(self.classes):  # one by one: memory for a single class
            label = torch.full((rows,), number, dtype=torch.int64, device=inputs.device)
            found = self._described(inputs, label) | {"class": label}
            better = found["elbo"] > best["elbo"] if best else label >= 0
            for name, value in found.items():
                kept = best.get(name, value)
                best[name] = torch.where(better.view(-1, *[1] * (value.dim() - 1)), value, kept)
        return best

    def _decoded(self, codes: Tensor, label: Tensor | None) -> Tensor:
        """The mean of p(x | z)."""
        raw = full_precision(self.model.decode(codes, label))
        return raw.sigmoid() if self.decoder == "bernoulli" else raw

    @torch.no_grad()
    def sample(
        self, count: int, label: Labels = None, temperature: float = 1.0, seed: int = 0,
        noisy: bool | None = None,
    ) -> Tensor:  # fmt: skip
        """`count` new rows (B, D), or images (B, C, H, W) in bytes where pixels are scaled, from codes
        z ~ N(0, temperature²); the same for the same seed. `label` is one class for all or one for each;
        without it the classes come in turn. `noisy` draws from p(x | z), whose mean is given otherwise;
        without it rows are drawn, with `temperature` times the decoder's deviation, and images are means."""
        check_asked(count, temperature)
        source = torch.Generator().manual_seed(seed)
        made = self._from_codes(temperature * torch.randn(count, self.latent, generator=source), label)
        noisy = self.inputs is None if noisy is None else noisy
        if noisy and self.decoder == "bernoulli":
            made = (torch.rand(made.shape, generator=source).to(made) < made).to(made.dtype)
        elif noisy:
            noise = torch.randn(made.shape, generator=source).to(made)
            made = made + temperature * self.log_noise.exp() * noise
        return self._as_inputs(made)

    @torch.no_grad()
    def traverse(
        self, dimensions: Sequence[int] | None = None, *, steps: int = 9, span: float = 2.5,
        around: Tensor | None = None, label: int | None = None,
    ) -> Tensor:  # fmt: skip
        """(dimensions, steps, …): what is decoded while one latent dimension goes from −span to span and the
        others stay as they are in the code `around` (d,), zeros without it; of class 0 without `label`."""
        start = torch.zeros(self.latent) if around is None else around.detach().cpu().float()
        if start.shape != (self.latent,):
            raise InputError(f"a code of shape {tuple(start.shape)}", expected=f"({self.latent},)")
        codes = traversal(start, dimensions, steps, span)
        asked = 0 if label is None and self.classes else label
        made = self._as_inputs(self._from_codes(codes.flatten(0, 1), asked))
        return made.unflatten(0, codes.shape[:2])

    def _from_codes(self, codes: Tensor, label: Labels) -> Tensor:
        asked = asked_classes(self.classes, len(codes), label)
        return in_parts(self, self._decoded, codes.to(self._dtype()), asked)

    # -- Saving --------------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        return {
            "task": "variational",
            "model": model_spec(self.model),
            **{name: getattr(self, name) for name in OPTIONS},
            "inputs": inputs_spec(self.inputs),
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        model = build_model(spec["model"])
        if not isinstance(model, VAE):
            raise InputError(f"the model {spec['model'].get('model')}", expected="the model vae")
        inputs = build_inputs(spec)
        return cls(model, **{name: spec[name] for name in OPTIONS}, inputs=inputs)


def _latent_tally(mean: Tensor, log_std: Tensor) -> dict[str, Tensor]:
    wide = mean.double()
    return {
        "count": torch.tensor(len(mean)),
        "kl": latent_kl_by_dimension(wide, log_std.double()).sum(0),
        "mean": wide.sum(0),
        "square": wide.square().sum(0),
    }
