"""Every reader of files, for the fuzzer: what the file is called, who reads it, and good files to begin with.

Readers are imported when they are asked for, as the fuzzer watches imports.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from quire.errors import QuireError

Read = Callable[[Path], object]


class Reader(NamedTuple):
    file: str
    """Its name, which some readers go by."""
    read: Read


def reader(name: str, runs: Path) -> Reader:
    """`runs` has finished runs, whose other files lie beside the one that is read."""
    file, make = READERS[name]
    return Reader(file, make(runs))


def take(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"quire.{module}"), name)


def _table(_: Path) -> Read:
    return take("data", "read_table")  # type: ignore[no-any-return]


def _in_pieces(_: Path) -> Read:
    open_rows = take("data.streamed", "open_rows")

    def reading(path: Path) -> None:
        rows = open_rows(path)
        rows.read(0, min(len(rows), 100))

    return reading


def _weights(_: Path) -> Read:
    return take("models.weights", "read_weights")  # type: ignore[no-any-return]


def _image(_: Path) -> Read:
    from quire.data.images.decode import Shape, decode

    shape = Shape(8, 8, 3, "crop")
    return lambda path: decode(path, shape, 10**6)


def _idx(_: Path) -> Read:
    return partial(take("data.images.idx", "read_array"), dimensions=3)


def _cifar(_: Path) -> Read:
    from quire.data.images.cifar import CIFAR_10, read_cifar
    from quire.options import Images

    return lambda path: read_cifar(path, CIFAR_10, Images())


def _coco(_: Path) -> Read:
    from quire.data.images.coco import find_files, read_coco
    from quire.options import Scenes

    return lambda path: read_coco(path, find_files(path), Scenes())


def _with_text(module: str, name: str) -> Callable[[Path], Read]:
    def make(_: Path) -> Read:
        from quire.options import Text

        return partial(take(module, name), options=Text())

    return make


def _tokens(_: Path) -> Read:
    read = take("data.text.tokenfile", "read_token_file")
    return lambda path: read(path.with_suffix(""))


def _beside(module: str, name: str) -> Callable[[Path], Read]:
    """Who is given the folder."""

    def make(_: Path) -> Read:
        read = take(module, name)
        return lambda path: read(path.parent)

    return make


def _shown(_: Path) -> Read:
    """A run as a report reads it."""
    read_config, read_run = take("train.folder", "read_config"), take("report.reading", "read_run")

    def reading(path: Path) -> None:
        for read in (read_config, read_run):
            read(path.parent)

    return reading


def _watched(_: Path) -> Read:
    from quire.board.metrics import Metrics, last_values

    def reading(path: Path) -> None:
        metrics = Metrics(path)
        metrics.read_on()
        for splits in metrics.series.values():
            for series in splits.values():
                series.curve()
        last_values(path)

    return reading


def _predicted(_: Path) -> Read:
    from quire.report.reading import Run, Target, read_predictions

    def reading(path: Path) -> None:
        problem: QuireError | None = None
        for kind in ("classification", "regression"):
            try:
                read_predictions(Run(path.parent, {}), Target("kind", kind, ("small", "large")))
            except QuireError as error:
                problem = error
        if problem:
            raise problem

    return reading


def _samples(_: Path) -> Read:
    from quire.report.reading import Run, read_samples

    return lambda path: read_samples(Run(path.parent, {}))


def _pictures(_: Path) -> Read:
    read = take("report.pictures", "recipe_pictures")
    return lambda path: read(path.parents[1])


def _manifest(_: Path) -> Read:
    read = take("train.checkpoints", "newest_checkpoint")
    return lambda path: read(path.parents[1])


def _described(runs: Path) -> Read:
    """A checkpoint's description, under a manifest that was made to fit."""
    from tests.faults.hostile_files.runs import sign

    load_trained, manifest = take("tasks.loading", "load_trained"), content(runs, "table", "manifest.json")

    def reading(path: Path) -> None:
        (path.parent / "manifest.json").write_bytes(manifest)
        sign(path.parent)
        load_trained(path.parents[2])

    return reading


def _parsed(module: str, name: str) -> Callable[[Path], Read]:
    return lambda runs: parsed(take(module, name))


