"""Coverage-guided fuzzing of every reader: whatever the bytes, an answer or an error of ours.

    python -m tests.faults.fuzz --seconds 600              every reader, one after the other
    python -m tests.faults.fuzz --reader csv --seconds 10

Needs atheris; where that is not installed it says so and does nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.recipes.examples import write_csv

Reader = Callable[[Path], object]
PARTS = (
    "quire.data",
    "quire.report.reading",
    "quire.models.weights",
    "quire.tuning.files",
    "quire.train.folder",
)


def readers() -> dict[str, tuple[str, Reader]]:
    """Name of the file, and what reads it."""
    from quire.cli.config import load as load_toml
    from quire.data import read_table
    from quire.data.images.coco import find_files, read_coco
    from quire.data.images.decode import Shape, decode
    from quire.data.images.idx import read_array
    from quire.data.images.voc import parse_xml
    from quire.data.reading import read_preparation
    from quire.data.text.files import read_whole
    from quire.data.text.vocabulary import tokeniser_from_json
    from quire.models.weights import read_weights
    from quire.options import Scenes
    from quire.report.reading import read_metrics, read_result
    from quire.train.folder import read_config
    from quire.tuning import read_adapter

    def as_json(read: Callable[[Any], object]) -> Reader:
        def reading(path: Path) -> None:
            try:
                entry = json.loads(path.read_bytes())
            except (ValueError, RecursionError):
                return  # the reader is given what was parsed already
            if isinstance(entry, dict):
                read(entry)

        return reading

    shape = Shape(8, 8, 3, "crop")
    return {
        "csv": ("file.csv", read_table),
        "npy": ("file.npy", read_table),
        "npz": ("file.npz", read_table),
        "parquet": ("file.parquet", read_table),
        "image": ("file.png", lambda path: decode(path, shape, 10**6)),
        "idx": ("train-images-idx3-ubyte", lambda path: read_array(path, 3)),
        "idx in gzip": ("train-images-idx3-ubyte.gz", lambda path: read_array(path, 3)),
        "coco": ("file.json", lambda path: read_coco(path, find_files(path), Scenes())),
        "voc": ("file.xml", parse_xml),
        "text": ("file.txt", read_whole),
        "weights": ("file.safetensors", read_weights),
        "pickled weights": ("file.pth", read_weights),
        "adapter": ("file.safetensors", read_adapter),
        "options": ("file.toml", load_toml),
        "config": ("config.toml", lambda path: read_config(path.parent)),
        "result": ("result.json", read_result),
        "metrics": ("metrics.jsonl", read_metrics),
        "preparation": ("file.json", as_json(read_preparation)),
        "tokeniser": ("file.json", as_json(tokeniser_from_json)),
    }


def seeds(folder: Path, name: str) -> None:
    """Good files to begin with, where they are quickly made."""
    import io

    import numpy as np
    import torch
    from PIL import Image
    from safetensors.torch import save

    file = io.BytesIO()
    if name == "csv":
        file.write(write_csv(folder / "table", rows=4).read_bytes())
    elif name == "npy":
        np.save(file, np.zeros((3, 2)))
    elif name == "npz":
        np.savez(file, X=np.zeros((3, 2)), y=np.zeros(3))
    elif name == "image":
        Image.new("RGB", (4, 4)).save(file, "PNG")
    elif name in ("weights", "adapter"):
        file.write(save({"a": torch.zeros(2)}))
    elif name == "pickled weights":
        torch.save({"a": torch.zeros(2)}, file)
    (folder / "good").write_bytes(file.getvalue() or b"{}")


def fuzz(name: str, seconds: int) -> None:
    """One reader in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=[*PARTS]):
        found = readers()
    from quire.errors import QuireError

    file, read = found[name]
    folder = Path(tempfile.mkdtemp())
    (folder / "seeds").mkdir()
    seeds(folder / "seeds", name)
    path = folder / file

    def once(content: bytes) -> None:
        path.write_bytes(content)
        with contextlib.suppress(QuireError):
            read(path)

    limits = [f"-max_total_time={seconds}", "-rss_limit_mb=4096", f"-artifact_prefix={folder}/"]
    atheris.Setup([sys.argv[0], *limits, str(folder / "seeds")], once)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reader", default="")
    parser.add_argument("--seconds", type=int, default=600)
    arguments = parser.parse_args()
    try:
        import atheris  # noqa: F401
    except ImportError:
        print("not done: atheris is not installed")
        return
    if arguments.reader:
        fuzz(arguments.reader, arguments.seconds)
        return
    broken = []
    for name in readers():
        print(f"{name}: {arguments.seconds} s", flush=True)
        words = [
            sys.executable,
            "-m",
            "tests.faults.fuzz",
            "--reader",
            name,
            "--seconds",
            str(arguments.seconds),
        ]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            broken.append(name)
            print(done.stderr[-3000:])
    if broken:
        raise SystemExit(f"crashes in {', '.join(broken)}")


if __name__ == "__main__":
    main()
