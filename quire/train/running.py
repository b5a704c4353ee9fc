"""The training loss that is shown: sums and weights since the last record."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.train.gradients import Sums, Weights


class Running:
    """On a GPU the numbers are left there, step by step, until somebody asks for their sum."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.load({}, {})

    def load(self, sums: dict[str, float], weights: dict[str, float]) -> None:
        self.sums, self.weights = dict(sums), dict(weights)
        self._waiting: list[tuple[dict[str, float], str, Tensor]] = []

    def add(self, sums: Sums, weights: Weights) -> None:
        for total, new in ((self.sums, sums), (self.weights, weights)):
            for name, value in new.items():
                if not isinstance(value, Tensor):
                    total[name] = total.get(name, 0.0) + value
                elif value.is_cuda:
                    self._waiting.append((total, name, value))
                else:
                    total[name] = total.get(name, 0.0) + value.item()

    def numbers(self) -> tuple[dict[str, float], dict[str, float]]:
        waiting, self._waiting = self._waiting, []
        if waiting:
            values = torch.stack([value.double() for _, _, value in waiting]).tolist()
            for (total, name, _), value in zip(waiting, values, strict=True):
                total[name] = total.get(name, 0.0) + value
        return dict(self.sums), dict(self.weights)
