"""Starting several processes on this machine, and seeing to it that they end together.

Each process is a command of its own. The first one's output is the user's; what the others say is kept, and
shown where one of them failed. A signal is passed on to each once. When one fails, the others have a while to
end by themselves and are then ended. They also end when this process is killed: each holds the reading end of
a pipe that nobody writes to.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from quire.errors import QuireError

GRACE = 8.0
"""Seconds in which the others may end by themselves when one has failed; they may be about to say why."""
URGED = 4.0
"""Seconds after which a process that was told to end is killed."""
POLL = 0.05
SAYING = (1, 2)
"""Codes that a process ends with which has said why."""
LOST = "lost touch with another"
"""What a process says that failed because another did."""
SAID = 2000
"""Characters of what a failed process said that are shown."""


class _Process:
    def __init__(
        self, command: Sequence[str], number: int, folder: Path, environment: dict[str, str]
    ) -> None:
        self.number = number
        self.told = 0
        """Signals that were passed on to it."""
        self.said: IO[bytes] | None = (folder / f"{number}").open("w+b") if number else None
        self.running = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL if number else None,
            stderr=self.said,
            env=environment,
            start_new_session=True,  # the terminal's Ctrl-C reaches it through this process alone
        )

    @property
    def code(self) -> int | None:
        return self.running.poll()

    def send(self, number: int) -> None:
        if self.code is None:
            self.running.send_signal(number)

    def tell(self, numbers: Sequence[int]) -> None:
        """Each of these signals once, also those that came before it was there."""
        while self.told < len(numbers):
            self.told += 1
            self.send(numbers[self.told - 1])

    def words(self) -> str:
        """Its last error, where it told of one."""
        if self.said is None:
            return ""
        self.said.seek(0)
        text = self.said.read().decode(errors="replace").strip()
        found = max(text.rfind("error: "), text.rfind("Traceback"))
        return text[found:][:SAID].removeprefix("error: ") if found >= 0 else ""

    def close(self) -> None:
        if self.code is None:
            self.running.kill()
            self.running.wait()
        assert self.running.stdin is not None
        self.running.stdin.close()
        if self.said is not None:
            self.said.close()


class _Signals:
    """Signals to this process, to be passed on to all that it has started."""

    def __init__(self) -> None:
        self.started: list[_Process] = []
        self.numbers: list[int] = []

    def _note(self, number: int, frame: object) -> None:
        self.numbers.append(number)

    @contextmanager
    def listening(self) -> Iterator[None]:
        main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
        old = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def launch(commands: Sequence[Sequence[str]]) -> int:
    """Run the commands side by side; the exit code of all, 130 or 143 after an interrupt. A failure that the
    first process has not told of itself is raised, with the number of the process that failed first; to its
    own words a line is added where the others have lost it."""
    environment = dict(os.environ)
    # Each process would otherwise take all cores for itself.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // len(commands))))
    signals = _Signals()
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        try:
            with signals.listening():
                for number, command in enumerate(commands):
                    signals.started.append(_Process(command, number, Path(folder), environment))
                failed = _wait(signals)
            twice = len(signals.numbers) > 1
            return 128 + signals.numbers[-1] if twice else _outcome(signals.started, failed)
        finally:
            for process in signals.started:
                process.close()


def _wait(signals: _Signals) -> _Process | None:
    """Until all have ended; the one that failed first."""
    failed: _Process | None = None
    end: float | None = None
    urged = False
    while any(process.code is None for process in signals.started):
        for process in signals.started:
            process.tell(signals.numbers)
        failed = failed or _failed_first(signals.started)
        if end is None and (failed or len(signals.numbers) > 1):
            end = time.monotonic() + (GRACE if failed else URGED)
        if end is not None and time.monotonic() > end:
            for process in signals.started:
                process.send(signal.SIGKILL if urged else signal.SIGTERM)
            end, urged = time.monotonic() + URGED, True
        time.sleep(POLL)
    return failed or _failed_first(signals.started)


def _failed_first(started: list[_Process]) -> _Process | None:
    """Of those that are seen to have failed at once, one that did not fail for the loss of another."""
    failed = [process for process in started if process.code]
    return min(failed, key=lambda p: (p.code == 1, p.number == 0 or LOST in p.words()), default=None)


def _outcome(started: list[_Process], failed: _Process | None) -> int:
    if failed is None:
        return 0
    if started[0].code in SAYING and LOST in failed.words():
        failed = started[0]  # the one that was lost, though seen to end after the other
    code = failed.code
    assert code
    # One that is asked to stop before it listens, or twice, goes without a word.
    if -code in (signal.SIGINT, signal.SIGTERM):
        return 128 - code
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        return code
    words = failed.words()
    if code > 0 and started[0].code == code and not words and (failed.number or code in SAYING):
        # The first process has said why, and the others failed alike, or for the loss of it.
        if failed.number == 0 and any(LOST in process.words() for process in started):
            print(f"  in: process 0 of {len(started)}", file=sys.stderr)
        return code
    what = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed: {words or f'code {code}'}"
    raise _Failed(f"process {failed.number} of {len(started)} {what}", code if code > 0 else 1)


class _Failed(QuireError):
    def __init__(self, got: str, code: int) -> None:
        super().__init__(got)
        self.exit_code = code


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent() -> None:
    """In a process that `launch` started: stop as after a SIGTERM when whoever started it is gone."""

    def watch() -> None:
        try:
            while os.read(0, 1):
                pass
        except OSError:
            return
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE + URGED)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
