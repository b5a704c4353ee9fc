"""Fine-tuning: low-rank adapters (LoRA) on any weight, and frozen bases in NormalFloat4 (QLoRA)."""

from __future__ import annotations

from quire.tuning.adapters import Adapters, AdapterSummary, inject
from quire.tuning.config import LoRAConfig
from quire.tuning.files import AdapterFile, read_adapter
from quire.tuning.memory import Memory, measure_memory, predict_memory, step_memory
from quire.tuning.merging import MergeError, MergeReport
from quire.tuning.quantised import Quantised, quantise_base
from quire.tuning.targets import GROUPS, find_sites

__all__ = [
    "GROUPS", "AdapterFile", "AdapterSummary", "Adapters", "LoRAConfig", "Memory", "MergeError",
    "MergeReport", "Quantised", "find_sites", "inject", "measure_memory", "predict_memory", "quantise_base",
    "read_adapter", "step_memory",
]  # fmt: skip
