"""What an instrument is: a few controls, and a function from their values to pictures of numbers.

    @instrument("temperature", title=…, about=…, entries=("transformer/temperature",),
                controls=(Slider("value", "temperature τ", 0.0, 3.0, 0.05, 1.0),))
    def temperature(value: float) -> Answer: ...

The functions import PyTorch inside: the server describes instruments, the worker runs them. A picture is axes
with marks on them; the browser draws it and writes the same numbers into a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from quire.errors import InputError
from quire.registry import Registry


@dataclass(frozen=True)
class Slider:
    """A number; a whole one where the step and the ends are."""

    name: str
    label: str
    least: float
    most: float
    step: float
    start: float

    @property
    def whole(self) -> bool:
        return all(isinstance(value, int) for value in (self.least, self.most, self.step))

    def read(self, text: str) -> float | int:
        try:
            value = int(text) if self.whole else float(text)
        except ValueError:
            value = math.nan
        if not self.least <= value <= self.most:
            raise InputError(
                f"{self.name}: {text[:40]!r}",
                expected=f"a {'whole ' if self.whole else ''}number from {self.least:g} to {self.most:g}",
            )
        return value


@dataclass(frozen=True)
class Choice:
    """One of several words; the first to start with."""

    name: str
    label: str
    choices: tuple[str, ...]

    @property
    def start(self) -> str:
        return self.choices[0]

    def read(self, text: str) -> str:
        if text not in self.choices:
            raise InputError(f"{self.name}: {text[:40]!r}", expected=f"one of {', '.join(self.choices)}")
        return text


class Axis(NamedTuple):
    label: str
    log: bool = False
    labels: Sequence[str] = ()
    """Names of the places 0, 1, 2, … instead of numbers."""
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True)
class Mark:
    """Lines, points or bars at (x, y), or tiles: grey values from 0 to 1, row by row from the top."""

    kind: Literal["line", "points", "bars", "tiles"]
    name: str
    x: Sequence[float] = ()
    y: Sequence[float] = ()
    group: Sequence[int] = ()
    """Of each point, which colour it has."""
    tiles: Sequence[Sequence[float]] = ()
    faint: bool = False


@dataclass(frozen=True)
class Plot:
    title: str
    x: Axis
    y: Axis
    marks: Sequence[Mark]
    square: bool = False
    """Both axes have one scale."""


@dataclass(frozen=True)
class Answer:
    plots: Sequence[Plot]
    facts: Sequence[tuple[str, str]] = ()
    said: str = ""
    """What there is to see, in a sentence."""


@dataclass(frozen=True)
class Instrument:
    name: str
    title: str
    about: str
    controls: tuple[Slider | Choice, ...]
    compute: Callable[..., Answer] = field(repr=False)
    entries: tuple[str, ...] = ()
    """Entries of the sheet that it is about."""

    def read(self, given: Mapping[str, str]) -> dict[str, Any]:
        """The values of all controls from texts; those that are not given are where they start."""
        known = {control.name for control in self.controls}
        for name in given:
            if name not in known:
                raise InputError(f"{name[:40]!r}", expected=f"values for {', '.join(sorted(known))}")
        return {
            control.name: control.read(given[control.name]) if control.name in given else control.start
            for control in self.controls
        }


INSTRUMENTS: Registry[Instrument] = Registry("instrument")


def instrument(
    name: str, *, title: str, about: str, controls: tuple[Slider | Choice, ...], entries: tuple[str, ...] = ()
) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Register the decorated function."""

    def add(compute: Callable[..., Answer]) -> Callable[..., Answer]:
        INSTRUMENTS.register(name)(Instrument(name, title, about, controls, compute, entries))
        return compute

    return add


def answer(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of an instrument as plain lists, ready to be sent; what is not finite becomes None."""
    return _plain(asdict(INSTRUMENTS[name].compute(**values)))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        fields = getattr(value, "_fields", None)
        if fields is not None:
            return {name: _plain(inner) for name, inner in zip(fields, value, strict=True)}
        return [_plain(inner) for inner in value]
    return value
