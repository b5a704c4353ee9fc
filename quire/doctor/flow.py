"""What sizes from layer to layer say, before the first step and in training alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.doctor.findings import Finding

VANISHED, EXPLODED = 1e-5, 1e3
IDLE = 0.5
"""Share of dead or saturated units that is worth a word."""
NEARLY_ALL = 0.9
"""Share of dead units that is too much, whatever was learned."""
Flow = Sequence[tuple[str, float]]
"""Of each weight its gradient, in units of the weight, from the first layer to the last."""


def vanishing(flow: Flow) -> Iterator[Finding]:
    if len(flow) < 4:
        return
    (first, start), (last, end) = flow[0], flow[-1]
    if end > 0 and start < VANISHED * end:
        yield Finding(
            "warning",
            "gradients vanish on the way to the first layers",
            first,
            f"relative to its weights the gradient is {start:.1e} there and {end:.1e} at {last}",
            "use ReLU or GELU with He's initial weights, normalisation, or residual connections",
        )


def exploding(flow: Flow) -> Iterator[Finding]:
    large = [(name, size) for name, size in flow if size > EXPLODED]
    if large:
        name, size = large[0]
        yield Finding(
            "warning",
            "gradients explode",
            name,
            f"{size:.1e} times as large as the weights; large at {len(large)} of {len(flow)} weights",
            "start with smaller weights, normalise, and clip gradients by their norm",
        )
