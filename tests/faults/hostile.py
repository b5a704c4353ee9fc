"""Hostile files, given to everything that reads files of their kind.

    python -m tests.faults.hostile               all of them
    python -m tests.faults.hostile --every 8     one in eight

For each: nothing runs, nothing is imported by a name of the file, nothing speaks to a network, nothing is
written elsewhere (an audit hook listens); memory rises by at most twice the file and 64 MB; and who refuses
says so in one message of ours that names the file. Who accepts a packed file within bounds may take twice
what it says it holds, or to learn from it `LEARNING` times that.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo  # an export would, and what it takes is not the doing of a file

from quire.cli.main import main as command
from quire.errors import QuireError
from tests.faults.hostile_files.case import Case
from tests.faults.hostile_files.every import cases
from tests.faults.hostile_files.texts import FROM_DISK
from tests.faults.watch import CANARY, Watch, peak, status
from tests.recipes.examples import (
    write_csv,
    write_images,
    write_labelled,
    write_pairs,
    write_scenes,
    write_text,
)

SLACK = 64 * 2**20
LEARNING = 16
SECONDS = 20
REFUSED = (1, 2)
UNFORESEEN = "run again with --debug"
"""What the command says of an exception that is none of ours."""

Reader = Callable[[Path], object]


class Answer(NamedTuple):
    reader: str
    code: int
    text: str
    grown: int
    notes: list[str]


def readers(kind: str, runs: Path, work: Path) -> dict[str, list[str] | Reader]:
    """Commands, in which FILE stands for the file, and functions of Python."""
    from quire.board.runs import Runs
    from quire.data import read_table
    from quire.models.gpt_files import read_gpt2
    from quire.models.weights import read_weights
    from quire.runs import load
    from quire.tuning import read_adapter

    def train(recipe: str, *words: str) -> list[str]:
        return [
            "train",
            recipe,
            *words,
            "--out",
            str(work / "made"),
            "--steps",
            "1",
            "--quiet",
            "--device",
            "cpu",
        ]

    def lay_over(path: Path) -> None:
        adapters = load(runs / "tuned").adapters
        assert adapters is not None
        adapters.load(path)

    def on_board(path: Path) -> None:
        board = Runs(path.parent)
        board.list()
        board.glimpse(path.name)
        board.run(path.name)
        board.whole(path.name)

    small = ["--text.context", "8"]
    table, words, pictures = str(runs / "mine.csv"), str(runs / "mine.txt"), str(runs / "pictures")
    any_run: dict[str, list[str] | Reader] = {
        "show": ["runs", "show", "FILE"],
        "report": ["report", "FILE"],
        "evaluate": ["evaluate", "FILE"],
        "load": lambda path: load(path).task,
        "board": on_board,
    }
    found: dict[str, dict[str, list[str] | Reader]] = {
        "table": {
            "train": train("mlp", "--data", "FILE"),
            "predict": ["predict", str(runs / "table"), "FILE"],
            "evaluate": ["evaluate", str(runs / "table"), "--data", "FILE"],
            "read_table": read_table,
        },
        "images": {
            "train": train("lenet", "--data", "FILE"),
            "predict": ["predict", str(runs / "images"), "FILE"],
        },
        "scenes": {
            "train": train("ssd", "--data", "FILE"),
            "predict": ["predict", str(runs / "scenes"), "FILE"],
        },
        "text": {"train": train("gpt", "--data", "FILE", *small)},
        "tokens": {"train": train("gpt", "--data", "FILE", *small, "--text.memory", str(FROM_DISK))},
        "pairs": {
            "train": train("seq2seq", "--data", "FILE"),
            "predict": ["predict", str(runs / "pairs"), "FILE"],
            "evaluate": ["evaluate", str(runs / "pairs"), "--data", "FILE"],
        },
        "labels": {
            "train": train("textclass", "--data", "FILE"),
            "predict": ["predict", str(runs / "labels"), "FILE"],
            "evaluate": ["evaluate", str(runs / "labels"), "--data", "FILE"],
        },
        "weights": {
            "read_weights": read_weights,
            "read_gpt2": read_gpt2,
            "train a network": train("resnet", "--data", pictures, "--model.weights", "FILE"),
            "train a GPT": train("gpt", "--data", words, *small, "--model.weights", "FILE"),
        },
        "adapter": {"read_adapter": read_adapter, "Adapters.load": lay_over},
        "config": {
            "train": ["train", "mlp", "--config", "FILE", "--out", str(work / "made"), "--steps", "1"]
        },
        "run": {
            **any_run,
            "list": ["runs", "list", "--folder", str(work)],
            "predict": ["predict", "FILE", table],
            "export": ["export", "FILE", str(work / "made.pt2")],
            "adapters": ["adapter", "list", "FILE"],
            "doctor": ["doctor", "FILE"],
            "resume": ["train", "mlp", "--data", table, "--resume", "FILE", "--steps", "2", "--quiet"],
            "tune": train("mlp", "--data", table, "--tune.base", "FILE"),
        },
        "run of text": {**any_run, "sample": ["sample", "FILE", "--length", "4"]},
        "run of images": {**any_run, "predict": ["predict", "FILE", pictures]},
    }
    return found[kind]


def prepare(runs: Path) -> None:
    """A run of each kind, which hostile files are made from or given to."""
    table, pictures = write_csv(runs / "mine.csv"), write_images(runs / "pictures", each=6)
    words, scenes = write_text(runs / "mine.txt"), write_scenes(runs / "mine", 8)
    pairs, labels = write_pairs(runs / "mine.tsv"), write_labelled(runs / "labels.csv")
    once = ["--steps", "2", "--quiet", "--device", "cpu"]
    context = ["--text.context", "8", "--model.width", "16", "--model.layers", "1", "--model.heads", "2"]
    for name, line in {
        "table": ["mlp", "--data", str(table), "--model.hidden", "4"],
        "tuned": ["mlp", "--data", str(table), "--tune.base", str(runs / "table"), "--tune.lora.rank", "2"],
        "images": ["lenet", "--data", str(pictures)],
        "scenes": ["ssd", "--data", str(scenes)],
        "pairs": ["seq2seq", "--data", str(pairs), "--model.width", "8"],
        "labels": ["textclass", "--data", str(labels), "--model.width", "8"],
        "text": ["gpt", "--data", str(words), "--text.tokens", "characters", *context],
    }.items():
        code, text = ask(["train", *line, *once, "--out", str(runs / name)], runs)
        assert code == 0, text


def ask(reader: list[str] | Reader, path: Path) -> tuple[int, str]:
    """Exit code and message of a command or function; what is none of our errors comes as code -1."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        if isinstance(reader, list):
            code = command([str(path) if word == "FILE" else word for word in reader])
            text = said.getvalue()
            return (-1 if UNFORESEEN in text or "Traceback" in text else code), text
        try:
            reader(path)
        except QuireError as error:
            return error.exit_code, str(error)
        except Exception as error:
            return -1, f"{type(error).__name__}: {error}"
    return 0, ""


