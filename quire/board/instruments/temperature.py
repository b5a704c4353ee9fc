"""Temperature, top-k and top-p of a distribution of tokens."""

from __future__ import annotations

import math

from quire.board.instruments.base import Answer, Axis, Mark, Plot, Slider, instrument

TOKENS = ("learn", "train", "read", "run", "stop", "sing", "fall", "zebra")
LOGITS = (3.2, 2.8, 2.1, 1.6, 1.0, 0.3, -0.4, -2.0)


@instrument(
    "temperature",
    title="Temperature",
    about="Logits of eight tokens, divided by τ before the softmax: below 1 the best take all, above 1 all "
    "become alike. Top-k keeps the k best, top-p the fewest that together reach p; the rest is never drawn.",
    controls=(
        Slider("value", "temperature τ", 0.0, 3.0, 0.05, 1.0),
        Slider("top_k", "top-k", 1, 8, 1, 8),
        Slider("top_p", "top-p", 0.05, 1.0, 0.05, 1.0),
    ),
    entries=("dense/temperature", "transformer/temperature"),
)
def temperature(value: float, top_k: int, top_p: float) -> Answer:
    import torch

    from quire.functional.sampling import filter_logits

    logits = torch.tensor(LOGITS, dtype=torch.float64)
    before = logits.softmax(0)
    after = filter_logits(logits, temperature=value, top_k=top_k, top_p=top_p).softmax(0)
    places = list(range(len(TOKENS)))
    entropy = -sum(p * math.log2(p) for p in after.tolist() if p > 0)
    return Answer(
        [
            Plot(
                "Probability of the next token",
                Axis("token", labels=TOKENS),
                Axis("probability", least=0, most=1),
                [
                    Mark("bars", "after", places, after.tolist()),
                    Mark("points", "softmax alone", places, before.tolist()),
                ],
            )
        ],
        [
            ("entropy", f"{entropy:.3g} bits"),
            ("as many choices as", f"{2**entropy:.3g} equal ones"),
            ("tokens that can be drawn", str(int((after > 0).sum()))),
        ],
    )
