"""Random command lines: each begins as one that works, and has options added, changed, doubled, misspelt or
left out. What may be added stands in the command's own table of flags."""

from __future__ import annotations

import contextlib
import io
import resource
import shutil
import signal
import tempfile
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import strategies as st

from quire.cli.adapter import AdapterListOptions
from quire.cli.doctor import DoctorOptions
from quire.cli.evaluate import EvaluateOptions
from quire.cli.explain import ExplainOptions
from quire.cli.export import ExportOptions
from quire.cli.flags import Flag, table
from quire.cli.main import main as command
from quire.cli.predict import PredictOptions
from quire.cli.recipes import all_recipes
from quire.cli.runs import ReportOptions, RunsCompareOptions, RunsListOptions, RunsShowOptions
from quire.cli.sample import SampleOptions
from quire.cli.sheet import SheetListOptions, SheetShowOptions
from quire.cli.study import StudyOptions
from quire.cli.train import with_processes
from quire.files import check_sums
from quire.train.checkpoints import list_checkpoints, load_checkpoint
from quire.train.folder import CHECKPOINTS, CONFIG, read_config
from tests.recipes.examples import undrawn, write_csv, write_text

UNFORESEEN = "run again with --debug"
SECONDS = 8.0
"""After which a command is interrupted, and once more after as long again."""
MEMORY = 2**30
"""Bytes of address space that a command may add to what the process has."""


# -- Running the command ---------------------------------------------------------------------------


class Said(NamedTuple):
    code: int
    out: str
    error: str
    interrupted: bool


def call(words: Sequence[str], seconds: float = 0.0) -> Said:
    """The command in this process. With a number of seconds it gets Ctrl-C after them."""
    heard: list[int] = []
    running = True

    def interrupt(*_: object) -> None:
        if running:
            heard.append(1)
            signal.raise_signal(signal.SIGINT)

    out, error = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = command(words)
            running = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    said = [file.buffer.getvalue().decode() for file in (out, error)]  # type: ignore[attr-defined]
    return Said(code, *said, bool(heard))


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Sizes are drawn without regard for the machine; what is too much for it must fail here as elsewhere."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def prepare(folder: Path) -> Path:
    """Small files, and a finished run of each recipe that is drawn."""
    write_csv(folder / "mine.csv", rows=60)
    write_csv(folder / "other.csv", rows=20, seed=1)
    write_text(folder / "mine.txt", 60)
    (folder / "folder").mkdir()
    (folder / "options.toml").write_text("seed = 3\n")
    with contextlib.chdir(folder), undrawn():
        for name in RECIPES:
            said = call([*_train(name), "--out", f"{name}-run"])
            assert said.code == 0, said.error
    return folder


def judge(words: Sequence[str], prepared: Path, files: Mapping[str, bytes] | None = None) -> Said:
    """Run the command in a fresh copy of what was prepared: a known exit code, a message of ours, nothing
    half-written."""
    with tempfile.TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        here = Path(temporary, "outer", "inner")  # room for what is written to ".."
        shutil.copytree(prepared, here)
        for name, content in (files or {}).items():
            (here / name).write_bytes(content)
        before = loose_files(here)
        # How many processes a line asks for is drawn too; they are left to other tests.
        patch.setattr("quire.cli.train.start", lambda *_: 0)
        with contextlib.chdir(here), undrawn(), bounded():
            said = call(words, SECONDS)
        assert said.code in ((0, 1, 2, 130) if said.interrupted else (0, 1, 2)), (words, said)
        # Where Ctrl-C falls into a finaliser, Python itself writes what it ignores.
        assert said.interrupted or "Traceback" not in said.out + said.error, (words, said)
        assert UNFORESEEN not in said.error, (words, said)
        assert said.code == 0 or said.interrupted or said.error.count("error: ") == 1, (words, said)
        half = [path for path in Path(temporary).rglob("*") if path.name.endswith(".tmp")]
        assert not half, (words, half, said)
        if said.code and not any(word.startswith("--text.cache") for word in words):
            assert loose_files(here) == before, (words, said)
        if not files:  # which may be of a run
            check_runs(here, words)
    return said


def loose_files(folder: Path) -> dict[Path, bytes]:
    """Files that belong to no run, and folders without runs in them."""
    runs = {config.parent for config in folder.rglob(CONFIG)}
    around = {outer for run in runs for outer in run.parents}
    return {
        path: path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
        if path not in runs | around and not runs & {*path.parents}
    }


