"""Small pieces of pages: docstrings as HTML, code as Markdown."""

from __future__ import annotations

import html
import inspect
import re
import textwrap
from typing import Any


def prose(text: str) -> str:
    """A docstring as HTML. Indented parts keep their lines; names in backticks are code."""
    parts = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if all(line.startswith("    ") for line in block.splitlines()):
            parts.append(f"<pre><code>{html.escape(textwrap.dedent(block))}</code></pre>")
        else:
            parts.append(f"<p>{inline(' '.join(block.split()))}</p>")
    # Blank lines would end the HTML for Markdown.
    return "\n".join(parts).replace("\n\n", "\n&#10;")


def inline(text: str) -> str:
    escaped = html.escape(text, quote=False)
    return re.sub(r"(`+)(.+?)\1", r"<code>\2</code>", escaped)


def fenced(code: str, language: str = "python", indent: str = "") -> str:
    fence = "````" if "```" in code else "```"
    return textwrap.indent(f"{fence}{language}\n{code.rstrip()}\n{fence}\n", indent)


def source(item: Any) -> str:
    """The text of a function or class, without its decorators; empty where there is none."""
    try:
        lines = inspect.getsource(inspect.unwrap(item)).splitlines()
    except (TypeError, OSError):
        return ""
    text = textwrap.dedent("\n".join(lines)).splitlines()
    start = next((i for i, line in enumerate(text) if line.startswith(("def ", "class "))), 0)
    return "\n".join(text[start:])
