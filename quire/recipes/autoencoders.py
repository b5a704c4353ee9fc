"""Recipes that learn codes by giving back what they are given: autoencoder, sparse, denoising, contractive,
masked. Images, or rows of any table.

One idea with other obstacles: what is put in the way of copying decides what the code is good for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from quire.errors import InputError
from quire.options import Optim, Schedule, check, check_range
from quire.recipes.base import Expectation, recipe, refuse_input_noise
from quire.recipes.unlabelled import UnlabelledDescent

if TYPE_CHECKING:
    from quire.recipes.plan import Plan
    from quire.recipes.unlabelled import Unlabelled

Activation = Literal[
    "relu", "leaky_relu", "relu6", "tanh", "sigmoid", "softplus", "arctan", "log_sigmoid", "linear"
]
EPOCHS, LEAST_STEPS = 20, 3000
"""Few rows are learned for more epochs, so that there are so many steps, unless --epochs or --steps says
otherwise."""
BETWEEN = 50
"""Steps between two validations, at least: an epoch of few rows is shorter."""


@dataclass(frozen=True, kw_only=True)
class Coder:
    """Encoder and decoder."""

    kind: Literal["dense", "convolutional"] = "dense"
    hidden: tuple[int, ...] = (256,)
    """Widths of the dense hidden layers, from the data inwards; the decoder has them in reverse."""
    channels: int | None = None
    """Maps after the first convolution, 32 without it; each further one has twice as many."""
    activation: Activation = "relu"
    """Of the hidden layers."""
    code: int | None = None
    """Numbers of a code; without it a quarter of the numbers of a row, from 2 to 32."""

    def __post_init__(self) -> None:
        check_range(self, "--model.", code=">= 1")
        check_coder(self)


@dataclass(frozen=True, kw_only=True)
class FreeCoder(Coder):
    norm: Literal["none", "batch"] = "none"
    tied: bool = False
    """Let the decoder take the encoder's weights, transposed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tied and self.norm != "none":
            raise InputError(
                f"--model.tied with --model.norm {self.norm}",
                expected="one of them: the weights of a norm cannot be transposed",
            )


@dataclass(frozen=True, kw_only=True)
class SparseCoder(Coder):
    """Encoder and decoder, which shares the encoder's weights: a penalty could otherwise be got around by
    small codes and a large decoder."""

    hidden: tuple[int, ...] = ()
    code: int | None = None
    """Numbers of a code; without it twice the numbers of a row, from 16 to 512."""


@dataclass(frozen=True, kw_only=True)
class ContractiveCoder(Coder):
    """Encoder and decoder, which shares the encoder's weights: a penalty could otherwise be got around by
    small codes and a large decoder."""

    hidden: tuple[int, ...] = ()
    code: int | None = None
    """Numbers of a code; without it half the numbers of a row, from 2 to 128."""


@dataclass(frozen=True, kw_only=True)
class AutoencoderOptions(UnlabelledDescent):
    model: Coder = field(default_factory=FreeCoder)
    loss: Literal["squared", "bernoulli"] = "squared"
    """bernoulli: cross-entropy of pixels as shares of white; images alone."""
    optim: Optim = field(default_factory=lambda: Optim(lr=3e-3, schedule=Schedule("cosine")))


@dataclass(frozen=True, kw_only=True)
class PlainOptions(AutoencoderOptions):
    model: FreeCoder = field(default_factory=FreeCoder)


@dataclass(frozen=True, kw_only=True)
class SparseOptions(AutoencoderOptions):
    model: SparseCoder = field(default_factory=SparseCoder)
    penalty: float = 0.1
    """λ of Σ|h|, beside the loss of a whole row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--", penalty="> 0")


@dataclass(frozen=True, kw_only=True)
class ContractiveOptions(AutoencoderOptions):
    model: ContractiveCoder = field(default_factory=ContractiveCoder)
    penalty: float = 0.1
    """λ of Σ‖∇h‖², how fast the code changes with its input, beside the loss of a whole row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--", penalty="> 0")


@dataclass(frozen=True, kw_only=True)
class DenoisingOptions(AutoencoderOptions):
    model: FreeCoder = field(default_factory=lambda: FreeCoder(code=64))
    noise: Literal["gaussian", "masking", "salt_and_pepper"] = "gaussian"
    """What damages the inputs while training; all of them are judged clean and damaged."""
    amount: float = 0.3
    """Deviation of Gaussian noise (pixels are from 0 to 1, numbers of a table have deviation 1), or the share
    of values that the other kinds replace."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--", amount="> 0")
        share = self.noise == "gaussian" or self.amount < 1
        check(share, "--amount", self.amount, f"a share below 1 for {self.noise} noise")


@dataclass(frozen=True, kw_only=True)
class MaskedOptions(AutoencoderOptions):
    model: FreeCoder = field(default_factory=lambda: FreeCoder(code=64))
    share: float = 0.5
    """Of the patches of an image, or of the features of a row, that are hidden and filled in."""
    patch: int | None = None
    """Side of a patch in pixels; without it a quarter of the shorter side of an image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--", share="(0, 1)", patch=">= 1")


@recipe(
    "autoencoder",
    summary="Autoencoder: a code of few numbers from which images or rows are given back",
    expected=Expectation("r2", at_least=0.87),
    targets="unlabelled",
    options=PlainOptions,
)
def autoencoder(options: PlainOptions) -> Plan:
    return reconstruction_plan(options, free(options.model), {})


