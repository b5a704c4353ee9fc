"""Recipes of dense networks on tables: linear, logistic, softmax, mlp, heteroscedastic.

One idea with other heads: the table decides the inputs, the target decides the head.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from quire.options import Noise, Optim, Train, check_range
from quire.recipes.base import Expectation, TableRunOptions, recipe

if TYPE_CHECKING:
    from torch import Tensor

    from quire.recipes.plan import Plan


@dataclass(frozen=True)
class Dense:
    """The network between inputs and head."""

    hidden: tuple[int, ...] = (128,)
    """Widths of the hidden layers."""
    activation: Literal[
        "relu", "leaky_relu", "relu6", "tanh", "sigmoid", "softplus", "arctan", "log_sigmoid", "linear"
    ] = "relu"
    dropout: float = 0.0
    norm: Literal["none", "batch", "layer"] = "none"

    def __post_init__(self) -> None:
        check_range(self, "--model.", dropout="[0, 1)")


@dataclass(frozen=True, kw_only=True)
class ConvexOptions(TableRunOptions):
    """Models whose loss is convex: full batches, and the last weights are the optimum."""

    step: Literal["spectrum", "given"] = "spectrum"
    """spectrum: the largest stable step size, from the inputs' covariance. given: --optim.lr."""
    optim: Optim = field(default_factory=lambda: Optim("sgd", lr=0.1, momentum=0.9))
    train: Train = field(default_factory=lambda: Train(batch_size=0, restore="last", validate_every=250))


@dataclass(frozen=True, kw_only=True)
class LogisticOptions(ConvexOptions):
    C: float = 1.0
    """Inverse strength of the L2 penalty, as in scikit-learn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--", C="> 0")


@dataclass(frozen=True, kw_only=True)
class SoftmaxOptions(TableRunOptions):
    optim: Optim = field(default_factory=lambda: Optim(lr=3e-3))


@dataclass(frozen=True, kw_only=True)
class MLPOptions(TableRunOptions):
    model: Dense = field(default_factory=lambda: Dense(hidden=(256,), dropout=0.3))
    train: Train = field(default_factory=lambda: Train(noise=Noise(inputs=0.2)))


@dataclass(frozen=True, kw_only=True)
class HeteroscedasticOptions(TableRunOptions):
    model: Dense = field(default_factory=lambda: Dense(hidden=(64, 64), activation="tanh"))
    optim: Optim = field(default_factory=lambda: Optim(lr=3e-3))


@recipe(
    "linear",
    summary="Linear regression by gradient descent; reaches the least-squares solution",
    expected=Expectation("gap_to_least_squares", at_most=1e-4),
    targets="values",
    options=ConvexOptions,
)
def linear(options: ConvexOptions) -> Plan:
    import torch

    from quire.models.mlp import linear as linear_model
    from quire.recipes.plan import Plan, largest_eigenvalue, make_head, open_data, with_step_size
    from quire.tasks.supervised import Supervised

    data = open_data(options, "diabetes", kind="regression")
    if options.step == "spectrum":
        options = with_step_size(options, 1 / largest_eigenvalue(data.train.inputs))
    torch.manual_seed(options.seed)
    task = Supervised(
        linear_model(data.train.inputs.shape[1], 1), make_head(data.preparation.target, data.train.target)
    )

    def gap() -> dict[str, float]:
        """Root mean square difference of the predictions from least squares', in target deviations."""
        test = data.test or data.train
        best = _least_squares(data.train.inputs, data.train.target, test.inputs)
        found = task.predict(test.inputs.to(task.device))["value"].cpu().double()
        spread = data.train.target.double().std()
        return {"gap_to_least_squares": float((found - best).square().mean().sqrt() / spread)}

    return Plan(task, data, options, epochs=4000, extra_measures=gap)


def _least_squares(x: Tensor, y: Tensor, at: Tensor) -> Tensor:
    import torch

    def design(inputs: Tensor) -> Tensor:
        return torch.cat([inputs, inputs.new_ones(len(inputs), 1)], 1).double()

    # The pseudo-inverse also answers when columns depend on each other, as one-hot columns do.
    return design(at) @ (torch.linalg.pinv(design(x)) @ y.double())


