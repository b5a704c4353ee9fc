"""`quire board`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.cli.parse import parse
from quire.errors import InputError


@dataclass(frozen=True)
class BoardOptions:
    """Runs, sheet, explanations and instruments in the browser, on this machine alone.

    quire board
    quire board --folder /data/runs --port 9000 --open

    The board reads and never writes; training is started, stopped and resumed in the terminal.
    """

    folder: Path = Path("runs")
    """Where the runs lie."""
    port: int = 8765
    """Port on 127.0.0.1; 0 takes any that is free."""
    open: bool = False
    """Open the page in your browser."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InputError(f"--port {self.port}", expected="a port from 0 to 65535", fix="--port 8765")


def main(words: Sequence[str]) -> int:
    options = parse(BoardOptions, words, prog="quire board")
    if not options.folder.is_dir() and options.folder != Path("runs"):
        raise InputError(f"--folder {options.folder}: no such folder", expected="a folder of runs")
    try:
        import latex2mathml  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as missing:
        raise InputError(
            f"quire board without the package '{missing.name}'",
            expected="starlette, uvicorn and latex2mathml, which come with the extra 'board'",
            fix="pip install 'quire[board]'",
        ) from None
    from quire.board.app import serve

    def told(address: str) -> None:
        print(f"board: {address}   (Ctrl+C ends it)", flush=True)
        if options.open:
            import webbrowser

            webbrowser.open(address)

    serve(options.folder, options.port, told)
    return 0
