"""Good runs with one file in place of their own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.faults import payloads
from tests.faults.hostile_files.case import Case, Make
from tests.faults.watch import CANARY


def changed(change: Callable[[Path], object], run: str = "table") -> Make:
    """A good run, in which something was changed."""

    def make(folder: Path, runs: Path) -> Path:
        shutil.copytree(runs / run, folder / "victim")
        change(folder / "victim")
        return folder / "victim"

    return make


def in_run(name: str, content: bytes, run: str = "table") -> Make:
    """With one file in place of its own."""

    def change(victim: Path) -> None:
        (victim / name).parent.mkdir(exist_ok=True)
        (victim / name).write_bytes(content)

    return changed(change, run)


def signed(
    name: str, content: bytes, *, manifest: Mapping[str, Any] | None = None, run: str = "table"
) -> Make:
    """Whose checkpoints have this file, each under a manifest that was made to fit."""

    def change(victim: Path) -> None:
        for step in (victim / "checkpoints").iterdir():
            names = {name}
            if name == "weights.safetensors":  # whichever of the sets of weights is looked at
                names = {path.name for path in step.glob("*.safetensors")}
            for one in names:
                (step / one).write_bytes(content)
            sign(step, manifest)

    return changed(change, run)


def edited(name: str, edit: Callable[[Any], Any], run: str = "table") -> Make:
    """In whose checkpoints a JSON document was changed, under a manifest that was made to fit."""

    def change(victim: Path) -> None:
        for step in (victim / "checkpoints").iterdir():
            path = step / f"{name}.json"
            path.write_text(json.dumps(edit(json.loads(path.read_text()))))
            sign(step)

    return changed(change, run)


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


def runs() -> Iterator[Case]:
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
            yield Case(
                f"{file} of images, a pickle, {name}", "run of images", in_run(file, content, "images")
            )
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
            "run of text",
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
    yield Case(
        "a picture that laughs",
        "run",
        in_run("figures/x.svg", payloads.laughing("svg")),
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
        yield Case(f"{name} that is a pipe", "run", _piped(name))
    yield Case("checkpoint with a link to /dev/zero", "run", _linked("checkpoints/*/task.json", "/dev/zero"))
    yield Case("checkpoint with a pipe", "run", _piped("checkpoints/*/task.json"))
    yield Case("log.txt that is a pipe", "run", _piped("log.txt"))
    for name in ("predictions.parquet", "sums.json"):
        yield Case(f"{name} that is a link to /dev/zero", "run", _linked(name, "/dev/zero"))
        yield Case(f"{name} that is a pipe", "run", _piped(name))


def _manifest(content: bytes) -> Make:
    def change(victim: Path) -> None:
        for path in victim.glob("checkpoints/*/manifest.json"):
            path.write_bytes(content)

    return changed(change)


def _linked(pattern: str, target: str) -> Make:
    def change(victim: Path) -> None:
        for path in [*victim.glob(pattern)]:
            path.unlink()
            path.symlink_to(target)

    return changed(change)


def _piped(pattern: str) -> Make:
    def change(victim: Path) -> None:
        for path in [*victim.glob(pattern)]:
            path.unlink()
            os.mkfifo(path)

    return changed(change)
