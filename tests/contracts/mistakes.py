"""Every mistake that docs/errors.md shows: what was done, where it stands on the page, and how to do it.

    python -m tests.contracts.mistakes           writes the page again

The page is what the commands answer; a test makes it anew and compares.
"""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from starlette.testclient import TestClient

import quire
from quire.board.app import Board, application
from quire.cli.main import main as command
from quire.errors import QuireError
from tests.contracts.test_errors import CASES, OPTIONS
from tests.recipes.examples import write_csv, write_images

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
INTRODUCTION = """# What goes wrong, and what is said

Every message says what came, what was expected and, where it is known, how to repair it. A mistake of the
user ends the command with exit code 2, a failure with 1; neither leaves anything half-written behind. With
`--debug` the traceback is shown as well. In Python the same texts are the messages of `quire.errors`.

This page is made by `python -m tests.contracts.mistakes`, which makes each of these mistakes.
"""
SECTIONS = {
    "command": "On the command line",
    "configuration": "In a configuration file",
    "data": "In the data",
    "checkpoint": "In a run",
    "python": "In Python",
    "board": "On the board",
}
Act = Callable[[], object]


class Mistake(NamedTuple):
    section: str
    what: str
    act: list[str] | Act
    """Words of the command, or what is done in Python."""
    shown: str = ""
    """How it is done in Python, as shown."""
    files: dict[str, bytes] = {}  # noqa: RUF012
    run: Callable[[Path], object] | None = None
    """What is done beforehand to the run in `runs/mine`."""


def table(*extra: str) -> list[str]:
    return ["train", "mlp", "--data", "mine.csv", "--out", "made", *extra]


def mistakes() -> list[Mistake]:
    return [
        *_from_tests(),
        *_commands(),
        *_configurations(),
        *_data(),
        *_checkpoints(),
        *_python(),
        *_board(),
    ]


def _from_tests() -> Iterator[Mistake]:
    """Those of the contract tests."""
    for what, (words, _) in OPTIONS.items():
        yield Mistake("command", what, [*words])
    for what, case in CASES.items():
        words = ["--table.missing", case.options["missing"]] if "missing" in case.options else []
        words += ["--target", case.options["target"]] if "target" in case.options else []
        yield Mistake("data", what, table(*words), files={"mine.csv": case.content})


def _commands() -> Iterator[Mistake]:
    yield Mistake("command", "unknown command", ["trian", "mlp"])
    yield Mistake("command", "an option before the command", ["--quiet", "train"])
    yield Mistake("command", "a set that is not known by name", ["download", "fashon-mnist"])
    words = ["train", "lenet", "--data", "cifar-10"]
    yield Mistake("command", "a known set that is not there yet", words)
    yield Mistake("command", "a run folder that exists", ["train", "mlp", "--out", "runs/mine"])
    yield Mistake("command", "a folder that is no run", ["train", "mlp", "--out", "pictures"])
    yield Mistake(
        "command", "predictions in an unknown format", ["predict", "runs/mine", "mine.csv", "--out", "p.xls"]
    )
    yield Mistake("command", "export in an unknown format", ["export", "runs/mine", "model.h5"])
    yield Mistake("command", "one run to compare", ["runs", "compare", "runs/mine"])
    yield Mistake(
        "command",
        "a file of a folder that is not there",
        ["predict", "runs/mine", "mine.csv", "--out", "none/p.csv"],
    )
    yield Mistake(
        "command", "an interval at a level of 2", ["predict", "runs/mine", "mine.csv", "--level", "2"]
    )
    yield Mistake(
        "command", "misspelt option of predict", ["predict", "runs/mine", "mine.csv", "--levl", "0.5"]
    )
    yield Mistake(
        "command", "a score of a table's model", ["predict", "runs/mine", "mine.csv", "--score", "0.5"]
    )
    yield Mistake("command", "adapters of a run that has none", ["adapter", "export", "runs/mine", "adapter"])
    yield Mistake("command", "text from a table's model", ["sample", "runs/mine"])
    words = ["train", "gru", "--data", "mine.txt", "--prompt", "Ω", "--out", "made"]
    yield Mistake("command", "a prompt in other letters", words, files={"mine.txt": b"to be or not\n" * 60})


