"""The hostile files themselves: each is laid in a folder of its own and given to every reader of its kind.

Kinds of readers: table, images, scenes, text, weights, adapter, config, run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from PIL import Image
from safetensors.numpy import save as save_arrays

from tests.faults import bombs, payloads
from tests.faults.watch import CANARY

Make = Callable[[Path, Path], Path]
"""From an empty folder and the folder of good runs to the path that is given to the readers."""


class Case(NamedTuple):
    name: str
    kind: str
    make: Make
    refused: bool = True
    """Whether at least one reader has to refuse it; otherwise it may also be read, without harm."""
    unpacked: int = 0
    """Bytes that a packed file says it holds, where that is within what is allowed: then it may take the room
    of these."""


def cases() -> list[Case]:
    return [*_tables(), *_tensors(), *_images(), *_scenes(), *_texts(), *_configs(), *_runs(), *_bombs()]


Content = bytes | Callable[[], bytes]
"""What is large is made when it is needed."""


def lay(name: str, content: Content) -> Make:
    def make(folder: Path, _: Path) -> Path:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content())
        return folder / name

    return make


def lay_all(files: Mapping[str, bytes], given: str = "") -> Make:
    def make(folder: Path, runs: Path) -> Path:
        for name, content in files.items():
            lay(name, content)(folder, runs)
        return folder / given

    return make


def _tables() -> Iterator[Case]:
    for name, content in payloads.pickles().items():
        yield Case(f"table.csv that is a pickle, {name}", "table", lay("table.csv", content))
        yield Case(f"table.npy of objects, {name}", "table", lay("table.npy", payloads.npy(content)))
        members = {"X.npy": payloads.npy(content), "y.npy": payloads.npy(content)}
        yield Case(f"table.npz of objects, {name}", "table", lay("table.npz", payloads.npz(members)))
    for ending in ("npy", "npz", "parquet", "tsv", "pt", "pkl", "data"):
        content = payloads.pickles()["system"]
        yield Case(f"table.{ending} that is a pickle", "table", lay(f"table.{ending}", content))
    yield Case(
        "table.npy, a pickle under an array's magic",
        "table",
        lay("table.npy", b"\x93NUMPY" + payloads.pickles()["exec"]),
    )
    lies = {
        "of 2**40 rows": {"descr": "'<f8'", "shape": "(1099511627776, 2)"},
        "of 2**62 rows": {"descr": "'<f8'", "shape": f"({2**62},)"},
        "of 10**30 rows": {"descr": "'<f8'", "shape": f"({10**30}, 2)"},
        "of -1 rows": {"descr": "'<f8'", "shape": "(-1, 2)"},
        "whose header is code": {"descr": f"__import__('{CANARY}')"},
        "whose shape is code": {"descr": "'<f8'", "shape": f"(exec('import {CANARY}'),)"},
        "of records of objects": {"descr": "[('a', '|O'), ('b', '<f8')]"},
        "of a type of 2**31 bytes": {"descr": "'|V2147483647'"},
        "of an unknown type": {"descr": f"'{CANARY}'"},
        "of a deep header": {"descr": "(" * 3000 + "1" + ")" * 3000},
        "of wrong order": {"descr": "'<f8'", "order": f"'{CANARY}'"},
    }
    for name, values in lies.items():
        content = payloads.npy(bytes(64), **values)  # type: ignore[arg-type]
        yield Case(f"table.npy {name}", "table", lay("table.npy", content))
        yield Case(f"table.npz {name}", "table", lay("table.npz", payloads.npz({"X.npy": content})))
    for name, shape in {"a million columns": (1, 10**6), "no rows of 2**40 columns": (0, 2**40)}.items():
        content = payloads.npy(bytes(min(10**6, shape[0] * shape[1])), descr="'|u1'", shape=str(shape))
        yield Case(f"table.npy of {name}", "table", lay("table.npy", content))
    head = payloads.npy(b"", descr="'<f8'", shape=f"({300 * 2**17}, 1)")
    yield Case(
        "table.npz of 300 MB in 300 kB",
        "table",
        lay("table.npz", lambda: payloads.zip_bomb("X.npy", 300, start=head)),
    )
    yield Case(
        "table.npz whose member is no array",
        "table",
        lay("table.npz", lambda: payloads.zip_bomb("X.npy", 200)),
    )
    outside = {f"../../{CANARY}.npy": payloads.npy(b""), "/etc/x.npy": payloads.npy(b"")}
    yield Case("table.npz with names outside", "table", lay("table.npz", payloads.npz(outside)))
    yield Case("table.npz, a zip of nothing", "table", lay("table.npz", payloads.npz({})))
    yield Case("table.npz cut short", "table", lay("table.npz", payloads.npz({"X.npy": bytes(999)})[:-30]))

    def huge_parquet(folder: Path, _: Path) -> Path:
        column = pa.array(np.zeros(2**20))
        schema = pa.schema([(name, pa.float64()) for name in "abcdefgh"])
        with parquet.ParquetWriter(folder / "table.parquet", schema) as writer:
            for _ in range(12):
                writer.write_table(pa.table({name: column for name in "abcdefgh"}, schema))
        return folder / "table.parquet"

    yield Case("table.parquet of 800 MB in few", "table", huge_parquet)
    yield Case(
        "table.parquet whose footer lies",
        "table",
        lay("table.parquet", b"PAR1" + bytes(64) + struct.pack("<I", 2**31 - 1) + b"PAR1"),
    )
    yield Case(
        "table.parquet of noise",
        "table",
        lay("table.parquet", b"PAR1" + payloads.random_bytes(4000) + struct.pack("<I", 3900) + b"PAR1"),
    )
    yield Case("table.csv of gzip", "table", lay("table.csv", lambda: payloads.gzip_bomb(50)))
    yield Case("table.csv of a zip", "table", lay("table.csv", lambda: payloads.zip_bomb("table.csv", 50)))
    yield Case("table.csv of a million columns", "table", lay("table.csv", b"," * 1_000_000 + b"\n"))
    yield Case("table.csv of an open quote", "table", lay("table.csv", b'a,b\n1,"' + b"x\n" * 500_000))
    yield Case("table.csv of zero bytes", "table", lay("table.csv", bytes(1_000_000)))
    yield Case(
        "table.csv of formulas",
        "table",
        lay("table.csv", b"a,b,kind\n" + b"=cmd|' /C calc'!A0,2,x\n1,2,y\n" * 40),
        refused=False,
    )


def _tensors() -> Iterator[Case]:
    for name, content in payloads.pickles().items():
        yield Case(f"weights.pth that is a pickle, {name}", "weights", lay("weights.pth", content))
        yield Case(f"weights.pt in a zip, {name}", "weights", lay("weights.pt", payloads.torch_zip(content)))
        yield Case(
            f"weights.safetensors that is a pickle, {name}", "weights", lay("weights.safetensors", content)
        )
        yield Case(
            f"adapter.safetensors that is a pickle, {name}", "adapter", lay("adapter.safetensors", content)
        )
    content = payloads.pickles()["system"]
    yield Case(
        "weights.bin with a name outside",
        "weights",
        lay("weights.bin", payloads.torch_zip(content, "../../archive/data.pkl")),
    )
    yield Case(
        "weights.pt, a zip bomb",
        "weights",
        lay("weights.pt", lambda: payloads.zip_bomb("archive/data.pkl", 200)),
    )
    for name, content in payloads.bad_tensors().items():
        yield Case(f"weights.safetensors: {name}", "weights", lay("weights.safetensors", content))
        yield Case(f"adapter.safetensors: {name}", "adapter", lay("adapter.safetensors", content))
        yield Case(f"checkpoint's weights: {name}", "run", signed("weights.safetensors", content))
    good = save_arrays({"base_model.model.x.lora_A.weight": np.zeros((2, 4), np.float32)})
    peft = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    described = {
        "that imports": {**peft, "peft_type": f"{CANARY}.Type", "auto_mapping": {"parent_library": CANARY}},
        "of rank 10**9": {**peft, "r": 10**9},
        "of rank -1": {**peft, "r": -1},
        "of rank true": {**peft, "r": {"a": 1}},
        "of alpha text": {**peft, "lora_alpha": "many"},
        "of infinite alpha": {**peft, "lora_alpha": 1e400},
    }
    for name, entry in described.items():
        files = {"adapter_config.json": json.dumps(entry).encode(), "adapter_model.safetensors": good}
        yield Case(f"PEFT's description {name}", "adapter", lay_all(files))
    for name, content in payloads.bad_json().items():
        files = {"adapter_config.json": content, "adapter_model.safetensors": good}
        yield Case(f"PEFT's description: {name}", "adapter", lay_all(files))
        files = {"config.json": content, "model.safetensors": save_arrays({"wte.weight": np.zeros((4, 64))})}
        yield Case(f"GPT-2's description: {name}", "weights", lay_all(files, "model.safetensors"))
    files = {
        "adapter_config.json": json.dumps(peft).encode(),
        "adapter_model.bin": payloads.pickles()["exec"],
    }
    yield Case("PEFT's weights as a pickle", "adapter", lay_all(files))
    header = {"quire.adapter": json.dumps({"format": 1, "name": "x", "config": {"rank": 10**12}})}
    arrays = {"base_model.model.model.layers.0.weight.lora_A.weight": np.zeros((1, 4), np.float32)}
    yield Case("adapter of rank 10**12", "adapter", lay("adapter.safetensors", save_arrays(arrays, header)))
    deep = {"quire.adapter": "[" * 100_000}
    yield Case("adapter with a deep header", "adapter", lay("adapter.safetensors", save_arrays(arrays, deep)))


def _images() -> Iterator[Case]:
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
                Image.new("L", (16, 16)).save(folder / "set" / part / "0.png")
            (folder / "set" / "a" / "1.png").symlink_to(target)
            return folder / "set"

        return make

    yield Case("image that is a link to /dev/zero", "images", linked("/dev/zero"))
    yield Case("image that is a link to itself", "images", linked("1.png"))
    yield Case("image that is a link to a folder", "images", linked("/"), refused=False)

    def pipe(folder: Path, runs: Path) -> Path:
        made = linked("1.png")(folder, runs)
        (made / "a" / "1.png").unlink()
        os.mkfifo(made / "a" / "1.png")
        return made

    yield Case("image that is a pipe", "images", pipe)


def image(name: str, content: Content) -> Make:
    """A folder of two classes with this image among good ones."""

    def make(folder: Path, _: Path) -> Path:
        for part in "ab":
            (folder / "set" / part).mkdir(parents=True)
            for number in range(4):
                Image.new("L", (16, 16), 40 * number).save(folder / "set" / part / f"good{number}.png")
        return lay(f"a/{name}", content)(folder / "set", folder).parents[1]

    return make


def _scenes() -> Iterator[Case]:
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
    laughs = "<!DOCTYPE a [<!ENTITY a 'ha'>" + "".join(
        f"<!ENTITY {b} '{f'&{a};' * 10}'>" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
    )
    trees = {
        "that laughs": f"<?xml version='1.0'?>{laughs}]><annotation>&j;</annotation>",
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
    for number, name in enumerate(("../../../secret", "/etc/hostname", "\0")):
        listed = {"ImageSets/Main/train.txt": f"{name}\n".encode()}
        yield Case(f"VOC whose list leads outside, {number}", "scenes", _voc(listed))


def _voc(files: Mapping[str, bytes]) -> Make:
    def make(folder: Path, runs: Path) -> Path:
        (folder / "set" / "JPEGImages").mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(folder / "secret.jpg")
        Image.new("RGB", (9, 9)).save(folder / "set" / "JPEGImages" / "0.png")
        (folder / "set" / "Annotations").mkdir()
        return lay_all({f"set/{name}": content for name, content in files.items()}, "set")(folder, runs)

    return make


def _texts() -> Iterator[Case]:
    for name in ("system", "exec", "by hand"):
        content = payloads.pickles()[name]
        yield Case(
            f"text.txt that is a pickle, {name}", "text", lay("text.txt", content), refused=b"\0" in content
        )
    yield Case("text.txt of zero bytes", "text", lay("text.txt", bytes(1000)))
    yield Case("text.txt of gzip", "text", lay("text.txt", lambda: payloads.gzip_bomb(20)))
    yield Case("text.txt in UTF-16", "text", lay("text.txt", "text".encode("utf-16")))
    yield Case("text.txt of surrogates", "text", lay("text.txt", b"\xed\xa0\x80" * 100))
    yield Case("folder with a link to /dev/zero", "text", _linked_text)
    yield Case("empty text", "text", lay("text.txt", b""))


def _linked_text(folder: Path, _: Path) -> Path:
    (folder / "set").mkdir()
    (folder / "set" / "text.txt").symlink_to("/dev/zero")
    return folder / "set"


def _configs() -> Iterator[Case]:
    for name, content in payloads.bad_toml().items():
        yield Case(f"options.toml: {name}", "config", lay("options.toml", content))
        yield Case(f"config.toml of a run: {name}", "run", in_run("config.toml", content))
    for name in ("system", "exec"):
        content = payloads.pickles()[name]
        yield Case(f"options.toml that is a pickle, {name}", "config", lay("options.toml", content))
        yield Case(f"config.toml that is a pickle, {name}", "run", in_run("config.toml", content))
    yaml = f"!!python/object/apply:os.system ['touch {CANARY}.ran']\n".encode()
    yield Case("options.yaml that calls", "config", lay("options.yaml", yaml))
    lines = b"a: &a [x, x]\n" + b"".join(
        b"%c: &%c [*%c, *%c]\n" % (i + 1, i + 1, i, i) for i in range(97, 117)
    )
    yield Case("options.yaml that laughs", "config", lay("options.yaml", lines))
    for number, line in enumerate(
        (
            f'device = "{CANARY}"',
            f'optim.name = "{CANARY}:make"',
            f'"__class__" = "{CANARY}"',
            f"model.activation = \"__import__('{CANARY}')\"",
            "optim = 3",
            "seed = -1",
            "optim.lr = nan",
            "model.hidden = [[1], [2]]",
            "data = 5",
            "train.batch_size = 1e9",
        )
    ):
        yield Case(f"options.toml with a bad value, {number}", "config", lay("options.toml", line.encode()))


def _alone(make: Callable[[Path], Path], folder: Path, _: Path) -> Path:
    return make(folder)


def _bombs() -> Iterator[Case]:
    for make in (bombs.texts, bombs.categories, bombs.nothing, bombs.lists):
        yield Case(f"table.parquet of {make.__name__}", "table", partial(_alone, make))
    jpeg = image("bomb.jpg", partial(bombs.progressive_jpeg, 9_000))
    yield Case("JPEG of 81 million pixels, progressive", "images", jpeg)
    yield Case("weights.pt of packed tensors", "weights", lay("weights.pt", bombs.packed_tensor))
    yield Case("weights.pt of a terabyte by its strides", "weights", lay("weights.pt", bombs.shared_tensor))
    most = bombs.UNPACKED
    yield Case("table.npz within bounds", "table", lay("table.npz", bombs.packed_array), False, most)
    idx = lay("train-images-idx3-ubyte.gz", bombs.packed_idx)
    yield Case("IDX in gzip within bounds", "images", idx, False, most)
    yield Case("PNG within bounds", "images", image("large.png", bombs.packed_png), False, most)


# Runs -------------------------------------------------------------------------------------------


def in_run(name: str, content: bytes, run: str = "table") -> Make:
    """A good run with one file in place of its own."""

    def make(folder: Path, runs: Path) -> Path:
        shutil.copytree(runs / run, folder / "victim")
        (folder / "victim" / name).parent.mkdir(exist_ok=True)
        (folder / "victim" / name).write_bytes(content)
        return folder / "victim"

    return make


def signed(
    name: str, content: bytes, run: str = "table", *, manifest: Mapping[str, Any] | None = None
) -> Make:
    """A run whose checkpoints have this file, each under a manifest that was made to fit."""

    def make(folder: Path, runs: Path) -> Path:
        shutil.copytree(runs / run, folder / "victim")
        for step in (folder / "victim" / "checkpoints").iterdir():
            names = {name}
            if name == "weights.safetensors":  # whichever of the sets of weights is looked at
                names = {path.name for path in step.glob("*.safetensors")}
            for one in names:
                (step / one).write_bytes(content)
            sign(step, manifest)
        return folder / "victim"

    return make


def edited(name: str, edit: Callable[[Any], Any], run: str = "table") -> Make:
    """A run in whose checkpoints a JSON document was changed, under a manifest that was made to fit."""

    def make(folder: Path, runs: Path) -> Path:
        shutil.copytree(runs / run, folder / "victim")
        for step in (folder / "victim" / "checkpoints").iterdir():
            path = step / f"{name}.json"
            path.write_text(json.dumps(edit(json.loads(path.read_text()))))
            sign(step)
        return folder / "victim"

    return make


def sign(step: Path, changes: Mapping[str, Any] | None = None) -> None:
    """What whoever wants to be believed would write: the right sum of every file."""

    def spelt(value: Any) -> bytes:
        return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()

    old = json.loads((step / "manifest.json").read_bytes())
    files = {
        path.name: {"bytes": len(content := path.read_bytes()), "sha256": hashlib.sha256(content).hexdigest()}
        for path in sorted(step.iterdir())
        if path.name != "manifest.json"
    }
    made = {"format": 1, "step": old["step"], "files": files, **(changes or {})}
    made["sha256"] = hashlib.sha256(spelt(made)).hexdigest()
    (step / "manifest.json").write_bytes(spelt(made))


def put(*path: str, value: Any) -> Callable[[Any], Any]:
    """Set the entry down this path of keys wherever the document has it."""

    def edit(document: Any) -> Any:
        node = document
        for key in path[:-1]:
            node = node[int(key)] if isinstance(node, list) else node[key]
        last: Any = int(path[-1]) if isinstance(node, list) else path[-1]
        node[last] = value
        return document

    return edit


def _runs() -> Iterator[Case]:
    pickles = payloads.pickles()
    for name, content in pickles.items():
        yield Case(
            f"checkpoint's weights that are a pickle, {name}", "run", signed("weights.safetensors", content)
        )
        yield Case(f"checkpoint with a file data.pkl, {name}", "run", signed("data.pkl", content))
    for file in ("result.json", "metrics.jsonl", "predictions.parquet"):
        for name in ("system", "exec", "import"):
            content = pickles[name] + (b"\n{}\n" if file == "metrics.jsonl" else b"")
            yield Case(f"{file} that is a pickle, {name}", "run", in_run(file, content))
    for name, content in payloads.bad_json().items():
        yield Case(f"result.json: {name}", "run", in_run("result.json", content))
        yield Case(f"metrics.jsonl: {name}", "run", in_run("metrics.jsonl", content + b"\n{}\n"))
        yield Case(f"manifest: {name}", "run", _manifest(content))
        yield Case(f"checkpoint's task: {name}", "run", signed("task.json", content))
        yield Case(f"captions.json: {name}", "run", in_run("figures/captions.json", content), refused=False)
    names = (
        CANARY,
        f"{CANARY}:make",
        f"{CANARY}.Task",
        "os.system",
        "builtins.exec",
        f"__import__('{CANARY}')",
        "../../" + CANARY,
        "",
        "__class__",
        "mlp\0",
        "x" * 10**6,
        None,
        7,
        ["mlp"],
        {"a": 1},
    )
    for number, name in enumerate(names):
        yield Case(f"task by a name that is none, {number}", "run", edited("task", put("task", value=name)))
        yield Case(
            f"model by a name that is none, {number}",
            "run",
            edited("task", put("model", "model", value=name)),
        )
        if isinstance(name, str):
            recipe = b"format = 1\nrecipe = " + json.dumps(name).encode() + b"\n[options]\nseed = 0\n"
            yield Case(f"recipe by a name that is none, {number}", "run", in_run("config.toml", recipe))
    sizes = {
        "wide": [10**6, 10**6], "very wide": [10**18], "deep": [1] * 200_000, "negative": [-5], "zero": [0],
        "text": ["x"], "float": [1.5], "nested": [[[1]]],
    }  # fmt: skip
    for name, hidden in sizes.items():
        yield Case(f"a network that is {name}", "run", edited("task", put("model", "hidden", value=hidden)))
    yield Case("a description without a model", "run", edited("task", lambda entry: {"task": entry["task"]}))
    yield Case(
        "a description with more than it has",
        "run",
        edited("task", lambda entry: {**entry, CANARY: 1}),
        refused=False,
    )
    for name, edit in {
        "of another format": put("format", value=CANARY),
        "without columns": lambda entry: {key: value for key, value in entry.items() if key != "inputs"},
        "of wrong columns": put("inputs", value=[{CANARY: 1}]),
        "of text": put("inputs", value="inputs"),
    }.items():
        yield Case(f"preparation {name}", "run", edited("preparation", edit))  # type: ignore[arg-type]
    for number, entry in enumerate(({"kind": CANARY}, {"kind": "bpe", "model": "[" * 100_000, "specials": []},
                                    {"kind": "characters", "alphabet": 7, "specials": [], "policy": "refuse"},
                                    {"kind": "bytes", "specials": [CANARY]}, [], None)):  # fmt: skip
        yield Case(
            f"tokeniser that is none, {number}",
            "run",
            edited("preparation", put("tokeniser", value=entry), "text"),
        )
    facts = {"bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}
    for number, files in enumerate(
        ({f"../../../{CANARY}": facts}, {"/etc/hostname": facts}, {"": facts}, [], None, 7)
    ):
        yield Case(
            f"manifest that leads outside, {number}",
            "run",
            signed("data.json", b"{}", manifest={"files": files}),
        )
    yield Case("manifest without a step", "run", signed("data.json", b"{}", manifest={"step": None}))
    yield Case(
        "adapters that are none", "run", signed("tuning.json", json.dumps({"format": CANARY}).encode())
    )
    svg = "<!DOCTYPE svg [<!ENTITY a 'ha'>" + "".join(
        f"<!ENTITY {b} '{f'&{a};' * 10}'>" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
    )
    yield Case(
        "a picture that laughs",
        "run",
        in_run("figures/x.svg", f"{svg}]><svg>&j;</svg>".encode()),
        refused=False,
    )
    yield Case(
        "a picture with a script",
        "run",
        in_run("figures/x.svg", b"<svg><script>alert(1)</script></svg>"),
        refused=False,
    )
    for name in ("config.toml", "result.json", "metrics.jsonl"):
        yield Case(f"{name} that is a link to /dev/zero", "run", _linked(name, "/dev/zero"))
    yield Case("checkpoint with a link to /dev/zero", "run", _linked("checkpoints/*/task.json", "/dev/zero"))


def _manifest(content: bytes) -> Make:
    def make(folder: Path, runs: Path) -> Path:
        shutil.copytree(runs / "table", folder / "victim")
        for path in (folder / "victim").glob("checkpoints/*/manifest.json"):
            path.write_bytes(content)
        return folder / "victim"

    return make


def _linked(pattern: str, target: str) -> Make:
    def make(folder: Path, runs: Path) -> Path:
        shutil.copytree(runs / "table", folder / "victim")
        for path in [*(folder / "victim").glob(pattern)]:
            path.unlink()
            path.symlink_to(target)
        return folder / "victim"

    return make
