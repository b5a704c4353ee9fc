"""What the user types as package.module:name or folder/file.py:name.

The one place where a name becomes an import: it comes from the command line alone, never from a file.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from quire.cli.paths import require_file
from quire.errors import InputError, QuireError, nearest

FORM = "package.module:name, or folder/file.py:name"


def is_object(word: str) -> bool:
    return ":" in word


def typed_object(word: str) -> Any:
    """The object of that name, imported as Python itself would from the current folder."""
    place, _, name = word.rpartition(":")
    if not place or not name.replace(".", "").isidentifier():
        raise InputError(f"'{word}'", expected=FORM, fix="write the function after a colon: model.py:make")
    try:
        if place.endswith(".py"):
            require_file(Path(place))
            module = _from_file(Path(place).resolve())
        else:
            with _first_on_path(Path.cwd()):
                module = importlib.import_module(place)
    except QuireError:
        raise
    except Exception as problem:
        raise InputError(
            f"{place} cannot be imported: {type(problem).__name__}: {problem}",
            expected=FORM,
            fix="check the name, and that python can import it from this folder",
        ) from problem
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise InputError(
                f"{place} has no '{name}'",
                expected="a function, a class or an object that is defined there",
                fix=nearest(part, vars(module)) or "check the spelling",
            )
        found = getattr(found, part)
    return found


def _from_file(path: Path) -> ModuleType:
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_of_{path.parent.name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _first_on_path(path.parent):
        sys.modules[name] = module  # where dataclasses look for it
        try:
            spec.loader.exec_module(module)
        finally:
            sys.modules.pop(name, None)
    return module


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
