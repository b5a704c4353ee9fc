"""The look of every picture: one palette, axes that read on light and on dark paper, stable SVG.

    fig = figure(4.6, 2.8)
    axes = fig.subplots()
    axes.plot(steps, loss, label="validation")
    axes.set(title="Loss", xlabel="step", ylabel="loss")
    svg = to_svg(fig)

Figures are transparent. Text, axes and whatever else was left black are drawn in `INK`, a grey with
the same contrast to white as to near-black; `inline` swaps it for the colour of the page's own text.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.text import Text

INK = "#757b84"

BLUE, VERMILION, GREEN, PURPLE, OCHRE, GREY = "#2a85c7", "#d55e00", "#669f69", "#a41dd2", "#a9820c", "#808790"
PALETTE = (BLUE, VERMILION, GREEN, PURPLE, OCHRE, GREY)
"""Each has a contrast of at least 3 to white and to near-black. The first four are also told apart without
red, green or blue cones; a picture with more lines needs dashes or marks beside colour."""

_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: searchable, small, in the reader's own font
    "svg.hashsalt": "quire",  # otherwise every picture has new random ids
    "svg.image_inline": True,
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],
}
_TAG = re.compile(r"<[A-Za-z][^<>]*>")
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}(?![\de])")


def figure(width: float = 4.6, height: float = 2.9) -> Figure:
    """An empty transparent figure of this size in inches; axes added to it come in the common look."""
    fig = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    styled: set[int] = set()

    def dress_new_axes(changed: Figure) -> None:
        for axes in changed.axes:
            if id(axes) not in styled:
                styled.add(id(axes))
                _dress(axes)

    # The look is set per axes rather than through rcParams, which are global state.
    fig.add_axobserver(dress_new_axes)
    return fig


def _dress(axes: Axes) -> None:
    axes.set_facecolor("none")
    axes.set_prop_cycle(cycler(color=PALETTE))
    if axes.name == "3d":
        return
    axes.tick_params(colors=INK, labelcolor=INK, labelsize=9, length=3)
    for side, spine in axes.spines.items():
        spine.set_edgecolor(INK)
        spine.set_linewidth(0.8)
        spine.set_visible(side in ("left", "bottom"))
    if axes.get_label() != "<colorbar>":
        axes.grid(True, color=INK, alpha=0.22, linewidth=0.6)
        axes.set_axisbelow(True)


def plain(text: object, limit: int = 40) -> str:
    """A user's text for a label: no mathematics in it, on one line, its middle cut out beyond `limit`."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    if len(line) > limit:
        # Names of one family differ at their start or at their end.
        line = line[: limit - 1 - limit // 3] + "…" + line[-(limit // 3) :]
    return line.replace("$", r"\$")


def _to_ink(artist: Artist) -> None:
    """Draw what was left at matplotlib's default black in ink; a colour chosen by the author stays."""
    if isinstance(artist, Text | Line2D):
        if to_hex(artist.get_color()) == "#000000":
            artist.set_color(INK)
    elif isinstance(artist, Legend):
        frame = artist.get_frame()
        frame.set_facecolor("none")
        frame.set_edgecolor("none")


def _in_tags(svg: str, pattern: str, replacement: str | Callable[[re.Match[str]], str]) -> str:
    """Replace inside tags only: the same characters in a label are the user's text."""
    return _TAG.sub(lambda tag: re.sub(pattern, replacement, tag[0]), svg)


def to_svg(fig: Figure) -> str:
    """The figure as one ``<svg>`` element; equal figures give equal text. Its size is in its viewBox."""
    for artist in fig.findobj():
        _to_ink(artist)
    buffer = io.StringIO()
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # The reader's browser has glyphs that the font used for measuring may lack.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        _lay_out(fig)
        fig.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].rstrip() + "\n"
    # Both would leak into a page that the picture is put in: the style sheet applies to every element.
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r"<style [^>]*>.*?</style>\s*", "", svg, count=1, flags=re.DOTALL)
    svg = _in_tags(svg, r' (?:d|x|y)="[^"]*"', lambda m: _LONG_NUMBER.sub(_short, m[0]))
    return svg.replace("<svg ", '<svg style="stroke-linejoin: round; stroke-linecap: butt" ', 1)


def _lay_out(fig: Figure) -> None:
    """Give everything its place. A figure that still has this to do is drawn twice, once for nobody."""
    engine = fig.get_layout_engine()
    if engine is not None and fig.axes:
        FigureCanvasSVG(fig)  # whose measures of text hold
        resolution, fig.dpi = fig.dpi, 72  # SVG's own
        with contextlib.suppress(ValueError):  # as when a figure is drawn: what has no room stays where it is
            engine.execute(fig)
        fig.dpi = resolution
        fig.set_layout_engine(None)


def _short(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}"


def inline(svg: str, name: str, label: str = "") -> str:
    """The picture ready to stand in a page: ids that no other picture has, ink in the page's colour.

    `name` tells the pictures of one page apart; `label` is what a screen reader says.
    """
    prefix = "q" + hashlib.sha256(name.encode()).hexdigest()[:8] + "-"
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    svg = _in_tags(svg, r' id="([^"]*)"', lambda m: f' id="{prefix}{m[1]}"' if m[1] in used else "")
    svg = _in_tags(svg, r'(url\(#|href="#)', rf"\g<1>{prefix}")
    svg = _in_tags(svg, INK, "currentColor")
    # HTML knows SVG's namespaces by itself.
    svg = _in_tags(svg, r' xmlns(:xlink)?="[^"]*"', "").replace(" xlink:href=", " href=")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1)
