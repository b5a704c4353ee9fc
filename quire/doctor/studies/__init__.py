"""How well a way of learning does on rows that it has not seen, and what would make it better.

    print(folds(from_estimator(LogisticRegression(), x, y)))

Anything that can be trained anew is studied alike: a `Refit` trains on some of its rows and gives a `Judge`,
which measures and answers any rows. `from_estimator` makes one of a scikit-learn estimator,
`quire.recipes.again` of a run. A study gives numbers (`numbers`, `table`), a sentence (`verdict`) and a
picture (`figure`).
"""

from quire.doctor.studies.confidence import Calibration, calibration
from quire.doctor.studies.learning import LearningCurve, learning_curve
from quire.doctor.studies.refit import Answers, Judge, Refit, Study, from_estimator
from quire.doctor.studies.resampling import BiasVariance, Folds, bias_variance, folds
from quire.doctor.studies.shape import Equivariance, Regions, equivariance, linear_regions

__all__ = [
    "Answers",
    "BiasVariance",
    "Calibration",
    "Equivariance",
    "Folds",
    "Judge",
    "LearningCurve",
    "Refit",
    "Regions",
    "Study",
    "bias_variance",
    "calibration",
    "equivariance",
    "folds",
    "from_estimator",
    "learning_curve",
    "linear_regions",
]
