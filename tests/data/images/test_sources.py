"""Folders, IDX and CIFAR files: what is recognised, and what is wrong with the rest."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from quire.data.images import open_images, open_scenes
from quire.data.images.decode import Shape
from quire.data.images.source import ImageSource
from quire.errors import DataError
from quire.options import Images, Scenes
from tests.data.images.making import class_folders, idx_bytes, idx_files, noise, save, voc_set, write_json

OPTIONS = Images()
MNIST = Path(__file__).parents[4] / "shared" / "data" / "mnist"


def shown(source: ImageSource, row: int, side: int, channels: int) -> np.ndarray:
    return source.pixels.read(row, Shape(side, side, channels, "crop"))


# -- Folders -------------------------------------------------------------------------------------------


def test_one_folder_a_class(tmp_path: Path) -> None:
    class_folders(tmp_path, {"dog": 2, "cat/indoors": 1, "cat": 1})
    (tmp_path / "cat" / "notes.txt").write_text("nothing")
    (tmp_path / "cat" / ".hidden.png").write_text("nothing")
    (tmp_path / ".cache").mkdir()
    source = open_images(tmp_path, OPTIONS)
    assert source.labels.values == ("cat", "dog")
    assert source.names.tolist() == ["cat/000.png", "cat/indoors/000.png", "dog/000.png", "dog/001.png"]
    assert source.codes.tolist() == [0, 0, 1, 1]
    assert source.parts is None
    assert source.notes == ("2 files other than images, ignored: cat/.hidden.png; cat/notes.txt",)
    assert (shown(source, 2, 6, 3) == noise(6, 6, seed=1).transpose(2, 0, 1)).all()


@pytest.mark.parametrize("validation", ["val", "valid", "Validation"])
def test_parts_as_folders(tmp_path: Path, validation: str) -> None:
    class_folders(tmp_path, {"train/a": 3, "train/b": 2, f"{validation}/a": 1, "test/b": 2, "extra/c": 1})
    source = open_images(tmp_path, OPTIONS)
    assert source.labels.values == ("a", "b")
    counts = {part: int((source.parts == part).sum()) for part in ("train", "validation", "test")}
    assert counts == {"train": 5, "validation": 1, "test": 2}
    assert all(name.startswith("test/b/") for name in source.names[source.parts == "test"])
    assert source.notes == ("folders beside the parts are ignored: extra",)


def test_classes_may_be_called_train_and_test(tmp_path: Path) -> None:
    source = open_images(class_folders(tmp_path, {"train": 2, "test": 2}), OPTIONS)
    assert source.labels.values == ("test", "train")
    assert source.parts is None


def test_two_folders_for_one_part(tmp_path: Path) -> None:
    class_folders(tmp_path, {"train/a": 1, "val/a": 1, "valid/a": 1})
    with pytest.raises(DataError, match="two folders for one part: train, val, valid"):
        open_images(tmp_path, OPTIONS)


def test_empty_class_folder(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 1, "b": 1})
    (tmp_path / "c").mkdir()
    with pytest.raises(DataError, match=r"c: a class folder without images\n.*\n  fix: add images to it"):
        open_images(tmp_path, OPTIONS)


def test_images_without_classes(tmp_path: Path) -> None:
    class_folders(tmp_path, {".": 2, "more": 1})
    source = open_images(tmp_path, OPTIONS)
    assert source.codes is None
    assert source.names.tolist() == ["000.png", "001.png", "more/000.png"]
    one = open_images(tmp_path / "001.png", OPTIONS)
    assert one.names.tolist() == ["001.png"]
    assert (shown(one, 0, 6, 3) == shown(source, 1, 6, 3)).all()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="a folder without images"):
        open_images(tmp_path / "empty", OPTIONS)


# -- IDX -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("dot", ["-", "."])
@pytest.mark.parametrize(("prefix", "test"), [("", "t10k"), ("emnist-letters-", "test")])
def test_idx_folder(tmp_path: Path, zipped: bool, dot: str, prefix: str, test: str) -> None:
    train, held_out = np.arange(60).reshape(5, 4, 3), np.arange(100, 124).reshape(2, 4, 3)
    idx_files(tmp_path, f"{prefix}train", train, np.array([3, 7, 7, 3, 9]), dot=dot, zipped=zipped)
    idx_files(tmp_path, f"{prefix}{test}", held_out, np.array([9, 3]), dot=dot, zipped=zipped)
    source = open_images(tmp_path, OPTIONS)
    assert source.labels.values == (3, 7, 9)
    of = {part: source.codes[source.parts == part].tolist() for part in ("train", "test")}
    assert of == {"train": [0, 1, 1, 0, 2], "test": [2, 0]}
    row = source.names.tolist().index(f"{prefix}{test}-images 2")
    assert (source.pixels.read(row, Shape(4, 3, 1, "crop"))[0] == held_out[1]).all()


def test_single_idx_file_with_and_without_labels(tmp_path: Path) -> None:
    idx_files(tmp_path, "train", np.zeros((3, 2, 2)), np.array([1, 0, 1]))
    source = open_images(tmp_path / "train-images-idx3-ubyte", OPTIONS)
    assert source.codes.tolist() == [1, 0, 1]
    assert source.parts is None
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    assert open_images(tmp_path / "train-images-idx3-ubyte", OPTIONS).codes is None
    (tmp_path / "any.bytes").write_bytes(idx_bytes(np.zeros((3, 2, 2))))
    assert open_images(tmp_path / "any.bytes", OPTIONS).codes is None


def damaged(tmp_path: Path, content: bytes, *, zipped: bool = False) -> str:
    folder = idx_files(tmp_path / "set", "train", np.ones((2, 2, 3)), np.array([0, 1]))
    path = folder / "train-images-idx3-ubyte"
    if zipped:
        path.unlink()
        path = path.with_suffix(".gz")
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_images(folder, OPTIONS)
    assert str(caught.value).startswith(str(path))
    return str(caught.value)


def test_idx_files_are_checked_to_the_last_byte(tmp_path: Path) -> None:
    good = idx_bytes(np.ones((2, 2, 3)))
    assert "the file ends at byte 26\n  expected: 28 bytes for 2 × 2 × 3 values" in damaged(
        tmp_path / "a", good[:-2]
    )
    assert "more bytes after the last value, from byte 28 on" in damaged(tmp_path / "b", good + b"\0")
    assert "the file ends at byte 7, inside its header" in damaged(tmp_path / "c", good[:7])
    text = damaged(tmp_path / "d", b"\0\0\x0d\x03" + good[4:])
    assert "it begins with the bytes 00 00 0d 03\n  expected: 00 00 08 03" in text
    huge = good[:4] + b"\xff\xff\xff\xff" * 3 + good[16:]
    assert "the file ends at byte 28" in damaged(tmp_path / "e", huge)
    assert "a file of no values" in damaged(tmp_path / "f", idx_bytes(np.ones((0, 2, 3))))
    assert "a file of no values" in damaged(tmp_path / "g", idx_bytes(np.ones((2, 0, 3))))


def test_compressed_idx_files_are_checked(tmp_path: Path) -> None:
    good = idx_bytes(noise(200, 100, 1)[None])
    packed = gzip.compress(good)
    assert "damaged after byte" in damaged(tmp_path / "a", packed[: len(packed) // 2], zipped=True)
    assert "damaged after byte" in damaged(tmp_path / "b", packed[:-8] + b"\0" * 8, zipped=True)
    assert "damaged after byte 0" in damaged(tmp_path / "c", b"no gzip at all", zipped=True)
    assert "from byte 20016 on" in damaged(tmp_path / "d", gzip.compress(good + b"!"), zipped=True)


def test_idx_files_that_do_not_belong_together(tmp_path: Path) -> None:
    folder = idx_files(tmp_path / "a", "train", np.ones((2, 2, 2)), np.array([0, 1, 1]))
    with pytest.raises(DataError, match=r"3 labels for the 2 images of train-images-idx3-ubyte"):
        open_images(folder, OPTIONS)
    folder = idx_files(tmp_path / "b", "train", np.ones((2, 2, 2)), np.array([0, 1]))
    idx_files(folder, "t10k", np.ones((1, 3, 2)), np.array([0]))
    with pytest.raises(DataError, match=r"images of different sizes: .*t10k-images-idx3-ubyte 2 × 3"):
        open_images(folder, OPTIONS)
    (folder / "t10k-labels-idx1-ubyte").unlink()
    idx_files(folder, "train", np.ones((2, 3, 2)), np.array([0, 1]))
    with pytest.raises(DataError, match="its labels are missing\n  expected: t10k-labels-idx1-ubyte beside"):
        open_images(folder, OPTIONS)
    idx_files(folder, "other-train", np.ones((2, 3, 2)), np.array([0, 1]))
    with pytest.raises(DataError, match="several sets in one folder: '', 'other-'"):
        open_images(folder, OPTIONS)


@pytest.mark.skipif(not MNIST.exists(), reason="the real set is not here")
def test_mnist_itself() -> None:
    source = open_images(MNIST, OPTIONS)
    assert (len(source), source.labels.values) == (70_000, tuple(range(10)))
    # the numbers of each digit in the training set, as published
    counts = np.bincount(source.codes[source.parts == "train"])
    assert counts.tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


# -- CIFAR ---------------------------------------------------------------------------------------------


def records(labels: np.ndarray, seed: int = 0) -> np.ndarray:
    """(N, bytes), from labels (N, 1) or (N, 2)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    return np.concatenate([labels.astype(np.uint8), pixels], 1)


