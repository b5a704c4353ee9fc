"""A second Ctrl-C that does not wait.

Python hears of a signal when the call into C that is under way returns, which a step of a large model may do
after minutes; of two that come in one call it hears once. The system hears at once and writes to a pipe.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 1.0
"""Seconds in which this process may end by itself after the second signal."""
STOPS = (signal.SIGINT, signal.SIGTERM)
OVER = 0


@contextmanager
def ending_when_asked_twice() -> Iterator[None]:
    """End this process where it is asked to for the second time in the with-block, whatever it does."""
    if threading.current_thread() is not threading.main_thread():
        yield  # who alone hears of signals
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    over = threading.Event()

    def listen() -> None:
        asked = 0
        while asked < 2:
            (number,) = os.read(reading, 1)
            if number == OVER:
                return
            asked += number in STOPS
        if not over.wait(PATIENCE):
            cursor = "\033[?25h" if sys.stderr.isatty() else ""  # which a bar has hidden
            os.write(2, f"{cursor}interrupted\n".encode())
            os._exit(128 + number)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        over.set()
        os.write(writing, bytes([OVER]))
        listener.join()
        os.close(reading)
        os.close(writing)
