"""What is given as data may be a device, which has no end, or a pipe, which nobody writes to."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from quire.data import read_table
from quire.data.images.hashing import fingerprint
from quire.data.images.recognise import open_images, open_scenes
from quire.data.streamed import open_rows
from quire.data.text import load_corpus
from quire.data.text.labelled import open_labelled
from quire.data.text.pairs import open_pairs
from quire.errors import DataError
from quire.options import Images, Scenes, Text

pytestmark = pytest.mark.timeout(20)
ENDLESS: dict[str, Callable[[Path], None]] = {
    "device": lambda path: path.symlink_to("/dev/null"),
    "pipe": os.mkfifo,
}
"""Of devices one that would not fill the memory where it is read after all."""
IDX = bytes([0, 0, 8, 3]) + struct.pack(">III", 2, 4, 4) + bytes(32)
READERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "CSV": (read_table, "table.csv"),
    "JSON lines": (read_table, "table.jsonl"),
    "NumPy": (read_table, "table.npy"),
    "NumPy's archive": (read_table, "table.npz"),
    "Parquet": (read_table, "table.parquet"),
    "rows of NumPy": (open_rows, "table.npy"),
    "rows of Parquet": (open_rows, "table.parquet"),
    "text": (lambda path: load_corpus(path, Text(context=8)), "text.txt"),
    "text in a folder": (lambda path: load_corpus(path.parent, Text(context=8)), "text/text.txt"),
    "pairs": (lambda path: open_pairs(path, Text()), "pairs.tsv"),
    "labelled texts": (lambda path: open_labelled(path, Text()), "labels.csv"),
    "labelled texts in folders": (lambda path: open_labelled(path.parents[1], Text()), "set/a/text.txt"),
    "IDX": (lambda path: open_images(path, Images()), "train-images-idx3-ubyte"),
    "IDX in gzip": (lambda path: open_images(path, Images()), "train-images-idx3-ubyte.gz"),
    "IDX by its content": (lambda path: open_images(path, Images()), "pixels"),
    "IDX of labels": (lambda path: open_images(path.parent, Images()), "idx/train-labels-idx1-ubyte"),
    "CIFAR": (lambda path: open_images(path, Images()), "data_batch_1.bin"),
    "VOC": (lambda path: open_scenes(path.parents[1], Scenes()), "voc/Annotations/0.xml"),
    "COCO": (lambda path: open_scenes(path.parents[1], Scenes()), "coco/annotations/instances_train.json"),
    "fingerprint": (fingerprint, "table.csv"),
    "fingerprint of a folder": (lambda path: fingerprint(path.parent), "table.csv"),
}


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("name", READERS)
def test_devices_and_pipes_are_refused_by_their_name(name: str, kind: str, tmp_path: Path) -> None:
    read, place = READERS[name]
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    if name == "VOC":
        (tmp_path / "voc" / "JPEGImages").mkdir()
        Image.new("L", (8, 8)).save(tmp_path / "voc" / "JPEGImages" / "0.png")
    if name == "IDX of labels":
        (path.parent / "train-images-idx3-ubyte").write_bytes(IDX)
    ENDLESS[kind](path)
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: cannot be read: a device or a pipe")


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("ending", ["json", "bin"])
def test_tokens_that_are_no_files_are_made_again(ending: str, kind: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sees water. " * 40)
    options = Text(context=8, memory=1e-9)
    first = load_corpus(text, options)
    (path,) = (tmp_path / "text.txt.tokens").glob(f"*.{ending}")
    description = path.with_suffix(".json")
    if ending == "bin":
        description.write_text(json.dumps({**json.loads(description.read_text()), "counts": {"train": 0}}))
    path.unlink()
    ENDLESS[kind](path)
    rows = torch.arange(len(first.train))
    assert load_corpus(text, options).train.take(rows).inputs.equal(first.train.take(rows).inputs)
    assert path.is_file()
    assert not path.is_symlink()


@pytest.mark.parametrize("place", ["idx/train-images-idx3-ubyte", "cifar/data_batch_1.bin"])
def test_folders_that_are_named_like_files(place: str, tmp_path: Path) -> None:
    (tmp_path / place).mkdir(parents=True)
    with pytest.raises(DataError, match=f"{place}: cannot be read: Is a directory"):
        open_images((tmp_path / place).parent, Images())
