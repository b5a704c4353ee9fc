"""Writing TOML: the standard library reads it but does not write it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def dump_toml(document: Mapping[str, Any], prefix: str = "") -> str:
    """Plain values first, then a table for each nested mapping; None is left out."""
    tables = {key: value for key, value in document.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in document.items() if key not in tables and value is not None}
    text = "".join(f"{_key(key)} = {_value(value)}\n" for key, value in plain.items())
    for key, table in tables.items():
        name = f"{prefix}{_key(key)}"
        text += f"\n[{name}]\n" + dump_toml(table, f"{name}.")
    return text


def _key(key: str) -> str:
    return key if key and all(c.isascii() and (c.isalnum() or c in "_-") for c in key) else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are TOML's too, but for DEL, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)  # inf and nan are spelt alike in both languages
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return _string(str(value))
