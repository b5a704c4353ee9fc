"""Many perceptrons at once, each trained on its own bootstrap of the rows, as one estimator.

N rows, D features, O outputs, K classes, M members.
"""

from __future__ import annotations

import copy
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import ClassifierTags, RegressorTags
from sklearn.utils.metaestimators import available_if
from torch import Tensor

from quire.errors import unknown_name
from quire.estimators.base import (
    Array,
    in_form_of,
    labels_in_form_of,
    read_features,
    read_labels,
    read_targets,
    to_numpy,
)
from quire.estimators.network import (
    PREDICT_ROWS,
    RandomState,
    Scaling,
    Sizes,
    activation_name,
    check_parameters,
    draw_seed,
    hidden_widths,
    hold_out,
    is_number,
    resolve_device,
    train_network,
)
from quire.models.ensemble import EnsembleConfig, MLPEnsemble
from quire.models.mlp import MLP
from quire.nn.heads import Categorical, Gaussian, Head
from quire.options import check
from quire.tasks.bagging import COUNTS, Bagging, bootstrap_counts

KINDS = ("classification", "regression")


def _classifies(estimator: BaggingEnsemble) -> bool:
    return estimator.task == "classification"


class BaggingEnsemble(BaseEstimator):
    """The average of `n_estimators` perceptrons that are trained together in one computation.

    task: "classification" or "regression". It is a parameter, and not guessed from y, because
        scikit-learn's tools ask an estimator what it is before they fit it.
    bootstrap: give each member its own draw of N rows with replacement; without it the members differ
        by their initial weights alone, and there is no out-of-bag score.

    The other parameters are those of `MLPClassifier`. Class probabilities are averaged over members;
    so are predicted numbers. Intervals come from the spread of the members and the noise that the
    out-of-bag errors leave unexplained.

    Attributes: `model_` (a plain nn.Module, standardised features (N, D) → (M, N, outputs)),
    `members_` (each as a plain nn.Module), `oob_score_` (accuracy or R² on rows that a member has not
    seen), `scaling_`, `loss_curve_`, `validation_losses_`, `best_loss_`, `n_iter_`, `n_features_in_`,
    `feature_names_in_`, and `classes_` or `target_scaling_`.
    """

    classes_: Array
    oob_score_: float
    scaling_: Scaling
    target_scaling_: Scaling
    loss_curve_: list[float]
    validation_losses_: list[float]
    best_loss_: float
    n_iter_: int

    def __init__(
        self,
        task: Literal["classification", "regression"] = "classification",
        *,
        n_estimators: int = 50,
        bootstrap: bool = True,
        hidden_layer_sizes: Sizes = (100,),
        activation: str = "relu",
        solver: Literal["adam", "sgd"] = "adam",
        alpha: float = 0.0,
        batch_size: int = 64,
        learning_rate_init: float = 1e-3,
        momentum: float = 0.9,
        max_iter: int = 200,
        shuffle: bool = True,
        random_state: RandomState = None,
        tol: float = 1e-4,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        standardize: bool = True,
        device: str | torch.device = "auto",
    ) -> None:
        self.task = task
        self.n_estimators = n_estimators
        self.bootstrap = bootstrap
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.solver = solver
        self.alpha = alpha
        self.batch_size = batch_size
        self.learning_rate_init = learning_rate_init
        self.momentum = momentum
        self.max_iter = max_iter
        self.shuffle = shuffle
        self.random_state = random_state
        self.tol = tol
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.standardize = standardize
        self.device = device

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        if _classifies(self):
            tags.estimator_type, tags.classifier_tags = "classifier", ClassifierTags()
        else:
            tags.estimator_type, tags.regressor_tags = "regressor", RegressorTags()
            tags.target_tags.multi_output = True
        return tags

    # -- Training ------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any) -> Self:
        if self.task not in KINDS:
            raise unknown_name("task", str(self.task), KINDS)
        check_parameters(self)
        good = is_number(self.n_estimators, 1, np.inf, whole=True)
        check(good, "n_estimators", self.n_estimators, "an integer >= 1")
        head: Head
        if _classifies(self):
            self.classes_, target = read_labels(self, X, y)
            inputs = read_features(self, X, reset=True)
            head, stratify = Categorical(len(self.classes_)), target
        else:
            values = read_targets(self, X, y)
            inputs = read_features(self, X, reset=True)
            columns = values.reshape(len(values), -1)
            self._shape = values.shape[1:]
            self.target_scaling_ = Scaling.of(columns, active=bool(self.standardize))
            target, stratify = self.target_scaling_.apply(columns, torch.float32), None
            head = Gaussian(columns.shape[1])
        self._train(inputs, target, head, stratify)
        return self

    def _train(self, inputs: Tensor, target: Tensor, head: Head, stratify: Tensor | None) -> None:
        config = EnsembleConfig(
            members=int(self.n_estimators),
            in_features=inputs.shape[1],
            out_features=head.outputs_needed,
            hidden=hidden_widths(self.hidden_layer_sizes),
            activation=activation_name(self.activation),
        )
        device, seed = resolve_device(self.device, inputs), draw_seed(self.random_state)
        self.scaling_ = Scaling.of(inputs, active=bool(self.standardize))
        features = self.scaling_.apply(inputs, torch.float32).to(device)
        data, validation = hold_out(self, {"inputs": features, "target": target.to(device)}, seed, stratify)
        if self.bootstrap:
            data.fields[COUNTS] = bootstrap_counts(len(data), config.members, seed).to(device)
        task, training = train_network(
            self, lambda: Bagging(MLPEnsemble(config), head), data, validation,
            seed=seed, device=device, members=config.members,
        )  # fmt: skip
        assert isinstance(task, Bagging)
        self._bagging = task
        self.oob_score_ = task.out_of_bag.get("accuracy" if _classifies(self) else "r2", float("nan"))
        training.keep(self)

    @property
    def model_(self) -> MLPEnsemble:
        return self._bagging.model

    @property
    def members_(self) -> list[MLP]:
        return [self.model_.member(index) for index in range(self.model_.config.members)]

    # -- Predictions ---------------------------------------------------------------------------

    def _columns(self, inputs: Tensor, mode: str = "mode", level: float = 0.9) -> dict[str, Tensor]:
        features = self.scaling_.apply(inputs, inputs.dtype)
        task = copy.deepcopy(self._bagging).to(features)
        rows = max(1, PREDICT_ROWS // self.model_.config.members)
        parts = [task.predict(part, mode, level=level) for part in features.split(rows)]
        columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if _classifies(self):
            return columns
        return {name: value.reshape(len(inputs), *self._shape) for name, value in columns.items()}

    def predict(self, X: Any, mode: str = "mode", level: float = 0.9) -> Any:
        """What the average of the members says of each row; the modes are those of `MLPClassifier`
        and `MLPRegressor`."""
        inputs = read_features(self, X)
        columns = self._columns(inputs, mode, level)
        if _classifies(self):
            if mode in ("mean", "interval"):
                return in_form_of(X, columns["probabilities" if mode == "mean" else "set"])
            return labels_in_form_of(X, self.classes_, columns["class"])
        if mode == "interval":
            low, high = (self.target_scaling_.undo(columns[name]) for name in ("low", "high"))
            return in_form_of(X, low), in_form_of(X, high)
        return in_form_of(X, self.target_scaling_.undo(columns["value"]))

    def predict_std(self, X: Any) -> Any:
        """The standard deviation of the prediction over the members, or of class probabilities (N, K)."""
        inputs = read_features(self, X)
        spread = self._columns(inputs)["spread"]
        if not _classifies(self):
            spread = spread * self.target_scaling_.factor(spread)
        return in_form_of(X, spread)

    @available_if(_classifies)
    def predict_proba(self, X: Any) -> Any:
        """p(class | row), the mean over members, (N, K), columns in the order of `classes_`."""
        return in_form_of(X, self._columns(read_features(self, X))["probabilities"])

    @available_if(_classifies)
    def predict_log_proba(self, X: Any) -> Any:
        """ln of `predict_proba`."""
        return in_form_of(X, self._columns(read_features(self, X))["probabilities"].log())

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy, or R² as the mean over outputs."""
        judge = accuracy_score if _classifies(self) else r2_score
        return judge(to_numpy(y), to_numpy(self.predict(X)), sample_weight=to_numpy(sample_weight))
