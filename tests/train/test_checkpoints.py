"""Checkpoints appear whole, verify every byte, and fall back to the newest one that is sound."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from quire.errors import CheckpointError
from quire.files import canonical_json, write_bytes
from quire.train.checkpoints import (
    Checkpoint,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)


def checkpoint(step: int) -> Checkpoint:
    tensors = {"weights": {"w": torch.full((3, 2), float(step)), "b": torch.arange(4)}}
    return Checkpoint(step, tensors, {"progress": {"step": step, "name": "Grüße", "loss": 0.1}})


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint(5), keep=2)
    loaded = newest_checkpoint(tmp_path)
    assert loaded.step == 5
    assert loaded.documents["progress"] == {"step": 5, "name": "Grüße", "loss": 0.1}
    assert torch.equal(loaded.tensors["weights"]["w"], torch.full((3, 2), 5.0))
    assert loaded.tensors["weights"]["b"].dtype == torch.int64


def test_only_the_newest_are_kept_and_numbers_sort_as_numbers(tmp_path: Path) -> None:
    for step in (2, 9, 10, 100):
        save_checkpoint(tmp_path, checkpoint(step), keep=3)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-100", "step-10", "step-9"]


def test_the_final_checkpoint_stands_beside_one_of_the_same_step(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint(3), keep=2)
    final = checkpoint(3)
    save_checkpoint(tmp_path, Checkpoint(3, {**final.tensors, "final": {}}, final.documents), keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-3-final", "step-3"]


def test_a_single_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    """Every byte of every file, one bit of each."""
    path = save_checkpoint(tmp_path, checkpoint(1), keep=1)
    flips = 0
    for file in sorted(path.iterdir()):
        original = file.read_bytes()
        for position in range(len(original)):
            damaged = bytearray(original)
            damaged[position] ^= 1 << (position % 8)
            file.write_bytes(bytes(damaged))
            with pytest.raises(CheckpointError):
                load_checkpoint(path)
            flips += 1
        file.write_bytes(original)
    assert flips > 500
    load_checkpoint(path)


def test_a_manifest_in_another_spelling_is_noticed(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint(1), keep=1)
    manifest = path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes() + b" ")
    with pytest.raises(CheckpointError, match=r"manifest.json does not have its own sum"):
        load_checkpoint(path)


@pytest.mark.parametrize("damage", ["truncate", "append", "remove", "extra", "no manifest"])
def test_other_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    path = save_checkpoint(tmp_path, checkpoint(1), keep=1)
    weights = path / "weights.safetensors"
    if damage == "truncate":
        os.truncate(weights, 20)
    elif damage == "append":
        weights.write_bytes(weights.read_bytes() + b"\0")
    elif damage == "remove":
        weights.unlink()
    elif damage == "extra":
        (path / "more.json").write_text("{}")
    else:
        (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="step-1"):
        load_checkpoint(path)


def test_the_newest_sound_checkpoint_is_loaded(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint(1), keep=3)
    newest = save_checkpoint(tmp_path, checkpoint(2), keep=3)
    (newest / "weights.safetensors").write_bytes(b"nonsense")
    assert newest_checkpoint(tmp_path).step == 1


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint(2), keep=1)
    (path / "weights.safetensors").write_bytes(b"nonsense")
    save_checkpoint(tmp_path, checkpoint(2), keep=1)
    assert newest_checkpoint(tmp_path).step == 2


def test_nothing_and_nothing_sound_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint\n"):
        newest_checkpoint(tmp_path / "none")
    path = save_checkpoint(tmp_path, checkpoint(2), keep=1)
    (path / "progress.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no checkpoint that verifies .*progress.json"):
        newest_checkpoint(tmp_path)


def test_another_format_is_named(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint(2), keep=1)
    manifest = json.loads((path / "manifest.json").read_bytes())
    from quire.train.checkpoints import _digest

    manifest["format"] = 99
    del manifest["sha256"]
    manifest["sha256"] = _digest(canonical_json(manifest))
    (path / "manifest.json").write_bytes(canonical_json(manifest))
    with pytest.raises(CheckpointError, match="format 99"):
        load_checkpoint(path)


def test_a_failed_save_leaves_nothing_behind(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint(1), keep=2)
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path, Checkpoint(2, {}, {"progress": object()}), keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-7.123.tmp").mkdir()
    save_checkpoint(tmp_path, checkpoint(8), keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-8"]


def test_write_bytes_replaces_or_leaves_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.html"
    write_bytes(target, b"old")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_bytes(target, b"new")
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
