"""The curvature of any PyTorch model's loss: the Hessian as a product, its spectrum, the steps that it
allows, and how it changes in training."""

from quire.doctor.curvature.density import Spectrum, hessian_spectrum, smooth_density, spectrum
from quire.doctor.curvature.hessian import (
    Eigenvalue,
    Hessian,
    Tridiagonal,
    hessian_vector_product,
    lanczos,
    largest_eigenvalue,
)
from quire.doctor.curvature.sharpness import Sharpness
from quire.doctor.curvature.steps import StepAdvice, advise_step

__all__ = [
    "Eigenvalue",
    "Hessian",
    "Sharpness",
    "Spectrum",
    "StepAdvice",
    "Tridiagonal",
    "advise_step",
    "hessian_spectrum",
    "hessian_vector_product",
    "lanczos",
    "largest_eigenvalue",
    "smooth_density",
    "spectrum",
]
