"""Every exception Quire raises on purpose says three things: what came, what was expected, how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QuireError(Exception):
    """A failure with a message made for a person.

    ``exit_code`` is what the command returns: 1 for a failure, 2 for the user's mistake.
    """

    exit_code = 1

    def __init__(self, got: str, *, expected: str = "", fix: str = "") -> None:
        self.got, self.expected, self.fix = got, expected, fix
        lines = [got]
        if expected:
            lines.append(f"  expected: {expected}")
        if fix:
            lines.append(f"  fix: {fix}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        # Worker processes send exceptions back pickled; keyword arguments need help to survive that.
        return _rebuild, (type(self), dict(self.__dict__), self.args)


def _rebuild(kind: type[QuireError], state: dict[str, object], args: tuple[object, ...]) -> QuireError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class InputError(QuireError, ValueError):
    """The user's mistake: a wrong option, argument or name."""

    exit_code = 2


class DataError(InputError):
    """A mistake in a data file, with its place: ``file:line:column: value``."""

    def __init__(
        self,
        got: str,
        *,
        path: object = None,
        line: int | None = None,
        column: int | str | None = None,
        value: object = None,
        expected: str = "",
        fix: str = "",
    ) -> None:
        self.path, self.line, self.column, self.value = path, line, column, value
        place = ":".join(str(part) for part in (path, line, column) if part is not None)
        if value is not None:
            got = f"{got} (value {value!r})"
        super().__init__(f"{place}: {got}" if place else got, expected=expected, fix=fix)


class NonFiniteError(QuireError, FloatingPointError):
    """NaN or infinity in the data, the loss or a gradient; the step was not applied."""


class WriteError(QuireError, OSError):
    """A file that could not be written: the disk is full, read-only or gone. What stood there is whole."""

    def __str__(self) -> str:
        return str(self.args[0])  # not that of OSError, which is put together from number and path


class CheckpointError(QuireError):
    """A checkpoint or run folder that is missing, damaged or of another format."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` for the closest of `choices`, or nothing."""
    close = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else ""


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> InputError:
    """The error for a name that is in no closed list."""
    choices = sorted(choices)
    return InputError(
        f"unknown {kind} '{name}'",
        expected=f"one of {', '.join(choices)}",
        fix=nearest(name, choices) or f"choose a {kind} from the list",
    )