def _configurations() -> Iterator[Mistake]:
    broken = {
        "an unknown key": b"[optim]\nlrr = 0.1\n",
        "a value of another kind": b'[optim]\nlr = "fast"\n',
        "a number out of range": b"[optim]\nlr = -1.0\n",
        "a value where a table belongs": b"optim = 3\n",
        "no TOML": b"optim: {lr: 0.1}\n",
        "a key twice": b"epochs = 1\nepochs = 2\n",
        "bytes that are not UTF-8": b'device = "\xff"\n',
        "brackets without an end": b"x = " + b"[" * 20_000,
    }
    for what, content in broken.items():
        yield Mistake(
            "configuration", what, ["train", "mlp", "--config", "mine.toml"], files={"mine.toml": content}
        )
    run = b'format = 1\nrecipe = "pca"\n[options]\nseed = 1\n'
    yield Mistake(
        "configuration",
        "the config of another recipe",
        ["train", "mlp", "--config", "mine.toml"],
        files={"mine.toml": run},
    )


def _data() -> Iterator[Mistake]:
    def npz(**arrays: np.ndarray) -> bytes:
        file = io.BytesIO()
        np.savez(file, allow_pickle=True, **arrays)  # type: ignore[arg-type]
        return file.getvalue()

    words = ["train", "mlp", "--data", "mine.npz", "--out", "made"]
    objects = np.array([{"a": 1}, {"a": 2}], object)
    yield Mistake("data", "an array of Python objects", words, files={"mine.npz": npz(X=objects)})
    uneven = npz(X=np.zeros((9, 2)), y=np.zeros(8))
    yield Mistake("data", "arrays of different lengths", words, files={"mine.npz": uneven})
    yield Mistake("data", "a spreadsheet named .csv", table(), files={"mine.csv": b"PK\x03\x04" + bytes(60)})
    yield Mistake(
        "data", "a table of unknown kind", ["train", "mlp", "--data", "mine.xlsx"], files={"mine.xlsx": b"x"}
    )
    yield Mistake("data", "a text in UTF-16", table(), files={"mine.csv": "a,b\n1,2\n".encode("utf-16")})
    yield Mistake(
        "data",
        "an image that is none",
        ["train", "lenet", "--data", "pictures", "--out", "made"],
        files={"pictures/bar/bad.png": b"no image"},
    )
    yield Mistake(
        "data",
        "a class without images",
        ["train", "lenet", "--data", "pictures", "--out", "made"],
        files={"pictures/none/readme.txt": b"nothing"},
    )
    yield Mistake(
        "data",
        "an empty text",
        ["train", "gpt", "--data", "mine.txt", "--out", "made"],
        files={"mine.txt": b"\n"},
    )
    yield Mistake(
        "data",
        "a column that is missing at prediction",
        ["predict", "runs/mine", "new.csv"],
        files={"new.csv": b"siz,colour,fast,day\n1,red,yes,2024-03-01\n"},
    )
    yield Mistake(
        "data",
        "weights that ask for code",
        ["train", "resnet", "--data", "pictures", "--out", "made", "--model.weights", "weights.pth"],
        files={"weights.pth": b"cos\nsystem\n(S'echo'\ntR."},
    )


