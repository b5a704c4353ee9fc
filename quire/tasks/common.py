"""What several tasks do alike: weigh, save the layer that scales pixels, choose rows to read noise from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.data.batch import Data
from quire.errors import InputError
from quire.nn.images import ImageInputs
from quire.train.task import Weight

ENOUGH = 30
"""Validation rows from which on the noise of a head can be estimated."""


def as_weight(count: Weight) -> Weight:
    """A number on the CPU, where it costs less than the tensor arithmetic that would follow; on a GPU the
    tensor, so that nobody waits for it."""
    return count if isinstance(count, float) or count.is_cuda else float(count)


def inputs_spec(layer: ImageInputs | None) -> dict[str, Any] | None:
    """The layer that scales pixels, as plain JSON values; None without one."""
    return None if layer is None else layer.spec()


def build_inputs(spec: Mapping[str, Any]) -> ImageInputs | None:
    """The layer of a task's description, if it has one."""
    return ImageInputs.from_spec(spec["inputs"]) if spec.get("inputs") else None


def require_features(found: int, wanted: int) -> None:
    """Rows as long as those that a task was made for."""
    if found != wanted:
        raise InputError(
            f"rows of {found} features",
            expected=f"{wanted} features, which the task was made for",
            fix=f"make it with features={found}",
        )


def rows_for_noise(data: Data, validation: Data | None) -> Data:
    """Rows that were not trained on, where there are enough of them."""
    return validation if validation is not None and len(validation) >= ENOUGH else data
