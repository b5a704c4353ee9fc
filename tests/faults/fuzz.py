"""Coverage-guided fuzzing of every reader: whatever the bytes, an answer or an error of ours.

    python -m tests.faults.fuzz --seconds 600          every reader, as many at a time as there are cores
    python -m tests.faults.fuzz --seconds 10 csv npz   these

An exception that is none of ours is noted once for each place that it comes from, with the bytes, and the
search goes on; a reader that hangs for half a minute or takes a gigabyte ends it. Needs atheris, which
`make fuzz` installs; where it is missing nothing can be tried, and that is a failure.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PARTS = (
    "quire.data",
    "quire.board.metrics",
    "quire.cli.config",
    "quire.files",
    "quire.models.gpt_files",
    "quire.models.weights",
    "quire.report.pictures",
    "quire.report.reading",
    "quire.tasks.loading",
    "quire.train.checkpoints",
    "quire.train.folder",
    "quire.tuning.files",
)
PATIENCE = 30
"""Seconds for one file of a few kilobytes."""
MEMORY = 1024
"""Megabytes for the whole process, most of which is PyTorch."""


def fuzz(name: str, seconds: int, runs: Path, folder: Path) -> None:
    """One reader in this process, which ends with it."""
    import atheris

    from tests.faults.fuzz_readers import lay_beside, reader, seeds

    with atheris.instrument_imports(include=[*PARTS]):
        file, read = reader(name, runs)
    from quire.errors import QuireError

    path = folder / "work" / file
    path.parent.mkdir(parents=True)
    lay_beside(name, folder / "work", runs)
    (folder / "seeds").mkdir()
    for number, good in enumerate(seeds(name, runs)):
        (folder / "seeds" / f"{number}").write_bytes(good)
    seen: set[str] = set()

    def once(content: bytes) -> None:
        path.write_bytes(content)
        try:
            read(path)
        except QuireError:
            return
        except Exception as error:
            steps = traceback.extract_tb(error.__traceback__)
            place = f"{type(error).__name__} {[f'{step.filename}:{step.lineno}' for step in steps[-2:]]}"
            if place not in seen:
                seen.add(place)
                note = folder / f"found-{len(seen)}"
                note.write_bytes(content)
                note.with_suffix(".txt").write_text(traceback.format_exc())

    limits = [f"-max_total_time={seconds}", f"-rss_limit_mb={MEMORY}", f"-timeout={PATIENCE}"]
    limits += [f"-artifact_prefix={folder}/", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *limits, str(folder / "seeds")], once)
    atheris.Fuzz()


def start(name: str, seconds: int, runs: Path, folder: Path) -> tuple[str, list[str]]:
    """One reader in a process of its own: how far it came, and what was found."""
    words = [sys.executable, "-m", "tests.faults.fuzz", name, "--seconds", str(seconds)]
    words += ["--runs", str(runs), "--folder", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    tried = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    covered = re.findall(r"cov: (\d+)", done.stderr)
    found = [note.read_text() for note in sorted(folder.glob("found-*.txt"))]
    if done.returncode:
        found.append(done.stderr[-3000:])
    if not tried or not int(tried[1]):
        found.append("nothing was tried: " + done.stderr[-1000:])
    return f"{tried[1] if tried else 0} files, {covered[-1] if covered else 0} places", found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readers", nargs="*", help="all unless given")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="readers at a time")
    parser.add_argument("--runs", type=Path, help="finished runs to take good files from")
    parser.add_argument("--folder", type=Path, help="an empty folder to work in")
    arguments = parser.parse_args()
    try:
        import atheris  # noqa: F401
    except ImportError:
        raise SystemExit(
            "nothing was fuzzed: atheris is not installed\n"
            "  fix: python -m pip install atheris, on Linux with a Python that it is built for"
        ) from None
    if arguments.folder:
        fuzz(*arguments.readers, arguments.seconds, arguments.runs, arguments.folder)
        return
    from tests.faults.fuzz_readers import READERS
    from tests.faults.hostile import prepare

    broken = []

    def one(name: str) -> None:
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        far, found = start(name, arguments.seconds, runs, folder)
        print(f"{name}: {far} in {arguments.seconds} s, {len(found)} faults", *found, sep="\n", flush=True)
        if found:
            broken.append(f"{name} ({folder})")
        else:
            shutil.rmtree(folder)

    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(arguments.jobs) as pool:
        runs = Path(temporary, "runs")
        runs.mkdir()
        prepare(runs)
        list(pool.map(one, arguments.readers or READERS))
    if broken:
        raise SystemExit(f"faults in {', '.join(broken)}")


if __name__ == "__main__":
    main()
