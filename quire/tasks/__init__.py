"""Tasks: a model, its objective, its measures and its predictions, ready for the trainer."""

from quire.tasks.bagging import Bagging
from quire.tasks.detection import Detection, DetectionRules
from quire.tasks.loading import Trained, load_trained
from quire.tasks.supervised import Supervised

__all__ = ["Bagging", "Detection", "DetectionRules", "Supervised", "Trained", "load_trained"]
