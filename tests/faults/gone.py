"""The folder of a run deleted at random moments: the run ends at once with one message, and leaves nothing.

    python -m tests.faults.gone --count 40

The run is in one process or in two; its folder is deleted while it trains, saves or writes its report, moved
away whole or file by file. The exit code is 1, the one message has the path, and the bytes if something was
being written; the folder is not made again, and no process and no temporary file is left.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

from quire.files import SUMS
from tests.faults.kill import Course
from tests.faults.lives import Life, line, prepare
from tests.faults.signals import wait_for

MOMENTS = ("preparing", "training", "saving", "reporting", "any")


def delete(path: Path, away: Path, *, whole: bool) -> bool:
    """Whether there was a folder of a run that had not ended."""
    if whole:
        try:
            path.rename(away)
        except FileNotFoundError:
            return False
        ended = "report.html" in (away / SUMS).read_text()
        remove(away)
        return not ended
    there = path.exists()
    remove(path)
    return there


def remove(path: Path) -> None:
    """Though the run may put something there, or take something away, while it goes."""
    while path.exists():
        with contextlib.suppress(OSError):
            shutil.rmtree(path)


def attempt(course: Course, moment: str, generator: random.Random, temporary: Path) -> Counter[str]:
    """One run without its folder, and how it ended; nothing where it had ended before."""
    # What goes file by file takes a while, in which a run that is almost through may end.
    whole = moment in ("reporting", "any") or generator.random() < 0.5
    what = f"{course.name} in {course.count}, {moment}, {'moved away' if whole else 'file by file'}"
    life = Life(line(course.kind, course.path, course.count), course.folder)
    if moment == "preparing":
        life.wait_for(course.path.exists)
        time.sleep(generator.uniform(0.0, 0.01))
    else:
        wait_for(moment, course, life, generator)
    under_way = delete(course.path, course.folder / "away", whole=whole)
    begun = time.monotonic()
    code = life.end()
    took, said = time.monotonic() - begun, life.words()
    if not under_way:
        assert code == 0, f"{what}: code {code}: {said}"
        shutil.rmtree(course.path, ignore_errors=True)
        return Counter()
    assert code == 1, f"{what}: code {code}: {said}"
    errors = [text for text in said.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1, f"{what}: {said}"
    assert str(course.path) in errors[0], f"{what}: {said}"
    assert "bytes" in errors[0], f"{what}: {said}"
    assert "Traceback" not in said, f"{what}: {said}"
    assert "--debug" not in said, f"{what}: {said}"
    assert not course.path.exists(), f"{what}: {[*course.path.rglob('*')]}"
    left = [path.name for path in course.path.parent.iterdir() if ".tmp" in path.name]
    assert not left, f"{what}: {left}"
    left = [path.name for path in temporary.glob("quire-*")]  # PyTorch keeps what it compiles there
    assert not left, f"{what}: {left}"
    found = Counter({"runs whose folder was deleted": 1, moment: 1, f"of {course.count}": 1})
    found["longest in milliseconds"] = int(1000 * took)
    return found


def campaign(count: int, seed: int) -> Counter[str]:
    """So many deletions, by turns in one process and in two."""
    generator = random.Random(seed)
    counts: Counter[str] = Counter()
    longest = 0
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        temporary = folder / "temporary"
        temporary.mkdir()
        kinds = prepare(folder, ("mlp",) if count < 20 else ("mlp", "gan", "kmeans"))
        courses = [Course(name, kinds[name], processes, folder) for name in kinds for processes in (1, 2)]
        before, tempfile.tempdir = tempfile.tempdir, str(temporary)
        try:
            for turn in range(3 * count + 20):
                moment = MOMENTS[turn // len(courses) % len(MOMENTS)]
                found = attempt(courses[turn % len(courses)], moment, generator, temporary)
                longest = max(longest, found.pop("longest in milliseconds", 0))
                counts += found
                if counts["runs whose folder was deleted"] == count:
                    break
        finally:
            tempfile.tempdir = before
    assert counts["runs whose folder was deleted"] == count, "most runs end before their folder is gone"
    counts["longest in milliseconds"] = longest
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    counts = campaign(arguments.count, arguments.seed)
    print(*(f"{value:5d}  {name}" for name, value in sorted(counts.items())), sep="\n")


if __name__ == "__main__":
    main()
