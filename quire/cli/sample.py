"""`quire sample RUN`: text, images or rows that a trained model makes."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from quire.cli.parse import parse
from quire.cli.paths import refuse_existing, require_run
from quire.cli.predict import as_csv, write_table
from quire.cli.show import print_json
from quire.errors import InputError
from quire.options import check_range

if TYPE_CHECKING:
    import numpy as np

    from quire.runs import Run
    from quire.tasks.samples import Made

ROW_ENDINGS, IMAGE_ENDINGS = (".csv", ".parquet", ".npy"), (".png", ".npy")
TEXT_ALONE = ("prompt", "length", "top_k", "top_p", "stop")
DATA_ALONE = ("label", "out", "overwrite")
LEAST_SIDE = 48
"""Pixels of an image in a grid, at least; smaller ones are shown enlarged."""
MOST_COLUMNS = 20
"""Classes up to which each has a column of a grid."""


@dataclass(frozen=True)
class SampleOptions:
    """What a trained model makes: text, printed as it is made; images, in a file or folder (--out); or rows,
    as CSV on standard output or in a file, in the columns and units of the training file."""

    run: Positional[Path]
    """Run folder."""
    count: int | None = None
    """How many; without it 1 text, 25 images or 25 rows."""
    label: str | None = None
    """Class to make, by its own name; without it a conditional model takes all classes in turn."""
    out: Path | None = None
    """Images: a grid (.png), an array (.npy), or a folder for one file each, with a folder for each class
    inside of it. Rows: .csv, .parquet or .npy."""
    overwrite: bool = False
    """Replace the file of --out if it exists."""
    prompt: str | None = None
    """What a text begins with; without it a new line."""
    length: int | None = None
    """Tokens of a text after the prompt, 300 without it."""
    temperature: float | None = None
    """Text: 0 takes the likeliest token each time, above 1 unlikely ones become more frequent; 0.8 without
    it. Images and rows: factor of the noise that they are made from, 1 without it."""
    top_k: int | None = None
    """Draw from the k likeliest tokens alone."""
    top_p: float | None = None
    """Draw from the fewest tokens that together have this probability."""
    stop: tuple[str, ...] = ()
    """Strings at which a text ends."""
    seed: int = 0
    json: bool = False
    """Print one object: run, and texts or rows, or how many there are in which file."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        check_range(self, "--", length=">= 1", count=">= 1", temperature=">= 0", top_k=">= 1", seed=">= 0")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"--top-p is {self.top_p}", expected="a probability in (0, 1]")
        known = ("", *IMAGE_ENDINGS, *ROW_ENDINGS)
        if self.out is not None and self.out.suffix.lower() not in known:
            raise InputError(
                f"--out {self.out}",
                expected="a name that ends in .png, .npy, .csv or .parquet, or the name of a folder",
                fix="change the ending",
            )


def main(words: Sequence[str]) -> int:
    options = parse(SampleOptions, words, prog="quire sample")
    require_run(options.run)
    if options.out is not None:
        refuse_taken(options.out, options.overwrite)
    from quire.runs import load
    from quire.tasks.generating import Generates
    from quire.tasks.language import LanguageModel

    run = load(options.run)
    if isinstance(run.task, LanguageModel):
        refuse(options, DATA_ALONE, run, "text")
        print_text(options, run)
    elif isinstance(run.task, Generates):
        refuse(options, TEXT_ALONE, run, "images or rows")
        write_data(options, run)
    else:
        raise InputError(
            f"{options.run} is a run of '{run.config['recipe']}', which makes nothing new",
            expected="a run of a language model or of another generative model",
            fix="train one, such as 'quire train gpt', 'quire train vae' or 'quire train gmm'",
        )
    return 0


def refuse(options: SampleOptions, names: Sequence[str], run: Run, makes: str) -> None:
    """Options that would be ignored."""
    for name in names:
        if getattr(options, name) not in (None, (), False):
            raise InputError(
                f"--{name.replace('_', '-')} with a run of '{run.config['recipe']}', which makes {makes}",
                expected="options of what the run makes",
                fix="leave it out",
            )


def refuse_taken(out: Path, overwrite: bool) -> None:
    """A file that exists is replaced if that was asked for; a folder never."""
    if out.suffix:
        refuse_existing(out, overwrite)
    elif out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(
            f"{out} is {'a folder that is not empty' if out.is_dir() else 'a file'}",
            expected="a folder that is new or empty",
            fix="choose another name",
        )
    elif not out.parent.is_dir():
        refuse_existing(out, overwrite)


# -- Text --------------------------------------------------------------------------------------


