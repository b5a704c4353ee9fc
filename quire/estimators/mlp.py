"""Multi-layer perceptrons as scikit-learn estimators.

N rows, D features, O outputs, K classes.

    parameters           as in scikit-learn's MLPClassifier and MLPRegressor, and beside them
    standardize          features (and the targets of a regression) are scaled to mean 0 and deviation 1
    dropout              probability with which a hidden unit is dropped while training
    device               "auto" (where X lies if it is a tensor, otherwise the CPU), "cpu", "cuda", …

    attributes           model_ (a plain nn.Module that takes standardised features), scaling_ (mean
                         and scale of the features), coefs_, intercepts_, loss_curve_ (training loss
                         of each epoch), validation_losses_ (with early_stopping), best_loss_, n_iter_
                         (epochs), n_features_in_, feature_names_in_

There is no sample_weight: mini-batches of weighted rows are not equivalent to repeated rows.
"""

from __future__ import annotations

import copy
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from quire.errors import unknown_name
from quire.estimators.base import (
    Array,
    Classifier,
    Regressor,
    in_form_of,
    labels_in_form_of,
    read_features,
    read_labels,
    read_targets,
    to_numpy,
)
from quire.estimators.network import (
    RandomState,
    Scaling,
    Sizes,
    activation_name,
    check_parameters,
    draw_seed,
    hidden_widths,
    hold_out,
    raw_outputs,
    resolve_device,
    train_network,
)
from quire.models.mlp import MLP, MLPConfig
from quire.nn.heads import Categorical, Gaussian, Head, Heteroscedastic
from quire.tasks.supervised import Supervised


class _Network:
    """What both estimators learn: a model, the head that reads its outputs, the record of training."""

    model_: MLP
    scaling_: Scaling
    loss_curve_: list[float]
    validation_losses_: list[float]
    best_loss_: float
    n_iter_: int

    def _train(self, inputs: Tensor, target: Tensor, head: Head, stratify: Tensor | None = None) -> None:
        settings: Any = self
        check_parameters(settings)
        config = MLPConfig(
            in_features=inputs.shape[1],
            out_features=head.outputs_needed,
            hidden=hidden_widths(settings.hidden_layer_sizes),
            activation=activation_name(settings.activation),
            dropout=settings.dropout,
        )
        device = resolve_device(settings.device, inputs)
        scaling = Scaling.of(inputs, active=bool(settings.standardize))
        seed = draw_seed(settings.random_state)
        fields = {"inputs": scaling.apply(inputs, torch.float32).to(device), "target": target.to(device)}
        data, validation = hold_out(settings, fields, seed, stratify)
        task, training = train_network(
            settings, lambda: Supervised(MLP(config), head), data, validation, seed=seed, device=device
        )
        assert isinstance(task, Supervised)
        assert isinstance(task.model, MLP)
        self.model_, self._head, self.scaling_ = task.model, task.head, scaling
        training.keep(self)

    def _raw(self, inputs: Tensor) -> Tensor:
        return raw_outputs(self.model_, self.scaling_.apply(inputs, inputs.dtype))

    def _distribution(self, inputs: Tensor, mode: str, level: float) -> dict[str, Tensor]:
        return copy.deepcopy(self._head).to(inputs).predict(self._raw(inputs), mode, level=level)

    @property
    def coefs_(self) -> list[Array]:
        """The weights of each layer, (inputs, outputs), for standardised features."""
        return [to_numpy(layer.weight.mT) for layer in self.model_.modules() if isinstance(layer, nn.Linear)]

    @property
    def intercepts_(self) -> list[Array]:
        """The biases of each layer."""
        return [to_numpy(layer.bias) for layer in self.model_.modules() if isinstance(layer, nn.Linear)]


class MLPClassifier(_Network, Classifier):
    """A perceptron with softmax outputs that minimises the cross-entropy. Learns `classes_`, too."""

    def __init__(
        self,
        hidden_layer_sizes: Sizes = (100,),
        activation: str = "relu",
        *,
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
        dropout: float = 0.0,
        device: str | torch.device = "auto",
    ) -> None:
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
        self.dropout = dropout
        self.device = device

    def fit(self, X: Any, y: Any) -> Self:
        self.classes_, codes = read_labels(self, X, y)
        inputs = read_features(self, X, reset=True)
        self._train(inputs, codes, Categorical(len(self.classes_)), stratify=codes)
        return self

    def _log_probabilities(self, X: Tensor) -> Tensor:
        return self._raw(X).log_softmax(1)

    def predict(self, X: Any, mode: str = "mode", level: float = 0.9) -> Any:
        """What p(class | row) says of each row.

        mode: "mode" gives the most probable class, "mean" the probabilities (N, K), "sample" a class
            drawn by its probability (from torch's random numbers), "interval" the smallest set of
            classes that holds the probability `level`, as true and false (N, K).
        """
        answer = self._distribution(read_features(self, X), mode, level)
        if mode == "mean":
            return in_form_of(X, answer["probabilities"])
        if mode == "interval":
            return in_form_of(X, answer["set"])
        return labels_in_form_of(X, self.classes_, answer["class"])


class MLPRegressor(_Network, Regressor):
    """A perceptron with Gaussian outputs: p(y | x) = N(μ(x), σ²), or N(μ(x), σ(x)²).

    noise: "homoscedastic" minimises the squared error and takes σ² from the residuals, those of the
        held-out rows with early_stopping (and at least 30 of them), otherwise those of the training,
        which are too small where the net overfits. "heteroscedastic" learns σ(x) with μ(x).
    """

    def __init__(
        self,
        hidden_layer_sizes: Sizes = (100,),
        activation: str = "relu",
        *,
        noise: Literal["homoscedastic", "heteroscedastic"] = "homoscedastic",
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
        dropout: float = 0.0,
        device: str | torch.device = "auto",
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.noise = noise
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
        self.dropout = dropout
        self.device = device

    def fit(self, X: Any, y: Any) -> Self:
        heads: dict[str, type[Head]] = {"homoscedastic": Gaussian, "heteroscedastic": Heteroscedastic}
        if self.noise not in heads:
            raise unknown_name("noise", str(self.noise), heads)
        targets = read_targets(self, X, y)
        inputs = read_features(self, X, reset=True)
        columns = targets.reshape(len(targets), -1)
        self._shape = targets.shape[1:]
        self.target_scaling_ = Scaling.of(columns, active=bool(self.standardize))
        head = heads[self.noise](columns.shape[1])
        self._train(inputs, self.target_scaling_.apply(columns, torch.float32), head)
        return self

    def predict(self, X: Any, mode: str = "mode", level: float = 0.9) -> Any:
        """What p(y | row) says of each row, shaped like the y of `fit`.

        mode: "mode" and "mean" give μ, "sample" a draw (from torch's random numbers), "interval" the
            pair (low, high) of the central interval that holds the probability `level`.
        """
        inputs = read_features(self, X)
        columns = {
            key: self.target_scaling_.undo(value.reshape(len(inputs), *self._shape))
            for key, value in self._distribution(inputs, mode, level).items()
        }
        if mode == "interval":
            return in_form_of(X, columns["low"]), in_form_of(X, columns["high"])
        return in_form_of(X, columns["value"])
