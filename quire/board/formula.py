"""MathML from the sheet's LaTeX, as browsers draw it.

What stands side by side (`\\qquad`) becomes a list of formulas, so that a narrow window can put them one
below the other. Browsers know no `mathvariant` but "normal": other alphabets are written with their own
characters.
"""

from __future__ import annotations

import functools
import itertools
import re
from xml.etree import ElementTree

from latex2mathml.converter import convert

from quire.board.markup import Markup, join, tag

_SPACE = "{http://www.w3.org/1998/Math/MathML}"
_KNOWN = frozenset(
    (
        *(
            "math",
            "mrow",
            "mi",
            "mo",
            "mn",
            "mtext",
            "mspace",
            "mfrac",
            "msqrt",
            "mroot",
            "mstyle",
            "mpadded",
        ),
        *("msub", "msup", "msubsup", "munder", "mover", "munderover", "mtable", "mtr", "mtd", "mphantom"),
    )
)
_BROKEN = re.compile(r"\\(?:begin|end)\{[a-z*]+\}|\\q?quad\b|\\[\\{}]|[{}]")
_ALPHABETS = {"bold": (0x1D400, 0x1D41A, 0x1D7CE), "double-struck": (0x1D538, 0x1D552, 0x1D7D8),
              "script": (0x1D49C, 0x1D4B6, None)}  # fmt: skip
_HOLES = {
    "double-struck": dict(zip("CHNPQRZ", "ℂℍℕℙℚℝℤ", strict=True)),
    "script": dict(zip("BEFHILMR", "ℬℰℱℋℐℒℳℛ", strict=True)),
}
"""Letters that stand elsewhere in Unicode than the rest of their alphabet."""

_ATTRIBUTES = (
    *("display", "stretchy", "fence", "accent", "minsize", "maxsize", "width", "displaystyle", "alttext"),
    *("scriptlevel", "form", "columnalign", "movablelimits", "lspace", "rspace"),
)
_LIMITS = {"msub": "munder", "msup": "mover", "msubsup": "munderover"}
_OPERATORS = frozenset({*"∑∏⋃⋂⨆", "min", "max", "sup", "inf", "lim"})
"""What has its limits below and above it where there is room, beside it where there is none."""

_LINES = frozenset("|‖")
_FUNCTIONS = frozenset({"log", "ln", "exp", "sin", "cos", "tan", "tanh", "arctan", "dim", "det"})
_CLOSING = frozenset({")", "]", "}", r"\}", "⟩"})
_CARRIERS = frozenset(f"{_SPACE}{name}" for name in ("msub", "msup", "msubsup"))

_SIGNS = {r"\|": "‖", r"\{": "{", r"\}": "}"}
"""What the converter leaves as it is after \\Big."""


@functools.cache
def formula(latex: str) -> Markup:
    """A block of formulas; as code where the LaTeX cannot be read."""
    try:
        parts = [_math(part) for part in side_by_side(latex)]
    except Exception:
        # The converter raises whatever it meets, and a page is worth more than one of its formulas.
        return tag("pre", tag("code", latex), class_="formula")
    return tag("div", [tag("div", part, class_="scroll") for part in parts], class_="formula")


def side_by_side(latex: str) -> list[str]:
    """The formulas between spaces that stand in no braces and no environment."""
    depth, start, parts = 0, 0, []
    for match in _BROKEN.finditer(latex):
        word = match[0]
        if word.startswith(r"\begin") or word == "{":
            depth += 1
        elif word.startswith(r"\end") or word == "}":
            depth -= 1
        elif word == r"\qquad" and depth == 0:
            parts.append(latex[start : match.start()])
            start = match.end()
    parts.append(latex[start:])
    return [part.strip().rstrip(",;").strip() for part in parts if part.strip()]


def _math(latex: str) -> Markup:
    plain = re.sub(r"\\arg(?![a-zA-Z])", r"\\operatorname{arg}", latex)
    plain = plain.replace("{aligned}", "{split}")  # the converter knows the same by this name
    root = ElementTree.fromstring(convert(plain, display="block"))
    for row in list(root.iter()):
        _bracket(row)
        _space(row)
    root.set("alttext", latex)
    return _element(root)


def _bracket(row: ElementTree.Element) -> None:
    """What stands between large brackets becomes one thing that carries the exponent.

    The converter hangs it on the closing one, and browsers do not enlarge a bracket that carries anything.
    """
    opened: list[int] = []
    for place, node in enumerate(list(row)):
        if _is_large(node):
            line = node.text in ("|", "‖", r"\|")  # opens and closes by the same sign
            if opened and (row[opened[-1]].text == node.text if line else node.text in _CLOSING):
                opened.pop()
            else:
                opened.append(place)
        elif opened and node.tag in _CARRIERS and len(node) and _is_large(node[0]):
            inner = [*row[opened[-1] : place], node[0]]
            whole = ElementTree.Element(f"{_SPACE}mrow")
            whole.extend(inner)
            node[0] = whole
            for moved in inner[:-1]:
                row.remove(moved)
            _bracket(row)  # places have changed
            return


def _space(row: ElementTree.Element) -> None:
    """A thin space beside the name of a function, where it would run into a letter: x log y."""
    if row.tag != f"{_SPACE}mrow":
        return
    letters = {f"{_SPACE}{name}" for name in ("mi", "mn", "mfrac", "msqrt", *_LIMITS)}
    for before, after in reversed(list(itertools.pairwise(row))):
        if {before.tag, after.tag} <= letters and (_is_function(before) or _is_function(after)):
            row.insert(list(row).index(after), ElementTree.Element(f"{_SPACE}mspace", width="0.167em"))


def _is_function(node: ElementTree.Element) -> bool:
    return (node[0] if node.tag in _CARRIERS and len(node) else node).text in _FUNCTIONS


def _is_large(node: ElementTree.Element) -> bool:
    return node.tag == f"{_SPACE}mo" and "minsize" in node.attrib


def _element(node: ElementTree.Element) -> Markup:
    """The same tree from a closed list of elements, everything escaped."""
    name = node.tag.removeprefix(_SPACE)
    if name not in _KNOWN:
        raise ValueError(f"<{name}> is no element of MathML that is used here")
    if name in _LIMITS and len(node) and (node[0].text or "").strip() in _OPERATORS:
        name = _LIMITS[name]
        node[0].set("movablelimits", "true")
    if name == "mo" and node.text in _LINES:
        node.attrib |= {"lspace": "0", "rspace": "0"}  # they enclose; what stands between two things is ∣
        if not {"stretchy", "minsize"} & node.attrib.keys():
            node.set("stretchy", "false")  # in TeX only what follows \\left grows
    variant = node.get("mathvariant", "")
    children = [
        lettered(_SIGNS.get(node.text or "", node.text or ""), variant),
        *(_element(child) for child in node),
    ]
    attributes = {key: node.get(key) for key in _ATTRIBUTES}
    if variant == "normal":
        attributes["mathvariant"] = "normal"
    return tag(name, join(children), **attributes)


def lettered(text: str, variant: str) -> str:
    """The text in another alphabet: R as ℝ, N as 𝒩."""
    if variant not in _ALPHABETS:
        return text
    return "".join(_HOLES.get(variant, {}).get(letter) or _moved(letter, variant) for letter in text)


def _moved(letter: str, variant: str) -> str:
    upper, lower, digit = _ALPHABETS[variant]
    for first, last, start in (("A", "Z", upper), ("a", "z", lower), ("0", "9", digit)):
        if first <= letter <= last and start is not None:
            return chr(start + ord(letter) - ord(first))
    return letter
