"""Recipes that learn to make more of what they are shown: vae, cvae, gan, cgan. Images, or rows of any table.

The conditional ones are told a class beside the noise, and make what is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from quire.errors import InputError
from quire.options import Optim, Train, Tune, check_range
from quire.recipes.autoencoders import Activation, check_coder, descent_plan, refuse_for
from quire.recipes.base import Expectation, recipe
from quire.recipes.unlabelled import UnlabelledDescent

if TYPE_CHECKING:
    from quire.recipes.plan import Plan
    from quire.recipes.unlabelled import Unlabelled
    from quire.tasks.adversarial import Adversarial
    from quire.tasks.variational import Variational

SMALL = 256
"""Numbers of a row up to which networks are small."""
VAE_EPOCHS, VAE_STEPS = 20, 2000
GAN_EPOCHS, GAN_STEPS = 4, 2500
"""Few rows are learned for more epochs, so that there are so many steps, unless --epochs or --steps says
otherwise."""


@dataclass(frozen=True, kw_only=True)
class VariationalCoder:
    """Encoder and decoder."""

    kind: Literal["dense", "convolutional"] = "dense"
    hidden: tuple[int, ...] | None = None
    """Widths of the dense hidden layers, from the data inwards; the decoder has them in reverse. Without it
    500 500, or 128 128 where a row has at most 256 numbers."""
    channels: int | None = None
    """Maps after the first convolution, 32 without it; each further one has twice as many."""
    activation: Activation = "relu"
    latent: int | None = None
    """Dimensions of a code; without it as many as an eighth of an image's pixels or half of a row's features,
    from 2 to 20."""

    def __post_init__(self) -> None:
        check_range(self, "--model.", latent=">= 1")
        check_coder(self)


@dataclass(frozen=True, kw_only=True)
class Players:
    """Generator and discriminator, which are built alike."""

    kind: Literal["auto", "dense", "convolutional"] = "auto"
    """auto: convolutional for images, dense for rows."""
    hidden: tuple[int, ...] | None = None
    """Widths of the dense hidden layers, from the data inwards; the generator has them in reverse. Without it
    256 256, or 128 where an image has at most 256 pixels."""
    channels: int | None = None
    """Maps after the first convolution, 32 without it, or 16 where an image has at most 256 pixels."""
    latent: int = 64
    """Numbers of noise that a sample is made from."""
    spectral: bool = True
    """Divide the weights of the discriminator by their largest singular value, which keeps its slope
    bounded and the generator from giving all but a few kinds of samples up."""

    def __post_init__(self) -> None:
        check_range(self, "--model.", latent=">= 1")
        check_coder(self)
        if self.hidden == ():
            raise InputError(
                "--model.hidden without a width",
                expected="at least one: the features that the discriminator decides by",
                fix="--model.hidden 128",
            )


@dataclass(frozen=True, kw_only=True)
class VAEOptions(UnlabelledDescent):
    model: VariationalCoder = field(default_factory=VariationalCoder)
    decoder: Literal["auto", "bernoulli", "gaussian"] = "auto"
    """What a decoded value is: the probability of a white pixel, or the mean of a number with noise; auto:
    bernoulli for grey images, gaussian for colours and rows."""
    binarise: bool = True
    """With a bernoulli decoder: take grey values for probabilities, and learn from coins thrown by them anew
    in every step."""
    noise: float | None = None
    """Standard deviation of a gaussian decoder; learned without it."""
    beta: float = 1.0
    """Factor of the divergence of codes from their prior; 1 is the bound itself."""
    warmup: int = 0
    """Steps over which this factor grows from 0, against codes that carry nothing."""
    samples: int = 1
    """Codes drawn for each row in each step."""
    importance: int = 5
    """Codes drawn for each row by which log p(x) is bounded more tightly when judging; 0 leaves it out."""
    train: Train = field(default_factory=lambda: Train(batch_size=128, average=0.9995))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--", noise="> 0", beta=">= 0", warmup=">= 0", samples=">= 1", importance=">= 0")


@dataclass(frozen=True, kw_only=True)
class GANOptions(UnlabelledDescent):
    model: Players = field(default_factory=Players)
    loss: Literal["non-saturating", "min-max"] = "non-saturating"
    """Of the generator: −log D, or log(1 − D), whose gradient fades where the discriminator is sure."""
    discriminator_steps: int = 1
    """Steps of the discriminator for one of the generator."""
    discriminator_step: float = 1.0
    """Factor of the discriminator's step size; the generator's is --optim.lr."""
    optim: Optim = field(default_factory=lambda: Optim(lr=1e-3, beta1=0.5))
    train: Train = field(
        default_factory=lambda: Train(validate_every=200, average=0.999, monitor="sliced_wasserstein")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--", discriminator_steps=">= 1", discriminator_step="> 0")
        if self.tune != Tune():
            raise InputError(
                "--tune with two players",
                expected="a single network",
                fix="train anew, or go on with --resume RUN",
            )


@recipe(
    "vae",
    summary="Variational autoencoder: codes of a known distribution, from which images or rows are made",
    expected=Expectation("elbo", at_least=-23.5),
    targets="unlabelled",
    options=VAEOptions,
)
def vae(options: VAEOptions) -> Plan:
    return variational_plan(options)


@recipe(
    "cvae",
    summary="Conditional variational autoencoder: makes images or rows of the class that is asked for",
    expected=Expectation("elbo", at_least=-21.0),
    targets="images",
    options=VAEOptions,
)
def cvae(options: VAEOptions) -> Plan:
    return variational_plan(options, conditional=True)


@recipe(
    "gan",
    summary="Adversarial networks: a generator learns until its samples are taken for data",
    expected=Expectation("sliced_wasserstein", at_most=0.25),
    targets="unlabelled",
    options=GANOptions,
)
def gan(options: GANOptions) -> Plan:
    return adversarial_plan(options)


@recipe(
    "cgan",
    summary="Conditional adversarial networks: samples of the class that is asked for",
    expected=Expectation("recognised", at_least=0.95),
    targets="images",
    options=GANOptions,
)
def cgan(options: GANOptions) -> Plan:
    return adversarial_plan(options, conditional=True)


def variational_plan(options: VAEOptions, *, conditional: bool = False) -> Plan:
    import torch

    from quire.models.vae import VAE, VAEConfig
    from quire.recipes.unlabelled import load_unlabelled
    from quire.tasks.variational import Variational

    found = load_unlabelled(options, "digits", need_classes=conditional)
    chosen = options.model
    refuse_for(found, options)
    if conditional:
        require_classes_of_base(options, found)
    small = found.numbers <= SMALL
    config = VAEConfig(
        found.shape, chosen.kind,
        ((128, 128) if small else (500, 500)) if chosen.hidden is None else chosen.hidden,
        chosen.channels or 32, chosen.activation,
        latent=chosen.latent or max(2, min(20, found.numbers // (8 if found.images else 2))),
        classes=len(found.classes) if conditional else 0,
    )  # fmt: skip
    torch.manual_seed(options.seed)
    task = Variational(
        VAE(config), samples=options.samples, importance=options.importance, warmup=options.warmup,
        beta=options.beta, inputs=found.inputs(unit=True), **decoder_of(options, found),
    )  # fmt: skip
    plan = descent_plan(options, found, task, VAE_EPOCHS, VAE_STEPS)
    return finished(plan, task, found, conditional)


def require_classes_of_base(options: VAEOptions, found: Unlabelled) -> None:
    """A network that is taken over knows its classes by their numbers."""
    from quire.recipes.plan import base_preparation

    base: Any = base_preparation(options, type(found.data.preparation))
    if base is None or not base.targets:
        return
    known = tuple(str(label) for label in base.target.classes)
    if known != found.classes:
        raise InputError(
            f"classes {', '.join(found.classes)} with --tune.base {options.tune.base}",
            expected=f"those of the base: {', '.join(known)}",
            fix="train a new model",
        )


def decoder_of(options: VAEOptions, found: Unlabelled) -> dict[str, Any]:
    """The decoder's options, where those that would be ignored are refused."""
    decoder = options.decoder
    if decoder == "auto":
        decoder = "bernoulli" if found.images and found.shape[0] == 1 else "gaussian"
    if decoder == "bernoulli" and not found.images:
        raise InputError(
            "--decoder bernoulli with a table",
            expected="pixels, which are shares of white; columns are scaled to deviation 1",
            fix="leave it out",
        )
    for given, name, owner in (
        (not options.binarise, "no-binarise", "bernoulli"),
        (options.noise is not None, "noise", "gaussian"),
    ):
        if given and decoder != owner:
            raise InputError(
                f"--{name} with a {decoder} decoder",
                expected=f"an option of {owner} decoders",
                fix="leave it out" if not found.images else f"leave it out, or set --decoder {owner}",
            )
    return {"decoder": decoder, "noise": options.noise, "binarise": options.binarise}