READERS: dict[str, tuple[str, Callable[[Path], Read]]] = {
    "csv": ("file.csv", _table),
    "JSON lines": ("file.jsonl", _table),
    "npy": ("file.npy", _table),
    "npz": ("file.npz", _table),
    "parquet": ("file.parquet", _table),
    "npy in pieces": ("file.npy", _in_pieces),
    "parquet in pieces": ("file.parquet", _in_pieces),
    "image": ("file.png", _image),
    "idx": ("train-images-idx3-ubyte", _idx),
    "idx in gzip": ("train-images-idx3-ubyte.gz", _idx),
    "cifar": ("test_batch.bin", _cifar),
    "coco": ("file.json", _coco),
    "voc": ("file.xml", lambda runs: take("data.images.voc", "parse_xml")),
    "text": ("file.txt", lambda runs: take("data.text.files", "read_whole")),
    "pairs of texts": ("file.txt", _with_text("data.text.pairs", "read_pairs")),
    "labelled texts": ("file.csv", _with_text("data.text.labelled", "open_labelled")),
    "tokens": ("file.json", _tokens),
    "weights": ("file.safetensors", _weights),
    "pickled weights": ("file.pth", _weights),
    "GPT-2's description": ("config.json", _beside("models.gpt_files", "read_gpt2")),
    "adapter": ("file.safetensors", lambda runs: take("tuning", "read_adapter")),
    "PEFT's description": ("adapter_config.json", _beside("tuning", "read_adapter")),
    "options": ("file.toml", lambda runs: take("cli.config", "load")),
    "config": ("config.toml", _shown),
    "result": ("result.json", lambda runs: take("report.reading", "read_result")),
    "metrics": ("metrics.jsonl", lambda runs: take("report.reading", "read_metrics")),
    "metrics of the board": ("metrics.jsonl", _watched),
    "predictions": ("predictions.parquet", _predicted),
    "samples": ("samples.json", _samples),
    "captions": ("figures/captions.json", _pictures),
    "picture": ("figures/file.svg", _pictures),
    "sums": ("sums.json", _beside("files", "check_sums")),
    "manifest": ("checkpoints/step-2/manifest.json", _manifest),
    "task": ("checkpoints/step-2/task.json", _described),
    "preparation": ("file.json", _parsed("data.reading", "read_preparation")),
    "tokeniser": ("file.json", _parsed("data.text.vocabulary", "tokeniser_from_json")),
}


def parsed(read: Callable[[Any], object]) -> Read:
    """A reader that is given what was parsed already."""

    def reading(path: Path) -> None:
        try:
            entry = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            return
        if isinstance(entry, dict):
            read(entry)

    return reading


def content(runs: Path, run: str, name: str) -> bytes:
    """A file of a finished run, in its last checkpoint where it has it there."""
    found = [*(runs / run).glob(f"checkpoints/*-final/{name}"), runs / run / name]
    return found[0].read_bytes()


def lay_beside(name: str, folder: Path, runs: Path) -> None:
    """What has to lie beside a file for its reader to get that far."""
    import numpy as np
    from safetensors.numpy import save

    if name == "GPT-2's description":
        tensors = {"wte.weight": (4, 64), "wpe.weight": (4, 64), "h.0.mlp.c_fc.weight": (64, 256)}
        made = {key: np.zeros(shape, np.float32) for key, shape in tensors.items()}
        (folder / "model.safetensors").write_bytes(save(made))
    elif name == "PEFT's description":
        key = "base_model.model.x.lora_A.weight"
        (folder / "adapter_model.safetensors").write_bytes(save({key: np.zeros((2, 4), np.float32)}))
    elif name == "tokens":
        (folder / "file.bin").write_bytes(bytes(4))
    elif name == "captions":
        (folder / "figures" / "file.svg").write_text("<svg/>")
    elif name == "config":
        for file in ("result.json", "metrics.jsonl"):
            (folder / file).write_bytes(content(runs, "table", file))
    elif name in ("task", "manifest"):
        for file in ("weights.safetensors", "final.safetensors", "preparation.json", "progress.json"):
            (folder / "checkpoints/step-2" / file).write_bytes(content(runs, "table", file))


def seeds(name: str, runs: Path) -> list[bytes]:
    """Good files to begin with."""
    made = SEEDS[name](runs)
    return made if isinstance(made, list) else [made]


def _arrays(*, packed: bool) -> list[bytes]:
    import numpy as np

    made = []
    for values in (np.zeros((3, 2)), np.array(["a", "b"]), np.zeros(2, [("a", "<f8"), ("b", "<i4")])):
        file = io.BytesIO()
        if packed:
            np.savez_compressed(file, X=values, y=np.zeros(len(values)))
        else:
            np.save(file, values)
        made.append(file.getvalue())
    return made


def _parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    file = io.BytesIO()
    parquet.write_table(pa.table({"a": [1.0, None], "b": ["x", "y"], "c": [True, False]}), file)
    return file.getvalue()


def _images() -> list[bytes]:
    from PIL import Image

    made = []
    for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"):
        file = io.BytesIO()
        Image.new("RGB", (5, 4), (9, 99, 200)).save(file, kind)
        made.append(file.getvalue())
    file = io.BytesIO()
    Image.new("P", (5, 4)).save(file, "PNG", transparency=0)
    return [*made, file.getvalue()]


def _pickled() -> bytes:
    import torch

    file = io.BytesIO()
    torch.save({"state_dict": {"a": torch.zeros(2), "b": torch.ones(2, 2, dtype=torch.int64)}}, file)
    return file.getvalue()


