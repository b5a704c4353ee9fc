"""Checkpoints: safetensors and JSON with a manifest of sizes and SHA-256 sums, never pickle.

A checkpoint is a folder `step-N` (`step-N-final` at the end of training) that appears whole or not at
all. The manifest names every file and carries its own sum over its one canonical spelling, so a
flipped bit anywhere is noticed. The newest checkpoint that verifies is the one that is loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import Tensor

from quire.errors import CheckpointError
from quire.files import canonical_json, folder_that_appears_whole, make_folder, names_its_file, read_file

FORMAT = 1
MANIFEST = "manifest.json"


class Later(NamedTuple):
    """A tensor that is made when its turn to be written has come."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """Named sets of tensors and named JSON documents; `step` is what it is called by. Sets are written in
    their order, and so is each of their tensors that is made then."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    documents: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The end of training gets a folder of its own, as a save of the same step may stand already."""
        return f"step-{self.step}" + ("-final" if "final" in self.tensors else "")


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write `folder`/step-N and then remove all but the newest `keep`."""
    make_folder(folder, parents=False)  # not the run itself, should somebody have deleted it
    target = folder / checkpoint.name
    if target.exists():
        # Same step, so same content if it is whole; what does not verify is in the way.
        try:
            load_checkpoint(target)
            return target
        except CheckpointError:
            shutil.rmtree(target)
    with folder_that_appears_whole(target) as temporary:
        for name, tensors in checkpoint.tensors.items():
            if any(isinstance(value, Later) for value in tensors.values()):
                _write_one_by_one(temporary / f"{name}.safetensors", tensors)
                continue
            plain = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
            save_file(plain, temporary / f"{name}.safetensors")
        for name, document in checkpoint.documents.items():
            (temporary / f"{name}.json").write_bytes(canonical_json(document))
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": _digest_of_file(path)}
            for path in sorted(temporary.iterdir())
        }
        manifest = {"format": FORMAT, "step": checkpoint.step, "files": files}
        manifest["sha256"] = _digest(canonical_json(manifest))
        (temporary / MANIFEST).write_bytes(canonical_json(manifest))
    for old in list_checkpoints(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    for leftover in folder.glob(".step-*.tmp"):  # of a process that was killed in a save
        shutil.rmtree(leftover, ignore_errors=True)
    return target


_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""What safetensors calls them."""


def _write_one_by_one(path: Path, tensors: Mapping[str, Tensor | Later]) -> None:
    """A safetensors file (length of the header, header, numbers), with one tensor in memory at a time."""
    header: dict[str, Any] = {}
    end = 0
    for key, value in tensors.items():
        begin, end = end, end + torch.Size(value.shape).numel() * value.dtype.itemsize
        entry = {"dtype": _TYPES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
        header[key] = entry
    words = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    words += b" " * (-len(words) % 8)
    with path.open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        for value in tensors.values():
            plain = value.make() if isinstance(value, Later) else value
            content = plain.detach().cpu().contiguous().reshape(-1)
            if content.numel():
                file.write(content.view(torch.uint8).numpy().data)


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first, verified or not."""
    found = [
        (int(match[1]), match[2] or "", path)
        for path in folder.glob("step-*")
        if (match := _STEP.fullmatch(path.name))
    ]
    return [path for *_, path in sorted(found, reverse=True)]


_STEP = re.compile(r"step-(\d+)(-final)?")


@names_its_file
def load_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one checkpoint; every byte is accounted for before any of it is used."""
    manifest = _read_manifest(path)
    present = {file.name for file in path.iterdir()} - {MANIFEST}
    if present != set(manifest["files"]):
        odd = sorted(present ^ set(manifest["files"]))
        raise _damaged(path, f"files do not match the manifest: {', '.join(odd)}")
    tensors: dict[str, Mapping[str, Tensor]] = {}
    documents: dict[str, Any] = {}
    for name, facts in manifest["files"].items():
        content = read_file(path / name)
        if len(content) != facts["bytes"] or _digest(content) != facts["sha256"]:
            raise _damaged(path, f"{name} does not have the size or the sum of the manifest")
        if name.endswith(".safetensors"):
            tensors[name.removesuffix(".safetensors")] = load_tensors(content)
        else:
            documents[name.removesuffix(".json")] = json.loads(content)
    if type(manifest["step"]) is not int:
        raise _damaged(path, f"{MANIFEST} has the step {manifest['step']!r}")
    return Checkpoint(manifest["step"], tensors, documents)


def newest_checkpoint(folder: Path, tell: Callable[[str], object] = lambda problem: None) -> Checkpoint:
    """The newest checkpoint that verifies; of those that do not somebody is told."""
    problems = []
    for path in list_checkpoints(folder):
        try:
            return load_checkpoint(path)
        except CheckpointError as problem:
            problems.append(problem.got)
            tell(problem.got)
    raise CheckpointError(
        f"{folder}: no checkpoint" + (f" that verifies ({'; '.join(problems)})" if problems else ""),
        expected="a folder step-N with a manifest and its files",
        fix="start the run again with --overwrite" if problems else "check the path of the run",
    )


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        content = read_file(path / MANIFEST)
    except OSError as problem:
        raise _damaged(path, f"no readable {MANIFEST}") from problem
    try:
        manifest = json.loads(content)
        stated = manifest.pop("sha256")
        whole = canonical_json({**manifest, "sha256": stated}) == content
    except (ValueError, KeyError, AttributeError, TypeError) as problem:
        raise _damaged(path, f"{MANIFEST} is not what was written") from problem
    if not whole or stated != _digest(canonical_json(manifest)):
        raise _damaged(path, f"{MANIFEST} does not have its own sum")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{path}: format {manifest['format']}",
            expected=f"format {FORMAT}",
            fix="read it with the version of Quire that wrote it",
        )
    return manifest


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {what}",
        expected="a checkpoint exactly as it was written",
        fix="use an older checkpoint of the run, or train again",
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
