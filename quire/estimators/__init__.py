"""scikit-learn estimators on PyTorch: arrays, data frames and tensors in, the same kind out."""

from quire.estimators.autoencoder import Autoencoder
from quire.estimators.bagging import BaggingEnsemble
from quire.estimators.linear import LinearRegression
from quire.estimators.logistic import LogisticRegression
from quire.estimators.mlp import MLPClassifier, MLPRegressor
from quire.estimators.nadaraya_watson import NadarayaWatsonClassifier, NadarayaWatsonRegressor
from quire.estimators.polynomial import PolynomialRegression

__all__ = [
    "Autoencoder",
    "BaggingEnsemble",
    "LinearRegression",
    "LogisticRegression",
    "MLPClassifier",
    "MLPRegressor",
    "NadarayaWatsonClassifier",
    "NadarayaWatsonRegressor",
    "PolynomialRegression",
]
