"""Texts with a label: a column of a table, or a folder for each class."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quire.data.columns import Labels, Target, find_labels
from quire.data.images.folders import PART_FOLDERS
from quire.data.load import without_missing_targets
from quire.data.readers import read_table
from quire.data.table import Table
from quire.data.targets import require_column, resolve_targets
from quire.data.text.builtin import LABELLED
from quire.data.text.files import empty_text, existing, files_below, no_files, read_whole
from quire.data.text.samples import Column, Samples, object_array
from quire.data.types import infer, is_text
from quire.errors import DataError
from quire.options import Table as TableOptions
from quire.options import Text

KINDS = (
    "a CSV, TSV, JSON lines or Parquet table with a column of texts and one of labels, a folder with one "
    "sub-folder of text files for each class (also below train/, val/ and test/), or to predict on a text "
    "file with a text on each line"
)


def open_labelled(
    source: Path | str | Samples, options: Text, like: tuple[Column, Target] | None = None
) -> Samples:
    """Texts, with their labels where they have some. `like` are the columns of the table that a model was
    trained on."""
    if isinstance(source, Samples):
        return source
    if isinstance(source, str) and source in LABELLED and not Path(source).exists():
        return _builtin(source, options)
    path = existing(source, KINDS, list(LABELLED))
    if path.is_dir():
        return read_folders(path, options)
    if path.suffix.lower() == ".txt":
        return read_lines(path, options)
    table = read_table(path)
    text, label = choose_columns(table, options) if like is None else match_columns(table, *like)
    samples = from_table(table, text, label, options)
    if like is not None or label is None or None not in (options.column, options.label):
        return samples
    note = f"the texts are in '{text}', the labels in '{label}'; --text.column and --text.label name others"
    return replace(samples, notes=(note, *samples.notes))


def _builtin(name: str, options: Text) -> Samples:
    rows = LABELLED[name]()
    labels = Labels("text", tuple(sorted({row.label for row in rows})))
    return Samples(
        f"{name} (built in)", options, object_array([row.text for row in rows]), np.arange(1, len(rows) + 1),
        labels=labels, codes=np.array([labels.values.index(row.label) for row in rows]),
        groups=object_array([row.group for row in rows]),
    )  # fmt: skip


def read_lines(path: Path, options: Text) -> Samples:
    """A text on each line that is not blank, without labels."""
    lines = [line.strip() for line in read_whole(path, options.on_bad_utf8).split("\n")]
    numbers = [number for number, line in enumerate(lines, 1) if line]
    if not numbers:
        raise empty_text(path)
    return Samples(str(path), options, object_array([line for line in lines if line]), np.array(numbers))


def read_folders(root: Path, options: Text) -> Samples:
    """A text in each file; with labels where the folder has sub-folders and no text files beside them."""
    folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    files, others = files_below(root, options.suffixes)
    if not files:
        raise no_files(root, options, others)
    classes = bool(folders) and all(file.parent != root for file in files)
    own = {p.name: PART_FOLDERS[p.name.lower()] for p in folders if p.name.lower() in PART_FOLDERS}
    parted = classes and own and any(len(file.relative_to(root).parts) > 2 for file in files)
    if parted:
        files = [file for file in files if file.relative_to(root).parts[0] in own]
    depth = 1 if parted else 0
    shallow = [file for file in files if classes and len(file.relative_to(root).parts) < depth + 2]
    if shallow:
        raise DataError("a text file beside the folders of the classes", path=shallow[0], expected=KINDS)
    samples = Samples(
        str(root), options, object_array([read_whole(file, options.on_bad_utf8) for file in files]),
        object_array([file.relative_to(root).as_posix() for file in files]),
        notes=(f"{len(others)} files end otherwise than in {', '.join(options.suffixes)} and are ignored",)
        if others else (),
    )  # fmt: skip
    if not classes:
        return samples
    names = [file.relative_to(root).parts[depth] for file in files]
    labels = Labels("text", tuple(sorted(set(names))))
    numbers = {name: code for code, name in enumerate(labels.values)}
    parts = np.array([own[file.relative_to(root).parts[0]] for file in files]) if parted else None
    return Samples(
        samples.source, options, samples.texts, samples.names, labels=labels,
        codes=np.array([numbers[name] for name in names]), parts=parts, notes=samples.notes,
    )  # fmt: skip


def choose_columns(table: Table, options: Text) -> tuple[str, str | None]:
    """Names of the columns of texts and of labels: those of the options, or the wordiest and the last."""
    if len(table.names) == 1:
        return table.names[0], None
    label = resolve_targets(table, options.label)[0]
    if options.column is not None:
        text = resolve_targets(table, options.column)[0]
        if text == label:
            raise DataError(
                f"the column {text!r} for the texts and for the labels", path=table.source,
                expected="two columns", fix="name them with --text.column and --text.label",
            )  # fmt: skip
        return text, label
    words = {name: _characters(table, name) for name in table.names if name != label}
    text = max(words, key=lambda name: words[name])
    if not words[text]:
        raise DataError(
            "no column of text beside the labels", path=table.source, column=label, expected=KINDS,
            fix="name the columns with --text.column and --text.label",
        )  # fmt: skip
    return text, label


def _characters(table: Table, name: str) -> int:
    column = table.column(name)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return int(pc.sum(pc.utf8_length(column)).as_py() or 0) if is_text(column.type) else 0


def match_columns(table: Table, column: Column, target: Target) -> tuple[str, str | None]:
    """The columns of training in another table: by name, or by position where there are no names."""
    if table.named and column.named:
        if len(table.names) == 1 and column.name not in table.names:
            return table.names[0], None
        require_column(table, column.name, "the training table")
        return column.name, target.name if target.name in table.names else None
    if len(table.names) == 1:
        return table.names[0], None
    if len(table.names) == column.width:
        return table.names[column.position], table.names[target.position]
    raise DataError(
        f"a table of {len(table.names)} columns", path=table.source,
        expected=f"{column.width} columns as in training, or the texts alone",
    )  # fmt: skip


def from_table(table: Table, text: str, label: str | None, options: Text) -> Samples:
    """The rows whose label is not missing; a missing text is an empty one."""
    dropped: list[str] = []
    if label is not None:
        table, dropped = without_missing_targets(table, [label], TableOptions())
    column = table.column(text)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not is_text(column.type) and not pa.types.is_null(column.type):
        raise DataError(
            f"values of type {column.type}", path=table.source, column=text, expected="text",
            fix="name the column of the texts with --text.column",
        )  # fmt: skip
    samples = Samples(
        table.source, options, object_array([cell or "" for cell in column.to_pylist()]), table.lines,
        column=Column(text, table.positions[text], table.named, len(table.names)), notes=tuple(dropped),
    )  # fmt: skip
    if label is None:
        return samples
    kind = infer(table, label, strict=False)
    if kind == "empty":
        raise DataError("the column of the labels has no values", path=table.source, column=label)
    labels = find_labels(table, label, kind)
    if len(table) > 2 and len(labels.values) == len(table) and options.label is None:
        raise DataError(
            f"another label in each of {len(table)} rows", path=table.source, column=label,
            expected="classes with several texts each", fix="name the column of the labels with --text.label",
        )  # fmt: skip
    return Samples(
        samples.source, options, samples.texts, samples.names, labels=labels,
        codes=labels.codes(table, label).astype(np.int64), label=label,
        label_position=table.positions[label], column=samples.column, notes=samples.notes,
    )  # fmt: skip