def check_runs(folder: Path, words: Sequence[str]) -> None:
    """Every run is whole, whether it has ended or not."""
    for path in {lock.parent for lock in folder.rglob(".lock")} | {
        made.parent for made in folder.rglob(CONFIG)
    }:
        assert read_config(path), words
        check_sums(path)
        for checkpoint in list_checkpoints(path / CHECKPOINTS):
            load_checkpoint(checkpoint)


# -- Lines that work -------------------------------------------------------------------------------

SMALL: dict[str, tuple[str, ...]] = {
    "mlp": ("--steps", "1", "--model.hidden", "4"),
    "kmeans": ("--sweeps", "2", "--clusters", "2", "--starts", "1"),
    "gmm": ("--sweeps", "2", "--clusters", "2", "--starts", "1"),
    "pca": ("--components", "2"),
    "gan": ("--steps", "1", "--model.hidden", "4", "--model.latent", "2"),
    "gru": ("--steps", "1", "--model.width", "4", "--text.context", "8"),
}
RECIPES = tuple(SMALL)
LEFT_OUT = {
    "--debug": "it asks for a traceback",
    "--strict": "it ends with 1 for what it has found, which is no failure",
    "--train.compile": "it takes a minute and a C++ compiler",
}


def _train(recipe: str) -> list[str]:
    data = "mine.txt" if recipe == "gru" else "mine.csv"
    return ["train", recipe, "--data", data, *SMALL[recipe], "--quiet"]


class Line(NamedTuple):
    words: list[str]
    options: type


TRAIN: list[Callable[[], Line]] = [
    lambda name=name: Line([*_train(name), "--out", "made"], with_processes(all_recipes()[name].options))
    for name in RECIPES
]
OTHERS: list[Callable[[], Line]] = [
    lambda: Line(["predict", "mlp-run", "other.csv", "--out", "made.csv"], PredictOptions),
    lambda: Line(["predict", "gmm-run", "other.csv", "--out", "made.parquet"], PredictOptions),
    lambda: Line(["predict", "gan-run", "mine.csv", "--json"], PredictOptions),
    lambda: Line(["evaluate", "mlp-run", "--data", "other.csv"], EvaluateOptions),
    lambda: Line(["evaluate", "gan-run", "--split", "train"], EvaluateOptions),
    lambda: Line(["export", "mlp-run", "made.onnx"], ExportOptions),
    lambda: Line(["export", "kmeans-run", "made.pt2"], ExportOptions),
    lambda: Line(["sample", "gru-run", "--length", "5"], SampleOptions),
    lambda: Line(["sample", "gan-run", "--count", "3", "--out", "made.csv"], SampleOptions),
    lambda: Line(["sample", "gmm-run", "--count", "2", "--json"], SampleOptions),
    lambda: Line(["runs", "list", "--folder", "."], RunsListOptions),
    lambda: Line(["runs", "show", "pca-run"], RunsShowOptions),
    lambda: Line(["runs", "compare", "mlp-run", "gan-run", "kmeans-run"], RunsCompareOptions),
    lambda: Line(["report", "mlp-run"], ReportOptions),
    lambda: Line(["doctor", "mlp-run", "--no-curvature", "--seconds", "1"], DoctorOptions),
    lambda: Line(["doctor", "gan-run", "--no-curvature", "--out", "made"], DoctorOptions),
    lambda: Line(["explain", "mlp-run", "--no-time"], ExplainOptions),
    lambda: Line(["explain", "gpt", "--no-time", "--batch", "2"], ExplainOptions),
    lambda: Line(["study", "mlp-run", "folds", "--folds", "2", "--steps", "1", "--quiet"], StudyOptions),
    lambda: Line(["adapter", "list", "mlp-run"], AdapterListOptions),
    lambda: Line(["sheet", "list"], SheetListOptions),
    lambda: Line(["sheet", "show", "loss/mse"], SheetShowOptions),
]  # fmt: skip


# -- What becomes of them --------------------------------------------------------------------------

