"""Signs by which training tells how it goes. Each is a function of a course, registered by the name that
silences it; a new one goes into the file of its subject and is found by itself."""

from quire.doctor.signs import curves, gradients, steps, units

__all__ = ["curves", "gradients", "steps", "units"]
