"""Data sets that need no download: scikit-learn's small ones, and simulated ones whose truth is known.

Each is a table like one read from a file, with the target last, and takes the same way from there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.data.table import Table, arrow_column, make_table
from quire.registry import Registry

BUILTIN: Registry[Callable[[], Table]] = Registry("built-in data set")


def builtin(name: str) -> Table:
    """A built-in set by name: the same rows each time."""
    return BUILTIN[name]()


def _table(name: str, columns: dict[str, np.ndarray]) -> Table:
    arrays = {key: arrow_column(values, key, name) for key, values in columns.items()}
    return make_table(arrays, f"{name} (built in)")


@BUILTIN.register("digits")
def digits() -> Table:
    """1797 images of handwritten digits, 8 × 8 pixels from 0 to 16; the digit as class."""
    from sklearn.datasets import load_digits

    data = load_digits()
    columns = {f"pixel_{i}": data.data[:, i] for i in range(64)}
    return _table("digits", columns | {"digit": data.target})


def _named_classes(name: str, target: str) -> Table:
    from sklearn import datasets

    data = getattr(datasets, f"load_{name}")()
    columns = {str(key): data.data[:, i] for i, key in enumerate(data.feature_names)}
    return _table(name, columns | {target: data.target_names[data.target].astype(str)})


@BUILTIN.register("iris")
def iris() -> Table:
    """150 irises of three species, four lengths in cm."""
    return _named_classes("iris", "species")


@BUILTIN.register("wine")
def wine() -> Table:
    """178 wines from three cultivators, 13 measurements."""
    return _named_classes("wine", "cultivator")


@BUILTIN.register("breast_cancer")
def breast_cancer() -> Table:
    """569 tumours, benign or malignant, 30 measurements of cell nuclei."""
    return _named_classes("breast_cancer", "diagnosis")


@BUILTIN.register("diabetes")
def diabetes() -> Table:
    """442 patients, ten measurements in their own units; the progression of diabetes after a year."""
    from sklearn.datasets import load_diabetes

    data = load_diabetes(scaled=False)
    columns = {str(key): data.data[:, i] for i, key in enumerate(data.feature_names)}
    return _table("diabetes", columns | {"progression": data.target})


CLOUD_CENTRES = {"left": (-1.0, -0.5), "right": (1.0, 0.5)}
"""Means of the two clouds; the covariance of both is the identity."""


@BUILTIN.register("two_clouds")
def two_clouds() -> Table:
    """1000 points of two overlapping Gaussian clouds with identity covariance, half of each.

    The posterior is logistic: log P(right|x)/P(left|x) = 2·(x·(1, 0.5)), so the best weights are (2, 1).
    """
    generator = np.random.default_rng(1)
    names = np.array(list(CLOUD_CENTRES)).repeat(500)
    centres = np.array(list(CLOUD_CENTRES.values())).repeat(500, axis=0)
    points = centres + generator.standard_normal((1000, 2))
    return _table("two_clouds", {"x": points[:, 0], "y": points[:, 1], "cloud": names})


def heteroscedastic_truth(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of y given x in the set `heteroscedastic`: sin 2x + x/2, 0.1 + 0.15·x."""
    return np.sin(2 * x) + 0.5 * x, 0.1 + 0.15 * x


@BUILTIN.register("heteroscedastic")
def heteroscedastic() -> Table:
    """4000 points with x uniform on [0, 4] and Gaussian noise that grows with x."""
    generator = np.random.default_rng(2)
    x = generator.uniform(0, 4, 4000)
    mean, std = heteroscedastic_truth(x)
    return _table("heteroscedastic", {"x": x, "y": mean + std * generator.standard_normal(len(x))})


WAVE_NOISE = 0.2
"""Standard deviation of the noise in `wave`."""


def wave_truth(x: np.ndarray) -> np.ndarray:
    """Mean of y given x in the set `wave`: sin 2πx."""
    return np.sin(2 * np.pi * x)


@BUILTIN.register("wave")
def wave() -> Table:
    """200 points of a sine wave on [0, 1] with noise of standard deviation 0.2, for polynomials."""
    generator = np.random.default_rng(3)
    x = generator.uniform(0, 1, 200)
    return _table("wave", {"x": x, "y": wave_truth(x) + WAVE_NOISE * generator.standard_normal(len(x))})
