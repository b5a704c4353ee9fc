"""Data that is learned from without a target: rows of a table, images, files larger than memory.

Classes that the data has are kept beside it: to colour pictures, to judge by, to make a model conditional.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quire.errors import InputError
from quire.options import Images, Rows
from quire.recipes.base import DescentOptions, RunOptions, SweepOptions

if TYPE_CHECKING:
    from quire.data.loaded import LoadedData, Prepares
    from quire.nn.images import ImageInputs


Prepared = TypeVar("Prepared", bound="Prepares")


@dataclass(frozen=True, kw_only=True)
class UnlabelledOptions(RunOptions):
    """How rows or images are read."""

    target: str | None = None
    """Column of a table that is no input: classes to colour by, to be judged by or to be conditional on."""
    table: Rows = field(default_factory=Rows)
    images: Images = field(default_factory=Images)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target is not None and self.data is None:
            raise InputError(
                f"--target {self.target} without --data",
                expected="a column of your own file",
                fix="add --data FILE, or leave --target out",
            )


@dataclass(frozen=True, kw_only=True)
class UnlabelledSweeps(UnlabelledOptions, SweepOptions):
    """Learning by statistics from rows or images."""


@dataclass(frozen=True, kw_only=True)
class UnlabelledDescent(UnlabelledOptions, DescentOptions):
    """Learning by descent from rows or images."""


@dataclass(frozen=True)
class Unlabelled:
    """Data with the shape of one of its rows."""

    data: LoadedData
    shape: tuple[int, ...]
    """(D,) or (C, H, W)."""
    classes: tuple[str, ...] = ()
    """Of the field "target", where there is one."""

    @property
    def images(self) -> bool:
        return len(self.shape) == 3

    @property
    def numbers(self) -> int:
        """In one row."""
        size = 1
        for side in self.shape:
            size *= side
        return size

    def inputs(self, *, unit: bool) -> ImageInputs | None:
        """What scales pixels: to [0, 1], or by mean and deviation of the training part; None for rows."""
        from quire.nn.images import ImageInputs

        if not self.images:
            return None
        preparation: Any = self.data.preparation
        if unit:
            return ImageInputs((0.0,) * self.shape[0], (255.0,) * self.shape[0])
        return ImageInputs(preparation.mean, preparation.std)

    @property
    def shown(self) -> Any:
        """The part that pictures are taken from."""
        return self.data.test or self.data.validation or self.data.train


def load_unlabelled(
    options: UnlabelledOptions, builtin: str, *, need_classes: bool = False, largest: int = 64
) -> Unlabelled:
    """The user's file or folder, or a built-in set: a table's name, or "digits", which are images.

    Images that differ in size, or are larger, are brought to the side `largest` unless the options say
    otherwise.
    """
    source: Path | str = builtin if options.data is None else options.data
    if is_images(source):
        _refuse(options, "table", Rows(), "images")
        if options.target is not None:
            raise InputError(
                f"--target {options.target} with images", expected="a column of a table", fix="leave it out"
            )
        return _load_images(options, source, need_classes, largest)
    _refuse(options, "images", Images(), "a table")
    return _load_rows(options, source, need_classes)


def is_images(source: Path | str) -> bool:
    """Whether a path holds images rather than a table."""
    from quire.data.images.builtin import IMAGES
    from quire.data.images.cifar import find_layout
    from quire.data.images.decode import is_image
    from quire.data.images.idx import is_idx

    path = Path(source)
    if isinstance(source, str) and not path.exists():
        return source in IMAGES
    return (
        path.is_dir() or is_image(path) or find_layout(path) is not None or (path.is_file() and is_idx(path))
    )


def _load_images(
    options: UnlabelledOptions, source: Path | str, need_classes: bool, largest: int
) -> Unlabelled:
    from quire.data.images import ImagePreparation, load_images

    data = load_images(
        source, options.images, seed=options.seed, like=_base(options, ImagePreparation), largest=largest,
        need_classes=need_classes,
    )  # fmt: skip
    preparation = data.preparation
    classes = tuple(str(label) for target in preparation.targets for label in target.classes)
    return Unlabelled(data, (preparation.channels, *preparation.size), classes)


def _load_rows(options: UnlabelledOptions, source: Path | str, need_classes: bool) -> Unlabelled:
    from quire.data.builtin import BUILTIN
    from quire.data.load import load_table
    from quire.data.preparation import Preparation
    from quire.data.streamed import is_large, load_streamed

    like = _base(options, Preparation)
    if is_large(source, options.table) and options.target is None and not need_classes and like is None:
        large = load_streamed(Path(source), options.table, options.seed)
        return Unlabelled(large, (large.train.row_size,))
    known = isinstance(source, str) and source in BUILTIN
    wanted = options.target if options.target is not None else (None if known else ())
    if need_classes and not known and options.target is None:
        raise InputError(
            f"{source} without --target",
            expected="the column that holds the classes",
            fix="name it with --target COLUMN",
        )
    data = load_table(source, options.table, targets=wanted, seed=options.seed, like=like)
    classes: tuple[str, ...] = ()
    if data.preparation.targets and data.preparation.target.kind == "classification":
        classes = tuple(str(label) for label in data.preparation.target.classes)
    elif need_classes:
        raise InputError(f"--target {options.target}, which holds values", expected="a column of classes")
    return Unlabelled(data, (data.train.row_size,), classes)


def _base(options: UnlabelledOptions, kind: type[Prepared]) -> Prepared | None:
    """The preparation of the run that is tuned."""
    from quire.recipes.plan import base_preparation

    return base_preparation(options, kind) if isinstance(options, DescentOptions) else None


def _refuse(options: UnlabelledOptions, name: str, usual: object, what: str) -> None:
    """Options that would be ignored."""
    if getattr(options, name) != usual:
        raise InputError(
            f"--{name} options with {what}",
            expected="options of the data that is given",
            fix="leave them out",
        )
