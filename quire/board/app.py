"""Which address is answered by what. Every handler reads; none of them writes anything.

app = board(Path("runs"))         an ASGI application
serve(Path("runs"), port=8765)    on the loopback address, until it is interrupted
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from quire.board import layout
from quire.board.guard import DOCUMENT_POLICY, Guard
from quire.board.instruments import INSTRUMENTS
from quire.board.pages import compare, explain, instruments, listing, sheet
from quire.board.pages.charts import curves
from quire.board.pages.problem import problem_page
from quire.board.pages.run import run_page
from quire.board.runs import Runs
from quire.board.worker import Worker
from quire.errors import InputError, QuireError, unknown_name
from quire.report.css import CSS
from quire.report.reading import read_samples

COMPARED = 50
"""Runs side by side at most; nobody tells more lines apart."""
KEPT_ANSWERS = 64
STATIC = Path(__file__).parent / "static"
KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class Board:
    """The handlers, and what they share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = Runs(folder)
        self.formulas = Worker()
        self.doctor = Worker(seconds=120.0)  # beside the other, which must not wait for a diagnosis
        self._answers: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._files = {path.name: path.read_bytes() for path in STATIC.iterdir() if path.suffix in KINDS}
        # One look for reports and board: what the board adds comes after what both have.
        self._files["board.css"] = CSS.encode() + self._files["board.css"]

    def prepare(self) -> None:
        """Whoever opens the list finds it read already, and curves are read quickly from the first on."""
        self.runs.list()
        layout.prepare()

    def close(self) -> None:
        self.formulas.close()
        self.doctor.close()

    def routes(self) -> list[Route]:
        handlers: dict[str, Callable[[Request], Response]] = {
            "/": self.listing,
            "/runs/{name}": self.run,
            "/runs/{name}/{document:str}": self.document,
            "/runs/{name}/figures/{file}": self.figure,
            "/compare": self.compare,
            "/sheet": self.contents,
            "/sheet/{chapter}": self.chapter,
            "/sheet/{chapter}/{name}/picture.svg": self.picture,
            "/explain": self.explain,
            "/instruments": lambda request: HTMLResponse(instruments.list_page()),
            "/instruments/{name}": self.instrument,
            "/api/runs": self.runs_now,
            "/api/moving": self.runs_moving,
            "/api/curves": self.curves_now,
            "/api/proof": self.proof,
            "/api/diagnosis": self.diagnosis,
            "/api/instrument": self.answer,
            "/static/{file}": self.static,
        }
        return [Route(path, handler, methods=["GET"]) for path, handler in handlers.items()]

    def asked(self, call: str, **given: Any) -> Any:
        """An answer of the worker that stays true, asked for once."""
        key = json.dumps([call, given])
        found = self._answers.get(key) or self.formulas.ask(call, **given)
        with self._lock:
            self._answers[key] = found
            self._answers.move_to_end(key)
            while len(self._answers) > KEPT_ANSWERS:
                self._answers.popitem(last=False)
        return found

    # -- runs ----------------------------------------------------------------------------------

    def listing(self, request: Request) -> Response:
        given = request.query_params
        words = given.get("words", "")[:200]
        found = self.runs.list()
        return HTMLResponse(
            listing.listing_page(
                found, str(self.folder), given.get("sort", ""), given.get("order", ""), words
            )
        )

    def run(self, request: Request) -> Response:
        name = request.path_params["name"]
        run, summary = self.runs.run(name), self.runs.summary(name)
        has = [word for word in ("report", "doctor") if self.runs.file(name, f"{word}.html")]
        texts = read_samples(run) if self.runs.file(name, "samples.json") else []
        return HTMLResponse(run_page(run, summary, texts, list(self.figures(name)), has))

    def figures(self, name: str) -> Iterator[tuple[str, str, str]]:
        """File, title and caption of each picture in the folder of a run."""
        captions: Any = {}
        listed = self.runs.file(name, "figures", "captions.json")
        if listed is not None:
            try:
                captions = json.loads(listed.read_bytes())
            except (ValueError, RecursionError):
                captions = {}  # pictures are shown without their words
        folder = self.runs.folder(name) / "figures"
        for path in sorted(folder.glob("*.svg")) if folder.is_dir() and not folder.is_symlink() else ():
            words = captions.get(path.name) if isinstance(captions, dict) else None
            words = words if isinstance(words, dict) else {}
            yield (
                path.name,
                str(words.get("title") or path.stem.replace("_", " ")),
                str(words.get("caption") or ""),
            )

    def document(self, request: Request) -> Response:
        """report.html or doctor.html of a run, as it lies there."""
        name, word = request.path_params["name"], request.path_params["document"]
        if word not in ("report", "doctor"):
            raise HTTPException(404)
        path = self.runs.file(name, f"{word}.html")
        if path is None:
            command = "quire report" if word == "report" else "quire doctor"
            raise InputError(f"run '{name}' has no {word}", fix=f"{command} {self.folder / name}")
        return HTMLResponse(path.read_bytes(), headers={"content-security-policy": DOCUMENT_POLICY})

    def figure(self, request: Request) -> Response:
        name, file = request.path_params["name"], request.path_params["file"]
        if file not in [known for known, _, _ in self.figures(name)]:
            raise HTTPException(404)
        path = self.runs.file(name, "figures", file)
        if path is None:
            raise HTTPException(404)
        return svg(path.read_bytes())

    def compare(self, request: Request) -> Response:
        names = chosen_runs(request)
        if len(names) < 2:
            raise InputError(
                f"{len(names)} run to compare",
                expected="two runs or more",
                fix="mark them in the list of runs",
            )
        shown = [(self.runs.summary(name), self.runs.glimpse(name)) for name in names]
        self.runs.read_ahead(names)
        return HTMLResponse(compare.compare_page(shown))

    def runs_now(self, request: Request) -> Response:
        """What the list shows of each run; nothing where it is as the asker knows it."""
        found = [listing.plain(run) for run in self.runs.list()]
        version = format(hash(json.dumps(found)) & (1 << 64) - 1, "x")
        if request.query_params.get("version") == version:
            return Response(status_code=204)
        return JSONResponse({"version": version, "runs": found})

    def runs_moving(self, request: Request) -> Response:
        """How some runs stand: state, last value, how many points they have by now, and of which measures."""
        found = []
        names = chosen_runs(request)
        for name, metrics in zip(names, self.runs.all_metrics(names), strict=True):
            now = listing.plain(self.runs.summary(name))
            found.append({**now, "points": metrics.points, "measures": list(metrics.series)})
        return JSONResponse({"runs": found})

    def curves_now(self, request: Request) -> Response:
        names, given = chosen_runs(request), request.query_params
        if not names:
            raise InputError("no run", expected="the name of a run or more")
        return JSONResponse(curves(self.runs, names, given.get("measure", ""), given.get("split")))

    def diagnosis(self, request: Request) -> Response:
        folder = self.runs.whole(request.query_params.get("run", ""))
        return JSONResponse(self.doctor.ask("diagnose", folder=str(folder)))

    # -- sheet, models, instruments --------------------------------------------------------------

    def contents(self, request: Request) -> Response:
        return HTMLResponse(sheet.contents_page(self.asked("sheet")))

    def chapter(self, request: Request) -> Response:
        chapters, name = sheet.chapters_of(self.asked("sheet")), request.path_params["chapter"]
        if name not in chapters:
            raise unknown_name("chapter", name, chapters)
        return HTMLResponse(sheet.chapter_page(name, self.asked("chapter", name=name)))

    def entry(self, id: str) -> Mapping[str, Any]:
        found = {entry["id"]: entry for entry in self.asked("sheet")}
        if id not in found:
            raise unknown_name("entry", id, found)
        return found[id]

    def picture(self, request: Request) -> Response:
        entry = self.entry("{chapter}/{name}".format(**request.path_params))
        if not entry["picture"]:
            raise HTTPException(404)
        return svg(self.asked("picture", id=entry["id"]).encode())

    def proof(self, request: Request) -> Response:
        entry = self.entry(request.query_params.get("id", ""))
        return JSONResponse(self.formulas.ask("proof", id=entry["id"]))

    def explain(self, request: Request) -> Response:
        given = request.query_params
        model, shape = given.get("model", explain.START)[:300], given.get("input", "")[:80]
        batch = int(given["batch"]) if re.fullmatch("[0-9]{1,6}", given.get("batch", "")) else explain.BATCH
        found: Mapping[str, Any] | QuireError
        try:
            found = self.costs(model, shape, batch)
        except QuireError as error:
            found = error
        names = [run.name for run in self.runs.list()[: explain.RUNS]]
        return HTMLResponse(explain.explain_page(self.asked("models"), names, model, shape, batch, found))

    def costs(self, model: str, shape: str, batch: int) -> Any:
        """Of a model by its name, or of a run's, which may have changed since it was last asked for."""
        if not model.startswith(explain.RUN):
            return self.asked("explain", model=model, input=shape, batch=batch)
        folder = self.runs.whole(model.removeprefix(explain.RUN))
        return self.formulas.ask("explain_run", folder=str(folder), input=shape, batch=batch)

    def instrument(self, request: Request) -> Response:
        return HTMLResponse(instruments.instrument_page(INSTRUMENTS[request.path_params["name"]]))

    def answer(self, request: Request) -> Response:
        given = dict(request.query_params)
        one = INSTRUMENTS[given.pop("name", "")]
        return JSONResponse(self.formulas.ask("instrument", name=one.name, values=one.read(given)))

    def static(self, request: Request) -> Response:
        content = self._files.get(request.path_params["file"])
        if content is None:
            raise HTTPException(404)
        return Response(content, media_type=KINDS[Path(request.path_params["file"]).suffix])


