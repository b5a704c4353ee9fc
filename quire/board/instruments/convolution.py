"""Convolution arithmetic and receptive field."""

from __future__ import annotations

from quire.board.instruments.base import Answer, Axis, Mark, Plot, Slider, instrument
from quire.errors import InputError


@instrument(
    "convolution",
    title="Convolution arithmetic and receptive field",
    about="Equal layers one after the other. Each gives ⌊(W − d(K−1) − 1 + 2P)/S⌋ + 1 pixels along a side; "
    "what one pixel of the output sees grows by d(K−1) times all strides so far.",
    controls=(
        Slider("size", "input size W", 4, 64, 1, 32),
        Slider("kernel", "kernel K", 1, 9, 1, 3),
        Slider("stride", "stride S", 1, 4, 1, 1),
        Slider("padding", "padding P", 0, 4, 1, 1),
        Slider("dilation", "dilation d", 1, 4, 1, 1),
        Slider("layers", "layers", 1, 6, 1, 3),
    ),
    entries=("convolve/output-size", "convolve/receptive-field"),
)
def convolution(size: int, kernel: int, stride: int, padding: int, dilation: int, layers: int) -> Answer:
    from quire.functional.geometry import output_size
    from quire.functional.receptive import Window, receptive_field

    window = Window(kernel, stride, padding, dilation)
    sizes, fields, refused = [size], [receptive_field([])], ""
    for count in range(1, layers + 1):
        try:
            sizes.append(output_size(sizes[-1], kernel, stride, padding, dilation))
        except InputError as error:
            refused = f"Layer {count} does not fit: {error.got}."
            break
        fields.append(receptive_field([window] * count))
    depth = list(range(len(sizes)))
    names = ["input", *(f"layer {i}" for i in depth[1:])]
    middle = sizes[-1] // 2
    first, stop = fields[-1].span(middle)
    row = [0.9 if first <= pixel < stop else 0.15 for pixel in range(size)]
    return Answer(
        [
            Plot("Pixels along a side", Axis("", labels=names), Axis("pixels", least=0),
                 [Mark("bars", "output size", depth, sizes)]),
            Plot("Receptive field", Axis("", labels=names), Axis("pixels of the input", least=0),
                 [Mark("bars", "receptive field", depth, [field.size for field in fields])]),
            Plot("What the middle pixel of the output sees",
                 Axis("pixel of the input", least=0, most=size), Axis(""),
                 [Mark("tiles", "seen", tiles=[row])]),
        ],
        [
            ("output", f"{sizes[-1]} × {sizes[-1]}"),
            ("receptive field", f"{fields[-1].size} pixels, from {first} to {stop - 1}"),
            ("pixels between neighbours", str(fields[-1].jump)),
        ],
        refused,
    )  # fmt: skip
