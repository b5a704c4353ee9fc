"""What a run needs of its data, whatever it is: a table, images, scenes, text.

A loader reads, splits and prepares; what it found out about the training part is the preparation,
which is saved with the weights and applied again at evaluate, predict and export.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor

from quire.data.batch import Data
from quire.data.columns import Label, Target

Split = Literal["train", "validation", "test"]


class Prepared(Protocol):
    """Data of another file, ready for the model."""

    @property
    def data(self) -> Data: ...

    @property
    def lines(self) -> np.ndarray | range:
        """Where each row stands in its source: a line of a table, the name of an image."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What training did not prepare for, and what was done about it."""


class Prepares(Protocol):
    """A preparation: `Preparation` of tables, `ImagePreparation`, `TextPreparation`."""

    @property
    def targets(self) -> tuple[Target, ...]: ...

    @property
    def target(self) -> Target: ...

    @property
    def feature_names(self) -> list[str]: ...

    def read(self, path: Path | str, options: Any = None) -> Any: ...

    def transform(self, table: Any, need_target: bool = False) -> Prepared: ...

    def decode_classes(self, indices: Tensor | Sequence[int], target: int = 0) -> list[Label]: ...

    def to_json(self) -> dict[str, Any]: ...


class LoadedData(Protocol):
    """Training, validation and test part, prepared."""

    @property
    def train(self) -> Data: ...

    @property
    def validation(self) -> Data | None: ...

    @property
    def test(self) -> Data | None: ...

    @property
    def preparation(self) -> Prepares: ...

    @property
    def source(self) -> str: ...

    @property
    def warnings(self) -> tuple[str, ...]: ...

    def lines(self, split: Split) -> np.ndarray:
        """Where each row of a part stands in the source."""
