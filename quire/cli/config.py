"""`--config FILE.toml`: tables onto options, before PyTorch is imported."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from quire.cli.flags import Flag, Misfit, dashed, misfit, read
from quire.errors import DataError, InputError, nearest
from quire.files import parse_toml, read_file

# Where a run went and how it was shown is not what is repeated by its config.toml.
NOT_REPEATED = ("out", "resume", "overwrite", "json", "quiet", "debug", "config")


def read_config(options: type, file: Path, recipe: str, given: Set[str]) -> tuple[Any, set[str]]:
    """Unchecked options with the file's values in place of defaults, and the flag names it sets.

    A run's own config.toml is accepted too: it has its options in a table `options`. `given` are the
    flags of the command line; of --epochs and --steps the one that is given displaces the other.
    """
    values = load(file)
    if "format" in values and isinstance(values.get("options"), dict):
        if recipe and values.get("recipe") != recipe:
            raise InputError(
                f"{file} is of the recipe '{values.get('recipe')}', not '{recipe}'",
                expected=f"a run of '{recipe}' or a file of options",
                fix=f"quire train {values.get('recipe')} …",
            )
        values = {name: value for name, value in values["options"].items() if name not in NOT_REPEATED}
    for one, other in (("epochs", "steps"), ("steps", "epochs")):
        if one in given:
            values.pop(other, None)
    named: set[str] = set()
    return draft(options, values, file, "", named), named


def load(file: Path) -> dict[str, Any]:
    try:
        return parse_toml(read_file(file))
    except FileNotFoundError:
        raise InputError(f"--config {file}: no such file", expected="a TOML file of options") from None
    except IsADirectoryError:
        raise InputError(
            f"--config {file} is a folder",
            expected="a TOML file of options",
            fix=f"for a run folder give {file}/config.toml",
        ) from None
    except OSError as error:
        raise InputError(f"--config {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        place = f"byte {error.start + 1}"
        raise DataError(f"not UTF-8 at {place}", path=file, expected="a TOML file in UTF-8") from None
    except (ValueError, RecursionError) as error:  # tomllib itself counts neither digits nor brackets
        lines = 'lines such as epochs = 5 or device = "cpu"'
        raise InputError(f"{file} is not TOML: {error}", expected=lines) from None


def draft(options: type, values: Mapping[str, Any], file: Path, prefix: str, named: set[str]) -> Any:
    """An instance that was not checked yet: the parser makes the checked one from it and the flags."""
    hints = get_type_hints(options, include_extras=True)
    known = {field.name: field for field in fields(options)}
    for key in values:
        if key.replace("-", "_") not in known:
            hint = nearest(key, known)
            raise InputError(
                f"{file}: unknown key '{prefix}{key}'",
                expected=f"one of {', '.join(sorted(known))}",
                fix=hint.replace("'", f"'{prefix}", 1) if hint else "take the key out",
            )
    settled = {key.replace("-", "_"): value for key, value in values.items()}
    made: Any = object.__new__(options)
    for name, field in known.items():
        kind = get_args(hints[name])[0] if hasattr(hints[name], "__metadata__") else hints[name]
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        value = default
        if name in settled:
            place = f"{prefix}{name}"
            value = _value(kind, settled[name], file, place, named)
        object.__setattr__(made, name, value)
    return made


def _value(kind: Any, value: Any, file: Path, place: str, named: set[str]) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise InputError(
                f"{file}: {place} is {value!r}", expected="a table", fix=f"write [{place}] and its keys below"
            )
        return draft(kind, value, file, f"{place}.", named)
    named.add(dashed(place))
    try:
        return read(kind, value, text=False)
    except Misfit:
        raise misfit(f"{file}: {place}", value, Flag(place, kind)) from None
