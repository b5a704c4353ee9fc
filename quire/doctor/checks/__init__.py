"""Checks before the first step. Each is a function, registered by the name that silences it; a new one goes
into the file of its subject and is found by `examine`."""

from quire.doctor.checks import data, layers, loss, parameters

__all__ = ["data", "layers", "loss", "parameters"]
