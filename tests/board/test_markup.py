"""HTML and MathML in which what comes from outside stays text."""

from __future__ import annotations

from html.parser import HTMLParser
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.board.formula import formula, lettered, side_by_side
from quire.board.markup import Markup, address, join, tag


class Reading(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


# NUL and carriage returns are changed by every HTML parser.
words = st.text(st.characters(blacklist_characters="\0\r", blacklist_categories=["Cs"]), max_size=30)


@given(words, words)
def test_a_browser_reads_back_what_was_said(text: str, attribute: str) -> None:
    read = Reading(tag("p", text, title=attribute))
    assert read.tags == [("p", {"title": attribute})]
    assert read.text == text


def test_markup_stays_and_all_else_is_escaped() -> None:
    assert tag("b", tag("i", "<"), "<", 3, None, ["&", tag("u")]) == "<b><i>&lt;</i>&lt;3&amp;<u></u></b>"
    assert (
        tag("input", disabled=True, checked=False, value=None, aria_label='"')
        == '<input disabled aria-label="&quot;">'
    )
    assert tag("label", "x", for_="y", class_="z") == '<label for="y" class="z">x</label>'
    assert isinstance(join([]), Markup)
    assert not isinstance(tag("b") + "<script>", Markup)


@given(st.lists(st.text(st.characters(blacklist_categories=["Cs"]), min_size=1), min_size=1, max_size=3))
def test_a_part_of_an_address_stays_one_part(parts: list[str]) -> None:
    path = address(*parts)
    assert [unquote(part) for part in path[1:].split("/")] == parts
    assert not set(path) & set("?#<>\"' ")


# -- formulas ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("latex", "parts"),
    [
        (r"a = b", ["a = b"]),
        (r"a, \qquad b; \qquad c", ["a", "b", "c"]),
        (r"\begin{cases} a \qquad b \end{cases} \qquad c", [r"\begin{cases} a \qquad b \end{cases}", "c"]),
        (r"{a \qquad b}", [r"{a \qquad b}"]),
        (r"\{a \qquad b\}", [r"\{a", r"b\}"]),
        (r"a \quad b", [r"a \quad b"]),
    ],
)
def test_formulas_side_by_side(latex: str, parts: list[str]) -> None:
    assert side_by_side(latex) == parts


def test_alphabets() -> None:
    assert lettered("R", "double-struck") == "ℝ"
    assert lettered("N", "script") == "𝒩"
    assert lettered("1x", "bold") == "𝟏𝐱"
    assert lettered("E1", "double-struck") == "𝔼𝟙"
    assert lettered("x", "normal") == "x"
    assert "ℝ" in formula(r"x \in \mathbb{R}")


def test_limits_stand_below() -> None:
    assert "<munder>" in formula(r"\sum_i x_i")
    assert "<msub>" in formula(r"\sum_i x_i")


@pytest.mark.parametrize(
    ("latex", "carried"),
    [
        (r"\Big(\frac{a}{b}\Big)^\top x", "(ab)"), (r"c \big\|A_j\big\|_2", "‖Aj‖"),
        (r"\Big(\big(a\big) + b\Big)^2", "((a)+b)"), (r"\Big[a\Big] \Big[b\Big]_i^2", "[b]"),
        (r"\left(a\right)^2", "(a)"),
    ],
)  # fmt: skip
def test_an_exponent_is_carried_by_both_brackets(latex: str, carried: str) -> None:
    """Browsers enlarge brackets that stand beside what they enclose, in one row with it."""
    (math,) = ElementTree.fromstring(formula(latex)).iter("math")
    carriers = [node for name in ("msup", "msub", "msubsup") for node in math.iter(name)]
    row = next(node[0] for node in carriers if node[0].tag == "mrow")
    assert "".join(row.itertext()) == carried
    assert [row[0].tag, row[-1].tag] == ["mo", "mo"]


@pytest.mark.parametrize(
    ("latex", "spaces"),
    [
        (r"P\log Q", 2),
        (r"-\log p", 1),
        (r"\log(p)", 0),
        (r"\tanh^2 a", 1),
        (r"\frac{1}{2}\log_b x", 2),
        ("ab", 0),
    ],
)
def test_a_function_does_not_run_into_a_letter(latex: str, spaces: int) -> None:
    assert formula(latex).count('<mspace width="0.167em">') == spaces


def test_lines_do_not_grow_unless_asked_to() -> None:
    (math,) = ElementTree.fromstring(formula(r"\lVert x \rVert^2 + \left| y \right|")).iter("math")
    lines = [(node.text, node.get("stretchy")) for node in math.iter("mo") if node.text in ("|", "‖")]
    assert lines == [("‖", "false"), ("‖", "false"), ("|", "true"), ("|", "true")]


@pytest.mark.slow
def test_every_formula_of_the_sheet_is_typeset() -> None:
    import quire.sheet  # noqa: F401  registers every entry
    from quire.sheet.registry import ENTRIES

    assert [entry.id for _, entry in ENTRIES.items() if formula(entry.latex).startswith("<pre")] == []


@pytest.mark.parametrize(
    "latex", [r"<script>alert(1)</script>", r"\text{<img src=x onerror=alert(1)>}", r"\frac{", "&lt;"]
)
def test_hostile_formulas_are_text(latex: str) -> None:
    made = formula(latex)
    assert "<script" not in made
    assert "<img" not in made
