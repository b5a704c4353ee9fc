"""Quire beside its peers, in one run: time, ratio, extra memory, and the share of what the machine allows.

`case.py` says what a subject is, `subjects/` has one file each, `measure.py` times them, and `machine.py`
finds out what the machine could do at best.
"""

from __future__ import annotations

from quire.bench.case import SUBJECTS, Absent, Bar, Case, Growth, Place, Turns, Work
from quire.bench.measure import Outcome, run_case

__all__ = ["SUBJECTS", "Absent", "Bar", "Case", "Growth", "Outcome", "Place", "Turns", "Work", "run_case"]
