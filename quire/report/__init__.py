"""The report of a run, and runs side by side; both read run folders and nothing else."""

from __future__ import annotations

from pathlib import Path

from quire.report.comparison import Row, compare, comparison_table

__all__ = ["Row", "compare", "comparison_table", "write"]


def write(run_folder: Path) -> Path:
    """Make ``report.html`` in a run folder, finished or not, and return its path."""
    # Plotting is loaded only when something is drawn: `quire runs` has to answer at once.
    from quire.report.document import write as write_document

    return write_document(run_folder)
