"""scikit-learn estimators on PyTorch: arrays, data frames and tensors in, the same kind out."""

from quire.estimators.autoencoder import Autoencoder
from quire.estimators.bagging import BaggingEnsemble
from quire.estimators.kmeans import KMeans
from quire.estimators.linear import LinearRegression
from quire.estimators.logistic import LogisticRegression
from quire.estimators.mixture import GaussianMixture
from quire.estimators.mlp import MLPClassifier, MLPRegressor
from quire.estimators.nadaraya_watson import NadarayaWatsonClassifier, NadarayaWatsonRegressor
from quire.estimators.pca import PCA
from quire.estimators.polynomial import PolynomialRegression

__all__ = [
    "PCA",
    "Autoencoder",
    "BaggingEnsemble",
    "GaussianMixture",
    "KMeans",
    "LinearRegression",
    "LogisticRegression",
    "MLPClassifier",
    "MLPRegressor",
    "NadarayaWatsonClassifier",
    "NadarayaWatsonRegressor",
    "PolynomialRegression",
]
