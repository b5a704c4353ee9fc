"""The pages, asked for as a browser would, and what stands in them."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from quire.board import app as module
from quire.board.app import STATIC
from quire.board.instruments import INSTRUMENTS
from quire.board.worker import Worker
from quire.report.css import CSS
from tests.board.making import Client, finished, line, make_run

SHEET = Path(module.__file__).parents[1] / "sheet"
EVIL = "<script>alert(1)</script>"
VOID = {"input", "img", "link", "meta", "br", "hr"}


class Balance(HTMLParser):
    """Whether each element that is opened is closed in turn; and which attributes there are."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: set[str] = set()
        self.ids: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.update(name for name, _ in attrs)
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def checked(text: str) -> str:
    """The text of a page that is well formed and brings neither style nor script of its own."""
    found = Balance()
    found.feed(text)
    assert found.open == []
    assert not {name for name in found.attributes if name.startswith("on") or name == "style"}
    assert len(found.ids) == len(set(found.ids))
    assert not re.search(r"<script(?! type=\"module\" src=\"/static/[a-z]+\.js\"></script>)", text)
    assert "<style" not in text
    assert "http://" not in text.replace("http://www.w3.org/", "")
    assert "https://" not in text
    return " ".join(" ".join(found.texts).split())


def test_the_list(client: Client, runs: Path) -> None:
    text = checked(client(runs).get("/").text)
    assert "3 runs" in text
    assert "0.9 test accuracy" in text
    assert re.search("gamma .* beta .* alpha", text)
    assert "training" in text
    assert "interrupted" in text


@pytest.mark.parametrize(
    ("query", "order"),
    [
        ("sort=name", "alpha beta gamma"),
        ("sort=name&order=down", "gamma beta alpha"),
        ("sort=value", "alpha beta gamma"),
        ("sort=value&order=up", "gamma beta alpha"),
        ("sort=recipe&order=down", "beta"),
        ("sort=nonsense", "gamma beta alpha"),
        ("words=res", "beta"),
        ("words=mlp+finished", "alpha"),
        ("words=nothing", ""),
    ],
)
def test_sorting_and_filtering(client: Client, runs: Path, query: str, order: str) -> None:
    text = client(runs).get(f"/?{query}").text
    found = " ".join(re.findall('data-run="([a-z]+)"', text))
    assert found.startswith(order)
    assert bool(found) == bool(order)


def test_an_empty_folder_says_how_to_begin(client: Client, tmp_path: Path) -> None:
    assert "quire train mlp" in checked(client(tmp_path / "runs").get("/").text)


def test_a_run(client: Client, runs: Path) -> None:
    (runs / "alpha" / "report.html").write_text("<p>the report</p>")
    (runs / "alpha" / "samples.json").write_text(json.dumps([{"name": "prompt", "text": f"said {EVIL}"}]))
    (runs / "alpha" / "figures").mkdir()
    (runs / "alpha" / "figures" / "codes.svg").write_text("<svg/>")
    captions = {"codes.svg": {"title": "Codes", "caption": "by class"}}
    (runs / "alpha" / "figures" / "captions.json").write_text(json.dumps(captions))
    asked = client(runs)
    text = asked.get("/runs/alpha").text
    said = checked(text)
    for part in (
        "alpha",
        "finished",
        "mlp",
        "optim.lr 0.1",
        "quire train mlp",
        "Codes. by class",
        f"said {EVIL}",
    ):
        assert part in said, part
    assert 'href="/runs/alpha/report"' in text
    assert 'data-measure="loss"' in text
    assert asked.get("/runs/alpha/report").text == "<p>the report</p>"
    assert asked.get("/runs/alpha/figures/codes.svg").headers["content-type"] == "image/svg+xml"
    answer = asked.get("/runs/beta/report")
    assert answer.status_code == 404
    assert "quire report" in checked(answer.text)


@pytest.mark.parametrize("captions", ["{", "[" * 100_000, "[]", '{"codes.svg": 7}'])
def test_captions_that_say_nothing(client: Client, runs: Path, captions: str) -> None:
    (runs / "alpha" / "figures").mkdir()
    (runs / "alpha" / "figures" / "codes.svg").write_text("<svg/>")
    (runs / "alpha" / "figures" / "captions.json").write_text(captions)
    answer = client(runs).get("/runs/alpha")
    assert answer.status_code == 200
    assert "codes" in checked(answer.text)