def chosen_runs(request: Request) -> list[str]:
    names = list(dict.fromkeys(request.query_params.getlist("run")))
    if len(names) > COMPARED:
        raise InputError(
            f"{len(names)} runs", expected=f"at most {COMPARED} side by side", fix="choose fewer"
        )
    return names


def svg(content: bytes) -> Response:
    return Response(content, media_type="image/svg+xml", headers={"content-security-policy": DOCUMENT_POLICY})


def refused(request: Request, error: Exception) -> Response:
    """An error of ours: a page for a reader, an object for a script."""
    assert isinstance(error, QuireError)
    missing = isinstance(error, InputError) and error.got.startswith(("no run", "unknown", "run '"))
    code = 404 if missing else 400 if error.exit_code == 2 else 500
    if request.url.path.startswith("/api/"):
        return JSONResponse({"error": error.got, "expected": error.expected, "fix": error.fix}, code)
    return HTMLResponse(problem_page("This is not here" if code == 404 else "This cannot be shown", error.got,
                                     error.expected, error.fix), code)  # fmt: skip


def missing(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if request.url.path.startswith("/api/"):
        return JSONResponse({"error": "not found", "expected": "", "fix": ""}, error.status_code)
    return HTMLResponse(problem_page("This is not here", "There is no such page."), error.status_code)


def failed(request: Request, error: Exception) -> Response:
    """A mistake of the board's own, whose words stay in the terminal."""
    return HTMLResponse(problem_page("This went wrong", "The terminal of the board says more."), 500)


def board(folder: Path) -> ASGIApp:
    """The application over a folder of runs."""
    return application(Board(folder))


def application(made: Board) -> ASGIApp:
    handlers: Any = {QuireError: refused, HTTPException: missing, Exception: failed}
    inner = Starlette(routes=made.routes(), exception_handlers=handlers)
    inner.router.redirect_slashes = False  # an address is right or it is not
    return Guard(inner)


@contextmanager
def listening(port: int) -> Iterator[socket.socket]:
    """A socket of the loopback address; 0 takes any free port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(("127.0.0.1", port))
        except OSError as error:
            raise InputError(
                f"--port {port}: {error.strerror}",
                expected="a port that nobody listens on, from 1024 to 65535",
                fix="--port 0 takes any that is free",
            ) from None
        found.listen()  # whoever is told the address may come at once
        yield found


def settings_of(made: Board) -> uvicorn.Config:
    return uvicorn.Config(
        application(made), log_level="warning", access_log=False, server_header=False, lifespan="off",
        ws="none", timeout_graceful_shutdown=2,
    )  # fmt: skip


def serve(folder: Path, port: int, told: Callable[[str], None] = print) -> None:
    """Answer until interrupted; `told` is given the address once."""
    made = Board(folder)
    with listening(port) as found:
        threading.Thread(target=made.prepare).start()  # no daemon: PyArrow must not be cut off
        told(f"http://127.0.0.1:{found.getsockname()[1]}/")
        try:
            uvicorn.Server(settings_of(made)).run(sockets=[found])
        except KeyboardInterrupt:
            pass  # how it is meant to end
        finally:
            made.close()
