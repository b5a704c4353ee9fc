"""The board in a real browser: Chromium, driven by Playwright.

Each page without a word in the console, curves that move while a run trains, proofs that run, instruments
that respond; with the keyboard alone, at the width of a phone, in light and dark, and with no serious finding
of axe.
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.board.instruments import INSTRUMENTS
from quire.board.worker import Worker
from quire.cli.main import main
from tests.board.making import finished, line, make_run, serving

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]

PAGES = [
    "/", "/runs/alpha", "/compare?run=alpha&run=beta&run=gamma", "/sheet", "/sheet/normalise",
    "/explain?model=lenet5", "/instruments", "/instruments/kmeans", "/runs/none",
]  # fmt: skip
DARK = ("/", "/runs/alpha", "/sheet/normalise", "/instruments")
PHONE = {"width": 390, "height": 800}
Page = Any


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("browser") / "runs"
    make_run(root, "alpha", day=1, lr=0.1, result=finished(0.9, warnings=["a column never changes"]))
    make_run(root, "beta", day=2, lr=0.01, recipe="resnet", result=finished(0.8, stopped="interrupted"))
    make_run(root, "gamma", day=3, lr=0.001)
    return root


@pytest.fixture(scope="module")
def address(root: Path, formulas: Worker) -> Iterator[str]:
    with serving(root, formulas) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Page]:
    """A page that fails its test if the console says anything but that an address is missing."""
    context = browser.new_context(base_url=address, viewport={"width": 1200, "height": 900})
    opened = context.new_page()
    said: list[str] = []
    opened.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    opened.on("pageerror", lambda error: said.append(f"error: {error}"))
    elsewhere: list[str] = []
    opened.on(
        "request", lambda request: elsewhere.append(request.url) if address not in request.url else None
    )
    yield opened
    context.close()
    assert [text for text in said if "status of 404" not in text] == []
    assert elsewhere == []  # nothing is loaded from anywhere else


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait in Python: the page's policy forbids what Playwright would have it evaluate again and again."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def settle(page: Page, path: str) -> None:
    page.goto(path)
    if path.startswith(("/runs/", "/compare", "/explain", "/instruments/")) and "none" not in path:
        page.locator("figure.chart svg .mark").first.wait_for()


def test_each_page_opens_and_axe_finds_nothing_serious(page: Page) -> None:
    for path in PAGES:
        settle(page, path)
        page.emulate_media(color_scheme="light")
        assert serious(page) == [], path
        if path in DARK:  # other colours, and else the same
            page.emulate_media(color_scheme="dark")
            assert serious(page, {"runOnly": ["color-contrast"]}) == [], path


def serious(page: Page, options: dict[str, Any] | None = None) -> list[tuple[str, list[str]]]:
    found = axe.Axe().run(page, options=options).response["violations"]
    return [
        (rule["id"], [node["html"][:200] for node in rule["nodes"]][:3])
        for rule in found
        if rule["impact"] in ("serious", "critical")
    ]


def test_nothing_scrolls_sideways_on_a_phone(page: Page) -> None:
    page.set_viewport_size(PHONE)
    for path in PAGES:
        settle(page, path)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], path
        small = page.evaluate(
            "[...document.querySelectorAll('button, select, input:not([type=hidden], [type=checkbox])')]"
            ".filter(e => e.offsetParent && e.getBoundingClientRect().height < 24).map(e => e.outerHTML)"
        )
        assert small == [], path
        assert serious(page, {"runOnly": ["label"]}) == [], path  # also of what is further down


def test_curves_move_while_a_run_trains(page: Page, root: Path) -> None:
    folder = make_run(root, "moving", day=4, lines=[])
    page.goto("/runs/moving")
    assert page.get_by_text("Nothing has been recorded yet.").first.is_visible()
    metrics = folder / "metrics.jsonl"

    def write(step: int) -> None:
        with metrics.open("a") as file:
            file.write(line(step, "train", loss=1 / step) + line(step, "validation", loss=2 / step))

    write(1)
    write(2)
    curve = page.locator("figure[data-measure=loss] path.mark.line").first
    curve.wait_for(timeout=10_000)
    before = curve.get_attribute("d")
    write(3)
    page.wait_for_function(
        "old => document.querySelector('path.mark.line').getAttribute('d') !== old", arg=before
    )
    assert page.locator("#state").inner_text() == "training"
    reading = page.locator("figure[data-measure=loss] .reading")
    assert reading.inner_text() == "step 3: train 0.3333, validation 0.6667"
    page.goto("/")
    row = page.locator("tr[data-run=moving]")
    assert "0.6667" in row.inner_text()
    write(4)
    until(lambda: "0.5 " in row.inner_text())
    page.locator("input[value=alpha]").check()
    make_run(root, "newcomer", day=4)
    page.get_by_role("link", name="1 new run").wait_for()
    assert page.locator("input[value=alpha]").is_checked()  # what was marked stays
    page.get_by_role("link", name="1 new run").click()
    page.locator("tr[data-run=newcomer]").wait_for()


def test_runs_are_chosen_and_compared_with_the_keyboard_alone(page: Page) -> None:
    page.goto("/?sort=name")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "words"
    page.keyboard.type("finished mlp")
    assert page.locator("tr[data-run]:visible").count() == 1
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    for name in ("alpha", "beta"):
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.value") == name:
                break
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"  # where the focus is can be seen
        with page.expect_request(f"**/api/moving?run={name}"):  # its curves are read ahead
            page.keyboard.press("Space")
    page.keyboard.press("Enter")
    page.wait_for_url("**/compare?run=alpha&run=beta")
    slider = page.locator("figure[data-measure=loss] .reader")
    slider.wait_for()
    slider.focus()
    page.keyboard.press("Home")
    note = page.locator("figure[data-measure=loss] .reading")
    assert note.inner_text() == "step 1: alpha 1, beta 1"
    page.keyboard.press("ArrowRight")
    assert note.inner_text() == "step 2: alpha 0.5, beta 0.5"
    table = page.locator("figure[data-measure=loss] details")
    table.locator("summary").focus()
    page.keyboard.press("Enter")
    until(lambda: table.locator("tbody tr").count() == 30)
    assert table.locator("tbody tr").first.inner_text().split() == ["1", "1", "1"]
    page.select_option("#split", "train")
    page.locator("figcaption").get_by_text("Loss, train").wait_for()


def test_a_proof_runs_where_it_stands(page: Page) -> None:
    page.goto("/sheet")
    page.locator("#words").fill("sigmoid")
    assert 0 < page.locator("section.chapter li:visible").count() < 20
    page.goto("/sheet/normalise")
    button = page.locator("button.proof").first
    button.focus()
    page.keyboard.press("Enter")
    outcome = page.locator(".outcome").first
    until(lambda: "✓ proven: error" in outcome.inner_text())
    assert "tolerance" in outcome.inner_text()
    assert page.evaluate("document.activeElement.className") == "proof"
    assert page.locator("math").first.bounding_box()["height"] > 15
    page.goto("/sheet/activation")
    image = page.locator("img").first
    image.scroll_into_view_if_needed()
    until(lambda: image.evaluate("each => each.naturalWidth") > 100)


@pytest.mark.parametrize("name", list(INSTRUMENTS))
def test_each_instrument_responds(page: Page, name: str) -> None:
    page.set_viewport_size(PHONE)
    page.goto(f"/instruments/{name}")
    page.locator("figure.chart svg .mark").first.wait_for(timeout=20_000)
    before = page.locator("#plots").inner_html()
    slider = page.locator("input[type=range]").first
    slider.focus()
    value = slider.input_value()
    page.keyboard.press("ArrowRight")
    assert slider.input_value() != value
    until(lambda: page.locator("#plots").inner_html() != before)
    assert page.locator("output").first.inner_text() == slider.input_value()
    assert page.locator("#facts dd").first.inner_text()
    page.locator("figure.chart summary").first.click()
    page.locator("figure.chart details tbody tr").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_a_model_is_picked(page: Page) -> None:
    page.goto("/explain?model=lenet5")
    page.select_option("#model", "mlp")
    page.get_by_role("button", name="Explain").click()
    page.wait_for_url("**/explain?model=mlp*")
    assert page.locator("#layers-table").is_visible()
    assert page.locator("figure[data-bars=parameters] rect").count() > 0


def test_the_model_of_a_run_is_explained(page: Page, root: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["train", "lenet", "--steps", "1", "--quiet", "--out", str(root / "digits")]) == 0
    page.goto("/runs/digits")
    page.get_by_role("link", name="What its model costs").click()
    page.wait_for_url("**/explain?model=runs*digits")
    assert page.locator("#model").input_value() == "runs/digits"
    assert page.get_by_text("Input: 1×8×8").is_visible()
    assert page.locator("figure[data-bars=field] rect").count() > 0
    assert serious(page) == []


def test_a_report_cannot_run_anything(page: Page, root: Path) -> None:
    taken = "document.title = 'taken'"
    evil = f'<h1>report</h1><script>{taken}</script><img src=x onerror="{taken}">'
    (root / "beta" / "report.html").write_text(evil)
    other = page.context.new_page()  # the policy's refusals are said in the console, as they should be
    other.goto("/runs/beta/report")
    assert other.locator("h1").inner_text() == "report"
    assert other.title() != "taken"
    other.close()


def test_the_doctor_is_asked(page: Page, root: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["train", "mlp", "--epochs", "2", "--quiet", "--out", str(root / "real")]) == 0
    page.goto("/runs/real")
    page.get_by_role("button", name="Ask the doctor").click()
    verdict = page.locator("#verdict .verdict")
    verdict.wait_for(timeout=60_000)
    assert re.search(r"the loss went from [0-9.]+ to [0-9.]+ by step 40", verdict.inner_text())
    assert "inputs-constant" in page.locator("#verdict li").first.inner_text()  # digits have empty corners
    make_run(root, "strange", day=5, recipe="no-such-recipe")
    page.goto("/runs/strange")
    page.get_by_role("button", name="Ask the doctor").click()
    page.locator("#verdict .notice").wait_for(timeout=30_000)  # an error in words, and no more
    assert page.locator("#verdict").inner_text()
