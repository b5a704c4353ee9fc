"""The formula sheet. Importing this package registers every entry, chapter by chapter."""

from quire.sheet import (  # noqa: I001  the chapters' own order
    maths,
    dense,
    activation,
    loss,
    backprop,
    optimise,
    convergence,
    initialise,
    regularise,
    generalise,
    normalise,
    convolve,
    detect,
    measure,
    coco,
)
from quire.sheet.registry import ENTRIES, Entry, Verdict, entry

__all__ = [
    "ENTRIES",
    "Entry",
    "Verdict",
    "activation",
    "backprop",
    "coco",
    "convergence",
    "convolve",
    "dense",
    "detect",
    "entry",
    "generalise",
    "initialise",
    "loss",
    "maths",
    "measure",
    "normalise",
    "optimise",
    "regularise",
]
