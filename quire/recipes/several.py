"""Recipes that share what is learned: bagging, multitask, transfer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import InputError
from quire.options import Noise, Optim, Train, check_range
from quire.recipes.base import Expectation, TableRunOptions, recipe
from quire.recipes.dense import Dense

if TYPE_CHECKING:
    from quire.data.load import TableData
    from quire.models.mlp import MLP
    from quire.recipes.plan import Plan


@dataclass(frozen=True)
class Members:
    """The nets of the ensemble."""

    members: int = 50
    hidden: tuple[int, ...] = (64,)
    activation: str = "relu"

    def __post_init__(self) -> None:
        check_range(self, "--model.", members=">= 1")


@dataclass(frozen=True, kw_only=True)
class BaggingOptions(TableRunOptions):
    model: Members = field(default_factory=Members)


@recipe(
    "bagging",
    summary="Many nets at once, each on its own bootstrap; better than one of them",
    expected=Expectation("gain_over_one", at_least=0.005),
    targets="any",
    options=BaggingOptions,
)
def bagging(options: BaggingOptions) -> Plan:
    import torch

    from quire.data.batch import TensorData
    from quire.models.ensemble import EnsembleConfig, MLPEnsemble
    from quire.recipes.plan import Plan, make_head, open_data
    from quire.tasks.bagging import COUNTS, Bagging, bootstrap_counts
    from quire.tasks.supervised import Supervised
    from quire.train.evaluate import evaluate

    data = open_data(options, "digits")
    head = make_head(data.preparation.target, data.train.target)
    torch.manual_seed(options.seed)
    model = options.model
    config = EnsembleConfig(
        model.members, data.train.inputs.shape[1], head.outputs_needed, model.hidden, model.activation
    )
    task = Bagging(MLPEnsemble(config), head)
    counts = bootstrap_counts(len(data.train), model.members, options.seed)
    data = replace(data, train=TensorData({**data.train.fields, COUNTS: counts}))

    def gain() -> dict[str, float]:
        """The ensemble's accuracy (R² for values) less the mean of its members'."""
        test = data.test or data.train
        device = task.device
        name = "accuracy" if data.preparation.target.kind == "classification" else "r2"
        part = TensorData({"inputs": test.inputs, "target": test.target}).to(device)
        alone = [
            evaluate(Supervised(task.model.member(m), task.head), part)[name] for m in range(model.members)
        ]
        return {"gain_over_one": evaluate(task, part)[name] - sum(alone) / len(alone)}

    return Plan(task, data, options, epochs=20, extra_measures=gain)


@dataclass(frozen=True, kw_only=True)
class MultitaskOptions(TableRunOptions):
    model: Dense = field(default_factory=lambda: Dense(hidden=(64,), dropout=0.1))
    optim: Optim = field(default_factory=lambda: Optim(lr=3e-3))
    train: Train = field(default_factory=lambda: Train(batch_size=32))


@recipe(
    "multitask",
    summary="One network, several targets (--target a,b): classes and values side by side",
    expected=Expectation("species.accuracy", at_least=0.9),
    targets="several",
    options=MultitaskOptions,
)
def multitask(options: MultitaskOptions) -> Plan:
    import torch

    from quire.data.load import load_table
    from quire.models.mlp import MLP, MLPConfig
    from quire.recipes.plan import Plan, make_head, several_targets
    from quire.tasks.supervised import Supervised

    source: Path | str
    if options.data is None:
        source, targets = "iris", ["species", "petal width (cm)"]
    else:
        source, targets = options.data, [t.strip() for t in (options.target or "").split(",") if t.strip()]
        if len(targets) < 2:
            raise InputError(
                f"--target {options.target or '(none)'}",
                expected="two or more columns, separated by commas",
                fix="write --target price,colour, or use 'quire train mlp' for one target",
            )
    loaded = load_table(source, options.table, targets=targets, seed=options.seed)
    data = several_targets(loaded)
    heads = {
        target.name: make_head(target, data.train.fields[f"target.{target.name}"])
        for target in data.preparation.targets
    }
    torch.manual_seed(options.seed)
    model = options.model
    config = MLPConfig(
        data.train.inputs.shape[1], sum(head.outputs_needed for head in heads.values()), hidden=model.hidden,
        activation=model.activation, dropout=model.dropout, norm=model.norm,
    )  # fmt: skip
    return Plan(Supervised(MLP(config), heads), data, options, epochs=120)


@dataclass(frozen=True, kw_only=True)
class TransferOptions(TableRunOptions):
    source: Path | None = None
    """A run of the recipe mlp whose body is taken over; its preparation is too."""
    model: Dense = field(default_factory=lambda: Dense(hidden=(128, 64), dropout=0.2))
    labels: int = 20
    """Training rows of the new problem, on built-in data."""
    freeze: bool = True
    """Keep the body as it is; otherwise it learns with body_step times the step size."""
    body_step: float = 0.1
    optim: Optim = field(default_factory=lambda: Optim(lr=3e-3))
    train: Train = field(default_factory=lambda: Train(batch_size=16, noise=Noise(inputs=0.2)))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--", labels=">= 1", body_step="> 0")
        if self.data is not None and self.source is None:
            raise InputError(
                "--data without --source",
                expected="a run whose body is taken over",
                fix="train one with 'quire train mlp --data …' and give its folder with --source",
            )


@recipe(
    "transfer",
    summary="A body trained on one problem (ten digits) learns another (odd or even) from few labels",
    expected=Expectation("gain_over_scratch", at_least=0.05),
    targets="any",
    options=TransferOptions,
)
def transfer(options: TransferOptions) -> Plan:
    import torch

    from quire.models.mlp import MLP
    from quire.recipes.plan import Plan, make_head
    from quire.tasks.supervised import Supervised
    from quire.train import fit
    from quire.train.evaluate import evaluate

    data, body = _from_run(options) if options.source is not None else _from_digits(options)
    head = make_head(data.preparation.target, data.train.target)

    def network() -> MLP:
        torch.manual_seed(options.seed)
        return MLP(replace(body.config, out_features=head.outputs_needed))

    model = network()
    model.body.load_state_dict(body.body.state_dict())
    if options.freeze:
        model.body.requires_grad_(False)
    factors = {} if options.freeze else {"model.body.": options.body_step}
    task = Supervised(model, head, step_factors=factors)
    epochs = 100

    def gain() -> dict[str, float]:
        """The same network and rows without the transferred body."""
        scratch = Supervised(network(), make_head(data.preparation.target, data.train.target))
        fit(
            scratch, data.train, data.validation, epochs=None if options.steps else options.epochs or epochs,
            steps=options.steps, optim=options.optim, train=options.train, seed=options.seed,
            train_measures=False,
        )  # fmt: skip
        test = data.test or data.train
        name = "accuracy" if data.preparation.target.kind == "classification" else "r2"
        with_body = evaluate(task, test.to(task.device))[name]
        return {"gain_over_scratch": with_body - evaluate(scratch, test)[name]}

    return Plan(task, data, options, epochs=epochs, extra_measures=gain)


def _from_run(options: TransferOptions) -> tuple[TableData, MLP]:
    """The user's file prepared as the source run prepared its own, and the source's network."""
    from quire.data.load import load_table
    from quire.data.preparation import Preparation
    from quire.models.mlp import MLP
    from quire.tasks import Supervised, load_trained
    from quire.train.folder import read_config

    assert options.source is not None
    assert options.data is not None
    config = read_config(options.source)
    trained = load_trained(options.source)
    task, preparation = trained.task, trained.preparation
    if trained.adapters is not None:
        trained.adapters.merge(dequantise=True)
    network = task.model if isinstance(task, Supervised) else None
    if not isinstance(network, MLP) or not isinstance(preparation, Preparation):
        raise InputError(
            f"--source {options.source} is a run of '{config['recipe']}'",
            expected="a run of a dense network",
            fix="train one with 'quire train mlp'",
        )
    data = load_table(
        options.data, options.table, targets=options.target, seed=options.seed, like=preparation
    )
    return data, network


def _from_digits(options: TransferOptions) -> tuple[TableData, MLP]:
    """Odd or even with few labels, on one half of the digits, and a network that learned to tell all
    ten apart on the other half."""
    import numpy as np
    import torch

    from quire.data.builtin import builtin
    from quire.data.load import load_table
    from quire.data.table import table_from_arrays
    from quire.models.mlp import MLP, MLPConfig
    from quire.nn.heads import Categorical
    from quire.tasks.supervised import Supervised
    from quire.train import fit

    digits = builtin("digits")
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(options.seed)).numpy()
    half = len(order) // 2
    known = load_table(digits.take(order[:half]), options.table, seed=options.seed)
    torch.manual_seed(options.seed)
    model = options.model
    config = MLPConfig(
        known.train.inputs.shape[1], 10, hidden=model.hidden, activation=model.activation,
        dropout=model.dropout, norm=model.norm,
    )  # fmt: skip
    network = MLP(config)
    fit(Supervised(network, Categorical(10)), known.train, known.validation, epochs=40, seed=options.seed)

    other = digits.take(order[half:])
    pixels = np.stack([other.column(name).to_numpy() for name in other.names[:-1]], 1)
    parity = np.where(other.column("digit").to_numpy() % 2, "odd", "even")
    table = table_from_arrays(pixels, other.names[:-1], target=parity, source="odd or even digits (built in)")
    data = load_table(table, options.table, seed=options.seed, like=known.preparation)
    few = torch.arange(min(options.labels, len(data.train)))
    rows = {**data.rows, "train": data.rows["train"][few]}
    return replace(data, train=data.train.subset(few), rows=rows), network