def adversarial_plan(options: GANOptions, *, conditional: bool = False) -> Plan:
    import torch

    from quire.models.gan import Discriminator, DiscriminatorConfig, Generator, GeneratorConfig
    from quire.recipes.unlabelled import load_unlabelled
    from quire.tasks.adversarial import Adversarial, pixel_inputs

    found = load_unlabelled(options, "digits", need_classes=conditional)
    chosen = options.model
    refuse_for(found, options)
    kind = chosen.kind if chosen.kind != "auto" else "convolutional" if found.images else "dense"
    if kind == "dense" and chosen.channels is not None:
        raise InputError(
            f"--model.channels {chosen.channels} with a table", expected="images", fix="leave it out"
        )
    small = found.images and found.numbers <= SMALL
    common: dict[str, Any] = {
        "shape": found.shape,
        "kind": kind,
        "hidden": chosen.hidden or ((128,) if small else (256, 256)),
        "channels": chosen.channels or (16 if small else 32),
        "classes": len(found.classes) if conditional else 0,
    }
    torch.manual_seed(options.seed)
    generator = GeneratorConfig(**common, latent=chosen.latent, output="tanh" if found.images else "linear")
    factor = options.discriminator_step
    task = Adversarial(
        Generator(generator),
        Discriminator(DiscriminatorConfig(**common, spectral=chosen.spectral)),
        loss=options.loss,
        discriminator_steps=options.discriminator_steps,
        step_factors={} if factor == 1 else {"discriminator.": factor},
        inputs=pixel_inputs(found.shape[0]) if found.images else None,
    )
    plan = descent_plan(options, found, task, GAN_EPOCHS, GAN_STEPS)
    return finished(plan, task, found, conditional)


def finished(plan: Plan, task: Variational | Adversarial, found: Unlabelled, conditional: bool) -> Plan:
    """The plan with its pictures and, where classes can be asked for, how well they are met."""

    def pictures() -> Any:
        from quire.recipes.generative_pictures import generative_pictures

        return generative_pictures(task, found, plan.history)

    def measures() -> dict[str, float]:
        from quire.recipes.generative_pictures import recognised

        return recognised(task, found)

    plan.pictures = pictures
    plan.extra_measures = measures if conditional else None
    return plan