def _checkpoints() -> Iterator[Mistake]:
    def newest(run: Path) -> Path:
        return next(run.glob("checkpoints/*-final"))

    def flip(pattern: str) -> Callable[[Path], object]:
        def do(run: Path) -> None:
            path = next(run.glob(pattern))
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)

        return do

    evaluate = ["evaluate", "runs/mine"]
    yield Mistake(
        "checkpoint",
        "a flipped bit in the weights",
        evaluate,
        run=flip("checkpoints/*-final/final.safetensors"),
    )
    yield Mistake(
        "checkpoint", "a flipped bit in the manifest", evaluate, run=flip("checkpoints/*-final/manifest.json")
    )
    yield Mistake(
        "checkpoint", "a file too many", evaluate, run=lambda run: (newest(run) / "more.bin").touch()
    )
    yield Mistake(
        "checkpoint", "a file too few", evaluate, run=lambda run: (newest(run) / "task.json").unlink()
    )
    yield Mistake(
        "checkpoint", "no checkpoint at all", evaluate, run=lambda run: shutil.rmtree(run / "checkpoints")
    )
    yield Mistake(
        "checkpoint",
        "a result that was changed",
        ["runs", "show", "runs/mine"],
        run=lambda run: (run / "result.json").write_text(json.dumps({"format": 1})),
    )
    yield Mistake(
        "checkpoint",
        "a config that is no TOML",
        evaluate,
        run=lambda run: (run / "config.toml").write_text("format = "),
    )
    yield Mistake(
        "checkpoint",
        "a config of another format",
        evaluate,
        run=lambda run: (run / "config.toml").write_text("format = 2\n"),
    )
    yield Mistake(
        "checkpoint",
        "a configuration that was changed",
        ["train", "mlp", "--resume", "runs/mine"],
        run=lambda run: (run / "config.toml").write_bytes(
            (run / "config.toml").read_bytes().replace(b"lr = 0.001", b"lr = 0.003")
        ),
    )
    yield Mistake(
        "checkpoint",
        "metrics with a damaged line",
        ["report", "runs/mine"],
        run=lambda run: [(run / "sums.json").unlink(), (run / "metrics.jsonl").write_text("{}\n{}\n")],
    )
    yield Mistake(
        "checkpoint",
        "the data has changed",
        evaluate,
        run=lambda run: Path("mine.csv").write_text("a,b\n1,2\n"),
    )
    yield Mistake("checkpoint", "the data is gone", evaluate, run=lambda run: Path("mine.csv").unlink())
    yield Mistake(
        "checkpoint",
        "resuming with other options",
        [
            "train",
            "mlp",
            "--data",
            "mine.csv",
            "--target",
            "value",
            "--resume",
            "runs/mine",
            "--optim.lr",
            "1",
        ],
    )
    yield Mistake("checkpoint", "resuming with another recipe", ["train", "linear", "--resume", "runs/mine"])


def _python() -> Iterator[Mistake]:
    from quire.data import read_table
    from quire.estimators import KMeans
    from quire.models import build_model
    from quire.nn import BatchNorm, activation
    from quire.tuning import read_adapter

    lines: dict[str, tuple[str, Act]] = {
        "a run that is not there": ('quire.load("runs/none")', lambda: quire.load("runs/none")),
        "an activation that is not there": ('activation("rellu")', lambda: activation("rellu")),
        "a model that is not there": ('build_model({"model": "mpl"})', lambda: build_model({"model": "mpl"})),
        "a model without its sizes": ('build_model({"model": "mlp"})', lambda: build_model({"model": "mlp"})),
        "channels in the wrong place": ("BatchNorm(3)(torch.zeros(2, 8, 8, 3))",
                                        lambda: BatchNorm(3)(torch.zeros(2, 8, 8, 3))),
        "a step size below zero": ("Optim(lr=-1)", lambda: quire.options.Optim(lr=-1)),
        "more clusters than rows": ("KMeans(9).fit(np.zeros((3, 2)))",
                                    lambda: KMeans(9).fit(np.zeros((3, 2)))),
        "a table that is not there": ('read_table("mine.cvs")', lambda: read_table("mine.cvs")),
        "an adapter that is not there": ('read_adapter("adapter.safetensors")',
                                         lambda: read_adapter("adapter.safetensors")),
        "text from a table's model": ('quire.load("runs/mine").sample(["once"])',
                                      lambda: quire.load("runs/mine").sample(["once"])),
        "exporting to an unknown format": ('quire.load("runs/mine").export(Path("model.h5"))',
                                           lambda: quire.load("runs/mine").export(Path("model.h5"))),
        "an option that predictions do not have": (
            'quire.load("runs/mine").task.predict(inputs, leevl=0.5)',
            lambda: quire.load("runs/mine").task.predict(torch.zeros(1, 1), leevl=0.5),
        ),
        "images from a table's model": ('quire.load("runs/mine").generate()',
                                        lambda: quire.load("runs/mine").generate()),
    }  # fmt: skip
    for what, (shown, act) in lines.items():
        yield Mistake("python", what, act, shown)


