"""Checks before the first step. Each is a function, registered by the name that silences it; a new one goes
into the file of its subject and is found by `examine`."""

from quire.doctor.checks import data, fitting, layers, loss, parameters, structure

__all__ = ["data", "fitting", "layers", "loss", "parameters", "structure"]