def test_a_run_of_hostile_words(client: Client, tmp_path: Path) -> None:
    """Whatever a file says is text: names, measures, splits, options, warnings."""
    root = tmp_path / "runs"
    name = f"{EVIL.replace('/', '')}&\"'"
    result = finished(
        warnings=[EVIL], expected={"met": False, "text": EVIL}, data=EVIL, device=EVIL, stopped=EVIL
    )
    lines = [line(1, EVIL, **{EVIL: 1.0}), line(2, "train", **{"loss": 0.1})]
    make_run(root, name, recipe=EVIL, lines=lines, result=result)
    make_run(root, "other", lines=lines)
    asked = client(root)
    for path in ("/", f"/runs/{html.unescape(name)}".replace("&", "%26"), "/runs/other"):
        answer = asked.get(path)
        assert answer.status_code == 200, path
        assert "<script>alert" not in answer.text
        assert "alert(1)" in checked(answer.text)
    answer = asked.get("/compare", params=[("run", name), ("run", "other")])
    assert answer.status_code == 200
    assert "<script>alert" not in answer.text
    checked(answer.text)


def test_comparison(client: Client, runs: Path) -> None:
    text = checked(client(runs).get("/compare?run=alpha&run=beta&run=gamma").text)
    assert "3 runs side by side" in text
    assert re.search(r"optim\.lr 0\.1 0\.01 0\.001", text)
    assert re.search(r"alpha mlp finished 0\.2 0\.9", text)
    assert "out" not in text.split("What differs")[1].split()  # where a run lies makes no difference


def test_too_few_or_too_many_to_compare(client: Client, runs: Path) -> None:
    asked = client(runs)
    assert "two runs or more" in checked(asked.get("/compare?run=alpha").text)
    answer = asked.get("/compare?" + "&".join(f"run=r{i}" for i in range(51)))
    assert (answer.status_code, "at most 50" in answer.text) == (400, True)


def test_curves(client: Client, runs: Path) -> None:
    asked = client(runs)
    found = asked.get("/api/curves?run=alpha&measure=loss").json()
    assert [entry["name"] for entry in found["lines"]] == ["train", "validation"]
    assert found["lines"][0]["x"] == list(range(1, 31))
    assert found["lines"][0]["y"] == [pytest.approx(1 / s, rel=1e-5) for s in range(1, 31)]
    several = asked.get("/api/curves?run=alpha&run=beta&measure=accuracy&split=train").json()
    assert [entry["name"] for entry in several["lines"]] == ["alpha", "beta"]
    assert several["split"] == "train"
    assert asked.get("/api/curves?run=alpha&measure=none").json()["lines"] == []


def test_curves_that_are_not_finite_are_gaps(client: Client, runs: Path) -> None:
    make_run(
        runs, "broken", lines=[line(1, loss=1.0), line(2, loss=float("nan")), line(3, loss=float("inf"))]
    )
    answer = client(runs).get("/api/curves?run=broken&measure=loss")
    assert answer.json()["lines"][0]["y"] == [1.0, None, None]


def test_a_run_is_seen_to_move(client: Client, runs: Path) -> None:
    asked = client(runs)
    first = asked.get("/api/moving?run=gamma").json()["runs"][0]
    listed = asked.get("/api/runs").json()
    assert asked.get("/api/runs", params={"version": listed["version"]}).status_code == 204
    with (runs / "gamma" / "metrics.jsonl").open("a") as file:
        file.write(line(31, "validation", loss=0.5, accuracy=0.99, fresh=1.0))
    second = asked.get("/api/moving?run=gamma").json()["runs"][0]
    assert second["points"] == first["points"] + 3
    assert second["value"] == "0.99"
    assert "fresh" in second["measures"]
    assert asked.get("/api/runs", params={"version": listed["version"]}).status_code == 200


def test_a_damaged_run_has_a_page_that_says_so(client: Client, runs: Path) -> None:
    (runs / "beta" / "result.json").write_text("{")
    asked = client(runs)
    answer = asked.get("/runs/beta")
    assert answer.status_code == 500
    assert "is damaged" in checked(answer.text)
    assert asked.get("/compare?run=alpha&run=beta").status_code == 500
    assert asked.get("/runs/alpha").status_code == 200