def _board() -> Iterator[Mistake]:
    yield Mistake("board", "a port that is none", ["board", "--port", "99999"])
    yield Mistake("board", "a folder that is not there", ["board", "--folder", "none"])
    yield _asked("a run that is not there", "/runs/yours")
    yield _asked("a run by another way", "/runs/..%2Fmine")
    yield _asked("a run without a report", "/runs/mine/doctor")
    yield _asked("one run to compare", "/compare?run=mine")
    yield _asked("curves of a run that is not there", "/api/curves?run=yours&measure=loss")
    yield _asked(
        "a run whose metrics are damaged", "/api/curves?run=mine&measure=loss",
        run=lambda run: (run / "metrics.jsonl").write_text("{}\n"),
    )  # fmt: skip
    yield _asked(
        "a run whose configuration is damaged", "/runs/mine",
        run=lambda run: (run / "config.toml").write_text("format = "),
    )  # fmt: skip


def _asked(what: str, path: str, run: Callable[[Path], object] | None = None) -> Mistake:
    """What the board answers to a browser that asks for this."""

    def act() -> None:
        made = Board(Path("runs"))
        try:
            client = TestClient(application(made), base_url="http://127.0.0.1:8765")
            answer = client.get(path)
        finally:
            made.close()
        if answer.headers["content-type"] == "application/json":
            got, expected, fix = answer.json().values()
        else:
            words = [
                html.unescape(re.sub("<.*?>", "", line)) for line in re.findall("<p>(.*?)</p>", answer.text)
            ]
            got, *others = words[:-1]  # which is the way back
            said = dict(other.split(": ", 1) for other in others)
            expected, fix = said.get("Expected", ""), said.get("What helps", "")
        error = type(f"{answer.status_code} {answer.reason_phrase}", (QuireError,), {})
        raise error(got, expected=expected, fix=fix)

    return Mistake("board", what, act, f"GET {path}", run=run)


# Making them ------------------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """Data and a run, as the mistakes expect them."""
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        write_csv(Path("mine.csv"))
        write_images(Path("pictures"), each=3)
        words = ["--target", "value", "--model.hidden", "4", "--epochs", "1", "--quiet", "--device", "cpu"]
        code = command(["train", "mlp", "--data", "mine.csv", "--out", "runs/mine", *words])
        assert code == 0


def make(mistake: Mistake, prepared: Path) -> tuple[int, str]:
    """Exit code and message, in a fresh copy of the prepared folder."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "here")
        shutil.copytree(prepared, folder)
        with (
            contextlib.chdir(folder),
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            config = Path("runs/mine/config.toml")
            config.write_text(config.read_text().replace(str(prepared), str(folder)))
            (config.parent / "sums.json").unlink()
            quire.files.write_sums(config.parent)
            for name, content in mistake.files.items():
                Path(name).parent.mkdir(parents=True, exist_ok=True)
                Path(name).write_bytes(content)
            if mistake.run is not None:
                mistake.run(config.parent)
            before = {path for path in folder.rglob("*") if "runs/mine" not in str(path)}
            if isinstance(mistake.act, list):
                code = command(mistake.act)
            else:
                try:
                    mistake.act()
                    code = 0
                except QuireError as error:
                    code = error.exit_code
                    print(f"{type(error).__name__}: {error}", file=said)
            left = {path for path in folder.rglob("*") if "runs/mine" not in str(path)} - before
            assert not left, f"{mistake.what} left {left} behind"
    text = said.getvalue().replace(str(folder) + os.sep, "").replace(str(folder.resolve()) + os.sep, "")
    return code, text.rstrip("\n")


def page() -> str:
    """The whole of docs/errors.md."""
    parts = [INTRODUCTION]
    found = mistakes()
    with tempfile.TemporaryDirectory() as temporary:
        prepared = Path(temporary).resolve()
        prepare(prepared)
        for section, title in SECTIONS.items():
            parts.append(f"\n## {title}\n")
            for mistake in found:
                if mistake.section != section:
                    continue
                code, text = make(mistake, prepared)
                assert code in (1, 2), f"{mistake.what}: exit code {code}: {text}"
                shown = mistake.shown
                if isinstance(mistake.act, list):
                    shown = "$ quire " + " ".join(mistake.act)
                parts.append(
                    f"\n{mistake.what[0].upper()}{mistake.what[1:]}:\n\n```text\n{shown}\n{text}\n```\n"
                )
    return "".join(parts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE}: {len(mistakes())} mistakes")
