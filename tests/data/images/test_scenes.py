"""Pascal VOC and COCO: boxes, parts, and everything that can be wrong with annotations."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from quire.data.images import load_scenes
from quire.errors import DataError
from quire.options import Scenes
from tests.data.images.making import (
    annotation,
    coco_entry,
    noise,
    save,
    voc_set,
    voc_xml,
    write_json,
)

BCCD = Path(__file__).parents[4] / "shared" / "data" / "bccd"


def all_in_training(**more: Any) -> Scenes:
    return Scenes(validation=0, test=0, **more)


def pixel_boxes(data: Any, split: str = "train") -> dict[str, list[list[float]]]:
    """Boxes by image in pixels of the original, class number last."""
    part = getattr(data, split)
    fields = part.fields
    found = {}
    for row, name in enumerate(data.lines(split)):
        extent = fields["target.extent"][row].repeat(2)
        there = fields["target.labels"][row] >= 0
        corners = (fields["target.boxes"][row][there] * extent).round(decimals=3)
        labels = fields["target.labels"][row][there]
        found[Path(name).stem] = [
            [*box, label] for box, label in zip(corners.tolist(), labels.tolist(), strict=True)
        ]
    return found


# -- Pascal VOC ----------------------------------------------------------------------------------------


def test_voc_boxes_count_pixels_from_one(tmp_path: Path) -> None:
    """The first ten columns and rows, and the whole image."""
    voc_set(tmp_path, {"a": [("dog", 1, 1, 10, 10), ("cat", 1, 1, 40, 30)], "b": [("dog", 11.5, 3, 20, 9)]})
    data = load_scenes(tmp_path, all_in_training(size=8))
    assert data.classes == ["cat", "dog"]
    assert pixel_boxes(data) == {
        "a": [[0, 0, 10, 10, 1], [0, 0, 40, 30, 0]],
        "b": [[10.5, 2, 20, 9, 1]],
    }
    fields = data.train.fields
    assert {name: (value.dtype, tuple(value.shape)) for name, value in fields.items()} == {
        "inputs": (torch.uint8, (2, 3, 8, 8)),
        "target.boxes": (torch.float32, (2, 2, 4)),
        "target.labels": (torch.int64, (2, 2)),
        "target.crowd": (torch.bool, (2, 2)),
        "target.extent": (torch.float32, (2, 2)),
    }
    assert fields["target.boxes"][0, 0].tolist() == [0.0, 0.0, 0.25, pytest.approx(1 / 3)]
    assert fields["target.boxes"][1, 1].tolist() == [0.0] * 4
    assert fields["target.labels"].tolist() == [[1, 0], [1, -1]]
    assert fields["target.extent"].tolist() == [[40, 30], [40, 30]]
    stretched = Image.fromarray(noise(40, 30)).resize((8, 8), Image.Resampling.BILINEAR)
    assert (fields["inputs"][0].permute(1, 2, 0).numpy() == np.asarray(stretched)).all()
    assert data.preparation.boxes
    assert data.preparation.target.name == "object"


def test_voc_lists_are_the_parts(tmp_path: Path) -> None:
    one: list[Any] = [("x", 1, 1, 5, 5)]
    lists = {"train": ["b", "a"], "val": ["c"], "test": ["d"], "trainval": ["a", "b", "c"]}
    # one level down, with an image that no list has
    voc_set(tmp_path / "VOC2007", dict.fromkeys("abcde", one), lists)
    data = load_scenes(tmp_path)
    assert [Path(name).stem for name in data.lines("train")] == ["b", "a"]
    assert [Path(name).stem for name in data.lines("validation")] == ["c"]
    assert data.lines("test").tolist() == ["JPEGImages/d.png"]
    assert data.warnings == ("1 image in no list of ImageSets/Main, left out",)
    for part in ("train", "val"):
        (tmp_path / "VOC2007" / "ImageSets" / "Main" / f"{part}.txt").unlink()
    data = load_scenes(tmp_path, Scenes(validation=0.3))
    assert sorted([*data.lines("train"), *data.lines("validation")]) == [
        f"JPEGImages/{name}.png" for name in "abc"
    ]
    assert len(data.validation) == 1


def test_voc_lists_that_overlap_or_are_empty(tmp_path: Path) -> None:
    one: list[Any] = [("x", 1, 1, 5, 5)]
    voc_set(tmp_path, dict.fromkeys("ab", one), {"train": ["a", "b"], "test": ["", "b"]})
    with pytest.raises(DataError, match=r"test\.txt:2: an image that is listed twice \(value 'b'\)"):
        load_scenes(tmp_path)
    (tmp_path / "ImageSets" / "Main" / "test.txt").write_text("\n")
    with pytest.raises(DataError, match=r"test\.txt: an empty list of images"):
        load_scenes(tmp_path)


def test_several_voc_sets(tmp_path: Path) -> None:
    for year in ("VOC2007", "VOC2012"):
        voc_set(tmp_path / year, {"a": []})
    with pytest.raises(DataError, match="several sets of Pascal VOC: VOC2007, VOC2012"):
        load_scenes(tmp_path)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("<annotation>\n<object>\n</annotation>", 3, r"not well-formed XML \(mismatched tag"),
        ('<!DOCTYPE a [<!ENTITY b "c">]>\n<annotation>&b;</annotation>', 1, "a document type"),
        ("<?xml version='1.0'?>\n<html></html>", 2, "an element <html>"),
        ("", 1, r"not well-formed XML \(no element found"),
        ("<annotation>\n" + "<a>" * 200 + "</a>" * 200 + "</annotation>", 2, "elements nested too deeply"),
    ],
)
def test_bad_xml_is_named_with_its_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    voc_set(tmp_path, {"a": []})
    (tmp_path / "Annotations" / "a.xml").write_text(text)
    with pytest.raises(DataError, match=rf"a\.xml:{line}: {message}"):
        load_scenes(tmp_path, all_in_training())


FAULTY: list[Any] = [
    ("x", 2, 3, 20, 20),  # nothing wrong
    ("x", 7, 7, 7, 20),  # no area
    ("x", 20, 5, 10, 8),  # reversed
    ("x", 30, 1, 45, 10),  # out of the image, 40 wide
    ("x", 50, 1, 60, 10),  # nowhere in the image
    ("x", "nan", 1, 6, 10),
    ("x", "wide", 1, 6, 10),
    ("", 1, 1, 6, 10),
]


def test_faulty_boxes_are_refused(tmp_path: Path) -> None:
    voc_set(tmp_path, {"a": FAULTY})
    with pytest.raises(DataError) as caught:
        load_scenes(tmp_path, all_in_training())
    file = tmp_path / "Annotations" / "a.xml"
    assert str(caught.value) == (
        f"{tmp_path}: 7 faulty boxes: no area at {file}:4 (7, 7, 7, 20); corners in the wrong order at "
        f"{file}:5 (20, 5, 10, 8); outside its image at {file}:6 (30, 1, 45, 10); and 4 more\n"
        "  expected: boxes of a known class, with an area, inside their image\n"
        "  fix: correct them, or use --images.boxes skip to leave them out, or repair to order corners and "
        "cut at the border"
    )


def test_faulty_boxes_are_left_out(tmp_path: Path) -> None:
    voc_set(tmp_path, {"a": FAULTY})
    data = load_scenes(tmp_path, all_in_training(boxes="skip"))
    assert pixel_boxes(data) == {"a": [[1, 2, 20, 20, 0]]}
    assert data.warnings[0].startswith("7 faulty boxes, left out: no area at")
    assert data.warnings[0].endswith("; and 4 more")


def test_faulty_boxes_are_repaired(tmp_path: Path) -> None:
    voc_set(tmp_path, {"a": FAULTY})
    data = load_scenes(tmp_path, all_in_training(boxes="repair"))
    # the reversed one has its first pixel at 10 and its last at 20; the other is cut at 40
    assert pixel_boxes(data) == {"a": [[1, 2, 20, 20, 0], [9, 4, 20, 8, 0], [29, 0, 40, 10, 0]]}
    repaired, lost = data.warnings[:2]
    assert repaired.startswith("2 faulty boxes, repaired: corners in the wrong order at ")
    assert lost.startswith("5 faulty boxes, left out: no area at ")


def test_half_a_pixel_is_rounding(tmp_path: Path) -> None:
    voc_set(tmp_path, {"a": [("x", 0.6, 1, 40.4, 30)]})
    assert pixel_boxes(load_scenes(tmp_path, all_in_training())) == {"a": [[0, 0, 40, 30, 0]]}
    root = coco_folder(tmp_path / "rim", [annotation(1, 7, 4, [40.1, 0, 0.3, 10])])
    with pytest.raises(DataError, match="1 faulty box: no area"):  # nothing of it is inside
        load_scenes(root)


def test_missing_annotation_files(tmp_path: Path) -> None:
    voc_set(tmp_path, {"a": [("x", 1, 1, 5, 5)], "b": [("x", 1, 1, 5, 5)]})
    gone = tmp_path / "Annotations" / "b.xml"
    gone.unlink()
    with pytest.raises(DataError, match=r"1 image without annotation file: .*b\.xml") as caught:
        load_scenes(tmp_path, all_in_training())
    assert "--images.missing skip" in caught.value.fix
    data = load_scenes(tmp_path, all_in_training(missing="skip"))
    assert data.lines("train").tolist() == ["JPEGImages/a.png"]
    assert data.warnings[0] == f"1 image without annotation file, left out: {gone}"
    data = load_scenes(tmp_path, all_in_training(missing="empty"))
    assert pixel_boxes(data) == {"a": [[0, 0, 5, 5, 0]], "b": []}
    assert data.warnings[0] == f"1 image without annotation file, taken as without objects: {gone}"


def test_missing_images(tmp_path: Path) -> None:
    voc_set(tmp_path, {"a": [("x", 1, 1, 5, 5)], "b": [("x", 1, 1, 5, 5)]})
    (tmp_path / "JPEGImages" / "b.png").unlink()
    with pytest.raises(DataError, match=r"b\.jpg: no such image") as caught:
        load_scenes(tmp_path, all_in_training())
    assert "--images.broken skip" in caught.value.fix
    data = load_scenes(tmp_path, all_in_training(broken="skip"))
    assert data.lines("train").tolist() == ["JPEGImages/a.png"]
    assert data.warnings[0].startswith("1 of 2 images unusable, left out: ")


def test_images_without_boxes(tmp_path: Path) -> None:
    voc_set(tmp_path, {"a": [], "b": [("x", 1, 1, 5, 5), ("y", 2, 2, 5, 5)], "c": [("y", 1, 1, 5, 5)]})
    data = load_scenes(tmp_path, all_in_training())
    assert pixel_boxes(data)["a"] == []
    assert data.warnings[0] == "1 image without boxes, kept as background: JPEGImages/a.png"
    data = load_scenes(tmp_path, all_in_training(empty="skip"))
    assert pixel_boxes(data) == {"b": [[0, 0, 5, 5, 0], [1, 1, 5, 5, 1]], "c": [[0, 0, 5, 5, 1]]}
    assert data.warnings[0] == "1 image without boxes, left out: JPEGImages/a.png"
    with pytest.raises(DataError, match=r"1 image without boxes: JPEGImages/a\.png") as caught:
        load_scenes(tmp_path, all_in_training(empty="refuse"))
    assert "--images.empty keep" in caught.value.fix


def test_difficult_objects_are_crowds(tmp_path: Path) -> None:
    voc_set(tmp_path, {"a": [("x", 1, 1, 5, 5)], "b": []})
    (tmp_path / "Annotations" / "b.xml").write_text(voc_xml([("x", 1, 1, 9, 9)], difficult=True))
    data = load_scenes(tmp_path, all_in_training())
    assert data.train.fields["target.crowd"].tolist() == [[False], [True]]
    data = load_scenes(tmp_path, all_in_training(crowd="skip"))
    assert pixel_boxes(data) == {"a": [[0, 0, 5, 5, 0]], "b": []}
    assert data.warnings[0] == "1 box marked as crowd or difficult, left out"


def test_orientation_follows_the_annotations(tmp_path: Path) -> None:
    """An image stored lying, 40 × 30, that a viewer shows standing, 30 × 40."""
    stored = noise(40, 30)
    exif = Image.Exif()
    exif[0x0112] = 6
    for name, size in (("stored", (40, 30)), ("shown", (30, 40)), ("silent", None)):
        save(tmp_path / "JPEGImages" / f"{name}.png", stored, exif=exif)
        (tmp_path / "Annotations").mkdir(exist_ok=True)
        (tmp_path / "Annotations" / f"{name}.xml").write_text(voc_xml([("x", 1, 1, 30, 30)], size))
    data = load_scenes(tmp_path, all_in_training(size=16))
    rows = {Path(name).stem: row for row, name in enumerate(data.lines("train"))}
    extents = {name: data.train.fields["target.extent"][row].tolist() for name, row in rows.items()}
    assert extents == {"stored": [40, 30], "shown": [30, 40], "silent": [30, 40]}

    def scaled(pixels: np.ndarray) -> np.ndarray:
        return np.asarray(Image.fromarray(pixels).resize((16, 16), Image.Resampling.BILINEAR))

    turned = np.ascontiguousarray(np.rot90(stored, -1))
    for name, expected in (("stored", stored), ("shown", turned), ("silent", turned)):
        assert (data.train.inputs[rows[name]].permute(1, 2, 0).numpy() == scaled(expected)).all(), name


def test_images_of_another_size_than_annotated(tmp_path: Path) -> None:
    voc_set(tmp_path, {"a": [("x", 1, 1, 5, 5)], "b": [("x", 1, 1, 40, 30)]})
    (tmp_path / "Annotations" / "b.xml").write_text(voc_xml([("x", 1, 1, 40, 60)], (80, 60)))
    with pytest.raises(DataError, match=r"JPEGImages/b\.png is 40 × 30, not 80 × 60"):
        load_scenes(tmp_path, all_in_training())
    data = load_scenes(tmp_path, all_in_training(boxes="skip"))
    assert data.lines("train").tolist() == ["JPEGImages/a.png"]
    data = load_scenes(tmp_path, all_in_training(boxes="repair"))
    assert data.train.fields["target.boxes"][1, 0].tolist() == [0, 0, 0.5, 1]


def test_a_class_without_training_boxes_is_noted(tmp_path: Path) -> None:
    voc_set(
        tmp_path,
        {"a": [("x", 1, 1, 5, 5), ("x", 1, 1, 6, 6)], "b": [("y", 1, 1, 5, 5)]},
        {"train": ["a"], "test": ["b"]},
    )
    assert load_scenes(tmp_path, Scenes(validation=0)).warnings == ("no training box of class 'y'",)


@pytest.mark.skipif(not BCCD.exists(), reason="the real set is not here")
def test_blood_cells(tmp_path: Path) -> None:
    """The published numbers of images and boxes, less the two without area."""
    with pytest.raises(DataError, match=r"2 faulty boxes: no area at .*BloodImage_00343\.xml:50 \(181, 329"):
        load_scenes(BCCD)
    data = load_scenes(BCCD, Scenes(boxes="skip", size=8))
    assert [len(part) for part in (data.train, data.validation, data.test)] == [205, 87, 72]
    labels = torch.cat(
        [part.fields["target.labels"].flatten() for part in (data.train, data.validation, data.test)]
    )
    assert data.classes == ["Platelets", "RBC", "WBC"]
    assert int((labels >= 0).sum()) == 4888 - 2


# -- COCO ----------------------------------------------------------------------------------------------


def coco_folder(root: Path, annotations: list[dict[str, Any]]) -> Path:
    """Image 7 in train2017/, image 3 in val2017/; categories 90 "zebra" and 4 "ant"."""
    categories = {90: "zebra", 4: "ant"}
    save(root / "train2017" / "a.png", noise(40, 30, seed=1))
    save(root / "val2017" / "b.png", noise(40, 30, seed=2))
    entry = coco_entry([(7, "a.png")], annotations, categories)
    write_json(root / "annotations" / "instances_train2017.json", entry)
    held_out = [annotation(1, 3, 90, [10, 5, 4, 4]), annotation(2, 3, 90, [0, 0, 40, 30], iscrowd=1)]
    write_json(
        root / "annotations" / "instances_val2017.json", coco_entry([(3, "b.png")], held_out, categories)
    )
    return root


def test_coco_folder(tmp_path: Path) -> None:
    root = coco_folder(
        tmp_path, [annotation(5, 7, 90, [1.5, 2, 10, 20]), annotation(6, 7, 4, [0, 0, 40, 30])]
    )
    data = load_scenes(root, Scenes(test=0))
    assert data.classes == ["ant", "zebra"]  # by id: 4, 90
    assert pixel_boxes(data) == {"a": [[1.5, 2, 11.5, 22, 1], [0, 0, 40, 30, 0]]}
    assert pixel_boxes(data, "validation") == {"b": [[10, 5, 14, 9, 1], [0, 0, 40, 30, 1]]}
    assert data.validation.fields["target.crowd"].tolist() == [[False, True]]
    assert data.lines("validation").tolist() == ["val2017/b.png"]
    assert data.test is None


def test_one_coco_file_with_images_beside_it(tmp_path: Path) -> None:
    images = [(i, f"some/{i}.png") for i in range(8)]
    for i, name in images:
        save(tmp_path / name, noise(40, 30, seed=i))
    boxes = [annotation(i, i, 1, [i, 0, 5, 5]) for i, _ in images]
    path = write_json(tmp_path / "labels.json", coco_entry(images, boxes, {1: "thing"}))
    data = load_scenes(path, Scenes(validation=0.25, test=0.25), seed=1)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [4, 2, 2]
    for split in ("train", "validation", "test"):
        for name, (box,) in pixel_boxes(data, split).items():
            assert box == [int(name), 0, int(name) + 5, 5, 0]
    assert data.classes == ["thing"]


def test_a_random_set_is_what_pycocotools_reads(tmp_path: Path) -> None:
    COCO = pytest.importorskip("pycocotools.coco").COCO
    generator = np.random.default_rng()
    images = [(int(number), f"{number}.png") for number in generator.permutation(100)[:15]]
    for number, name in images:
        save(tmp_path / name, noise(40, 30, seed=number))
    boxes = []
    for number in range(60):
        x, y = generator.uniform(0, 30), generator.uniform(0, 20)
        box = [x, y, generator.uniform(0.1, 40 - x), generator.uniform(0.1, 30 - y)]
        image, _ = images[generator.integers(12)]  # three stay empty
        crowd = int(generator.integers(2))
        boxes.append(annotation(number, image, int(generator.choice([3, 17, 90])), box, iscrowd=crowd))
    path = write_json(tmp_path / "all.json", coco_entry(images, boxes, {90: "c", 3: "a", 17: "b"}))
    theirs = COCO(path)
    data = load_scenes(path, all_in_training())
    fields = data.train.fields
    assert data.classes == [entry["name"] for entry in theirs.loadCats(sorted(theirs.getCatIds()))]
    assert fields["target.boxes"].shape[1] == max(len(theirs.getAnnIds(i)) for i, _ in images)
    for row, name in enumerate(data.lines("train")):
        own = theirs.loadAnns(theirs.getAnnIds(imgIds=[int(Path(name).stem)]))
        there = fields["target.labels"][row] >= 0
        x, y, width, height = np.array([entry["bbox"] for entry in own]).reshape(-1, 4).T
        corners = np.stack([x / 40, y / 30, (x + width) / 40, (y + height) / 30], 1)
        np.testing.assert_allclose(fields["target.boxes"][row][there], corners, atol=1e-6)
        assert fields["target.crowd"][row][there].tolist() == [bool(entry["iscrowd"]) for entry in own]
        classes = [theirs.cats[entry["category_id"]]["name"] for entry in own]
        assert data.preparation.decode_classes(fields["target.labels"][row][there]) == classes


def test_faulty_coco_boxes_are_named_by_their_annotation(tmp_path: Path) -> None:
    bad = [
        annotation(11, 7, 4, [1, 1, 0, 5]),
        annotation(12, 7, 4, [9, 9, -3, 5]),
        annotation(13, 7, 4, [30, 20, 20, 5]),
        annotation(14, 7, 5, [1, 1, 5, 5]),
        annotation(15, 7, 4, [1, math.nan, 5, 5]),
        annotation(16, 7, 4, "all of it"),
        annotation(17, 7, [4], [1, 1, 5, 5]),
        annotation(18, 7, 4, [1, 1, 5, 10**400]),
    ]
    root = coco_folder(tmp_path, [*bad, annotation(19, 7, 4, [2, 3, 5, 5])])
    file = root / "annotations" / "instances_train2017.json"
    with pytest.raises(DataError) as caught:
        load_scenes(root, Scenes(test=0))
    assert str(caught.value).splitlines()[0] == (
        f"{root}: 8 faulty boxes: no area at {file}: annotation 11 (1, 1, 0, 5); corners in the wrong order "
        f"at {file}: annotation 12 (9, 9, -3, 5); outside its image at {file}: annotation 13 (30, 20, 20, 5)"
        "; and 5 more"
    )
    assert pixel_boxes(load_scenes(root, Scenes(test=0, boxes="skip"))) == {"a": [[2, 3, 7, 8, 0]]}
    repaired = load_scenes(root, Scenes(test=0, boxes="repair"))
    assert pixel_boxes(repaired) == {"a": [[6, 9, 9, 14, 0], [30, 20, 40, 25, 0], [2, 3, 7, 8, 0]]}


def test_annotations_of_images_that_are_not_there(tmp_path: Path) -> None:
    root = coco_folder(tmp_path, [annotation(1, 7, 4, [1, 1, 5, 5]), annotation(2, 8, 4, [1, 1, 5, 5])])
    with pytest.raises(DataError, match=r"1 annotation whose image is not in .*: annotation 2\n") as caught:
        load_scenes(root, Scenes(test=0))
    assert "--images.boxes skip" in caught.value.fix
    assert len(pixel_boxes(load_scenes(root, Scenes(test=0, boxes="skip")))["a"]) == 1


def damage(entry: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    first = {**entry[key][0], **value} if isinstance(value, dict) else value
    return {**entry, key: [first, *entry[key][1:]]}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("images", {"id": "7"}, r"an image whose id is no whole number \(value '7'\)"),
        ("images", {"file_name": "/etc/a.png"}, r"image 7: its file_name \(value '/etc/a\.png'\)"),
        ("images", {"file_name": "../a.png"}, r"image 7: its file_name \(value '\.\./a\.png'\)"),
        ("images", 5, "no list 'images'"),
        ("annotations", {"id": None}, "an annotation whose id is no whole number"),
        ("categories", {"name": 3}, r"category 4 \(value 3\)"),
        ("categories", {"name": "bee"}, r"a name for two categories \(value 'bee'\)"),
    ],
)
def test_entries_that_cannot_be(tmp_path: Path, key: str, value: object, message: str) -> None:
    entry = coco_entry([(7, "a.png")], [annotation(1, 7, 4, [1, 1, 5, 5])], {4: "ant", 5: "bee"})
    path = write_json(tmp_path / "a.json", damage(entry, key, value))
    with pytest.raises(DataError, match=rf"a\.json: {message}"):
        load_scenes(path)


def test_files_that_are_no_annotations(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{\n"images": [,]}')
    with pytest.raises(DataError, match=r"a\.json:2:12: not JSON \(Expecting value\)"):
        load_scenes(path)
    path.write_text(json.dumps([1]))
    with pytest.raises(DataError, match="no list 'images'"):
        load_scenes(path)
    path.write_text("[" * 100_000)
    with pytest.raises(DataError, match="not JSON"):
        load_scenes(path)
    twice = coco_entry([(1, "a.png"), (1, "b.png")], [], {1: "x"})
    with pytest.raises(DataError, match="image 1 is there twice"):
        load_scenes(write_json(path, twice))
    with pytest.raises(DataError, match="no images"):
        load_scenes(write_json(path, coco_entry([], [], {1: "x"})))


def test_coco_files_for_one_part(tmp_path: Path) -> None:
    for year in (2014, 2017):
        write_json(tmp_path / "annotations" / f"instances_train{year}.json", {})
    with pytest.raises(DataError, match=r"two files for one part: instances_train2014\.json and inst"):
        load_scenes(tmp_path)
