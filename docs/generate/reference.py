"""The API reference, from docstrings: a page for each package, and in `functional` for each module."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

from docs.generate.markup import fenced, prose

WHOLE = ("functional", "nn", "models", "tuning", "backprop", "train", "tasks", "estimators")
"""Packages of which everything that is public and documented is shown."""
NAMED = (
    "data",
    "data.images",
    "data.text",
    "doctor",
    "doctor.curvature",
    "doctor.costs",
    "doctor.studies",
    "recipes",
)
"""Packages of which the names in __all__ are shown."""
MODULES = ("options", "errors", "registry", "runs", "export", "sheet.registry")


class Item(NamedTuple):
    name: str
    object: Any

    @property
    def place(self) -> str:
        plain = inspect.unwrap(self.object)
        return f"{plain.__module__}.{plain.__qualname__}"


Page = dict[ModuleType, list[Item]]


@cache
def collected() -> dict[str, Page]:
    """Path of a page → its modules → what they define."""
    found: dict[str, Page] = {}
    for name in WHOLE:
        package = importlib.import_module(f"quire.{name}")
        for info in pkgutil.iter_modules(package.__path__):
            module = importlib.import_module(f"quire.{name}.{info.name}")
            path = f"api/functional/{info.name}.md" if name == "functional" else f"api/{name}.md"
            if items := list(defined(module)):
                found.setdefault(path, {})[module] = items
    for name in NAMED:
        package = importlib.import_module(f"quire.{name}")
        path = f"api/{name.split('.')[0]}.md"
        for public in sorted(getattr(package, "__all__", ())):
            value = getattr(package, public)
            if is_shown(value):
                module = importlib.import_module(inspect.unwrap(value).__module__)
                items = found.setdefault(path, {}).setdefault(module, [])
                if value not in [item.object for item in items]:
                    items.append(Item(public, value))
    for name in MODULES:
        module = importlib.import_module(f"quire.{name}")
        found.setdefault("api/basics.md", {})[module] = list(defined(module))
    return found


def is_shown(value: Any) -> bool:
    plain = inspect.unwrap(value) if callable(value) else value
    return (inspect.isclass(plain) or inspect.isfunction(plain)) and bool(written_docstring(plain))


def written_docstring(value: Any) -> str:
    """The docstring, unless it is the one that a dataclass writes itself."""
    text = getattr(value, "__doc__", None) or ""
    return "" if inspect.isclass(value) and text.startswith(f"{value.__name__}(") else text


def defined(module: ModuleType) -> Iterator[Item]:
    for name, value in vars(module).items():
        if (
            not name.startswith("_")
            and getattr(value, "__module__", "") == module.__name__
            and is_shown(value)
        ):
            yield Item(name, value)


@cache
def anchors() -> dict[str, str]:
    """`module.name` → page and anchor."""
    return {
        item.place: f"{path}#{item.place}"
        for path, page in collected().items()
        for items in page.values()
        for item in items
    }


def contents() -> list[Any]:
    functional = sorted(path for path in collected() if path.startswith("api/functional/"))
    others = sorted({title(path): path for path in collected() if path not in functional}.items())
    section = {"quire.functional": [{path.split("/")[-1][:-3]: path} for path in functional]}
    return ["api/index.md", section, *({name: path} for name, path in others)]


def title(path: str) -> str:
    return "Options, errors, runs" if path == "api/basics.md" else f"quire.{path[4:-3].replace('/', '.')}"


def pages() -> dict[str, str]:
    made = {"api/index.md": overview()}
    for path, page in collected().items():
        single = len(page) == 1
        lines = [f"# {title(path)}\n"]
        for module, items in page.items():
            if not single:
                lines.append(f"## {module.__name__}\n")
            lines.append(block(prose(module.__doc__ or "")))
            lines += [shown(item, "##" if single else "###") for item in items]
        made[path] = "\n".join(lines)
    return made


def overview() -> str:
    rows = [
        "# API reference\n",
        "Made from the docstrings of the installed version.\n",
        "| module | holds |",
        "| --- | --- |",
    ]
    for path, page in sorted(collected().items()):
        for module in page:
            first = " ".join((module.__doc__ or "").strip().split("\n\n")[0].split())
            # A star or an underscore in a docstring is not meant as Markdown.
            first = re.sub(r"([*_<|\[])", r"\\\1", first)
            rows.append(f"| [{module.__name__}]({path.removeprefix('api/')}) | {first} |")
    return "\n".join(rows) + "\n"


def block(inner: str) -> str:
    return f'<div class="docstring">\n{inner}\n</div>\n'


def signature(name: str, value: Any) -> str:
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    parameters = [shown_default(parameter) for parameter in found.parameters.values()]
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    returned = found.return_annotation if not inspect.isclass(value) else found.empty
    whole = str(found.replace(parameters=parameters, return_annotation=returned)).replace("'", "")
    if len(name) + len(whole) <= 100:
        return name + whole
    inner = ",\n".join(f"    {p!s}" for p in marked(parameters)).replace("'", "")
    result = "" if returned is found.empty else f" -> {returned}".replace("'", "")
    return f"{name}(\n{inner},\n){result}"


def marked(parameters: list[inspect.Parameter]) -> Iterator[object]:
    """The parameters with the star before those that are given by name alone."""
    starred = False
    for parameter in parameters:
        starred |= parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        yield parameter


def shown_default(parameter: inspect.Parameter) -> inspect.Parameter:
    if parameter.default is parameter.empty:
        return parameter
    return parameter.replace(default=Shown(parameter.default))


class Shown:
    """A default as a reader writes it: no addresses, and functions by their names."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        if callable(self.value) and hasattr(self.value, "__name__"):
            return str(self.value.__name__)
        return re.sub(r"<(.*?) at 0x[0-9a-f]+>", r"<\1>", repr(self.value))


def shown(item: Item, level: str) -> str:
    lines = [f"{level} {item.name} {{: #{item.place} }}\n", fenced(signature(item.name, item.object))]
    lines.append(block(prose(written_docstring(inspect.unwrap(item.object)))))
    if inspect.isclass(item.object):
        for name, (kind, text) in fields(item.object).items():
            lines.append(block(f"<p><code>{name}: {prose(kind)[3:-4]}</code></p>{prose(text)}"))
        lines += list(methods(item.object))
    return "\n".join(lines)


def methods(kind: type) -> Iterator[str]:
    for name, value in vars(kind).items():
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if name.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        yield fenced(signature(f"{kind.__name__}.{name}", function)) + "\n" + block(prose(function.__doc__))


def fields(kind: type) -> dict[str, tuple[str, str]]:
    """Name → annotation and description of the fields that have a string below them."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (TypeError, OSError):
        return {}
    body = getattr(tree, "body", [])
    found = {}
    for first, second in itertools.pairwise(body):
        named = isinstance(first, ast.AnnAssign) and isinstance(first.target, ast.Name)
        described = isinstance(second, ast.Expr) and isinstance(second.value, ast.Constant)
        if named and described and isinstance(second.value.value, str):
            found[first.target.id] = (ast.unparse(first.annotation), second.value.value)
    return found