@recipe(
    "sparse",
    summary="Sparse autoencoder: many numbers of which each image or row uses few",
    expected=Expectation("active", at_least=0.05, at_most=0.25),
    targets="unlabelled",
    options=SparseOptions,
)
def sparse(options: SparseOptions) -> Plan:
    network = {"tied": True, "code_activation": "relu"}
    return reconstruction_plan(options, network, {"sparsity": options.penalty}, (2.0, 16, 512))


@recipe(
    "denoising",
    summary="Denoising autoencoder: gives back clean what it is shown damaged",
    expected=Expectation("restored_mse", at_most=0.022),
    targets="unlabelled",
    options=DenoisingOptions,
)
def denoising(options: DenoisingOptions) -> Plan:
    rules = {"noise": options.noise, "amount": options.amount}
    return reconstruction_plan(options, free(options.model), rules)


@recipe(
    "contractive",
    summary="Contractive autoencoder: a code that changes little where the data does not",
    expected=Expectation("r2", at_least=0.87),
    targets="unlabelled",
    options=ContractiveOptions,
)
def contractive(options: ContractiveOptions) -> Plan:
    network = {"tied": True, "code_activation": "sigmoid"}
    return reconstruction_plan(options, network, {"contraction": options.penalty}, (0.5, 2, 128))


@recipe(
    "masked",
    summary="Masked autoencoder: fills in what is hidden from what is seen",
    expected=Expectation("r2", at_least=0.5),
    targets="unlabelled",
    options=MaskedOptions,
)
def masked(options: MaskedOptions) -> Plan:
    return reconstruction_plan(options, free(options.model), {"masked": options.share})


def free(chosen: FreeCoder) -> dict[str, Any]:
    return {"tied": chosen.tied, "norm": chosen.norm}


def reconstruction_plan(
    options: AutoencoderOptions,
    network: Mapping[str, Any],
    rules: Mapping[str, Any],
    bounds: tuple[float, int, int] = (0.25, 2, 32),
) -> Plan:
    """`network` and `rules` are what a recipe adds to its options. `bounds`: where nobody says how many
    numbers a code has, the share of a row's numbers that it takes, and its least and most."""
    import torch

    from quire.models.autoencoder import Autoencoder, AutoencoderConfig
    from quire.recipes.unlabelled import load_unlabelled
    from quire.tasks.reconstruction import Reconstruction, ReconstructionRules

    found = load_unlabelled(options, "digits")
    chosen = options.model
    refuse_for(found, options)
    if isinstance(options, MaskedOptions):
        rules = {**rules, "patch": patch_of(options, found)}
    share, least, most = bounds
    config = AutoencoderConfig(
        found.shape, chosen.kind, chosen.hidden, chosen.channels or 32, chosen.activation,
        code=chosen.code or max(least, min(most, round(share * found.numbers))), **network,
    )  # fmt: skip
    torch.manual_seed(options.seed)
    task = Reconstruction(
        Autoencoder(config), ReconstructionRules(loss=options.loss, **rules), inputs=found.inputs(unit=True)
    )
    plan = descent_plan(options, found, task, EPOCHS, LEAST_STEPS)

    def pictures() -> Any:
        from quire.recipes.generative_pictures import code_pictures

        return code_pictures(task, found)

    plan.pictures = pictures
    return plan


# -- What recipes without a target have in common ----------------------------------------------


Options = TypeVar("Options", bound=UnlabelledDescent)


def descent_plan(options: Options, found: Unlabelled, task: Any, epochs: float, least_steps: int) -> Plan:
    """A plan of so many epochs, and more where rows are so few that these would be less than `least_steps`;
    then validations are not after each epoch either."""
    from quire.data.batch import steps_per_epoch
    from quire.recipes.plan import Plan

    steps = steps_per_epoch(len(found.data.train), options.train.batch_size)
    if options.train.validate_every is None and steps < BETWEEN:
        options = replace(options, train=replace(options.train, validate_every=BETWEEN))
    return Plan(task, found.data, options, max(epochs, math.ceil(least_steps / steps)))


def check_coder(chosen: Any) -> None:
    """Widths that cannot be, and options that would be ignored."""
    check(all(width >= 1 for width in chosen.hidden or ()), "--model.hidden", chosen.hidden, "widths >= 1")
    check_range(chosen, "--model.", channels=">= 1")
    if chosen.channels is not None and chosen.kind == "dense":
        raise InputError(
            f"--model.channels {chosen.channels} with --model.kind dense",
            expected="channels of a convolutional network",
            fix="add --model.kind convolutional, or leave --model.channels out",
        )


def refuse_for(found: Unlabelled, options: UnlabelledDescent) -> None:
    """What makes no sense for the data that was found."""
    kind, loss = getattr(options, "model").kind, getattr(options, "loss", "squared")  # noqa: B009
    if found.images:
        refuse_input_noise(options.train, "images", "use 'quire train denoising'")
        return
    if kind == "convolutional":
        raise InputError(
            "--model.kind convolutional with a table",
            expected="images",
            fix="leave it out: a dense network reads rows",
        )
    if loss == "bernoulli":
        raise InputError(
            "--loss bernoulli with a table",
            expected="pixels, which are shares of white; columns are scaled to deviation 1",
            fix="leave it out",
        )


def patch_of(options: MaskedOptions, found: Unlabelled) -> int:
    if not found.images:
        if options.patch is not None:
            raise InputError(f"--patch {options.patch} with a table", expected="images", fix="leave it out")
        return 1
    side = min(found.shape[1:])
    if options.patch is not None and options.patch > side:
        raise InputError(f"--patch {options.patch} of images of side {side}", expected="a smaller patch")
    return options.patch or max(1, side // 4)
