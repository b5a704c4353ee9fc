"""Activation curves with their derivatives."""

from __future__ import annotations

from quire.board.instruments.base import Answer, Axis, Choice, Mark, Plot, Slider, instrument

NAMES = (
    "sigmoid", "tanh", "arctan", "relu", "leaky_relu", "relu6", "softplus", "log_sigmoid", "linear",
)  # fmt: skip


@instrument(
    "activations",
    title="Activation curves",
    about="What a unit gives for a sum a, and what it lets through of a gradient on the way back: where the "
    "derivative is near 0, the unit is saturated and learns nothing.",
    controls=(
        Choice("activation", "activation", NAMES),
        Slider("place", "sum a", -6.0, 6.0, 0.1, 1.0),
    ),
    entries=("activation/sigmoid", "activation/relu", "activation/tanh"),
)
def activations(activation: str, place: float) -> Answer:
    import torch

    from quire.functional.activations import ACTIVATIONS

    chosen = ACTIVATIONS[activation]
    sums = torch.linspace(-6, 6, 241, dtype=torch.float64)
    here = torch.tensor(place, dtype=torch.float64)
    value, slope = chosen.function(here).item(), chosen.derivative(here).item()
    near = torch.linspace(place - 1.5, place + 1.5, 2, dtype=torch.float64)
    tangent = value + slope * (near - place)
    across = sums.tolist()
    return Answer(
        [
            Plot(
                "f(a)", Axis("a", least=-6, most=6), Axis("f(a)"),
                [Mark("line", activation, across, chosen.function(sums).tolist()),
                 Mark("line", "tangent", near.tolist(), tangent.tolist(), faint=True),
                 Mark("points", "here", [place], [value])],
            ),
            Plot(
                "f′(a)", Axis("a", least=-6, most=6), Axis("f′(a)"),
                [Mark("line", "derivative", across, chosen.derivative(sums).tolist()),
                 Mark("points", "here", [place], [slope])],
            ),
        ],
        [("f(a)", f"{value:.4g}"), ("f′(a)", f"{slope:.4g}"),
         ("gradient after 10 such layers", f"{slope ** 10:.3g}")],
    )  # fmt: skip
