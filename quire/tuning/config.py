"""What an adapter is: its rank, its scale, and the weights that it changes."""

from __future__ import annotations

from dataclasses import dataclass

from quire.options import check, check_range


@dataclass(frozen=True)
class LoRAConfig:
    """W = W₀ + (alpha/rank)·L R on every target, and a value of its own for what is learned in full."""

    rank: int = 8
    alpha: float | None = None
    """The change is scaled by alpha/rank; without it the scale is 1."""
    dropout: float = 0.0
    """Rate at which inputs of the thin path are dropped while training."""
    targets: tuple[str, ...] = ("all",)
    """Groups (all, attention, dense, convolution, recurrent, embedding), names of layers or weights, or
    patterns such as "h.*.attn.c_attn". A name may stand for the end of a longer one; a layer that is called
    like a group can be written as "*.dense"."""
    full: tuple[str, ...] = ()
    """Names or patterns of what is learned as a whole, such as a new classifier; biases and norms too."""

    def __post_init__(self) -> None:
        for name in ("targets", "full"):
            value = getattr(self, name)
            parts = value.split(",") if isinstance(value, str) else value
            object.__setattr__(self, name, tuple(part.strip() for part in parts))
        check(isinstance(self.rank, int), "rank", self.rank, "a whole number >= 1")
        check_range(self, "", rank=">= 1", alpha="> 0", dropout="[0, 1)")
        check(bool(self.targets or self.full), "targets", self.targets, "at least one target")

    @property
    def scale(self) -> float:
        """s = alpha/rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank
