"""Images, alone and with what is to be found in them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from PIL import Image

from tests.faults import payloads
from tests.faults.hostile_files.case import Case, Make, endless, image, lay, lay_all
from tests.faults.watch import CANARY


def images() -> Iterator[Case]:
    for name, content in payloads.pickles().items():
        yield Case(f"image.png that is a pickle, {name}", "images", image("image.png", content))
    for name, (file, content) in payloads.bad_images().items():
        yield Case(f"image: {name}", "images", image(file, content), refused="00 MB" not in name)
    idx = bytes([0, 0, 8, 3])
    sizes = {
        "10**12 bytes": (10_000, 10_000, 10_000),
        "2**96 bytes": (2**32 - 1,) * 3,
        "no images": (0, 28, 28),
    }
    for name, sides in sizes.items():
        content = idx + struct.pack(">III", *sides) + bytes(100)
        yield Case(f"IDX of {name}", "images", lay("train-images-idx3-ubyte", content))
        packed = partial(payloads.gzip_bomb, 50, idx + struct.pack(">III", *sides))
        yield Case(f"IDX in gzip of {name}", "images", lay("train-images-idx3-ubyte.gz", packed))
    packed = partial(payloads.gzip_bomb, 300, idx + struct.pack(">III", 300, 1024, 1024))
    yield Case("IDX in gzip, a bomb that says so", "images", lay("train-images-idx3-ubyte.gz", packed))
    yield Case("CIFAR that is a pickle", "images", lay("data_batch_1.bin", payloads.pickles()["exec"]))
    yield Case("CIFAR of noise", "images", lay("data_batch_1.bin", b"\xff" * 3073 * 3))

    def linked(target: str) -> Make:
        def make(folder: Path, runs: Path) -> Path:
            (folder / "set" / "a").mkdir(parents=True)
            (folder / "set" / "b").mkdir()
            for part in "ab":
                for number in ("0", "2", "3", "4"):
                    Image.new("L", (16, 16)).save(folder / "set" / part / f"{number}.png")
            (folder / "set" / "a" / "1.png").symlink_to(target)
            return folder / "set"

        return make

    yield Case("image that is a link to /dev/zero", "images", linked("/dev/zero"))
    idx_of_two = idx + struct.pack(">III", 2, 4, 4) + bytes(32)
    two = lay("set/train-images-idx3-ubyte", idx_of_two)
    yield from endless("IDX", "images", "train-images-idx3-ubyte")
    yield from endless("IDX in gzip", "images", "train-images-idx3-ubyte.gz")
    yield from endless("IDX by another name", "images", "pixels")
    yield from endless("IDX of labels", "images", "set/train-labels-idx1-ubyte", "set", two)
    yield from endless("CIFAR", "images", "data_batch_1.bin")
    records = lay("set/data_batch_1.bin", bytes(3073 * 4))
    yield from endless("CIFAR's names of classes", "images", "set/batches.meta.txt", "set", records)
    yield from endless("file beside images", "images", "set/a/notes.md", "set", image("more.png", _small_png))
    yield Case("image that is a link to itself", "images", linked("1.png"))
    yield Case("image that is a link to a folder", "images", linked("/"), refused=False)

    def pipe(folder: Path, runs: Path) -> Path:
        made = linked("1.png")(folder, runs)
        (made / "a" / "1.png").unlink()
        os.mkfifo(made / "a" / "1.png")
        return made

    yield Case("image that is a pipe", "images", pipe)


def scenes() -> Iterator[Case]:
    for name, content in payloads.bad_json().items():
        yield Case(f"COCO: {name}", "scenes", lay("annotations/instances_train.json", content))
    outside = ("/etc/hostname", "../secret.png", "a/../../secret.png", "", "\0", "x" * 5000, 7)
    for number, name in enumerate(outside):
        entry = {
            "images": [{"id": 1, "file_name": name, "width": 9, "height": 9}],
            "annotations": [{"id": 1, "image_id": 1, "bbox": [0, 0, 4, 4], "category_id": 1}],
            "categories": [{"id": 1, "name": "x"}],
        }
        content = json.dumps(entry).encode()
        yield Case(f"COCO with an image outside, {number}", "scenes", lay("set/instances.json", content))
    trees = {
        "that laughs": payloads.laughing("annotation").decode(),
        "that reads a file": "<!DOCTYPE a [<!ENTITY x SYSTEM 'file:///etc/passwd'>]><annotation>&x;</annotation>",
        "that loads a DTD": "<!DOCTYPE a SYSTEM 'http://127.0.0.1:9/x.dtd'><annotation/>",
        "that is deep": "<annotation>" + "<a>" * 100_000 + "</a>" * 100_000 + "</annotation>",
        "that is open": "<annotation><object>",
        "of another kind": "<svg/>",
        "that is no XML": "annotation",
        "that is empty": "",
        "in an unknown encoding": f"<?xml version='1.0' encoding='{CANARY}'?><annotation/>",
    }
    for name, tree in trees.items():
        yield Case(f"VOC {name}", "scenes", _voc({"Annotations/0.xml": tree.encode()}))
    yield Case("VOC that is a pickle", "scenes", _voc({"Annotations/0.xml": payloads.pickles()["system"]}))
    good = _voc({"Annotations/0.xml": b"<annotation/>"})
    for place in ("Annotations/0.xml", "ImageSets/Main/train.txt", "JPEGImages/0.png"):
        yield from endless(f"VOC with {place}", "scenes", f"set/{place}", "set", good)
    yield from endless("COCO", "scenes", "set/annotations/instances_train.json", "set")
    for number, name in enumerate(("../../../secret", "/etc/hostname", "\0")):
        listed = {"ImageSets/Main/train.txt": f"{name}\n".encode()}
        yield Case(f"VOC whose list leads outside, {number}", "scenes", _voc(listed))


def _small_png() -> bytes:
    return payloads.png(16, 16)


def _voc(files: Mapping[str, bytes]) -> Make:
    def make(folder: Path, runs: Path) -> Path:
        (folder / "set" / "JPEGImages").mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(folder / "secret.jpg")
        Image.new("RGB", (9, 9)).save(folder / "set" / "JPEGImages" / "0.png")
        (folder / "set" / "Annotations").mkdir()
        return lay_all({f"set/{name}": content for name, content in files.items()}, "set")(folder, runs)

    return make
