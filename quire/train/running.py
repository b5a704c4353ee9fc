"""The training loss that is shown: sums and weights since the last record."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor

from quire.train.gradients import Weights
from quire.train.pages import Row

Numbers = dict[str, float]


class Running:
    """On a GPU the numbers are left there, step by step, until somebody asks for their sum."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.load({}, {})

    def load(self, sums: Numbers, weights: Numbers) -> None:
        self.sums, self.weights = dict(sums), dict(weights)
        self._rows: list[_Rows] = []
        self._weights: list[tuple[str, Tensor]] = []

    def add(self, sums: Numbers | Row, weights: Weights) -> None:
        if isinstance(sums, Row):
            if not (self._rows and self._rows[-1].takes(sums)):
                self._rows.append(_Rows(sums))
        else:
            _add(self.sums, sums.items())
        for name, weight in weights.items():
            if isinstance(weight, Tensor) and weight.is_cuda:
                self._weights.append((name, weight))
            else:
                self.weights[name] = self.weights.get(name, 0.0) + float(weight)

    def numbers(self) -> tuple[Numbers, Numbers]:
        if self._rows:
            values = iter(torch.cat([rows.values() for rows in self._rows]).tolist())
            for rows in self._rows:
                for _ in range(rows.first, rows.end):
                    row = list(islice(values, rows.width))
                    _add(self.sums, ((name, row[column]) for name, column in rows.columns.items()))
        if self._weights:
            weights = torch.stack([weight.double() for _, weight in self._weights]).tolist()
            _add(self.weights, zip([name for name, _ in self._weights], weights, strict=True))
        self._rows, self._weights = [], []
        return dict(self.sums), dict(self.weights)


class _Rows:
    """Rows of one page that follow each other."""

    def __init__(self, row: Row) -> None:
        self.page, self.columns = row.page, row.columns
        self.first, self.end = row.number, row.number + 1

    def takes(self, row: Row) -> bool:
        """Whether a row is the next of these, which it then is one of."""
        next_one = row.page is self.page and row.number == self.end and row.columns is self.columns
        self.end += next_one
        return next_one

    @property
    def width(self) -> int:
        return self.page.values.size(1)

    def values(self) -> Tensor:
        return self.page.values[self.first : self.end].double().reshape(-1)


def _add(totals: Numbers, values: Iterable[tuple[str, float]]) -> None:
    for name, value in values:
        totals[name] = totals.get(name, 0.0) + value
