"""Tasks: a model, its objective, its measures and its predictions, ready for the trainer."""

from quire.tasks.adversarial import Adversarial
from quire.tasks.bagging import Bagging
from quire.tasks.components import PrincipalComponents
from quire.tasks.detection import Detection, DetectionRules
from quire.tasks.embedding import Embedding
from quire.tasks.generating import Generates
from quire.tasks.kernel import LeaveOneOut
from quire.tasks.kmeans import KMeansTask
from quire.tasks.language import LanguageModel
from quire.tasks.least_squares import LinearLeastSquares
from quire.tasks.loading import Trained, load_trained
from quire.tasks.mixture import MixtureTask
from quire.tasks.reconstruction import Reconstruction, ReconstructionRules
from quire.tasks.semi import SemiSupervised
from quire.tasks.supervised import Supervised
from quire.tasks.translation import Translation
from quire.tasks.variational import Variational

__all__ = [
    "Adversarial",
    "Bagging",
    "Detection",
    "DetectionRules",
    "Embedding",
    "Generates",
    "KMeansTask",
    "LanguageModel",
    "LeaveOneOut",
    "LinearLeastSquares",
    "MixtureTask",
    "PrincipalComponents",
    "Reconstruction",
    "ReconstructionRules",
    "SemiSupervised",
    "Supervised",
    "Trained",
    "Translation",
    "Variational",
    "load_trained",
]
