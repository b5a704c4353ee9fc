"""The one call that recipes use, and the preparation that it leaves for predict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from quire.data import load_table
from quire.data.images import (
    ImagePreparation,
    fingerprint,
    load_images,
    load_scenes,
)
from quire.data.images.builtin import SCENE_COUNT, digit_scenes
from quire.data.images.preparation import channel_moments
from quire.data.reading import read_preparation
from quire.errors import DataError, InputError
from quire.options import Images, Scenes
from tests.data.images.making import class_folders, idx_files, noise, save, voc_set

SPLITS = ("train", "validation", "test")


# -- Shape and statistics ------------------------------------------------------------------------------


def test_size_and_colour_that_all_share(tmp_path: Path) -> None:
    class_folders(tmp_path / "same", {"a": 3, "b": 3}, side=6, channels=1)
    data = load_images(tmp_path / "same")
    assert (data.preparation.size, data.preparation.channels) == ((6, 6), 1)
    assert "brought to" not in str(data.warnings)
    assert data.train.inputs.dtype == torch.uint8
    save(tmp_path / "same" / "a" / "wide.png", noise(8, 6))
    data = load_images(tmp_path / "same")
    assert (data.preparation.size, data.preparation.channels) == ((224, 224), 3)
    assert "images of 6 × 6 to 8 × 6 pixels are brought to 224 × 224" in data.warnings[0]
    data = load_images(tmp_path / "same", Images(size=5, colour="grey"))
    assert data.train.inputs.shape[1:] == (1, 5, 5)
    assert "brought to" not in str(data.warnings)
    for i in range(6):
        save(tmp_path / "large" / "ab"[i % 2] / f"{i}.png", noise(225, 100, seed=i))
        save(tmp_path / "flat" / "ab"[i % 2] / f"{i}.png", noise(20, 10, seed=i))
    assert load_images(tmp_path / "large").preparation.size == (224, 224)
    assert load_images(tmp_path / "flat").preparation.size == (10, 20)


def test_statistics_are_those_of_the_training_images(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 8, "b": 8})
    preparation = (data := load_images(tmp_path)).preparation
    pixels = data.train.inputs.double()
    torch.testing.assert_close(torch.tensor(preparation.mean).double(), pixels.mean((0, 2, 3)))
    torch.testing.assert_close(torch.tensor(preparation.std).double(), pixels.std((0, 2, 3), correction=0))


def test_constant_channels_do_not_divide_by_nothing() -> None:
    flat = torch.full((4, 3, 5, 5), 77, dtype=torch.uint8)
    assert channel_moments([flat, flat[:1]]) == ((77.0,) * 3, (1.0,) * 3)
    flat[0, 0, 0, 0] = 78
    assert channel_moments([flat])[1] == (1.0,) * 3


def test_an_older_preparation_is_taken_over(tmp_path: Path) -> None:
    older = load_images("digits", Images(size=5)).preparation
    class_folders(tmp_path, {"a": 6, "b": 6, "c": 6})
    data = load_images(tmp_path, like=older)
    assert data.train.inputs.shape[1:] == (1, 5, 5)
    assert (data.preparation.mean, data.preparation.std) == (older.mean, older.std)
    assert data.classes == ["a", "b", "c"]


# -- Parts ---------------------------------------------------------------------------------------------


def test_parts_are_stratified_and_seeded(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 20, "b": 40})
    options = Images(validation=0.1, test=0.2)
    first, again, other = (load_images(tmp_path, options, seed=seed) for seed in (0, 0, 1))
    counts = [getattr(first, split).target.bincount().tolist() for split in SPLITS]
    assert counts == [[14, 28], [2, 4], [4, 8]]
    assert first.lines("test").tolist() == again.lines("test").tolist()
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert first.lines("test").tolist() != other.lines("test").tolist()
    names = [name for split in SPLITS for name in first.lines(split)]
    assert len(set(names)) == 60
    for split in SPLITS:
        part = getattr(first, split)
        classes = first.preparation.decode_classes(part.target)
        assert [name.split("/")[0] for name in first.lines(split)] == classes


def test_own_parts_are_kept_and_others_taken_from_training(tmp_path: Path) -> None:
    class_folders(tmp_path, {"train/a": 10, "train/b": 10, "test/a": 2, "test/b": 1})
    data = load_images(tmp_path, Images(validation=0.2, test=0.5))
    assert [len(getattr(data, split)) for split in SPLITS] == [16, 4, 3]
    assert all(name.startswith("test/") for name in data.lines("test"))
    assert all(name.startswith("train/") for name in data.lines("validation"))
    data = load_images(tmp_path, Images(validation=0))
    assert data.validation is None
    assert data.lines("validation").tolist() == []
    class_folders(tmp_path, {"val/a": 1})
    data = load_images(tmp_path)
    assert [len(getattr(data, split)) for split in SPLITS] == [20, 1, 3]


def test_parts_that_cannot_be(tmp_path: Path) -> None:
    class_folders(tmp_path / "few", {"a": 1, "b": 1})
    with pytest.raises(DataError, match=r"2 images for 3 parts .*\n.*\n  fix: .*--images\.validation"):
        load_images(tmp_path / "few")
    class_folders(tmp_path / "one", {"photos": 5})
    with pytest.raises(DataError, match=r"one class only: 'photos'\n  expected: at least two\n  fix: give"):
        load_images(tmp_path / "one")
    class_folders(tmp_path / "none", {"test/a": 5, "val/b": 5})
    with pytest.raises(DataError, match="parts 'test' and 'validation', but no training part"):
        load_images(tmp_path / "none")
    class_folders(tmp_path / "new", {"train/a": 4, "train/b": 4, "test/c": 1})
    with pytest.raises(DataError, match="no training image of class 'c'"):
        load_images(tmp_path / "new")
    class_folders(tmp_path / "plain", {".": 3})
    with pytest.raises(DataError, match="images without classes") as caught:
        load_images(tmp_path / "plain")
    assert "one sub-folder for each class" in caught.value.expected


def test_a_class_with_one_image_is_noted(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 10, "b": 10, "rare": 1})
    data = load_images(tmp_path)
    assert data.warnings == ("one training image only of class 'rare'",)
    assert 2 in data.train.target


def test_images_in_two_parts_are_counted(tmp_path: Path) -> None:
    class_folders(tmp_path, {"train/a": 3, "train/b": 3, "test/a": 2})
    copy = tmp_path / "test" / "a" / "copy.png"
    copy.write_bytes((tmp_path / "train" / "a" / "001.png").read_bytes())
    data = load_images(tmp_path, Images(validation=0))
    assert data.warnings == (
        "1 test image also in another part, pixel for pixel: test/a/copy.png is train/a/001.png",
    )


# -- Preparation ---------------------------------------------------------------------------------------


def test_preparation_survives_json(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 6, "b": 6})
    for preparation in (
        load_images(tmp_path).preparation,
        load_images("digits").preparation,
        load_scenes("digit-scenes").preparation,
    ):
        entry = json.loads(json.dumps(preparation.to_json()))
        assert entry["format"] == "quire.images"
        assert ImagePreparation.from_json(entry) == preparation
        assert read_preparation(entry) == preparation
    table = load_table("iris").preparation
    assert read_preparation(json.loads(json.dumps(table.to_json()))) == table
    assert preparation.feature_names == []


@pytest.mark.parametrize(
    "change",
    [
        {"size": [8]}, {"size": [8, 0]}, {"size": [8, "8"]}, {"channels": 2}, {"mean": []},
        {"std": [0.0]}, {"std": [float("nan")]}, {"fit": "zoom"}, {"boxes": 1},
        {"targets": [], "boxes": True},
        {"targets": 3},
    ],
)  # fmt: skip
def test_damaged_preparation(change: dict[str, Any]) -> None:
    entry = load_images("digits").preparation.to_json()
    with pytest.raises(InputError, match="a damaged preparation"):
        ImagePreparation.from_json({**entry, **change})


def test_preparation_of_another_version() -> None:
    entry = load_images("digits").preparation.to_json()
    with pytest.raises(InputError, match=r"format 'quire\.images', version 2\n.*version 1"):
        ImagePreparation.from_json({**entry, "version": 2})
    with pytest.raises(InputError, match="format 'other'"):
        read_preparation({**entry, "format": "other"})


def test_predict_and_evaluate_take_new_images(tmp_path: Path) -> None:
    class_folders(tmp_path / "train", {"a": 6, "b": 6, "c": 6}, side=9)
    preparation = load_images(tmp_path / "train").preparation
    # other files, other size, one class fewer, another order
    class_folders(tmp_path / "new", {"c": 2, "b": 1}, side=18, seed=50)
    prepared = preparation.transform(preparation.read(tmp_path / "new"), need_target=True)
    assert prepared.data.fields["target"].tolist() == [1, 2, 2]
    assert prepared.lines.tolist() == ["b/000.png", "c/000.png", "c/001.png"]
    plain = preparation.transform(preparation.read(tmp_path / "new"))
    assert list(plain.data.fields) == ["inputs"]
    assert plain.data.inputs.shape == (3, 3, 9, 9)
    assert torch.equal(plain.data.inputs, prepared.data.inputs)
    one = preparation.transform(preparation.read(tmp_path / "new" / "c" / "001.png"))
    assert torch.equal(one.data.inputs, plain.data.inputs[2:])
    class_folders(tmp_path / "new", {"d": 1})
    unknown = preparation.read(tmp_path / "new")
    assert len(preparation.transform(unknown).data) == 4
    message = r"a class that was not in training, such as d/000\.png \(value 'd'\)\n.* one of a, b, c"
    with pytest.raises(DataError, match=message):
        preparation.transform(unknown, need_target=True)
    with pytest.raises(DataError, match="images without classes"):
        preparation.transform(preparation.read(tmp_path / "new" / "c"), need_target=True)


def test_training_images_come_out_the_same_at_predict(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 6, "b": 6}, side=9)
    data = load_images(tmp_path, Images(size=7))
    again = data.preparation.transform(data.preparation.read(tmp_path), need_target=True)
    rows = {name: row for row, name in enumerate(again.lines)}
    where = torch.tensor([rows[name] for name in data.lines("test")])
    assert torch.equal(again.data.inputs[where], data.test.inputs)
    assert torch.equal(again.data.fields["target"][where], data.test.target)


def test_labels_match_across_formats(tmp_path: Path) -> None:
    """7 of an IDX file is "7" of a folder."""
    images = np.random.default_rng(0).integers(0, 256, (12, 6, 6))
    idx_files(tmp_path / "idx", "train", images, np.array([3, 7] * 6))
    preparation = load_images(tmp_path / "idx").preparation
    class_folders(tmp_path / "folders", {"7": 1, "3": 1})
    prepared = preparation.transform(preparation.read(tmp_path / "folders"), need_target=True)
    assert preparation.decode_classes(prepared.data.fields["target"]) == [3, 7]


def test_scenes_at_predict_and_evaluate(tmp_path: Path) -> None:
    voc_set(tmp_path / "a", {str(i): [("cat", 1, 1, 5, 5), ("dog", 2, 2, 9, 9)] for i in range(9)})
    preparation = load_scenes(tmp_path / "a", Scenes(size=8)).preparation
    voc_set(tmp_path / "b", {"new": [("dog", 1, 1, 10, 15)], "none": []}, width=20)
    prepared = preparation.transform(preparation.read(tmp_path / "b"), need_target=True)
    assert prepared.data.fields["target.labels"].tolist() == [[1], [-1]]
    assert prepared.data.fields["target.boxes"][0, 0].tolist() == [0, 0, 0.5, 0.5]
    assert prepared.notes == ("1 image without boxes, kept as background: JPEGImages/none.png",)
    plain = preparation.transform(preparation.read(tmp_path / "b" / "JPEGImages"))
    assert list(plain.data.fields) == ["inputs", "target.extent"]
    assert plain.data.fields["target.extent"].tolist() == [[20, 30], [20, 30]]
    with pytest.raises(DataError, match="images without annotations"):
        preparation.transform(preparation.read(tmp_path / "b" / "JPEGImages"), need_target=True)
    voc_set(tmp_path / "c", {"new": [("ox", 1, 1, 10, 15)]})
    with pytest.raises(DataError, match=r"a class that was not in training \(value 'ox'\)"):
        preparation.transform(preparation.read(tmp_path / "c"), need_target=True)


# -- Built-in sets -------------------------------------------------------------------------------------


def test_digits_are_those_of_scikit_learn() -> None:
    data = load_images("digits", Images(validation=0, test=0))
    truth = load_digits()
    assert data.train.inputs.shape == (1797, 1, 8, 8)
    assert np.abs(data.train.inputs[:, 0].numpy() - truth.images * 255 / 16).max() <= 0.5
    assert (data.train.target.numpy() == truth.target).all()
    assert (data.classes, data.source) == (list(range(10)), "digits (built in)")
    assert load_images("digits").lines("test")[0].startswith("digit ")


def test_digit_scenes() -> None:
    data = load_scenes("digit-scenes")
    assert [len(getattr(data, split)) for split in SPLITS] == [840, 180, 180]
    assert sum(len(getattr(data, split)) for split in SPLITS) == SCENE_COUNT
    assert data.train.inputs.shape[1:] == (1, 64, 64)
    assert data.warnings == ()
    for split in SPLITS:
        fields = getattr(data, split).fields
        there = fields["target.labels"] >= 0
        assert set(there.sum(1).tolist()) == {1, 2, 3, 4}
        assert set(fields["target.labels"][there].tolist()) == set(range(10))
        boxes = fields["target.boxes"][there] * 64
        assert (boxes == boxes.round()).all()
        sides = boxes[:, 2:] - boxes[:, :2]
        assert sides[:, 1].min() >= 10
        assert sides.max() <= 28
        assert boxes.min() >= 0
        assert boxes.max() <= 64
    again = load_scenes("digit-scenes", seed=9)
    assert torch.equal(again.train.inputs, data.train.inputs)


def test_digit_boxes_are_tight_and_hardly_overlap() -> None:
    """Ink stands out of the ground in each outer row and column of a box, and not outside of all boxes."""
    data = load_scenes(digit_scenes(Scenes(), count=60, side=80))
    fields = data.train.fields
    bright = []
    for image, boxes, labels in zip(
        fields["inputs"][:, 0].float(), fields["target.boxes"], fields["target.labels"], strict=True
    ):
        corners = (boxes[labels >= 0] * 80).round().int().tolist()
        outside = torch.ones(80, 80, dtype=torch.bool)
        for x1, y1, x2, y2 in corners:
            outside[y1 - 4 if y1 > 3 else 0 : y2 + 4, x1 - 4 if x1 > 3 else 0 : x2 + 4] = False
        ground, spread = image[outside].mean(), image[outside].std()
        assert image[outside].max() < ground + 6 * spread + 1
        for number, (x1, y1, x2, y2) in enumerate(corners):
            inner = image[y1:y2, x1:x2]
            edges = (inner[0], inner[-1], inner[:, 0], inner[:, -1])
            bright += [bool(edge.max() > ground + 1.5 * spread) for edge in edges]
            for u1, v1, u2, v2 in corners[:number]:
                shared = max(0, min(x2, u2) - max(x1, u1)) * max(0, min(y2, v2) - max(y1, v1))
                assert shared <= 0.1 * min((x2 - x1) * (y2 - y1), (u2 - u1) * (v2 - v1))
    assert np.mean(bright) > 0.95


def test_digits_of_the_parts_are_disjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    import quire.data.images.builtin as home

    drawn: list[set[int]] = []
    make = home._make_scene

    def watch(images: Any, rows: np.ndarray, side: int, generator: Any) -> Any:
        scene, placed = make(images, rows, side, generator)
        drawn.append({row for row, _ in placed})
        return scene, placed

    monkeypatch.setattr(home, "_make_scene", watch)
    source = digit_scenes(Scenes(), count=300)
    used = {
        part: set().union(*[rows for rows, own in zip(drawn, source.parts, strict=True) if own == part])
        for part in SPLITS
    }
    assert all(used.values())
    assert not used["train"] & used["validation"]
    assert not used["train"] & used["test"]
    assert not used["validation"] & used["test"]


# -- Fingerprint ---------------------------------------------------------------------------------------


def test_fingerprint_of_files_and_folders(tmp_path: Path) -> None:
    import hashlib

    file = tmp_path / "set" / "b.txt"
    file.parent.mkdir()
    file.write_bytes(b"hello")
    assert fingerprint(file) == hashlib.sha256(b"hello").hexdigest()
    save(tmp_path / "set" / "a" / "a.png", noise(4, 4))
    first = fingerprint(tmp_path / "set")
    assert first == fingerprint(str(tmp_path / "set"))
    file.write_bytes(b"hellO")
    second = fingerprint(tmp_path / "set")
    file.rename(tmp_path / "set" / "c.txt")
    assert len({first, second, fingerprint(tmp_path / "set")}) == 3
    with pytest.raises(DataError, match="nothing: cannot be read: No such file"):
        fingerprint(tmp_path / "nothing")


def test_large_folders_count_by_their_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import quire.data.images.hashing as home

    monkeypatch.setattr(home, "WHOLE_FOLDER", 10_000)
    image, notes = tmp_path / "a.png", tmp_path / "notes.txt"
    content = bytearray(20_000)
    image.write_bytes(content)
    notes.write_bytes(content)
    first = fingerprint(tmp_path)
    content[10_000] = 1
    image.write_bytes(content)
    assert fingerprint(tmp_path) == first  # the middle of an image does not count there
    notes.write_bytes(content)
    assert fingerprint(tmp_path) != first
    notes.write_bytes(bytes(20_000))
    for place in (0, 19_999):
        changed = bytearray(20_000)
        changed[place] = 1
        image.write_bytes(changed)
        assert fingerprint(tmp_path) != first


def test_options_are_not_lost(tmp_path: Path) -> None:
    """What a run was read with is how new images are read."""
    class_folders(tmp_path, {"a": 6, "b": 6})
    preparation = load_images(tmp_path).preparation
    (tmp_path / "a" / "broken.png").write_bytes(b"")
    with pytest.raises(DataError, match="an empty file"):
        preparation.transform(preparation.read(tmp_path))
    prepared = preparation.transform(preparation.read(tmp_path, Images(broken="skip")))
    assert len(prepared.data) == 12
