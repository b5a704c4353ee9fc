"""The process beside the server: answers, refusals, what ends it, and that the server needs no PyTorch."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from quire.board.worker import Worker
from quire.errors import InputError, QuireError


@pytest.mark.slow
def test_answers_and_refusals(formulas: Worker) -> None:
    assert formulas.ask("proof", id="activation/sigmoid")["passed"]
    with pytest.raises(InputError, match="unknown call 'eval'"):
        formulas.ask("eval", text="1")
    with pytest.raises(InputError, match="did you mean 'activation/sigmoid'"):
        formulas.ask("proof", id="activation/sigmiod")
    with pytest.raises(QuireError, match=r"TypeError: .*unexpected keyword"):
        formulas.ask("proof", other=1)
    assert formulas.ask("proof", id="activation/tanh")["passed"]


@pytest.mark.slow
def test_several_threads_each_get_their_own_answer(formulas: Worker) -> None:
    ids = ["activation/sigmoid", "activation/tanh", "activation/relu", "activation/arctan"] * 3
    found: dict[int, str] = {}

    def ask(place: int) -> None:
        found[place] = formulas.ask("proof", id=ids[place])["id"]

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(ids))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place] for place in range(len(ids))] == ids


# As the worker speaks, without PyTorch: it sleeps, or ends, when it is told to.
STAND_IN = """
import json, sys, time
print("{}", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["call"] == "end":
        sys.exit(3)
    time.sleep(request["given"].get("seconds", 0))
    print(json.dumps({"value": request["given"]}), flush=True)
"""


@pytest.fixture
def stand_in() -> Iterator[Worker]:
    worker = Worker(0.5, (sys.executable, "-c", STAND_IN))
    yield worker
    worker.close()


def test_what_takes_too_long_is_ended(stand_in: Worker) -> None:
    assert stand_in.ask("say", word="ä" * 100_000) == {"word": "ä" * 100_000}
    before = stand_in._process
    with pytest.raises(QuireError, match=r"no answer within 0\.5 seconds"):
        stand_in.ask("say", seconds=30)
    assert before is not None
    assert before.poll() is not None
    assert stand_in.ask("say", word=1) == {"word": 1}  # of another process


def test_a_process_that_ends_is_replaced(stand_in: Worker) -> None:
    with pytest.raises(QuireError, match="'end' ended the process"):
        stand_in.ask("end")
    assert stand_in.ask("say", word=2) == {"word": 2}
    running = stand_in._process
    assert running is not None
    running.kill()
    running.wait()
    assert stand_in.ask("say", word=3) == {"word": 3}
    stand_in.close()
    assert stand_in._process is None


def test_the_server_needs_no_pytorch() -> None:
    heavy = {"torch", "sklearn", "matplotlib", "pyarrow"}
    program = f"import sys, quire.board.app; print(*({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