def _tensors(metadata: dict[str, str]) -> bytes:
    import torch
    from safetensors.torch import save

    return bytes(save({"a": torch.zeros(2), "b": torch.ones(2, 2).half()}, metadata))


def _preparations(runs: Path) -> list[bytes]:
    return [content(runs, run, "preparation.json") for run in ("table", "images", "text")]


def _tokenisers(runs: Path) -> list[bytes]:
    learned = json.loads(content(runs, "text", "preparation.json"))["tokeniser"]
    model = json.dumps({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}})
    others = ({"kind": "bytes", "specials": ["padding"]}, {"kind": "bpe", "model": model, "specials": []})
    return [json.dumps(entry).encode() for entry in (learned, *others)]


def _of_run(run: str, name: str) -> Callable[[Path], bytes]:
    return partial(lambda runs, run, name: content(runs, run, name), run=run, name=name)


IDX = bytes([0, 0, 8, 3]) + struct.pack(">III", 2, 3, 3) + bytes(18)
COCO = {
    "images": [{"id": 1, "file_name": "a.png", "width": 9, "height": 9}],
    "annotations": [{"id": 1, "image_id": 1, "bbox": [0, 0, 4, 4], "category_id": 1, "iscrowd": 0}],
    "categories": [{"id": 1, "name": "x"}],
}
VOC = b"""<annotation><filename>a.png</filename>
<size><width>9</width><height>9</height><depth>3</depth></size>
<object><name>x</name><difficult>0</difficult><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>4</xmax><ymax>4</ymax>
</bndbox></object></annotation>"""
GPT2 = {"model_type": "gpt2", "n_head": 1, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
PEFT = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "lora_dropout": 0.0, "use_dora": False}
TOKENS = {
    "format": "quire.tokens", "version": 1, "bytes": 2, "counts": {"train": 2},
    "sha256": hashlib.sha256(bytes(4)).hexdigest(),
    "tokeniser": {"kind": "bytes", "specials": []}, "notes": [],
}  # fmt: skip
OPTIONS = b'seed = 1\ndevice = "cpu"\n[optim]\nlr = 0.1\n[model]\nhidden = [4, 4]\n'
SVG = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><g><path d="M0 0" fill="url(#a)"/></g></svg>'
)

SEEDS: dict[str, Callable[[Path], bytes | list[bytes]]] = {
    "csv": lambda runs: [(runs / "mine.csv").read_bytes()[:600], b'a;b\n1,5;"x\ny"\n2;z\n', b"1\t2\n3\t4\n"],
    "JSON lines": lambda runs: [b'{"a": 1, "b": "x"}\n{"a": 2.5, "c": [1]}\n\n{"b": null, "a": true}\n'],
    "npy": lambda runs: _arrays(packed=False),
    "npz": lambda runs: _arrays(packed=True),
    "parquet": lambda runs: _parquet(),
    "npy in pieces": lambda runs: _arrays(packed=False),
    "parquet in pieces": lambda runs: _parquet(),
    "image": lambda runs: _images(),
    "idx": lambda runs: IDX,
    "idx in gzip": lambda runs: gzip.compress(IDX),
    "cifar": lambda runs: bytes(3073),
    "coco": lambda runs: json.dumps(COCO).encode(),
    "voc": lambda runs: VOC,
    "text": lambda runs: "\ufeffone\ntwo é\r\n☃".encode(),
    "pairs of texts": lambda runs: b"one\teins\r\n\ntwo\tzwei\n",
    "labelled texts": lambda runs: b"text,label\na b c,x\nd e f,y\ng h,x\n",
    "tokens": lambda runs: json.dumps(TOKENS).encode(),
    "weights": lambda runs: _tensors({"format": "pt"}),
    "pickled weights": lambda runs: _pickled(),
    "GPT-2's description": lambda runs: json.dumps(GPT2).encode(),
    "adapter": lambda runs: _tensors(
        {"quire.adapter": json.dumps({"format": 1, "name": "x", "config": {"rank": 2, "scale": 1.0}})}
    ),
    "PEFT's description": lambda runs: json.dumps(PEFT).encode(),
    "options": lambda runs: OPTIONS,
    "config": _of_run("table", "config.toml"),
    "result": _of_run("table", "result.json"),
    "metrics": _of_run("table", "metrics.jsonl"),
    "metrics of the board": _of_run("table", "metrics.jsonl"),
    "predictions": _of_run("table", "predictions.parquet"),
    "samples": _of_run("text", "samples.json"),
    "captions": lambda runs: b'{"file.svg": {"title": "a", "caption": "b"}}',
    "picture": lambda runs: [SVG, SVG.replace(b"<g>", f'<g fill="{take("report.style", "INK")}">'.encode())],
    "sums": _of_run("table", "sums.json"),
    "manifest": _of_run("table", "manifest.json"),
    "task": _of_run("table", "task.json"),
    "preparation": _preparations,
    "tokeniser": _tokenisers,
}
