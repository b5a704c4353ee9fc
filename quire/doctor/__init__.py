"""Why a model does not learn, and what step size would."""

from __future__ import annotations

from quire.doctor.curvature import (
    Hessian,
    Spectrum,
    hessian_spectrum,
    hessian_vector_product,
    lanczos,
    spectrum,
)
from quire.doctor.examine import examine
from quire.doctor.findings import CHECKS, SIGNS, Diagnosis, Finding
from quire.doctor.monitor import Monitor, Watching
from quire.doctor.verdict import Verdict, diagnose, judge

__all__ = [
    "CHECKS",
    "SIGNS",
    "Diagnosis",
    "Finding",
    "Hessian",
    "Monitor",
    "Spectrum",
    "Verdict",
    "Watching",
    "diagnose",
    "examine",
    "hessian_spectrum",
    "hessian_vector_product",
    "judge",
    "lanczos",
    "spectrum",
]
