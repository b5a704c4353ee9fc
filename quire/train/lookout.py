"""Which process is gone, where several learn together. One that fails leaves word of why; those that lose
touch with it read that word, and end.

gloo notices that touch is lost, and raises an error. A GPU that adds with others waits for ever, Python waits
for the GPU, and signals wait for Python. There each process has two threads that do not wait with it: one
holds a line to the next process, the other looks for word. Where some process is gone, they end this one.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from quire.errors import QuireError
from quire.train.keeping import Interrupted
from quire.train.processes import processes

WORD = 3.0
"""Seconds that a process which lost touch waits for word of which one is gone."""
LOOK = 1.0
"""Seconds between two looks for word."""
GRACE = 5.0
"""Seconds in which a process may end by itself, once some other is known to be gone."""
FOR_EVER = timedelta(days=3650)
"""How long a line is held; nothing is said on it before the end."""
ALARM = "gone"
"""Where the number of the first that is gone is written."""


class LostTouch(QuireError):
    """Another process is gone, and nothing can be added up without it."""

    def __init__(self, gone: str, fix: str) -> None:
        number, count = processes()
        super().__init__(
            f"process {number} of {count} lost touch with another, which has failed or was ended: {gone}",
            fix=fix,
        )


def says_that_touch_is_lost(problem: Exception) -> bool:
    """Whether an error says no more than that another process is gone."""
    if processes()[1] == 1 or isinstance(problem, QuireError):
        return False
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
    return isinstance(problem, distributed.DistError) or any(word in str(problem) for word in words)


def leave_word(problem: BaseException) -> None:
    """Why this process goes, for the others, who will lose touch with it."""
    words = problem.got if isinstance(problem, QuireError) else f"{type(problem).__name__}: {problem}"
    with suppress(Exception):
        _store().set(f"gone {processes()[0]}", words or " ")


def who_is_gone() -> str:
    """Which processes touch was lost with, and why where they have left word. Whoever is still there says so;
    one that has said nothing after a while is gone."""
    number, count = processes()
    others = {i: "" for i in range(count) if i != number}
    end = time.monotonic() + WORD
    with suppress(Exception):  # what is known is in the store; its own process may be the one that is gone
        store = _store()
        store.set(f"here {number}", " ")
        while time.monotonic() < end and others:
            for i in list(others):
                if store.check([f"gone {i}"]):
                    return _with_word(store, i)
                if store.check([f"here {i}"]):
                    del others[i]
            time.sleep(0.05)
    return f"process {' or '.join(map(str, others))} of {count}" if others else f"one of {count} processes"


def _with_word(store: Any, number: int) -> str:
    """A process, and its word where it has left one."""
    name, word = f"process {number} of {processes()[1]}", ""
    with suppress(Exception):
        if store.check([f"gone {number}"]):
            word = store.get(f"gone {number}").decode(errors="replace").strip()
    return f"{name}: {word}" if word else name


def _store() -> Any:
    return distributed.distributed_c10d._get_default_store()


@contextmanager
def attended(device: torch.device, fix: str, log: Callable[[str], object] | None = None) -> Iterator[None]:
    """Raise `LostTouch` where another process goes while the with-block works together with it; where that
    waits for a GPU, log and say the same and end this process."""
    lookout = Lookout(fix, log) if device.type == "cuda" and processes()[1] > 1 else None
    try:
        yield
    except Exception as problem:
        lost = says_that_touch_is_lost(problem)
        if lookout is not None and lost:
            lookout.over.set()  # it is not this process that is gone
        elif lookout is not None:
            # What all know of, none has to be told.
            known = isinstance(problem, Interrupted) or hasattr(problem, "said_elsewhere")
            if not known:
                leave_word(problem)
            lookout.close(alarm=not known)
        if not lost:
            raise
        raise LostTouch(who_is_gone(), fix) from problem
    if lookout is not None:
        lookout.close()


class Lookout:
    """All processes make one at the same time."""

    def __init__(self, fix: str, log: Callable[[str], object] | None = None) -> None:
        self.fix, self.log = fix, log
        self.number, self.count = processes()
        self.lines = distributed.new_group(backend="gloo", timeout=FOR_EVER)
        self.store = _store().clone()  # whose other users may wait for something
        self.over = threading.Event()
        self.line = threading.Thread(target=self._listen, daemon=True)
        self.line.start()
        threading.Thread(target=self._look, daemon=True).start()

    def close(self, *, alarm: bool = False) -> None:
        """At the end of this process's work; with an `alarm` the others are to end as well."""
        if alarm:
            self._tell(self.number)
        else:
            with suppress(Exception):  # who listened may be gone
                distributed.send(torch.zeros(1), (self.number - 1) % self.count, group=self.lines)
            self.line.join()  # the next one may have something to finish
        self.over.set()

    def _listen(self) -> None:
        """Until the next process is done with its work, or gone."""
        following = (self.number + 1) % self.count
        try:
            distributed.recv(torch.zeros(1), following, group=self.lines)
        except Exception:
            if not self.over.is_set():
                self._tell(following)

    def _tell(self, gone: int) -> None:
        with suppress(Exception):
            if not self.store.check([ALARM]):
                self.store.set(ALARM, str(gone))

    def _look(self) -> None:
        gone: int | None = None
        while gone is None and not self.over.wait(LOOK):
            try:
                if self.store.check([ALARM]):
                    gone = int(self.store.get(ALARM))
            except Exception:  # who keeps the store is gone, and is the first or was started with it
                gone = 0
        if gone is not None and not self.over.wait(GRACE):
            self._end(LostTouch(_with_word(self.store, gone), self.fix))

    def _end(self, error: LostTouch) -> None:
        with suppress(Exception):
            if self.log is not None:
                self.log(f"failed: {error.got}")
        cursor = "\033[?25h" if sys.stderr.isatty() else ""  # which a bar has hidden
        print(f"{cursor}error: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)