EDGES = (
    "", " ", "0", "-1", "-0.0", "1.5", "1e400", "-1e400", "1e-400", "nan", "inf", "2147483648",
    "1000000000000000000", "99999999999999999999", "9" * 5000, "²", "١", "1_0", "0x10", "1,2", "None", "True",
    "é☃", "\udcff", "a\nb", "x" * 300, "-", "--", "=", "[", "\x1b[31m", "mine.csv", "mine.txt", "mlp-run",
    "folder", ".", "~", "none.csv", "none/none.csv", "mine.csv/inner", "made.csv", "made.toml", "cuda",
    "cuda:²", "cuda:" + "9" * 5000,
)  # fmt: skip
FITTING: dict[Any, tuple[str, ...]] = {
    int: ("1", "2", "3", "7", "20"),
    float: ("0.1", "0.5", "0.99", "1", "3", "2e-3"),
    str: ("kind", "value", "label", "size", "colour", "1", "-1", "cpu", "loss", "accuracy", "a", "mlp"),
    Path: ("mine.csv", "other.csv", "mine.txt", "mlp-run", "gru-run", "options.toml", "mlp-run/config.toml",
           "made.csv", "made.npy", "made", "folder"),
}  # fmt: skip
EDGES_OF: dict[Any, tuple[str, ...]] = {
    int: ("0", "-1", "2147483648", "1000000000000000000", "99999999999999999999", "9" * 5000, "1_0"),
    float: ("0", "-1", "-0.0", "nan", "inf", "1e400", "1e300", "1e-300", "9" * 400),
    str: EDGES,
    Path: EDGES,
}
ANY_TEXT = st.text(st.characters(exclude_characters="\0/"), max_size=12)


def of_type(kind: Any, words: Mapping[Any, tuple[str, ...]]) -> st.SearchStrategy[list[str]]:
    """A value that has this type, of these words."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return st.sampled_from([[str(part)] for part in parts])
    if origin in (tuple, list):
        several = st.lists(of_type(parts[0], words), min_size=1, max_size=3)
        return several.map(lambda found: [word for one in found for word in one])
    if parts:  # a union
        return st.one_of([of_type(part, words) for part in parts if part is not type(None)])
    return st.sampled_from([[word] for word in words.get(kind, EDGES)])


def values(flag: Flag, wild: bool) -> st.SearchStrategy[list[str]]:
    if flag.kind is bool:
        return st.just([])
    good, edge = of_type(flag.kind, FITTING), of_type(flag.kind, EDGES_OF)
    if not wild:
        return st.one_of(good, good, good, edge)
    odd = st.one_of(st.sampled_from(EDGES), ANY_TEXT).map(lambda word: [word])
    return st.one_of(good, edge, odd, st.lists(st.sampled_from(EDGES), max_size=3))


@st.composite
def misspelt(draw: st.DrawFn, word: str) -> str:
    place = draw(st.integers(0, max(0, len(word) - 1)))
    added = draw(st.sampled_from(["", "x", "-", "É", word[place : place + 1] * 2]))
    return word[:place] + added + word[place + 1 :]


def grouped(words: Sequence[str]) -> list[list[str]]:
    """Each flag with its values; each word before the first flag by itself."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups or not groups[-1][0].startswith("--"):
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    """The words of a command. Most are words that it knows, with values that are at worst at an edge of what
    their type can say; one line in four is wild."""
    words, options = draw(st.one_of(st.sampled_from(TRAIN), st.sampled_from(OTHERS)))()
    wild = draw(st.integers(0, 3)) == 3
    flags = [flag for name, flag in table(options).items() if name.startswith("--") and name not in LEFT_OUT]
    flags.append(Flag("--config", Path) if words[0] == "train" else Flag("--help", bool))
    groups = grouped(words)
    changes = ["drop", "double", "misspell", "join", "stray"] if wild else []
    for change in draw(st.lists(st.sampled_from(["add", "add", "change", *changes]), min_size=1, max_size=4)):
        place = draw(st.integers(0, len(groups) - 1))
        chosen = groups[place]
        if change == "add":
            flag = draw(st.sampled_from(flags))
            groups.append([flag.name, *draw(values(flag, wild))])
        elif change == "change":
            known = next((flag for flag in flags if flag.name == chosen[0]), None)
            if known:
                groups[place] = [chosen[0], *draw(values(known, wild))]
            elif place > 1:  # a positional word after the command
                groups[place] = draw(of_type(Path, FITTING))
        elif change == "drop" and len(groups) > 1:
            groups.pop(place)
        elif change == "double":
            groups.append(list(chosen))
        elif change == "misspell":
            groups[place] = [draw(misspelt(chosen[0])), *chosen[1:]]
        elif change == "join" and len(chosen) == 2:
            groups[place] = ["=".join(chosen)]
        elif change == "stray":
            groups.insert(place + 1, [draw(st.one_of(st.sampled_from(EDGES), ANY_TEXT))])
    return [word for group in groups for word in group]
