"""Which columns are the targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from quire.data.columns import TargetKind, is_unnamed
from quire.data.table import Table, listed
from quire.data.types import infer
from quire.errors import DataError, InputError, nearest
from quire.options import Table as TableOptions

Targets = str | int | Sequence[str | int] | None


def kind_of(
    name: str, kind: TargetKind | Literal["auto"], options: TableOptions
) -> TargetKind | Literal["auto"]:
    """A target that is named among the categories is one of classes."""
    return "classification" if kind == "auto" and name in options.categories else kind


def require_column(table: Table, name: str, what: str) -> None:
    if name not in table.names:
        raise DataError(
            f"missing column {name!r}, named by {what}",
            path=table.source,
            expected=f"one of {listed(table.names, 30)}",
            fix=nearest(name, table.names) or "check the name, and whether the file has a header",
        )


def check_columns(table: Table, options: TableOptions) -> None:
    """Refuse options that name a column which does not exist."""
    for option, wanted in (("--table.drop", options.drop), ("--table.categories", options.categories)):
        for name in wanted:
            require_column(table, name, option)


def resolve_targets(table: Table, targets: Targets, drop: Sequence[str] = ()) -> list[str]:
    """Names of the target columns. A whole number is a position unless a column has that name."""
    if targets is None:
        left = [name for name in table.names if name not in drop]
        while (
            len(left) > 1 and is_unnamed(table, left[-1]) and infer(table, left[-1], strict=False) == "empty"
        ):
            left.pop()  # a delimiter at the end of each line
        return left[-1:]
    found: list[str] = []
    for target in [targets] if isinstance(targets, str | int) else targets:
        name = _at_position(table, target)
        if name in drop:
            raise InputError(f"the target {name!r} is also in --table.drop", expected="one of the two")
        if name in found:
            raise InputError(f"the target {name!r} is named twice", expected="each target once")
        found.append(name)
    return found


def _at_position(table: Table, target: str | int) -> str:
    if str(target) in table.names:
        return str(target)
    try:
        position = int(target)
    except ValueError:
        require_column(table, str(target), "the target")
        raise
    count = len(table.names)
    if position == 0 or abs(position) > count:
        raise DataError(
            f"target position {position} in a table of {count} columns",
            path=table.source,
            expected=f"1 to {count} from the left, or -1 to -{count} from the right",
        )
    return table.names[position - 1 if position > 0 else position]