def test_cifar_10(tmp_path: Path) -> None:
    first, second = records(np.array([[3], [9]]), 1), records(np.array([[0]]), 2)
    (tmp_path / "data_batch_1.bin").write_bytes(first.tobytes())
    (tmp_path / "data_batch_2.bin").write_bytes(second.tobytes())
    (tmp_path / "test_batch.bin").write_bytes(records(np.array([[5]]), 3).tobytes())
    source = open_images(tmp_path, OPTIONS)
    assert source.labels.values == tuple(range(10))
    assert source.codes.tolist() == [3, 9, 0, 5]
    assert source.parts.tolist() == ["train", "train", "train", "test"]
    assert source.names.tolist() == ["data_batch_1 1", "data_batch_1 2", "data_batch_2 1", "test_batch 1"]
    # the red plane first, row by row
    red = first[1, 1 : 1 + 1024].reshape(32, 32)
    assert (shown(source, 1, 32, 3)[0] == red).all()
    names = [f"kind{i}" for i in range(10)]
    (tmp_path / "batches.meta.txt").write_text("\n".join(names) + "\n\n")
    assert open_images(tmp_path, OPTIONS).labels.values == tuple(names)
    alone = open_images(tmp_path / "test_batch.bin", OPTIONS)
    assert (alone.codes.tolist(), alone.parts) == ([5], None)
    (tmp_path / "batches.meta.txt").write_text("a\na")
    with pytest.raises(DataError, match=r"2 names of classes\n  expected: 10 different names"):
        open_images(tmp_path, OPTIONS)


