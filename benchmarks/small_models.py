"""Small models side by side with the peers, in one run.

Trains the digits MLP (64-128-10, batches of 64, 20 epochs, Adam with step size 1e-3) with

    estimator      quire.estimators.MLPClassifier: the explicit equations
    trainer        quire.fit on a user's own nn.Module: autograd, as for any model
    raw loop       plain PyTorch with fused Adam and one gather an epoch, as fast as a short loop gets
    scikit-learn   MLPClassifier
    skorch         NeuralNetClassifier with fused Adam
    lightning      Trainer, with logging, checkpoints and progress off

then fifty bagged nets at once against fifty raw loops. Every peer is given the same float32 arrays
and the time of a whole `fit` is taken, set-up included. Repetitions are interleaved, so that a slow
minute of the machine hits all alike; medians are shown, and accuracies on the test rows beside them.

    python benchmarks/small_models.py [--repetitions 5] [--epochs 20] [--threads N] [--json]
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier as PeerMLP
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.machine import describe, machine, version
from quire.data.batch import TensorData
from quire.estimators import BaggingEnsemble, MLPClassifier
from quire.nn.heads import Categorical
from quire.options import Optim, Train
from quire.tasks.supervised import Supervised
from quire.train import fit

HIDDEN, BATCH, LR = 128, 64, 1e-3

BARS = {
    "estimator / scikit-learn": 0.5,
    "estimator / skorch": 0.25,
    "trainer / raw loop": 1.10,
    "bagged nets / as many raw loops": 0.2,
}


class Digits(NamedTuple):
    train: np.ndarray[Any, Any]
    test: np.ndarray[Any, Any]
    train_labels: np.ndarray[Any, Any]
    test_labels: np.ndarray[Any, Any]

    @property
    def steps(self) -> int:
        """Steps in one epoch."""
        return -(-len(self.train) // BATCH)


def digits() -> Digits:
    X, y = load_digits(return_X_y=True)
    train, test, train_labels, test_labels = train_test_split(X, y, test_size=0.2, random_state=0, stratify=y)
    scaler = StandardScaler().fit(train)
    scaled = (scaler.transform(part).astype(np.float32) for part in (train, test))
    return Digits(*scaled, train_labels.astype(np.int64), test_labels.astype(np.int64))


class Net(nn.Module):
    """The net as a user would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, HIDDEN)
        self.output = nn.Linear(HIDDEN, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(torch.relu(self.hidden(x)))


class Outcome(NamedTuple):
    seconds: float
    accuracy: float


Contestant = Callable[[Digits, int, int], Outcome]


def accuracy(model: nn.Module, data: Digits) -> float:
    with torch.no_grad():
        predicted = model(torch.from_numpy(data.test)).argmax(1).numpy()
    return float((predicted == data.test_labels).mean())


def timed_estimator(model: Any, data: Digits) -> Outcome:
    began = time.perf_counter()
    model.fit(data.train, data.train_labels)
    seconds = time.perf_counter() - began
    return Outcome(seconds, float((model.predict(data.test) == data.test_labels).mean()))


# Contestants --------------------------------------------------------------------------------------


def quire_estimator(data: Digits, epochs: int, seed: int) -> Outcome:
    model = MLPClassifier(
        (HIDDEN,), batch_size=BATCH, learning_rate_init=LR, max_iter=epochs, n_iter_no_change=epochs,
        random_state=seed,
    )  # fmt: skip
    return timed_estimator(model, data)


def quire_trainer(data: Digits, epochs: int, seed: int) -> Outcome:
    began = time.perf_counter()
    torch.manual_seed(seed)
    model = Net()
    rows = TensorData({"inputs": torch.from_numpy(data.train), "target": torch.from_numpy(data.train_labels)})
    options = {"optim": Optim(lr=LR), "train": Train(batch_size=BATCH), "seed": seed}
    fit(Supervised(model, Categorical(10)), rows, epochs=epochs, **options)  # type: ignore[arg-type]
    return Outcome(time.perf_counter() - began, accuracy(model, data))


def raw_net(inputs: Tensor, labels: Tensor, epochs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Net()
    optimiser = torch.optim.Adam(model.parameters(), lr=LR, fused=True)
    for _ in range(epochs):
        order = torch.randperm(len(inputs))
        batches = zip(inputs[order].split(BATCH), labels[order].split(BATCH), strict=True)
        for x, y in batches:
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimiser.step()
    return model


def raw_loop(data: Digits, epochs: int, seed: int) -> Outcome:
    began = time.perf_counter()
    model = raw_net(torch.from_numpy(data.train), torch.from_numpy(data.train_labels), epochs, seed)
    return Outcome(time.perf_counter() - began, accuracy(model, data))


def scikit_learn(data: Digits, epochs: int, seed: int) -> Outcome:
    model = PeerMLP(
        (HIDDEN,), alpha=0.0, batch_size=BATCH, learning_rate_init=LR, max_iter=epochs,
        n_iter_no_change=epochs, random_state=seed,
    )  # fmt: skip
    return timed_estimator(model, data)


def skorch(data: Digits, epochs: int, seed: int) -> Outcome:
    from skorch import NeuralNetClassifier

    torch.manual_seed(seed)
    model = NeuralNetClassifier(
        Net, criterion=nn.CrossEntropyLoss, optimizer=torch.optim.Adam, optimizer__fused=True, lr=LR,
        batch_size=BATCH, max_epochs=epochs, iterator_train__shuffle=True, train_split=None, verbose=0,
    )  # fmt: skip
    return timed_estimator(model, data)


def lightning(data: Digits, epochs: int, seed: int) -> Outcome:
    import lightning as L

    # Its loggers are set up by the import.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=LR, fused=True)

    began = time.perf_counter()
    torch.manual_seed(seed)
    rows = torch.utils.data.TensorDataset(torch.from_numpy(data.train), torch.from_numpy(data.train_labels))
    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True)
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, loader)
    return Outcome(time.perf_counter() - began, accuracy(module.net, data))


