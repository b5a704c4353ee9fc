"""Training: the contract of a task, learning by descent or by statistics, checkpoints and run folders."""

from quire.train.descent import Callback, fit
from quire.train.evaluate import evaluate
from quire.train.keeping import Fit, Interrupted
from quire.train.statistics import StatisticsTask, Swept, fit_statistics
from quire.train.task import TASKS, Task, build_task

__all__ = [
    "TASKS", "Callback", "Fit", "Interrupted", "StatisticsTask", "Swept", "Task", "build_task", "evaluate",
    "fit", "fit_statistics",
]  # fmt: skip
