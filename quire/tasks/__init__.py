"""Tasks: a model, its objective, its measures and its predictions, ready for the trainer."""

from quire.tasks.bagging import Bagging
from quire.tasks.detection import Detection, DetectionRules
from quire.tasks.kernel import LeaveOneOut
from quire.tasks.language import LanguageModel
from quire.tasks.loading import Trained, load_trained
from quire.tasks.supervised import Supervised
from quire.tasks.translation import Translation

__all__ = [
    "Bagging",
    "Detection",
    "DetectionRules",
    "LanguageModel",
    "LeaveOneOut",
    "Supervised",
    "Trained",
    "Translation",
    "load_trained",
]