def test_cifar_100_has_fine_classes(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(records(np.array([[19, 99], [1, 0]])).tobytes())
    (tmp_path / "test.bin").write_bytes(records(np.array([[2, 7]])).tobytes())
    source = open_images(tmp_path, OPTIONS)
    assert (source.codes.tolist(), len(source.labels.values)) == ([99, 0, 7], 100)


def test_cifar_records_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1.bin"
    content = records(np.array([[1], [2]])).tobytes()
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"6145 bytes, of which the last whole record ends at byte 3073"):
        open_images(tmp_path, OPTIONS)
    path.write_bytes(records(np.array([[1], [10]])).tobytes())
    with pytest.raises(DataError, match=r"a class at byte 3073 \(value 10\)\n  expected: 0 to 9"):
        open_images(path, OPTIONS)


# -- Everything else -----------------------------------------------------------------------------------


def test_paths_that_are_nothing(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(DataError, match=r"no such file, folder or built-in set") as caught:
        open_images(tmp_path / "photo", OPTIONS)
    assert caught.value.fix == "did you mean 'photos'?"
    for kind in ("one sub-folder for each class", "IDX", "CIFAR-10", "built-in sets digits"):
        assert kind in caught.value.expected
    with pytest.raises(DataError, match="did you mean 'digits'"):
        open_images("digit", OPTIONS)
    with pytest.raises(DataError, match="did you mean 'digit-scenes'"):
        open_scenes("digit-scene", Scenes())
    (tmp_path / "table.csv").write_text("a,b\n")
    with pytest.raises(DataError, match=r"table\.csv: a file of kind '\.csv'\n  expected: a folder with one"):
        open_images(tmp_path / "table.csv", OPTIONS)


def test_annotated_images_are_for_detectors(tmp_path: Path) -> None:
    voc_set(tmp_path / "voc", {"a": [("x", 1, 1, 5, 5)]})
    write_json(tmp_path / "coco" / "annotations" / "instances_train.json", {})
    for name in ("voc", "coco"):
        with pytest.raises(DataError, match="images annotated with boxes") as caught:
            open_images(tmp_path / name, OPTIONS)
        assert "quire train ssd" in caught.value.fix


def test_folders_without_annotations_are_not_for_detectors(tmp_path: Path) -> None:
    save(tmp_path / "a.png", noise(4, 4))
    with pytest.raises(DataError, match="a folder without annotations") as caught:
        open_scenes(tmp_path, Scenes())
    assert "Pascal VOC" in caught.value.expected
    assert "COCO" in caught.value.expected
    assert len(open_scenes(tmp_path, Scenes(), plain=True)) == 1
