"""The command `quire`: the first word chooses; heavy imports wait until the options are right.

Exit codes: 0, 1 for a failure, 2 for the user's mistake, 130 for Ctrl-C, 143 for a request to end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from quire import __version__
from quire.cli.member import leave
from quire.errors import InputError, QuireError, unknown_name

Words = Sequence[str]


class Command(NamedTuple):
    summary: str
    run: Callable[[Words], int]


def _list(words: Words) -> int:
    from quire.cli.listing import main

    return main(words)


def _train(words: Words) -> int:
    from quire.cli.train import main

    return main(words)


def _download(words: Words) -> int:
    from quire.cli.download import main

    return main(words)


def _evaluate(words: Words) -> int:
    from quire.cli.evaluate import main

    return main(words)


def _predict(words: Words) -> int:
    from quire.cli.predict import main

    return main(words)


def _sample(words: Words) -> int:
    from quire.cli.sample import main

    return main(words)


def _adapter(words: Words) -> int:
    from quire.cli.adapter import main

    return main(words)


def _export(words: Words) -> int:
    from quire.cli.export import main

    return main(words)


def _doctor(words: Words) -> int:
    from quire.cli.doctor import main

    return main(words)


def _explain(words: Words) -> int:
    from quire.cli.explain import main

    return main(words)


def _study(words: Words) -> int:
    from quire.cli.study import main

    return main(words)


def _runs(words: Words) -> int:
    from quire.cli.runs import main

    return main(words)


def _report(words: Words) -> int:
    from quire.cli.runs import report

    return report(words)


def _sheet(words: Words) -> int:
    from quire.cli.sheet import main

    return main(words)


def _bench(words: Words) -> int:
    from quire.cli.bench import main

    return main(words)


def _board(words: Words) -> int:
    from quire.cli.board import main

    return main(words)


def _completion(words: Words) -> int:
    from quire.cli.completion import main

    return main(words)


COMMANDS: dict[str, Command] = {
    "list": Command("every recipe, with one line and its expected result", _list),
    "download": Command("a well-known set of images: mnist, fashion-mnist, cifar-10", _download),
    "train": Command("train a recipe on built-in data, or on yours with --data", _train),
    "evaluate": Command("measures of a run, on its own data or on a file", _evaluate),
    "predict": Command("predictions of a run for the rows of a file", _predict),
    "sample": Command("text from a language model, as it is made", _sample),
    "adapter": Command("the adapters of a tuned run: list, merge, unmerge, export", _adapter),
    "export": Command("a run as ONNX (.onnx) or as a torch.export program (.pt2)", _export),
    "doctor": Command("why a run, or a model of yours, does not learn, and what would help", _doctor),
    "explain": Command("what a model costs: shapes, parameters, FLOPs, memory, time", _explain),
    "study": Command("how a run generalises: folds, learning curve, bias and variance, …", _study),
    "runs": Command("list, show and compare runs", _runs),
    "report": Command("write a run's report.html again", _report),
    "sheet": Command("the formulas and their proofs: list, show, verify", _sheet),
    "bench": Command("Quire beside its peers on this machine: time, memory, share of the limit", _bench),
    "board": Command("runs, sheet and instruments in the browser, on this machine alone", _board),
    "completion": Command("a script for your shell: bash, zsh or fish", _completion),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: quire COMMAND [OPTIONS]",
            "",
            "Deep learning from the formula sheet.",
            "",
            *lines,
            "",
            "quire COMMAND --help   the options of a command",
            "quire train RECIPE --help   the options of a recipe",
            "quire --version",
        ]
    )


def dispatch(words: Words) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"quire {__version__}")
        return 0
    if words[0].startswith("-"):
        raise InputError(
            f"the option {words[0]} before a command",
            expected=f"a command first: {', '.join(COMMANDS)}",
            fix="quire COMMAND [OPTIONS], for example quire train mlp",
        )
    if words[0] not in COMMANDS:
        raise unknown_name("command", words[0], COMMANDS)
    return COMMANDS[words[0]].run(words[1:])


def main(arguments: Words | None = None) -> int:
    """Run one command and return its exit code: one message for an error, a traceback with --debug."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show ≥ or η shows a question mark instead of a failure.
        getattr(stream, "reconfigure", lambda **_: None)(errors="replace")
    with _listening() as interrupted:
        return _answer(words, interrupted)


def _answer(words: list[str], interrupted: Sequence[int]) -> int:
    try:
        code = dispatch(words)
        sys.stdout.flush()
        return code
    except SystemExit as request:  # --help, printed by tyro
        return request.code if isinstance(request.code, int) else 0
    except KeyboardInterrupt as interrupt:
        say(str(interrupt) or "interrupted", head="")
        return 130
    except BrokenPipeError:
        # The reader has gone (`quire list | head -1`): as silent as any other tool in a pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except QuireError as error:
        if "--debug" in words:
            _traceback()
        say(str(error), head="" if error.exit_code > 128 else "error: ")
        return error.exit_code
    except Exception as error:
        if "--debug" in words:
            _traceback()
            return 1
        if interrupted:  # whoever caught that could not make anything of it
            say("interrupted", head="")
            return 130
        if isinstance(error, OSError) and error.strerror:
            place = f"{error.filename}: " if error.filename else ""
            say(f"{place}{error.strerror}\n  fix: check the path, its permissions and the space on the disk")
            return 1
        text = " ".join(str(error).split()) or "no message"
        if _is_too_large(error):
            say(f"not enough memory: {text[:200]}\n  fix: make smaller what was asked for, or use less data")
            return 1
        say(f"{type(error).__name__}: {text[:300]}\n  fix: run again with --debug to see where")
        return 1


def _is_too_large(error: Exception) -> bool:
    """Whether something was asked for that memory has no room for, or no addresses."""
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from quire.train.memory import is_out_of_memory

    return is_out_of_memory(error) or "size calculation overflowed" in str(error)


@contextmanager
def _listening() -> Iterator[list[int]]:
    """Filled by a Ctrl-C. Python's own handler leaves no trace where its exception is lost, as it may be in a
    library that is being imported and then fails in a way of its own."""
    heard: list[int] = []

    def hear(number: int, _: object) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    alone = threading.current_thread() is threading.main_thread()
    if not alone or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield heard
        return
    signal.signal(signal.SIGINT, hear)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def say(message: str, head: str = "error: ") -> None:
    """One message on standard error."""
    red, end = ("\033[1;31m", "\033[0m") if head and sys.stderr.isatty() else ("", "")
    print(f"{red}{head}{end}{message}", file=sys.stderr)


def _traceback() -> None:
    import traceback

    traceback.print_exc()


if __name__ == "__main__":
    leave(main())
