"""Why a model does not learn, what would help, what it costs, and how far its results hold.

`examine` looks before the first step, `diagnose` takes a few on a copy, `Monitor` looks while it trains.
`explain` says what a step will cost; `quire.doctor.curvature` and `quire.doctor.studies` go deeper.
"""

from __future__ import annotations

from quire.doctor.costs import Costs, explain, largest_batch, measure_machine
from quire.doctor.curvature import (
    Hessian,
    Sharpness,
    Spectrum,
    advise_step,
    hessian_spectrum,
    hessian_vector_product,
    lanczos,
    largest_eigenvalue,
    spectrum,
)
from quire.doctor.examine import examine
from quire.doctor.findings import CHECKS, SIGNS, Diagnosis, Finding
from quire.doctor.monitor import Monitor, Watching
from quire.doctor.verdict import Verdict, diagnose, judge

__all__ = [
    "CHECKS",
    "SIGNS",
    "Costs",
    "Diagnosis",
    "Finding",
    "Hessian",
    "Monitor",
    "Sharpness",
    "Spectrum",
    "Verdict",
    "Watching",
    "advise_step",
    "diagnose",
    "examine",
    "explain",
    "hessian_spectrum",
    "hessian_vector_product",
    "judge",
    "lanczos",
    "largest_batch",
    "largest_eigenvalue",
    "measure_machine",
    "spectrum",
]