CONTESTANTS: dict[str, tuple[Contestant, str]] = {
    "estimator": (quire_estimator, "quire"),
    "trainer": (quire_trainer, "quire"),
    "raw loop": (raw_loop, "torch"),
    "scikit-learn": (scikit_learn, "scikit-learn"),
    "skorch": (skorch, "skorch"),
    "lightning": (lightning, "lightning"),
}


def bagged(data: Digits, epochs: int, seed: int, members: int) -> Outcome:
    model = BaggingEnsemble(
        n_estimators=members, hidden_layer_sizes=(HIDDEN,), batch_size=BATCH, learning_rate_init=LR,
        max_iter=epochs, n_iter_no_change=epochs, random_state=seed,
    )  # fmt: skip
    return timed_estimator(model, data)


def bagged_loops(data: Digits, epochs: int, seed: int, members: int) -> Outcome:
    """As many raw loops, each on its own draw of the rows."""
    inputs, labels = torch.from_numpy(data.train), torch.from_numpy(data.train_labels)
    began = time.perf_counter()
    generator = torch.Generator().manual_seed(seed)
    models = []
    for member in range(members):
        rows = torch.randint(len(inputs), (len(inputs),), generator=generator)
        models.append(raw_net(inputs[rows], labels[rows], epochs, seed + member))
    seconds = time.perf_counter() - began

    class Average(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([model(x).softmax(1) for model in models]).mean(0)

    return Outcome(seconds, accuracy(Average(), data))


# The run ------------------------------------------------------------------------------------------


@dataclass
class Options:
    repetitions: int = 5
    epochs: int = 20
    members: int = 50
    threads: int | None = None


def interleaved(
    contestants: dict[str, Contestant], data: Digits, epochs: int, repetitions: int
) -> dict[str, dict[str, float]]:
    """Median seconds and mean accuracy of each; the order changes from round to round."""
    names = list(contestants)
    for name in names:
        contestants[name](data, 1, 0)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
    for repetition in range(repetitions):
        shift = repetition % len(names)
        for name in names[shift:] + names[:shift]:
            outcomes[name].append(contestants[name](data, epochs, repetition))
    return {
        name: {
            "seconds": statistics.median(one.seconds for one in found),
            "fastest": min(one.seconds for one in found),
            "accuracy": statistics.fmean(one.accuracy for one in found),
        }
        for name, found in outcomes.items()
    }


def run(options: Options) -> dict[str, Any]:
    data = digits()
    absent = [
        name for name, (_, package) in CONTESTANTS.items() if package != "quire" and not version(package)
    ]
    present = {name: one for name, (one, _) in CONTESTANTS.items() if name not in absent}
    single = interleaved(present, data, options.epochs, options.repetitions)
    steps = options.epochs * data.steps
    for row in single.values():
        row["microseconds_per_step"] = 1e6 * row["seconds"] / steps
        row["to_raw_loop"] = row["seconds"] / single["raw loop"]["seconds"]
        row["to_scikit_learn"] = row["seconds"] / single["scikit-learn"]["seconds"]

    members = options.members
    many = interleaved(
        {
            "bagged nets": lambda *arguments: bagged(*arguments, members),
            "as many raw loops": lambda *arguments: bagged_loops(*arguments, members),
        },
        data,
        options.epochs,
        max(1, (options.repetitions + 1) // 2),
    )
    seconds = {name: row["seconds"] for name, row in (single | many).items()}
    bars = []
    for name, limit in BARS.items():
        ours, theirs = name.split(" / ")
        ratio = seconds[ours] / seconds[theirs] if theirs in seconds else None
        bars.append(
            {"bar": name, "ratio": ratio, "limit": limit, "met": ratio is not None and ratio <= limit}
        )
    return {
        "benchmark": "small_models",
        "machine": machine(("scikit-learn", "skorch", "lightning", "numpy")),
        "epochs": options.epochs,
        "steps": steps,
        "repetitions": options.repetitions,
        "digits_mlp": single,
        "members": members,
        "bagging": many,
        "absent": absent,
        "bars": bars,
    }


def show(result: dict[str, Any]) -> None:
    print(describe(result["machine"]))
    print(f"\ndigits MLP 64-{HIDDEN}-10, batch {BATCH}, {result['epochs']} epochs ({result['steps']} steps)")
    print(f"{'':24}{'µs/step':>10}{'/ raw':>8}{'/ sklearn':>11}{'accuracy':>10}")
    for name, row in result["digits_mlp"].items():
        print(
            f"{name:24}{row['microseconds_per_step']:10.0f}{row['to_raw_loop']:8.2f}"
            f"{row['to_scikit_learn']:11.2f}{row['accuracy']:10.3f}"
        )
    for name in result["absent"]:
        print(f"{name:24}not installed")
    print(f"\n{result['members']} bagged nets, {result['epochs']} epochs")
    for name, row in result["bagging"].items():
        print(f"{name:24}{row['seconds']:10.2f} s{row['accuracy']:27.3f}")
    print()
    for bar in result["bars"]:
        ratio = "absent" if bar["ratio"] is None else f"{bar['ratio']:.2f}"
        verdict = {None: "not measured", True: "met", False: "NOT MET"}[bar["met"]]
        print(f"{bar['bar']:36}{ratio:>8}  at most {bar['limit']:.2f}  {verdict}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Small models side by side with the peers.")
    parser.add_argument("--repetitions", type=int, default=Options.repetitions)
    parser.add_argument("--epochs", type=int, default=Options.epochs)
    parser.add_argument("--members", type=int, default=Options.members, help="nets of the bagging part")
    parser.add_argument("--threads", type=int, help="threads for PyTorch and for scikit-learn's BLAS")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args(arguments)
    options = Options(chosen.repetitions, chosen.epochs, chosen.members, chosen.threads)
    warnings.filterwarnings("ignore")
    if options.threads:
        from threadpoolctl import threadpool_limits

        torch.set_num_threads(options.threads)
        threadpool_limits(options.threads)
    result = run(options)
    if chosen.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