def print_text(options: SampleOptions, run: Run) -> None:
    from quire.data.text import TextPreparation
    from quire.tasks.samples import opening

    assert isinstance(run.preparation, TextPreparation)
    prompt = opening(run.preparation) if options.prompt is None else options.prompt
    count = options.count or 1
    settings: dict[str, Any] = {
        "length": options.length or 300,
        "temperature": 0.8 if options.temperature is None else options.temperature,
        "top_k": options.top_k, "top_p": options.top_p, "stop_strings": options.stop,
    }  # fmt: skip
    if options.json or options.stop:  # a stop string is known only when it is complete
        texts = run.sample([prompt] * count, seed=options.seed, **settings)
        if options.json:
            print_json({"run": str(options.run), "prompt": prompt, "texts": texts})
        else:
            print("\n---\n".join(texts))
        return
    for number in range(count):
        pieces = run.stream(prompt, seed=options.seed + number, **settings)
        first = next(pieces, "")  # a prompt that cannot be read is refused before it is printed
        sys.stdout.write("\n---\n" if number else "")
        sys.stdout.write(prompt)
        for piece in itertools.chain([first], pieces):
            sys.stdout.write(piece)
            sys.stdout.flush()
    print()


# -- Images and rows ---------------------------------------------------------------------------


def write_data(options: SampleOptions, run: Run) -> None:
    from quire.data.images import ImagePreparation

    out, images = options.out, isinstance(run.preparation, ImagePreparation)
    check_ending(out, images)
    made = run.generate(
        options.count or 25,
        label=options.label,
        temperature=1.0 if options.temperature is None else options.temperature,
        seed=options.seed,
    )
    if out is not None:
        write_images(made, out) if images else write_rows(made, out)
    count = len(made.images) if made.images is not None else len(made.rows or ())
    if options.json:
        rest = {"rows": made.rows.to_pylist()} if out is None and made.rows else {"out": str(out)}
        print_json({"run": str(options.run), "count": count, **rest})
    elif out is None:
        sys.stdout.write(as_csv(made.rows).decode())
    else:
        print(f"{count} {'images' if images else 'rows'}: {out}")


def check_ending(out: Path | None, images: bool) -> None:
    if out is None:
        if images:
            raise InputError(
                "images without --out",
                expected="where they go: a grid (.png), an array (.npy), or a folder for one file each",
                fix="--out samples.png",
            )
        return
    ending = out.suffix.lower()
    if ending not in (("", *IMAGE_ENDINGS) if images else ROW_ENDINGS):
        what = "images" if images else "rows"
        endings = "ends in .png or .npy, or of a folder" if images else "ends in .csv, .parquet or .npy"
        raise InputError(
            f"{what} in {out}", expected=f"the name of a file that {endings}", fix="change the ending"
        )


def write_rows(made: Made, out: Path) -> None:
    import numpy as np
    import pyarrow as pa

    assert made.rows is not None
    if out.suffix.lower() != ".npy":
        write_table(made.rows, out)
        return
    for name, column in zip(made.rows.column_names, made.rows.columns, strict=True):
        if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)) or column.null_count:
            raise InputError(
                f"the column '{name}' in {out}: not all of its cells are numbers",
                expected="numbers alone in an array",
                fix=f"--out {out.with_suffix('.csv')}",
            )
    write_array(np.stack([column.to_numpy() for column in made.rows.columns], 1), out)


def write_array(values: np.ndarray, out: Path) -> None:
    import io

    import numpy as np

    from quire.files import write_bytes

    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    write_bytes(out, buffer.getvalue())


def write_images(made: Made, out: Path) -> None:
    import io

    from quire.files import write_bytes

    assert made.images is not None
    if out.suffix.lower() == ".npy":
        write_array(made.images, out)
    elif out.suffix:
        buffer = io.BytesIO()
        whole = grid(made.images, len(set(made.labels or ())))
        as_picture(whole).save(buffer, "PNG")
        write_bytes(out, buffer.getvalue())
    else:
        write_folder(made, out)


def write_folder(made: Made, out: Path) -> None:
    """An image a file, in a folder for each class: what any recipe on images can be trained on."""
    from quire.files import folder_that_appears_whole

    assert made.images is not None
    digits = len(str(len(made.images)))
    with folder_that_appears_whole(out) as folder:
        for number, image in enumerate(made.images, start=1):
            place = folder
            if made.labels is not None:
                place = folder / str(made.labels[number - 1]).replace("/", "_").replace("\\", "_")
                place.mkdir(exist_ok=True)
            as_picture(image).save(place / f"{number:0{digits}d}.png")


def as_picture(image: np.ndarray) -> Any:
    """A PIL image of bytes (C, H, W)."""
    from PIL import Image

    return Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))


def grid(images: np.ndarray, classes: int) -> np.ndarray:
    """All images (N, C, H, W) side by side, with a grey line between; where classes come in turn, one is
    below the other. Small images are enlarged by a whole factor."""
    import numpy as np

    count, channels = images.shape[:2]
    columns = classes if 1 < classes <= MOST_COLUMNS else math.ceil(math.sqrt(count))
    columns = min(columns, count)
    factor = max(1, math.ceil(LEAST_SIDE / min(images.shape[2:])))
    tiles = images.repeat(factor, axis=2).repeat(factor, axis=3)
    height, width = tiles.shape[2:]
    rows, gap = math.ceil(count / columns), 2
    whole = np.full(
        (channels, rows * (height + gap) + gap, columns * (width + gap) + gap), 128, dtype=np.uint8
    )
    for number, tile in enumerate(tiles):
        row, column = divmod(number, columns)
        top, left = gap + row * (height + gap), gap + column * (width + gap)
        whole[:, top : top + height, left : left + width] = tile
    return whole
