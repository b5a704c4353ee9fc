"""Closed registries: a name in a file or an option resolves here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from quire.errors import unknown_name

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to objects. Registration is a decorator; a look-up that fails names the nearest match."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        def add(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} '{name}' is registered twice")
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except KeyError:
            raise unknown_name(self.kind, name, self._entries) from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> Iterator[tuple[str, T]]:
        return iter(self._entries.items())
