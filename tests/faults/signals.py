"""SIGTERM and Ctrl-C to any one process of a run at random moments: all stop, with everything saved.

    python -m tests.faults.signals --count 50

The run is in one process or in two; the signal goes to the one that was started, or to one that it has
started; while it imports or reads its data, trains, saves, or writes its report. All processes end within 30
seconds, the exit code is 143 or 130, not a step is lost, and the resumed run ends with the bits of an
undisturbed one. Two Ctrl-C in a step that takes a minute stop it at once.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.faults.kill import Course
from tests.faults.lives import (
    NOTES,
    SECONDS,
    Life,
    check_same,
    is_running,
    line,
    newest_step,
    prepare,
)

MOMENTS = ("preparing", "training", "saving", "reporting", "any")
AT_ONCE = 6.0
"""Seconds after a second Ctrl-C; of several processes those that do not listen are given four."""


def wait_for(moment: str, course: Course, life: Life, generator: random.Random) -> None:
    """Until the run is about there."""
    share = generator.random()
    if moment == "preparing":
        time.sleep(0.2 * share * course.seconds)
    elif moment == "any":
        time.sleep(share * course.seconds)
    elif moment == "training":
        steps = generator.randint(1, 20)
        life.wait_for(lambda: NOTES["step"] >= steps or bool(NOTES["ended"]))
    elif moment == "saving":
        saves = generator.randint(1, 6)
        life.wait_for(lambda: NOTES["saving"] >= saves or bool(NOTES["ended"]))
        time.sleep(0.004 * share)
    else:
        life.wait_for(lambda: bool(NOTES["ended"]))
        time.sleep(0.3 * share * course.seconds)


def interrupt(course: Course, moment: str, number: int, to: str, generator: random.Random) -> Counter[str]:
    """One signal to one process, and what became of the run; nothing where it had ended before."""
    what = f"{course.name} in {course.count}, {moment}, {signal.Signals(number).name} to {to}"
    life = Life(line(course.kind, course.path, course.count), course.folder)
    wait_for(moment, course, life, generator)
    ended = bool(NOTES["ended"])
    sent = life.send(number, to)
    asked = time.monotonic()
    code = life.end()
    took = time.monotonic() - asked
    taken, said = NOTES["step"], life.words()
    found: Counter[str] = Counter()
    # Once all is learned and saved, what is left may be over before the signal is heard.
    assert code != 0 or ended or not sent, f"{what}: nobody heard of it: {said}"
    found["heard of too late"] += sent and code == 0
    if sent and code != 0:
        assert code in (128 + number, -number), f"{what}: code {code}: {said}"
        assert took < SECONDS, f"{what}: {took:.1f} s"
        saved = newest_step(course.path)
        assert saved >= taken, f"{what}: step {taken} was taken, {saved} is saved: {said}"
        assert said.count("everything is saved") <= 1, f"{what}: {said}"
        assert "Traceback" not in said, f"{what}: {said}"
        if "everything is saved" in said:
            assert not list(course.path.rglob("*.tmp")), f"{what}: {list(course.path.rglob('*.tmp'))}"
            found["with everything saved"] += 1
        found += Counter({"stopped": 1, moment: 1, signal.Signals(number).name: 1, f"of {course.count}": 1})
        found[f"to {to}"] += 1
        found["longest in milliseconds"] = int(1000 * took)
        life = Life(line(course.kind, course.path, course.count), course.folder)
        code = life.end(300)
    assert code == 0, f"{what}: {life.words()}"
    check_same(course.path, course.whole)
    shutil.rmtree(course.path)
    return found


def twice(course: Course) -> Counter[str]:
    """Two Ctrl-C while a step takes a minute."""
    life = Life(line(course.kind, course.path, course.count), course.folder)
    life.wait_for(lambda: NOTES["step"] >= 2)
    NOTES["slow"] = 1
    time.sleep(0.2)
    life.send(signal.SIGINT, "starter")
    time.sleep(1.0)
    assert life.poll() is None, f"the first Ctrl-C does not wait for the step: {life.words()}"
    life.send(signal.SIGINT, "starter")
    code = life.end(AT_ONCE)
    assert code == 130, life.words()
    NOTES["slow"] = 0
    life = Life(line(course.kind, course.path, course.count), course.folder)
    assert life.end(300) == 0, life.words()
    check_same(course.path, course.whole)
    shutil.rmtree(course.path)
    return Counter({"stopped at once by a second Ctrl-C": 1})


def importing(course: Course, number: int, generator: random.Random) -> Counter[str]:
    """A command that was not forked, in the first seconds of its life."""
    words = [sys.executable, "-m", "quire", "train", *line(course.kind, course.path, course.count)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}) as running:  # fmt: skip
        time.sleep(generator.uniform(0.05, 6.0))
        started = children(running.pid)
        sent = running.poll() is None
        running.send_signal(number)
        began = time.monotonic()
        _, said = running.communicate(timeout=SECONDS)
    assert not sent or running.returncode in (128 + number, -number, 0), f"{running.returncode}: {said}"
    while any(map(is_running, started)):
        assert time.monotonic() - began < SECONDS, f"processes are left: {said}"
        time.sleep(0.01)
    if running.returncode == 0 or not sent:
        return Counter()
    life = Life(line(course.kind, course.path, course.count), course.folder)
    assert life.end(300) == 0, life.words()
    check_same(course.path, course.whole)
    shutil.rmtree(course.path)
    return Counter({"stopped": 1, "importing": 1, signal.Signals(number).name: 1, f"of {course.count}": 1})


def children(process: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == process:
                found.append(int(path.name))
        except (OSError, ValueError):
            continue
    return found


def campaign(count: int, seed: int, *, fresh: int) -> Counter[str]:
    """`count` signals, of which one in `fresh` goes to a command that was not forked; and for each ten a
    second one that does not wait."""
    generator = random.Random(seed)
    counts: Counter[str] = Counter()
    longest = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kinds = prepare(folder, () if count >= 20 else ("mlp",))
        courses = {(n, c): Course(n, kinds[n], c, folder) for n in kinds for c in (1, 2)}
        turn = 0
        while counts["stopped"] < count:
            course = generator.choice([*courses.values()])
            number = (signal.SIGTERM, signal.SIGINT)[turn % 2]
            to = generator.choice(("starter", "member0", "member1")) if course.count > 1 else "starter"
            if turn % fresh == fresh - 1:
                found = importing(course, number, generator)
            else:
                found = interrupt(course, MOMENTS[turn % len(MOMENTS)], number, to, generator)
            longest = max(longest, found.pop("longest in milliseconds", 0))
            counts += found
            turn += 1
            assert turn < 5 * count + 20, "most runs end before the signal comes"
        patient = [name for name in ("mlp", "gmm", "gan", "gru", "kmeans", "tuned") if name in kinds]
        for turn in range(max(2, count // 10)):
            counts += twice(courses[patient[turn // 2 % len(patient)], 1 + turn % 2])
    counts["longest in milliseconds"] = longest
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--fresh", type=int, default=5, help="one in so many goes to a command that starts")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    counts = campaign(arguments.count, arguments.seed, fresh=arguments.fresh)
    print(*(f"{value:5d}  {name}" for name, value in sorted(counts.items())), sep="\n")


if __name__ == "__main__":
    main()
