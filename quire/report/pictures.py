"""The pictures that a recipe left in ``figures/``, brought into the page without trusting them.

A picture made by `quire.report.style` is rebuilt from a closed list of drawing elements, so it takes the
colours of the page. Any other becomes an ``<img>``, in which a browser runs nothing and loads nothing.
"""

from __future__ import annotations

import base64
import html
import json
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

from quire.errors import CheckpointError
from quire.files import read_file
from quire.report.page import picture
from quire.report.style import INK, inline

_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_ELEMENTS = frozenset(
    (
        *(
            "svg",
            "g",
            "defs",
            "use",
            "clipPath",
            "image",
            "text",
            "tspan",
            "path",
            "rect",
            "circle",
            "ellipse",
        ),
        *("line", "polyline", "polygon", "linearGradient", "radialGradient", "stop", "pattern"),
    )
)
_WIDE = 480.0


def recipe_pictures(folder: Path) -> list[str]:
    """The markup of each picture of a run folder, in the order of their names."""
    captions = _captions(folder / "figures" / "captions.json")
    blocks = []
    for path in sorted((folder / "figures").glob("*.svg")):
        words = captions.get(path.name, {})
        title = str(words.get("title") or path.stem.replace("_", " ").replace("-", " "))
        caption = str(words.get("caption") or "")
        text = read_file(path).decode("utf-8", errors="replace")
        markup, width = embed(text, path.name, title)
        said = f"{title}. {caption}" if caption else title
        blocks.append(picture(markup, said, shape="wide" if width > _WIDE else ""))
    return blocks


def _captions(path: Path) -> dict[str, dict[str, str]]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(read_file(path))
        return {str(name): dict(words) for name, words in found.items()}
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged: {error}",
            expected='an object {"NAME.svg": {"title": TEXT, "caption": TEXT}}',
            fix="repair the file or remove it; pictures are then named after their files",
        ) from error


def embed(svg: str, name: str, label: str) -> tuple[str, float]:
    """The markup of one picture and its width in points, 0 where it is not known."""
    try:
        # Entities of its own, with which a small file can grow without bound, no picture needs.
        root = None if "<!ENTITY" in svg else ElementTree.fromstring(svg)
    except ElementTree.ParseError:
        root = None
    if root is not None and INK in svg and root.tag == _SVG + "svg" and all(map(_is_harmless, root.iter())):
        with suppress(ValueError, RecursionError):  # no width, or deeper than any picture of ours
            width = float((root.get("viewBox", "").split() + ["0"] * 4)[2])
            return inline(_serialise(root), f"figures/{name}", label), width
    data = base64.b64encode(svg.encode("utf-8", errors="replace")).decode()
    return f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(label)}">', 0.0


def _is_harmless(element: ElementTree.Element) -> bool:
    if not isinstance(element.tag, str) or element.tag.removeprefix(_SVG) not in _ELEMENTS:
        return False
    for name, value in element.attrib.items():
        plain_value = "".join(value.split()).lower()
        if name in ("href", _LINK) and not plain_value.startswith(("#", "data:image/png;base64,")):
            return False
        if name.lower().startswith("on") or (name.startswith("{") and name != _LINK):
            return False
        if "\\" in value or "@" in value or plain_value.count("url(") != plain_value.count("url(#"):
            return False
    return True


def _serialise(element: ElementTree.Element) -> str:
    """Markup that an HTML parser reads as the same tree: no namespaces, comments or entities of its own."""
    tag = element.tag.removeprefix(_SVG)
    names = ((name.replace(_LINK, "href"), value) for name, value in element.attrib.items())
    attributes = "".join(f' {name}="{html.escape(value)}"' for name, value in names)
    inner = html.escape(element.text or "", quote=False)
    for child in element:
        inner += _serialise(child) + html.escape(child.tail or "", quote=False)
    return f"<{tag}{attributes}>{inner}</{tag}>"
