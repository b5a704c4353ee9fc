"""What training a model will cost, before it is trained."""

from quire.doctor.costs.account import explain
from quire.doctor.costs.budget import Fit, largest_batch
from quire.doctor.costs.machine import Machine, measure_machine
from quire.doctor.costs.table import Costs, LayerCost

__all__ = ["Costs", "Fit", "LayerCost", "Machine", "explain", "largest_batch", "measure_machine"]
