"""Recipes of learning with few labels: semi-supervised, contrastive, siamese.

Of the training rows `--labels` keep their class, stratified; all others are learned from without it, and so
is whatever `--unlabelled` names. The validation and test parts keep their classes, to judge by. They choose
nothing: a run ends with its last weights, so that no more labels are used than are counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quire.errors import InputError
from quire.options import Optim, Schedule, Train, Tune, check_range
from quire.recipes.base import Expectation, recipe
from quire.recipes.unlabelled import UnlabelledDescent

if TYPE_CHECKING:
    from quire.nn.views import Views
    from quire.recipes.few_labels_data import Few
    from quire.recipes.plan import Plan

LEAST_STEPS = 600
"""Few rows are learned for more epochs, so that there are so many steps, unless --epochs or --steps says
otherwise."""
MOST_REFERENCES = 2000
"""Rows that are kept with a run to be compared with; of more labels an even selection."""


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Random changes of images that leave their class as it is."""

    shift: float = 0.1
    """Move by up to this share of the longer side."""
    zoom: float = 1.2
    """Largest factor by which width and height change, each by itself."""
    rotate: float = 15.0
    """Turn by up to so many degrees."""
    shear: float = 0.2
    """Slant by up to so many pixels a row."""
    bend: float = 0.04
    """Deviation by which a grid of 4×4 points is pulled, as a share of the longer side."""
    flip: float = 0.0
    """Probability of mirroring left to right."""
    colour: float = 0.0
    """Brightness, contrast and saturation are multiplied by factors from 1 − colour to 1 + colour."""
    cut_out: float = 0.2
    """Side of a square that is blanked, as a share of the image's side."""

    def __post_init__(self) -> None:
        check_range(
            self, "--augment.", shift="[0, 1)", zoom=">= 1", rotate=">= 0", shear=">= 0", bend=">= 0",
            flip="[0, 1]", colour="[0, 1]", cut_out="[0, 1)",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RowChanges:
    """Random changes of a table's rows that leave their class as it is."""

    noise: float = 0.3
    """Deviation of Gaussian noise, in standard deviations of a column."""
    swap: float = 0.1
    """Probability with which a value is taken from another row."""

    def __post_init__(self) -> None:
        check_range(self, "--rows.", noise=">= 0", swap="[0, 1]")


@dataclass(frozen=True, kw_only=True)
class Coder:
    """The network that makes codes."""

    kind: Literal["auto", "dense", "convolutional"] = "auto"
    """auto: convolutional for images, dense for rows."""
    code: int = 64
    """Numbers of a code."""
    hidden: tuple[int, ...] = (128,)
    """Widths of dense hidden layers."""
    channels: int = 32
    """Maps after the first convolution; their number doubles with every stage."""
    norm: Literal["none", "batch"] = "none"

    def __post_init__(self) -> None:
        check_range(self, "--model.", code=">= 1", channels=">= 1")


@dataclass(frozen=True, kw_only=True)
class FewLabelsOptions(UnlabelledDescent):
    """Options of learning with few labels."""

    labels: int | None = 100
    """Training rows whose class is used; None uses all."""
    target: str | None = None
    """Column of a table that holds the classes."""
    augment: Changes = field(default_factory=Changes)
    rows: RowChanges = field(default_factory=RowChanges)
    model: Coder = field(default_factory=Coder)
    train: Train = field(default_factory=lambda: Train(batch_size=128, restore="last"))
    optim: Optim = field(default_factory=lambda: Optim(lr=2e-3, schedule=Schedule("cosine")))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--", labels=">= 1")
        if self.train.noise.inputs:
            raise InputError(
                f"--train.noise.inputs {self.train.noise.inputs:g} with a recipe of few labels",
                expected="changes that make views of a row",
                fix="use --rows.noise for tables, --augment for images",
            )
        if self.tune != Tune():
            raise InputError(
                "--tune with a recipe of few labels",
                expected="a network that is trained from the start",
                fix="leave it out",
            )


@dataclass(frozen=True, kw_only=True)
class SemiSupervisedOptions(FewLabelsOptions):
    unlabelled: Path | None = None
    """More images or rows without a class, to learn from: a folder, or a file with the same columns."""
    method: Literal["consistency", "autoencode"] = "consistency"
    """consistency: answers to a slightly changed row are the labels of its strongly changed view.
    autoencode: the code that classes are read from must also give back the row."""
    weight: float = 1.0
    """Of what is asked of all rows, beside the cross-entropy of the labelled ones."""
    threshold: float = 0.95
    """Probability from which on an answer is trusted as a label."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--", weight=">= 0", threshold="(0, 1)")


@dataclass(frozen=True, kw_only=True)
class ContrastiveOptions(FewLabelsOptions):
    unlabelled: Path | None = None
    """More images or rows without a class, to learn from: a folder, or a file with the same columns."""
    neighbours: int = 5
    """Labelled rows that are looked up for a row."""
    temperature: float = 0.2
    """τ by which likeness is divided: the smaller, the more the most similar rows count."""
    projection: int = 64
    """Numbers that views are compared by while training; 0 compares codes."""
    augment: Changes = field(default_factory=lambda: Changes(cut_out=0.0, bend=0.06, rotate=20.0, shear=0.3))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--", neighbours=">= 1", temperature="> 0", projection=">= 0")


@dataclass(frozen=True, kw_only=True)
class SiameseOptions(FewLabelsOptions):
    neighbours: int = 5
    """Labelled rows that are looked up for a row."""
    loss: Literal["siamese", "triplet", "cosine"] = "siamese"
    margin: float | None = None
    """Of siamese and triplet a distance, of cosine a likeness; without it 1, 0.5 and 0.5."""
    train: Train = field(default_factory=lambda: Train(batch_size=128, restore="last", validate_every=50))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--", neighbours=">= 1", margin=">= 0")


@recipe(
    "semi-supervised",
    summary="Few labels and many rows without: consistent answers to changed views, or an autoencoder's code",
    expected=Expectation("accuracy", at_least=0.95),
    targets="images",
    options=SemiSupervisedOptions,
)
def semi_supervised(options: SemiSupervisedOptions) -> Plan:
    import torch

    from quire.models.autoencoder import Autoencoder, AutoencoderConfig
    from quire.models.embedding import Embedding, EmbeddingConfig
    from quire.recipes.few_labels_data import coder_options, make_views, open_few
    from quire.tasks.semi import SemiSupervised, SemiSupervisedRules, Teaching

    few = open_few(options)
    weak, strong = make_views(options, few.whole)
    torch.manual_seed(options.seed)
    shape = coder_options(options, few.whole)
    model: Autoencoder | Embedding = (
        Autoencoder(AutoencoderConfig(**shape))
        if options.method == "autoencode"
        else Embedding(EmbeddingConfig(**shape))
    )
    task = SemiSupervised(
        model,
        len(few.whole.classes),
        SemiSupervisedRules(options.method, options.weight, options.threshold),
        teaching=Teaching(few.inputs, few.target, weak, strong),
        inputs=few.whole.inputs(unit=False),
    )
    return few_labels_plan(task, few, options, epochs=15, builtin_epochs=120, strong=strong)


@recipe(
    "contrastive",
    summary="Two views of a row find each other among all others (InfoNCE); then softmax on few labels",
    expected=Expectation("accuracy", at_least=0.9),
    targets="images",
    options=ContrastiveOptions,
)
def contrastive(options: ContrastiveOptions) -> Plan:
    from quire.tasks.embedding import EmbeddingRules

    rules = EmbeddingRules(
        "info_nce", temperature=options.temperature, answer="linear", neighbours=options.neighbours,
        compared=options.train.batch_size or 256,
    )  # fmt: skip
    return embedding_plan(options, rules, options.projection, epochs=20, builtin_epochs=60)


@recipe(
    "siamese",
    summary="Rows of one class near each other, those of two classes apart; answers by nearest neighbours",
    expected=Expectation("accuracy", at_least=0.9),
    targets="images",
    options=SiameseOptions,
)
def siamese(options: SiameseOptions) -> Plan:
    from quire.tasks.embedding import EmbeddingRules

    rules = EmbeddingRules(
        options.loss, options.margin, neighbours=options.neighbours, compared=options.train.batch_size or 256
    )
    return embedding_plan(options, rules, 0, epochs=30, builtin_epochs=600, only_labelled=True)


# What the recipes share -----------------------------------------------------------------------------


def embedding_plan(
    options: FewLabelsOptions,
    rules: Any,
    projection: int,
    *,
    epochs: float,
    builtin_epochs: float,
    only_labelled: bool = False,
) -> Plan:
    import torch

    from quire.data.few_labels import choose_labelled
    from quire.models.embedding import Embedding as EmbeddingNet
    from quire.models.embedding import EmbeddingConfig
    from quire.recipes.few_labels_data import coder_options, make_views, open_few
    from quire.tasks.embedding import Embedding, References

    few = open_few(options, only_labelled=only_labelled)
    _, strong = make_views(options, few.whole)
    classes = len(few.whole.classes)
    torch.manual_seed(options.seed)
    model = EmbeddingNet(EmbeddingConfig(**coder_options(options, few.whole), projection=projection))
    kept = torch.arange(len(few.rows))
    if len(kept) > MOST_REFERENCES:
        kept = choose_labelled(few.target, classes, max(MOST_REFERENCES, classes), options.seed)
        few.notes.append(f"{len(kept):,} labelled rows are kept to compare with")
    references = References(few.inputs[kept], few.target[kept], few.rows[kept])
    task = Embedding(model, classes, references, strong, rules, inputs=few.whole.inputs(unit=False))
    return few_labels_plan(task, few, options, epochs=epochs, builtin_epochs=builtin_epochs, strong=strong)


def few_labels_plan(
    task: Any, few: Few, options: FewLabelsOptions, *, epochs: float, builtin_epochs: float, strong: Views
) -> Plan:
    from quire.data.batch import steps_per_epoch
    from quire.recipes.few_labels_pictures import few_labels_pictures
    from quire.recipes.plan import Plan

    steps = steps_per_epoch(len(few.whole.data.train), options.train.batch_size)
    length = builtin_epochs if options.data is None else max(epochs, math.ceil(LEAST_STEPS / steps))
    return Plan(
        task, few.whole.data, options, length, notes=few.notes,
        pictures=lambda: few_labels_pictures(task, few.whole, strong),
    )  # fmt: skip
