"""Kernel width in attention pooling."""

from __future__ import annotations

from quire.board.instruments.base import Answer, Axis, Choice, Mark, Plot, Slider, instrument

POINTS = 40
WIDTHS = 40


@instrument(
    "kernel-width",
    title="Kernel width in attention pooling",
    about="Nadaraya–Watson: each answer is a mean of the values, weighted by how near their keys are to the "
    "query. A narrow kernel repeats the noise, a wide one flattens the curve; the error on points that were "
    "left out says which width is right.",
    controls=(
        Slider("width", "width h", 0.05, 2.0, 0.05, 0.3),
        Choice("kernel", "kernel", ("gaussian", "boxcar", "epanechnikov")),
        Slider("noise", "noise in the values", 0.0, 1.0, 0.05, 0.3),
    ),
    entries=("attention/nadaraya-watson",),
)
def kernel_width(width: float, kernel: str, noise: float) -> Answer:
    import torch

    from quire.functional.kernel_pooling import Kernel, nadaraya_watson

    source = torch.Generator().manual_seed(3)
    keys = (5 * torch.rand(POINTS, 1, generator=source, dtype=torch.float64)).sort(0).values
    clean = 2 * keys.sin() + keys.pow(0.8)
    values = clean + noise * torch.randn(clean.shape, generator=source, dtype=torch.float64)
    queries = torch.linspace(0, 5, 201, dtype=torch.float64)[:, None]
    kind: Kernel = kernel  # type: ignore[assignment]  # one of the choices

    def error(h: float) -> float:
        found = nadaraya_watson(keys, keys, values, kind, h, exclude_self=True)
        return (found - values).square().mean().item()

    answer = nadaraya_watson(queries, keys, values, kind, width)
    widths = torch.linspace(0.05, 2.0, WIDTHS, dtype=torch.float64).tolist()
    errors = [error(h) for h in widths]
    best = min(range(WIDTHS), key=errors.__getitem__)
    truth = 2 * queries.sin() + queries.pow(0.8)
    across = queries[:, 0].tolist()
    return Answer(
        [
            Plot(
                "Answers", Axis("x"), Axis("y"),
                [Mark("points", "data", keys[:, 0].tolist(), values[:, 0].tolist()),
                 Mark("line", "without noise", across, truth[:, 0].tolist(), faint=True),
                 Mark("line", "pooled", across, answer[:, 0].tolist())],
            ),
            Plot(
                "Error on points left out", Axis("width h"), Axis("mean squared error"),
                [Mark("line", "leave-one-out", widths, errors),
                 Mark("points", "chosen width", [width], [error(width)])],
            ),
        ],
        [
            ("leave-one-out error", f"{error(width):.3g}"),
            ("best of these widths", f"{widths[best]:.3g} with {errors[best]:.3g}"),
        ],
    )  # fmt: skip
