"""A second process with PyTorch, in which the board's proofs, instruments and diagnoses run.

The server stays small and quick beside it, whatever is computed, and what takes too long is ended. One line
of JSON goes over and one comes back:

    {"call": "proof", "given": {"id": "loss/hinge"}}      {"value": …} or {"error": [got, expected, fix]}
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from quire.errors import InputError, QuireError

SECONDS = 60.0
COMMAND = (sys.executable, "-m", "quire.board.worker")
_STARTING = 120.0


class Worker:
    """Starts its process when it is first asked, and again after one that was ended."""

    def __init__(self, seconds: float = SECONDS, command: Sequence[str] = COMMAND) -> None:
        self.seconds = seconds
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, call: str, **given: Any) -> Any:
        """What the function `call` of `quire.board.calls` gives. QuireError where it refuses or fails."""
        with self._lock:
            process = self._running()
            request = json.dumps({"call": call, "given": given}).encode() + b"\n"
            try:
                assert process.stdin is not None
                process.stdin.write(request)
                process.stdin.flush()
                answer = self._line(process, self.seconds)
            except BrokenPipeError:
                answer = b""
            if not answer:
                self._end()
                raise QuireError(f"'{call}' ended the process it ran in", fix="try again")
        found = json.loads(answer)
        if "error" in found:
            got, expected, fix = found["error"]
            raise (InputError if found["mistake"] else QuireError)(got, expected=expected, fix=fix)
        return found["value"]

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._line(self._process, _STARTING)  # it says that it is there
        return self._process

    def _line(self, process: subprocess.Popen[bytes], seconds: float) -> bytes:
        """The next line, empty where the process has ended; one that takes longer is ended."""
        assert process.stdout is not None
        end, pieces = time.monotonic() + seconds, [b""]
        while not pieces[-1].endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self._end()
                raise QuireError(
                    f"no answer within {seconds:g} seconds", fix="try again, or use the command line"
                )
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                return b""
            pieces.append(piece)
        return b"".join(pieces)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None

    def close(self) -> None:
        with self._lock:
            self._end()


def main() -> None:
    """The other side: answer line by line until nobody asks any more."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a function prints must not stand among the answers
    from quire.board.calls import answer

    answers.write(b"{}\n")
    answers.flush()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            found: dict[str, Any] = {"value": answer(request["call"], request["given"])}
            text = json.dumps(found)
        except QuireError as error:
            found = {"error": [error.got, error.expected, error.fix], "mistake": error.exit_code == 2}
            text = json.dumps(found)
        except Exception as error:
            words = " ".join(str(error).split())[:300]
            text = json.dumps({"error": [f"{type(error).__name__}: {words}", "", ""], "mistake": False})
        answers.write(text.encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