@recipe(
    "logistic",
    summary="Logistic regression by gradient descent; reaches the optimum of the penalised likelihood",
    expected=Expectation("gap_to_optimum", at_most=1e-4),
    targets="two classes",
    options=LogisticOptions,
)
def logistic(options: LogisticOptions) -> Plan:
    import torch

    from quire.estimators import LogisticRegression
    from quire.models.mlp import linear as linear_model
    from quire.nn.heads import Bernoulli
    from quire.recipes.plan import Plan, largest_eigenvalue, need_classes, open_data
    from quire.tasks.supervised import Supervised

    data = open_data(options, "two_clouds", kind="classification")
    need_classes(data, "logistic", exactly=2)
    penalty = 1 / (options.C * len(data.train))
    optim = replace(options.optim, weight_decay=penalty, decay="l2", decay_biases=False)
    if options.step == "spectrum":  # the Hessian of the logistic loss is at most a quarter of XᵀX/n
        optim = replace(optim, lr=1 / (largest_eigenvalue(data.train.inputs) / 4 + penalty))
    torch.manual_seed(options.seed)
    task = Supervised(linear_model(data.train.inputs.shape[1], 1), Bernoulli(1))

    def gap() -> dict[str, float]:
        """Root mean square difference of the probabilities from those of the optimum."""
        test = data.test or data.train
        newton = LogisticRegression(C=options.C).fit(data.train.inputs.numpy(), data.train.target.numpy())
        best = torch.from_numpy(newton.predict_proba(test.inputs.numpy())[:, 1])
        found = task.predict(test.inputs.to(task.device))["probabilities"].cpu().double()
        return {"gap_to_optimum": float((found - best).square().mean().sqrt())}

    return Plan(task, data, replace(options, optim=optim), epochs=2000, extra_measures=gap)


@recipe(
    "softmax",
    summary="Softmax regression: one linear layer, many classes",
    expected=Expectation("accuracy", at_least=0.94),
    targets="classes",
    options=SoftmaxOptions,
)
def softmax(options: SoftmaxOptions) -> Plan:
    return dense_plan(options, Dense(hidden=()), builtin="digits", kind="classification", epochs=40)


@recipe(
    "mlp",
    summary="Dense network for classes or values, as the target is",
    expected=Expectation("accuracy", at_least=0.97),
    targets="any",
    options=MLPOptions,
)
def mlp(options: MLPOptions) -> Plan:
    return dense_plan(options, options.model, builtin="digits", kind="auto", epochs=60)


@recipe(
    "heteroscedastic",
    summary="Regression with noise that depends on the input: calibrated 90% intervals",
    expected=Expectation("coverage", at_least=0.87, at_most=0.93),
    targets="values",
    options=HeteroscedasticOptions,
)
def heteroscedastic(options: HeteroscedasticOptions) -> Plan:
    return dense_plan(
        options, options.model, builtin="heteroscedastic", kind="regression", epochs=60, heteroscedastic=True
    )


def dense_plan(
    options: TableRunOptions,
    model: Dense,
    *,
    builtin: str,
    kind: Literal["classification", "regression", "auto"],
    epochs: float,
    heteroscedastic: bool = False,
) -> Plan:
    import torch

    from quire.models.mlp import MLP, MLPConfig
    from quire.recipes.plan import Plan, make_head, open_data
    from quire.tasks.supervised import Supervised

    data = open_data(options, builtin, kind=kind)
    head = make_head(data.preparation.target, data.train.target, heteroscedastic=heteroscedastic)
    torch.manual_seed(options.seed)
    config = MLPConfig(
        data.train.inputs.shape[1], head.outputs_needed, hidden=model.hidden, activation=model.activation,
        dropout=model.dropout, norm=model.norm,
    )  # fmt: skip
    return Plan(Supervised(MLP(config), head), data, options, epochs=epochs)
