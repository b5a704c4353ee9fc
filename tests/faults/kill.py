"""SIGKILL at random moments of every kind of run, many of them inside a save: no run that cannot be resumed,
no checkpoint that loads wrong.

    python -m tests.faults.kill --kills 500

A run, in one process or in two, is started, killed and resumed until it ends; of two processes all are
killed, or one of them or the one that has started them, and then all must end. After each kill the newest
checkpoint that verifies is at most one interval behind. At the end weights, optimiser, random states,
metrics, measures and predictions must be those of a run that nobody touched, to the last bit.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.faults.lives import (
    NOTES,
    Kind,
    Life,
    check_same,
    line,
    newest_step,
    prepare,
)

VICTIMS = (("starter", "member0", "member1"), ("starter",), ("member0",), ("member1",))
SAVES = 8
"""Of a life, in one of which it is killed."""


class Course:
    """A kind of run in so many processes, and the one run of it that is killed again and again."""

    def __init__(self, name: str, kind: Kind, count: int, folder: Path) -> None:
        self.name, self.kind, self.count, self.folder = name, kind, count, folder
        self.path, self.whole = folder / f"{name}-{count}", folder / f"whole-{name}-{count}"
        life = Life(line(kind, self.whole, count), folder)
        assert life.end(300) == 0, f"{name}: {life.words()}"
        self.seconds = time.monotonic() - life.begun
        self.step = 0
        """Of the newest checkpoint."""

    def attempt(self, generator: random.Random, *, inside_save: bool) -> Counter[str]:
        """One life of the run, and what became of it."""
        life = Life(line(self.kind, self.path, self.count), self.folder)
        victims = generator.choice(VICTIMS) if self.count > 1 else ("starter",)
        if inside_save:
            target = generator.randint(1, SAVES)
            reached = life.wait_for(lambda: NOTES["saving"] >= target)
            time.sleep(generator.uniform(0.0, 0.004) if reached else 0.0)
        else:
            moment = life.begun + generator.uniform(0.0, self.seconds)
            life.wait_for(lambda: time.monotonic() >= moment)
        killed = life.send(signal.SIGKILL, *victims)
        code = life.end()
        if code == 0:  # whoever was killed had nothing left to do
            check_same(self.path, self.whole)
            shutil.rmtree(self.path)
            self.step = 0
            return Counter({"runs that ended like an undisturbed one": 1})
        assert killed, f"{self.name} failed by itself with code {code}: {life.words()}"
        if "starter" not in victims:
            assert f"process {victims[0][-1]} of 2 was ended by SIGKILL" in life.words(), life.words()
        self.check_between()
        found = Counter({"kills": 1, f"of {self.name}": 1, "in two processes": int(self.count > 1)})
        found["inside a save"] = int(NOTES.inside_a_save)
        return found

    def check_between(self) -> None:
        """At most an interval is lost, and never what was saved before."""
        step = newest_step(self.path)
        taken = NOTES["step"]
        assert step >= self.step, f"{self.name}: from step {self.step} back to {step}"
        assert taken - step <= self.kind.interval, f"{self.name}: step {taken} was taken, {step} is saved"
        self.step = step


def campaign(kills: int, seed: int, *, names: str = "", quiet: bool = False) -> Counter[str]:
    """Kill until `kills` kills have been survived, a third of them inside a save; then let all come to their
    ends."""
    generator = random.Random(seed)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kinds = prepare(folder, names.split(",") if names else ())
        courses = [Course(name, kinds[name], count, folder) for count in (1, 2) for name in kinds]
        while counts["kills"] < kills:
            aim = 3 * counts["inside a save"] < counts["kills"] + 1
            # In the order of a shuffled deck, so that each has its share.
            if not counts["attempts"] % len(courses):
                generator.shuffle(courses)
            course = courses[counts["attempts"] % len(courses)]
            counts["attempts"] += 1
            counts += course.attempt(generator, inside_save=aim)
            if not quiet:
                short = {name: counts[name] for name in ("kills", "inside a save", "in two processes")}
                print(f"\r{short} {course.name}      ", end="", file=sys.stderr, flush=True)
        for course in courses:
            if course.path.exists():
                life = Life(line(course.kind, course.path, course.count), folder)
                assert life.end(300) == 0, life.words()
                check_same(course.path, course.whole)
                counts["runs that ended like an undisturbed one"] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--kinds", default="", help="names with commas between; without it all")
    parser.add_argument("--quiet", action="store_true")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    begun = time.monotonic()
    counts = campaign(arguments.kills, arguments.seed, names=arguments.kinds, quiet=arguments.quiet)
    print(f"\n{time.monotonic() - begun:.0f} s")
    print(*(f"{count:5d}  {name}" for name, count in sorted(counts.items())), sep="\n")
    need = arguments.kills // 5
    if counts["inside a save"] < need:
        raise SystemExit(f"only {counts['inside a save']} kills fell inside a save, {need} are wanted")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