def test_a_mistake_of_the_board_shows_nothing_of_itself(
    client: Client, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> str:
        raise RuntimeError("inner words")

    monkeypatch.setattr(module, "run_page", fail)
    answer = client(runs).get("/runs/alpha")
    assert answer.status_code == 500
    assert "inner words" not in answer.text


def test_what_is_static(client: Client, runs: Path) -> None:
    asked = client(runs)
    names = {path.name for path in STATIC.iterdir()}
    assert {"board.css", "chart.js", "page.js", "icon.svg"} <= names
    for name in names:
        answer = asked.get(f"/static/{name}")
        assert answer.status_code == 200
        assert answer.text.endswith((STATIC / name).read_text(encoding="utf-8"))
        # Offline, and within the policy: nothing from elsewhere, and no markup made from text.
        if name.endswith(".js"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|https://", answer.text
            )
    assert asked.get("/static/board.css").text.startswith(CSS)


def test_the_static_files_are_packaged() -> None:
    text = (Path(module.__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '"quire.board" = ["static/*"]' in text


def typeset(text: str) -> None:
    """Every formula is MathML that a browser knows, with nothing of LaTeX left in it."""
    assert 'class="formula"' in text
    assert '<pre class="formula"' not in text
    for math in re.findall(r"<math .*?</math>", text, re.DOTALL):
        assert set(re.findall("<([a-z]+)", math)) <= {
            "math", "mrow", "mi", "mo", "mn", "mtext", "mspace", "mfrac", "msqrt", "mroot", "mstyle", "msub",
            "msup", "msubsup", "munder", "mover", "munderover", "mtable", "mtr", "mtd",
        }  # fmt: skip
        assert "\\" not in re.sub("<[^>]*>", "", math)
        assert set(re.findall('mathvariant="([^"]*)"', math)) <= {"normal"}


@pytest.mark.slow
def test_the_sheet(client: Client, runs: Path, formulas: Worker) -> None:
    entries = formulas.ask("sheet")
    sources = "".join(path.read_text(encoding="utf-8") for path in SHEET.glob("*.py"))
    assert len(entries) == len(re.findall(r"^@entry\(", sources, re.MULTILINE))
    pictures = len(re.findall(r"^    picture=", sources, re.MULTILINE))
    assert sum(entry["picture"] for entry in entries) == pictures
    asked = client(runs)
    text = checked(asked.get("/sheet").text)
    assert all(" ".join(entry["title"].split()) in text for entry in entries)
    for chapter in dict.fromkeys(entry["chapter"] for entry in entries):
        answer = asked.get(f"/sheet/{chapter}")
        assert answer.status_code == 200, chapter
        said = checked(answer.text)
        own = formulas.ask("chapter", name=chapter)
        typeset(answer.text)
        assert answer.text.count('class="proof"') == len(own)
        assert answer.text.count("picture.svg") == sum(entry["picture"] for entry in own)
        assert all(entry["erratum"] in said for entry in own)
        assert all(item["place"] in said for entry in own for item in entry["code"])
    assert "def sigmoid(a: Tensor) -> Tensor:" in checked(asked.get("/sheet/activation").text)
    picture = asked.get("/sheet/activation/sigmoid/picture.svg")
    assert picture.text.startswith("<svg")
    proof = asked.get("/api/proof?id=activation/sigmoid").json()
    assert proof["passed"]
    assert 0 <= float(proof["error"]) <= float(proof["tolerance"])
    assert asked.get("/api/proof?id=activation/sigmiod").json()["fix"] == "did you mean 'activation/sigmoid'?"
    assert asked.get("/sheet/nothing").status_code == 404


@pytest.mark.slow
def test_explain_and_instruments(client: Client, runs: Path, formulas: Worker) -> None:
    asked = client(runs)
    text = checked(asked.get("/explain?model=resnet18").text)
    assert "11,689,512" in text
    assert "Receptive field by layer" in text
    refused = checked(asked.get("/explain?model=resnet18&input=3,x").text)
    assert "sizes of one sample" in refused
    assert asked.get("/explain?model=mlp&batch=" + "9" * 5000).status_code == 200
    assert "unknown model" in checked(asked.get("/explain?model=resnet1").text)
    assert "Temperature" in checked(asked.get("/instruments").text)
    checked(asked.get("/instruments/temperature").text)
    found = asked.get("/api/instrument?name=temperature&value=0").json()
    assert found["plots"][0]["marks"][0]["y"] == [1.0, *[0.0] * 7]
    for bad in ("value=-1", "value=nan", "value=x", "top_k=3.5", "other=1", "value=1e999"):
        assert asked.get(f"/api/instrument?name=temperature&{bad}").status_code == 400, bad
    assert asked.get("/api/instrument?name=none").status_code == 404
    known = {entry["id"] for entry in formulas.ask("sheet")}
    assert {id for _, one in INSTRUMENTS.items() for id in one.entries} <= known
