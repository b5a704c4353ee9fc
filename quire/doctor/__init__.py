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
from quire.doctor.findings import CHECKS, Diagnosis, Finding

__all__ = [
    "CHECKS",
    "Diagnosis",
    "Finding",
    "Hessian",
    "Spectrum",
    "examine",
    "hessian_spectrum",
    "hessian_vector_product",
    "lanczos",
    "spectrum",
]