@contextlib.contextmanager
def patience(seconds: int, notes: list[str]) -> Iterator[None]:
    """Seconds of computing, and twenty times as many by the clock: other programs may run beside. It is noted
    as well, as a reader may take the end for an error of the file."""

    def stop(*_: object) -> None:
        notes.append(f"it takes more than {seconds} s")
        raise TimeoutError(notes[-1])

    before = [signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)]
    signal.alarm(20 * seconds)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGALRM, before[0])
        signal.signal(signal.SIGPROF, before[1])


def size(path: Path) -> int:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if not p.is_symlink() and p.is_file()]
    return sum(file.stat().st_size for file in files)


def answers(case: Case, runs: Path, work: Path, watch: Watch) -> tuple[Path, list[str], int, list[Answer]]:
    """What each reader of the case's kind makes of it; every reader gets the file as it was made, with the
    names of the files in its folder, or none where it is a folder."""
    found: list[Answer] = []
    bytes_given = 0
    given, beside = work, [""]
    for name, reader in readers(case.kind, runs, work).items():
        if case.readers and name not in case.readers:
            continue
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        given = case.make(work, runs)
        bytes_given = size(given)
        beside = [] if given.is_dir() else [path.name for path in given.parent.iterdir()]
        os.chdir(work)
        with watch.over(work) as notes, peak() as grown, patience(SECONDS, notes):
            code, text = ask(reader, given)
        if list(work.rglob(f"{CANARY}.ran")):
            notes.append("foreign code ran")
        found.append(Answer(name, code, text, grown[0], notes))
    return given, beside, bytes_given, found


