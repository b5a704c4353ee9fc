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

__all__ = ["Hessian", "Spectrum", "hessian_spectrum", "hessian_vector_product", "lanczos", "spectrum"]
