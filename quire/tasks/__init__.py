"""Tasks: a model, its objective, its measures and its predictions, ready for the trainer."""

from quire.tasks.supervised import Supervised

__all__ = ["Supervised"]
