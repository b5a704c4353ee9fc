"""Training: the contract of a task, learning by descent, checkpoints and run folders."""

from quire.train.descent import Callback, Fit, Interrupted, fit
from quire.train.evaluate import evaluate
from quire.train.task import TASKS, Task, build_task

__all__ = ["TASKS", "Callback", "Fit", "Interrupted", "Task", "build_task", "evaluate", "fit"]
