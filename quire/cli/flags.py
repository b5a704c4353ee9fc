"""The flags of a dataclass of options, and whether a word fits one; PyTorch is not needed for it.

`--optim.lr 0.1` sets the field `lr` of the nested dataclass `optim`; a boolean has two flags,
`--overwrite` and `--no-overwrite`. The same table checks the command line, reads a TOML file and
writes shell completion.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from quire.errors import InputError, nearest

HELP = ("-h", "--help")
LARGEST = 2**63 - 1
"""Of whole numbers: nothing that takes one can do with more bits."""


@dataclass(frozen=True)
class Flag:
    """One flag, or one positional word where `name` has no dashes."""

    name: str
    kind: Any
    """The type of the field; bool for both flags of a boolean."""
    required: bool = False

    @property
    def many(self) -> bool:
        optional = typing.get_origin(self.kind) in (typing.Union, types.UnionType)
        kinds = typing.get_args(self.kind) if optional else (self.kind,)
        return any(typing.get_origin(kind) in (tuple, list) for kind in kinds)

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(str(choice) for choice in _literals(self.kind))


class Misfit(Exception):
    """A value that is not of the wanted type; the caller knows where it came from."""


def _literals(kind: Any) -> Iterator[object]:
    if typing.get_origin(kind) is Literal:
        yield from typing.get_args(kind)
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        for part in typing.get_args(kind):
            yield from _literals(part)


def dashed(name: str) -> str:
    return name.replace("_", "-")


def table(options: type, prefix: str = "") -> dict[str, Flag]:
    """Every flag and positional word of a dataclass, nested ones included, in order."""
    hints = typing.get_type_hints(options, include_extras=True)
    flags: dict[str, Flag] = {}
    for field in fields(options):
        kind, positional = hints[field.name], False
        if typing.get_origin(kind) is typing.Annotated:
            positional = tyro.conf.Positional in kind.__metadata__
            kind = typing.get_args(kind)[0]
        name = dashed(field.name)
        if is_dataclass(kind) and isinstance(kind, type):
            flags |= table(kind, f"{prefix}{name}.")
            continue
        required = field.default is MISSING and field.default_factory is MISSING
        flag = Flag(name if positional else f"--{prefix}{name}", kind, required)
        flags[flag.name] = flag
        if kind is bool:
            flags[f"--{prefix}no-{name}"] = Flag(f"--{prefix}no-{name}", bool)
    return flags


def describe(kind: Any) -> str:
    """What a value of this type is called in a message."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(str(choice) for choice in parts)}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(part) for part in parts if part is not type(None))
    if origin in (tuple, list):
        return f"a list, each {describe(parts[0])}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def read(kind: Any, value: Any, *, text: bool) -> Any:
    """`value` as a `kind`, or `Misfit`. `text`: a word of the command line, otherwise a TOML value."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for part in parts:
            try:
                return read(part, value, text=text)
            except Misfit:
                continue
        raise Misfit
    if origin is Literal:
        for choice in parts:
            if value == choice or (text and value == str(choice)):
                return choice
        raise Misfit
    if origin in (tuple, list):
        if not isinstance(value, tuple | list):
            raise Misfit
        variable = origin is list or (len(parts) == 2 and parts[1] is Ellipsis)
        kinds = [parts[0]] * len(value) if variable else list(parts)
        if len(kinds) != len(value):
            raise Misfit
        return origin(read(kind, item, text=text) for kind, item in zip(kinds, value, strict=True))
    return _read_scalar(kind, value, text)


def _read_scalar(kind: Any, value: Any, text: bool) -> Any:
    if kind is type(None):
        if text and value == "None":
            return None
    elif kind in (int, float) and text:
        try:
            found = kind(value)
        except ValueError:
            raise Misfit from None
        return _read_scalar(kind, found, False)
    elif isinstance(value, bool):  # before int, of which Python counts it
        if kind is bool:
            return value
    elif kind is int and isinstance(value, int):
        if abs(value) <= LARGEST:
            return value
    elif kind is float and isinstance(value, int | float):
        if isinstance(value, float) or abs(value) <= LARGEST:
            return float(value)
    elif kind in (str, Path) and isinstance(value, str):
        if value or kind is str:  # an empty path would mean the current folder
            return kind(value)
    elif kind not in (int, float, bool, str, Path):
        return value  # a type this table does not know; the parser decides
    raise Misfit


def misfit(place: str, value: object, flag: Flag) -> InputError:
    """The error for a value of the wrong type; `place` is the flag, or the file and the key in it."""
    hint = nearest(str(value), flag.choices) if flag.choices else ""
    wanted = describe(flag.kind)
    if re.fullmatch(r"[+-]?\d{19,}", str(value)):
        wanted += f", {LARGEST} at most"
    return InputError(f"{place} is {value!r}", expected=wanted, fix=hint or f"give {wanted}")


def is_flag(word: str) -> bool:
    """A word that starts with a dash and is no negative number."""
    return len(word) > 1 and word[0] == "-" and not (word[1].isdigit() or word[1] == ".")


def wants_help(words: Sequence[str]) -> bool:
    return any(word in HELP for word in words)


def given(words: Sequence[str]) -> set[str]:
    """The names of the flags among the words, with dashes, the `no-` form under its plain name."""
    names = {dashed(word.partition("=")[0].lstrip("-")) for word in words if is_flag(word)}
    return names | {".".join([*n.split(".")[:-1], n.split(".")[-1].removeprefix("no-")]) for n in names}


def check_words(options: type, words: Sequence[str], prog: str) -> None:
    """Raise InputError for an unknown flag, a missing or wrong value, a word too many or too few."""
    flags = table(options)
    wanted = [flag for name, flag in flags.items() if not name.startswith("-")]
    names = [name for name in flags if name.startswith("-")]
    loose: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not is_flag(word):
            loose.append(word)
            continue
        name, equals, value = word.partition("=")
        flag = flags.get("--" + dashed(name.removeprefix("--")))
        if flag is None:
            hint = nearest(name, names)
            see = f"see {prog} --help"
            raise InputError(f"unknown option '{name}'", fix=f"{hint} Otherwise {see}" if hint else see)
        if flag.kind is bool:
            if equals:
                raise InputError(
                    f"{word}: {name} takes no value", fix=f"write {name}, or its opposite, alone"
                )
            continue
        values = [value] if equals else []
        while position < len(words) and not equals and not is_flag(words[position]):
            values.append(words[position])
            position += 1
            if not flag.many:
                break
        if not values and not flag.many:
            raise InputError(f"{name} without a value", expected=describe(flag.kind))
        try:
            read(flag.kind, values if flag.many else values[0], text=True)
        except Misfit:
            raise misfit(name, " ".join(values), flag) from None
    _check_loose(loose, wanted, prog, "--data" in names)


def _check_loose(loose: list[str], wanted: list[Flag], prog: str, reads_data: bool) -> None:
    missing = [flag.name.upper() for flag in wanted[len(loose) :] if flag.required]
    if missing:
        pattern = " ".join(flag.name.upper() for flag in wanted)
        raise InputError(
            f"{prog}: {' and '.join(missing)} missing", expected=f"{prog} {pattern}", fix=f"see {prog} --help"
        )
    if len(loose) > len(wanted) and not any(flag.many for flag in wanted):
        word = loose[len(wanted)]
        file = reads_data and ("." in word or "/" in word)
        raise InputError(
            f"unexpected word '{word}'",
            expected="no further word" if wanted or file else f"an option such as --{word}",
            fix=f"for a file of yours write --data {word}" if file else f"see {prog} --help",
        )
    for word, flag in zip(loose, wanted, strict=False):
        try:
            read(flag.kind, [word] if flag.many else word, text=True)
        except Misfit:
            raise misfit(flag.name.upper(), word, flag) from None
