"""Autoencoders as a scikit-learn transformer: rows to codes and back.

N rows, D features, K numbers of a code.

    kind            "plain"; "linear" (no hidden layers, spans the principal directions); "sparse" (L1 on the
                    code); "denoising" (learns from damaged rows); "contractive" (penalises the code's slope)
    image_shape     (C, H, W) of images that stand flattened in the rows: the coders are then convolutional
    code_activation "auto" is "relu" for sparse codes, "sigmoid" for contractive ones and "identity" otherwise
    tied            whether the decoder takes the encoder's weights, transposed; "auto" ties where the code is
                    penalised, since small codes and a large decoder would otherwise evade it
    penalty         λ of the sparse and the contractive kind, beside the squared error of a whole row
    noise, amount   of the denoising kind: "gaussian", "masking" or "salt_and_pepper"; its deviation, or the
                    share of values that it replaces

    attributes      model_ (a plain nn.Module that takes standardised features), scaling_, mean_ (of the
                    training rows), n_components_, loss_curve_, validation_losses_ (with early_stopping),
                    best_loss_, n_iter_ (epochs), n_features_in_, feature_names_in_

The other parameters are those of MLPRegressor.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_array, check_is_fitted
from torch import Tensor

from quire.errors import InputError, unknown_name
from quire.estimators.base import Array, in_form_of, read_features, to_numpy, to_tensor
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
from quire.functional.autoencode import CORRUPTIONS, Corruption
from quire.models.autoencoder import Autoencoder as AutoencoderModel
from quire.models.autoencoder import AutoencoderConfig
from quire.options import check
from quire.tasks.reconstruction import Reconstruction, ReconstructionRules

KINDS = ("plain", "linear", "sparse", "denoising", "contractive")
CODE_ACTIVATIONS = {"sparse": "relu", "contractive": "sigmoid"}


class Autoencoder(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """A network that learns codes from which rows can be given back."""

    model_: AutoencoderModel
    scaling_: Scaling
    mean_: Array
    n_components_: int
    loss_curve_: list[float]
    validation_losses_: list[float]
    best_loss_: float
    n_iter_: int

    def __init__(
        self,
        n_components: int = 2,
        kind: Literal["plain", "linear", "sparse", "denoising", "contractive"] = "plain",
        *,
        hidden_layer_sizes: Sizes = (100,),
        activation: str = "relu",
        image_shape: tuple[int, int, int] | None = None,
        code_activation: str = "auto",
        tied: bool | Literal["auto"] = "auto",
        penalty: float = 0.1,
        noise: Corruption = "gaussian",
        amount: float = 0.3,
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
        self.n_components = n_components
        self.kind = kind
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.image_shape = image_shape
        self.code_activation = code_activation
        self.tied = tied
        self.penalty = penalty
        self.noise = noise
        self.amount = amount
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
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    # -- Learning ------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None) -> Self:
        inputs = read_features(self, X, reset=True)
        check_parameters(self)
        if self.early_stopping and len(inputs) < 2:
            raise InputError(
                "early_stopping with 1 sample",
                expected="at least 2 samples, one of them to judge by",
                fix="set early_stopping=False",
            )
        config, rules = self._config(inputs.shape[1]), self._rules()
        device = resolve_device(self.device, inputs)
        scaling = Scaling.of(inputs, active=bool(self.standardize))
        seed = draw_seed(self.random_state)
        rows = scaling.apply(inputs, torch.float32).reshape(-1, *config.shape).to(device)
        data, validation = hold_out(self, {"inputs": rows}, seed)
        task, training = train_network(
            self, lambda: Reconstruction(AutoencoderModel(config), rules), data, validation,
            seed=seed, device=device,
        )  # fmt: skip
        assert isinstance(task, Reconstruction)
        self.model_, self.scaling_, self.n_components_ = task.model, scaling, config.code
        self.mean_ = to_numpy(inputs.double().mean(0))
        training.keep(self)
        return self

    def _config(self, features: int) -> AutoencoderConfig:
        if self.kind not in KINDS:
            raise unknown_name("kind of autoencoder", str(self.kind), KINDS)
        code = self.n_components
        check(is_number(code, 1, np.inf, whole=True), "n_components", code, "an integer >= 1")
        check(self.tied in (True, False, "auto"), "tied", self.tied, "True, False or 'auto'")
        penalised, linear = self.kind in CODE_ACTIVATIONS, self.kind == "linear"
        named = self.code_activation
        if linear:
            check(
                named in ("auto", "identity", "linear"),
                "code_activation",
                named,
                "'auto' where all is linear",
            )
        auto = CODE_ACTIVATIONS.get(self.kind, "linear")
        return AutoencoderConfig(
            shape=self._shape(features),
            kind="dense" if self.image_shape is None else "convolutional",
            hidden=() if linear else hidden_widths(self.hidden_layer_sizes),
            activation="linear" if linear else activation_name(self.activation),
            code=int(code),
            code_activation=auto if named == "auto" else activation_name(named),
            tied=penalised if self.tied == "auto" else bool(self.tied),
        )

    def _shape(self, features: int) -> tuple[int, ...]:
        shape = self.image_shape
        if shape is None:
            return (features,)
        whole = len(tuple(shape)) == 3 and all(is_number(size, 1, np.inf, whole=True) for size in shape)
        if not whole or math.prod(shape) != features or self.kind == "linear":
            raise InputError(
                f"image_shape={shape!r} for kind={self.kind!r} and rows of {features} features",
                expected="(C, H, W) with C·H·W features, and a kind that is not linear",
                fix="leave image_shape out, or give the shape of one image",
            )
        return tuple(int(size) for size in shape)

    def _rules(self) -> ReconstructionRules:
        check(is_number(self.penalty, 0, np.inf), "penalty", self.penalty, "a number >= 0")
        check(is_number(self.amount, 0, np.inf), "amount", self.amount, "a number >= 0")
        if self.noise not in CORRUPTIONS:
            raise unknown_name("kind of noise", str(self.noise), CORRUPTIONS)
        penalty = float(self.penalty)
        return ReconstructionRules(
            sparsity=penalty if self.kind == "sparse" else 0.0,
            contraction=penalty if self.kind == "contractive" else 0.0,
            noise=self.noise if self.kind == "denoising" else "none",
            amount=float(self.amount),
        )

    # -- Codes and back ------------------------------------------------------------------------

    @property
    def _n_features_out(self) -> int:
        return self.n_components_

    def transform(self, X: Any) -> Any:
        """The code of each row, (N, K)."""
        return in_form_of(X, self._encode(read_features(self, X)))

    def inverse_transform(self, X: Any) -> Any:
        """Codes (N, K) back to rows (N, D) in the units of the training rows."""
        check_is_fitted(self)
        codes = X if isinstance(X, Tensor) else to_tensor(check_array(X, dtype=(np.float64, np.float32)))
        codes = codes.detach()
        codes = codes if codes.dtype in (torch.float32, torch.float64) else codes.double()
        return in_form_of(X, self.scaling_.undo(self._decode(codes)))

    def score(self, X: Any, y: Any = None) -> float:
        """1 − Σ‖x − x̂‖² / Σ‖x − x̄‖², with x̄ the mean of the training rows and features as they are
        standardised: the share of the rows' spread that their codes keep."""
        inputs = read_features(self, X)
        values = self.scaling_.apply(inputs, torch.float64)
        error = float((self._decode(self._encode(inputs)).double() - values).square().sum())
        centre = self.scaling_.apply(to_tensor(self.mean_[None]).to(values), torch.float64)
        spread = float((values - centre).square().sum())
        if spread == 0:
            return float(error == 0)
        return 1 - error / spread

    def _encode(self, inputs: Tensor) -> Tensor:
        values = self.scaling_.apply(inputs, inputs.dtype).reshape(-1, *self.model_.config.shape)
        return self._apply("encode", values)

    def _decode(self, codes: Tensor) -> Tensor:
        return self._apply("decode", codes).flatten(1)

    @torch.no_grad()
    def _apply(self, name: str, values: Tensor) -> Tensor:
        """Computed in the type and on the device of `values`, a bounded number of rows at a time."""
        model = copy.deepcopy(self.model_).to(values)
        return torch.cat([getattr(model, name)(part) for part in values.split(PREDICT_ROWS)])
