"""Learning to make samples: a generator and a discriminator as the two players of one task.

    discriminator   −Σ log D(x) − Σ log(1 − D(G(z)))          2 log 2 at the equilibrium
    generator       −Σ log D(G(z)), or Σ log(1 − D(G(z)))     log 2, or −log 2

The noise of a step is drawn once, as a field of the batch, from PyTorch's own generator: it is split into
micro-batches like the data, and a resumed run draws what it would have drawn. The noise that validation uses
is a function of the rows' places alone, so that records can be compared. With classes, samples of the classes
of the batch are made and judged.

Neither loss says how good the samples are, since each player's depends on the other. What does is the sliced
Wasserstein distance of samples to the rows judged, class by class, in units of the rows' own spread: 0 is
perfect, 1 what the mean alone would give.

B rows of a batch, Z noise, K directions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, final, get_args

import torch
from torch import Tensor, nn

from quire.data.batch import Batch
from quire.errors import InputError, unknown_name
from quire.functional.adversarial import (
    discriminator_loss,
    minimax_generator_loss,
    non_saturating_generator_loss,
    random_directions,
    sliced_wasserstein,
)
from quire.models.conditional import Labels, asked_classes
from quire.models.gan import Discriminator, Generator
from quire.models.registry import build_model, model_spec
from quire.nn.images import ImageInputs
from quire.tasks.common import build_inputs, inputs_spec
from quire.tasks.generating import check_asked, in_parts, label_of
from quire.train.task import TASKS, Task, Weight

GeneratorLoss = Literal["non-saturating", "min-max"]

NOISE = "noise"
DIRECTIONS = 64

WATCHED = 5
"""Validations in a row after which something that is wrong counts as a warning."""
SURE = 0.99
LOST = 5.0
"""−log D(G(z)) of a generator that has lost: D(G(z)) < 0.7 %."""
SATURATED = -0.01
"""log(1 − D(G(z))) of one that gets no gradient any more."""
COLLAPSED = 0.3
FAR = 0.5


def pixel_inputs(channels: int) -> ImageInputs:
    """Bytes to −1 … 1, which is what a generator with tanh gives."""
    return ImageInputs([127.5] * channels, [127.5] * channels)


@final
class Shadows:
    """Projections of rows and of samples, with their classes; adding two joins them."""

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        self.parts = tuple(parts)

    def __add__(self, other: Shadows) -> Shadows:
        return Shadows((*self.parts, *other.parts))

    def measures(self) -> dict[str, float]:
        """`sliced_wasserstein`: (Σ W₂² / Σ variance)^½, and `spread`, by how much samples vary for each unit
        that rows do; both within classes."""
        real, fake, label = (torch.cat(column).double() for column in zip(*self.parts, strict=True))
        apart = real_variance = fake_variance = real.new_zeros(())
        for one in label.unique():
            rows, samples = real[label == one], fake[label == one]
            apart = apart + sliced_wasserstein(rows, samples).square() * rows.numel()
            real_variance = real_variance + (rows - rows.mean(0)).square().sum()
            fake_variance = fake_variance + (samples - samples.mean(0)).square().sum()
        # A single row of each class has no spread: neither is then known.
        known = torch.where(real_variance > 0, real_variance, torch.nan)
        return {
            "sliced_wasserstein": (apart / known).sqrt().item(),
            "spread": (fake_variance / known).sqrt().item(),
        }


@final
@TASKS.register("adversarial")
class Adversarial(Task):
    """Two players over one batch of data; judge the weights to keep by ``monitor="sliced_wasserstein"``."""

    answers_target: ClassVar[bool] = False
    players = ("discriminator", "generator")

    directions: Tensor

    def __init__(
        self,
        generator: Generator,
        discriminator: Discriminator,
        *,
        loss: GeneratorLoss = "non-saturating",
        discriminator_steps: int = 1,
        step_factors: Mapping[str, float] | None = None,
        inputs: ImageInputs | None = None,
    ) -> None:
        """The generator moves in every step of `discriminator_steps`. `step_factors` are factors of the step
        size by the beginning of a parameter's name, such as {"discriminator.": 0.5}. `inputs` scales pixels,
        and back."""
        super().__init__()
        if loss not in get_args(GeneratorLoss):
            raise unknown_name("generator loss", loss, get_args(GeneratorLoss))
        for name in ("shape", "classes"):
            made, judged = getattr(generator.config, name), getattr(discriminator.config, name)
            if made != judged:
                raise InputError(
                    f"a generator with {name} {made} and a discriminator with {name} {judged}",
                    expected=f"the same {name}",
                    fix="build both from the data",
                )
        if discriminator_steps < 1:
            raise InputError(
                f"discriminator_steps is {discriminator_steps}", expected="at least 1", fix="leave it out"
            )
        self.generator, self.discriminator = generator, discriminator
        self.loss: GeneratorLoss = loss
        self.inputs = inputs
        self.step_factors = dict(step_factors or {})
        self.turns = {"generator": discriminator_steps}
        self.classes, self.latent = generator.config.classes, generator.config.latent
        size = torch.Size(generator.config.shape).numel()
        self.register_buffer("directions", random_directions(size, DIRECTIONS), persistent=False)

    def player_parameters(self, player: str) -> dict[str, nn.Parameter]:
        prefix = f"{player}."
        return {name: p for name, p in super().player_parameters(player).items() if name.startswith(prefix)}

    # -- Loss ----------------------------------------------------------------------------------

    @property
    def needs_target(self) -> bool:
        return self.classes > 0

    def augment(self, batch: Batch) -> Batch:
        like = batch.inputs
        return batch.replace(
            noise=torch.randn(len(batch), self.latent, device=like.device, dtype=self._dtype())
        )

    def weigh(self, batch: Batch) -> dict[str, Weight]:
        return {player: float(len(batch)) for player in self.players}

    def terms(self, batch: Batch, player: str = "generator") -> dict[str, Tensor]:
        label = label_of(batch, self.classes)
        if player == "generator":
            fake = self.discriminator(self._made(batch, label), label)
            return {player: self.generator_loss(fake)}
        with torch.no_grad():
            made = self._made(batch, label)
        real, fake = self._logits(self.scaled(batch.inputs), made, label)
        return {player: discriminator_loss(real, fake, reduction="sum")}

    def generator_loss(self, fake: Tensor) -> Tensor:
        """J_G of the logits of samples, summed."""
        function = minimax_generator_loss if self.loss == "min-max" else non_saturating_generator_loss
        return function(fake, reduction="sum")

    def scaled(self, inputs: Tensor) -> Tensor:
        """What the discriminator sees of the data."""
        return inputs if self.inputs is None else self.inputs(inputs)

    def _made(self, batch: Batch, label: Tensor | None) -> Tensor:
        noise = self._noise(batch)
        if not self.training or len(noise) > 1:
            return self.generator(noise, label)
        self.generator.eval()  # a batch of one, the rest of an epoch, has no statistics of its own
        made = self.generator(noise, label)
        self.train()
        return made

    def _logits(self, inputs: Tensor, made: Tensor, label: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the discriminator says of data and of samples, in one pass."""
        if self.discriminator.config.norm == "batch":  # which share no statistics
            return self.discriminator(inputs, label), self.discriminator(made, label)
        both = None if label is None else label.repeat(2)
        real, fake = self.discriminator(torch.cat([inputs, made]), both).chunk(2)
        return real, fake

    def _dtype(self) -> torch.dtype:
        return next(self.generator.parameters()).dtype

    def _noise(self, batch: Batch) -> Tensor:
        drawn = batch.fields.get(NOISE)
        if drawn is not None:
            return drawn
        place = int(batch.rows[0]) if len(batch) else 0
        return self._draw(len(batch), place).to(batch.inputs.device)

    def _draw(self, count: int, seed: int) -> Tensor:
        """Noise that is the same on every device."""
        source = torch.Generator().manual_seed(seed)
        return torch.randn(count, self.latent, generator=source).to(self._dtype())

    # -- Measures ------------------------------------------------------------------------------

    @torch.no_grad()
    def judge(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Any]]:
        label = label_of(batch, self.classes)
        inputs, made = self.scaled(batch.inputs), self._made(batch, label)
        real, fake = self._logits(inputs, made, label)
        sums = {
            "discriminator": discriminator_loss(real, fake, reduction="sum"),
            "generator": self.generator_loss(fake),
        }
        groups = label if label is not None else torch.zeros(len(batch), device=real.device)
        shadows = [(x.flatten(1).to(self.directions) @ self.directions.mT) for x in (inputs, made)]
        tallies = {
            "count": torch.tensor(len(batch)),
            "real": (real > 0).sum(),
            "fake": (fake < 0).sum(),
            "shadows": Shadows([(shadows[0], shadows[1], groups)]),
        }
        return sums, tallies

    def tally(self, batch: Batch) -> dict[str, Any]:
        return self.judge(batch)[1]

    def measures(self, tallies: Mapping[str, Any]) -> dict[str, float]:
        """`real_accuracy` and `fake_accuracy` of the discriminator, `sliced_wasserstein` and `spread`."""
        count = int(tallies["count"])
        return {
            "real_accuracy": int(tallies["real"]) / count,
            "fake_accuracy": int(tallies["fake"]) / count,
            **tallies["shadows"].measures(),
        }

    def warnings(self, history: Sequence[Mapping[str, Any]]) -> list[str]:
        """What has gone wrong in the last validations of a run's records: a player that has won, samples that
        are all alike."""
        values = [record["values"] for record in history if record["split"] == "validation"]
        last = values[-WATCHED:]

        def always(name: str, test: Callable[[float], bool]) -> bool:
            found = [value.get(name) for value in last]
            return len(found) == WATCHED and all(v is not None and test(v) for v in found)

        def now(name: str) -> str:
            return f"{last[-1][name]:.3g}"

        found = []
        when = f"in the last {WATCHED} validations"
        if always("real_accuracy", lambda a: a >= SURE) and always("fake_accuracy", lambda a: a >= SURE):
            found.append(
                f"the discriminator has won: it tells samples from data {when} "
                f"(accuracy {now('fake_accuracy')} on samples); "
                "give it smaller steps (step_factors), fewer units, or more data"
            )
        saturates = self.loss == "min-max"
        if always("generator", (lambda g: g > SATURATED) if saturates else (lambda g: g > LOST)):
            fix = 'use loss="non-saturating"' if saturates else "give the generator larger steps"
            found.append(f"the generator has lost: its loss is {now('generator')} {when}; {fix}")
        if always("spread", lambda s: s < COLLAPSED):
            found.append(
                f"the samples have collapsed: they vary {now('spread')} times as much as the data {when}; "
                "keep spectral=True, or lower the step size"
            )
        if always("fake_accuracy", lambda a: a <= 1 - SURE) and always(
            "sliced_wasserstein", lambda d: d > FAR
        ):
            found.append(
                f"the generator has won: the discriminator takes all samples for data {when}, though they "
                f"are {now('sliced_wasserstein')} standard deviations away; take more discriminator_steps"
            )
        return found

    @torch.no_grad()
    def loss_each(self, batch: Batch) -> dict[str, Tensor]:
        """−log D(x): the rows that look least like data come first."""
        logits = self.discriminator(self.scaled(batch.inputs), label_of(batch, self.classes))
        return {"discriminator": nn.functional.softplus(-logits)}

    # -- Predictions ---------------------------------------------------------------------------

    @torch.no_grad()
    def predict(
        self, inputs: Tensor, mode: str = "mode", *, label: Tensor | None = None
    ) -> dict[str, Tensor]:
        """`score`, the probability D(x) of being data; with classes that of the likeliest `class`, unless the
        option `label` (B,) says which."""
        if mode not in ("mode", "mean"):
            raise unknown_name("mode of two players", mode, ("mode", "mean"))
        scaled = self.scaled(inputs)
        if not self.classes or label is not None:
            return {"score": self.discriminator(scaled, label).sigmoid()}
        logits, best = self.discriminator.class_logits(scaled).max(1)
        return {"score": logits.sigmoid(), "class": best}

    def sample(self, count: int, label: Labels = None, temperature: float = 1.0, seed: int = 0) -> Tensor:
        """`count` new rows (B, D), or images (B, C, H, W) in bytes where pixels are scaled, from noise of
        deviation `temperature`; the same for the same seed. `label` is one class for all or one for each;
        without it the classes come in turn."""
        check_asked(count, temperature)
        asked = asked_classes(self.classes, count, label)
        made = in_parts(self, self.generator, temperature * self._draw(count, seed), asked)
        return made if self.inputs is None else self.inputs.pixels(made)

    # -- Saving --------------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        return {
            "task": "adversarial",
            "generator": model_spec(self.generator),
            "discriminator": model_spec(self.discriminator),
            "loss": self.loss,
            "discriminator_steps": self.turns["generator"],
            "step_factors": self.step_factors,
            "inputs": inputs_spec(self.inputs),
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        generator, discriminator = build_model(spec["generator"]), build_model(spec["discriminator"])
        if not isinstance(generator, Generator) or not isinstance(discriminator, Discriminator):
            raise InputError(
                f"the models {spec['generator'].get('model')} and {spec['discriminator'].get('model')}",
                expected="a generator and a discriminator",
            )
        return cls(
            generator, discriminator, loss=spec["loss"], discriminator_steps=spec["discriminator_steps"],
            step_factors=spec["step_factors"],
            inputs=build_inputs(spec),
        )  # fmt: skip
