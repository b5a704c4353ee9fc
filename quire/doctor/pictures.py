"""Pictures of what the doctor found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_axes(
    title: str, xlabel: str, ylabel: str, size: tuple[float, float] = (6.4, 4.0)
) -> tuple[Figure, Any]:
    """A picture with one diagram, its sides in inches."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=size, layout="constrained")
    axes = picture.add_subplot()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    return picture, axes