def names_it(text: str, given: Path, beside: list[str]) -> bool:
    """A file, or one that was laid beside it; of a folder itself, something in it, or that it is no run."""
    if beside:
        return any(name in text for name in beside)
    said = (f"{given}: ", f"{given.name}/", f"{given.name} has no config", f"no run '{given.name}'")
    return any(words in text for words in said)


def problems(
    case: Case, given: Path, beside: list[str], bytes_given: int, found: list[Answer]
) -> Iterator[str]:
    for answer in found:
        said = " ".join(answer.text.split())[:300]
        for note in answer.notes:
            yield f"{answer.reader}: {note}"
        most = 2 * bytes_given + SLACK
        if answer.code == 0 and case.unpacked:
            most = (LEARNING if "train" in answer.reader else 2) * case.unpacked + SLACK
        if answer.grown > most:
            grown, allowed = (number // 2**20 for number in (answer.grown, most))
            yield f"{answer.reader}: memory grew by {grown} MB, {allowed} are allowed"
        if answer.code not in (0, *REFUSED):
            yield f"{answer.reader}: code {answer.code}: {said}"
        elif answer.code in REFUSED and not names_it(answer.text, given, beside):
            yield f"{answer.reader}: the message names neither {given.name} nor what it was laid with: {said}"
    if case.refused and not any(answer.code in REFUSED or "left out" in answer.text for answer in found):
        yield "nobody refused it"


def campaign(every: int, only: str, *, quiet: bool) -> tuple[Counter[str], list[str]]:
    counts: Counter[str] = Counter()
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        runs, work = Path(temporary, "runs"), Path(temporary, "work")
        runs.mkdir()
        (Path(temporary) / f"{CANARY}.py").write_text("raise SystemExit('imported')\n")
        sys.path.insert(0, temporary)
        prepare(runs)
        chosen = [case for case in cases() if re.search(only, case.name)][::every]
        watch = Watch()
        limit = status("VmSize") + 4 * 2**30  # so that a bomb ends this process, not the machine
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for case in chosen:
            begun = time.monotonic()
            laid = answers(case, runs, work, watch)
            new = [f"{case.name}: {problem}" for problem in problems(case, *laid)]
            found = laid[-1]
            counts["files"] += 1
            counts["readings"] += len(found)
            counts["refused"] += sum(answer.code in REFUSED for answer in found)
            faults += new
            if not quiet:
                took = time.monotonic() - begun
                print(f"{took:5.1f} s  {case.name}", *new, sep="\n    ", flush=True)
        os.chdir("/")
    return counts, faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--only", default="", help="a regular expression on the names")
    parser.add_argument("--quiet", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counts, faults = campaign(arguments.every, arguments.only, quiet=arguments.quiet)
    print(", ".join(f"{name}: {count}" for name, count in counts.items()))
    if faults:
        raise SystemExit("\n".join([f"{len(faults)} faults", *faults]))


if __name__ == "__main__":
    main()
