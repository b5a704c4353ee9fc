"""A step of a small network on a GPU, where launching kernels takes longer than running them."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.bench.case import SUBJECTS, Bar, Case, Clocked, Place, peer
from quire.bench.training import captured, loop, plain_step, trainer, wait
from quire.data.batch import TensorData
from quire.models.ensemble import EnsembleConfig, MLPEnsemble
from quire.nn.heads import Categorical
from quire.options import Optim, Train
from quire.tasks.bagging import Bagging
from quire.tasks.supervised import Supervised

SIZES, BATCH = (64, 128, 10), 64
OPTIM = Optim(lr=1e-3)
TRAIN = Train(batch_size=BATCH, validate_every=10**9)


def network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(SIZES):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def rows(place: Place, count: int) -> TensorData:
    x = torch.randn(count, SIZES[0], device=place.device)
    return TensorData({"inputs": x, "target": torch.randint(SIZES[-1], (count,), device=place.device)})


@SUBJECTS.register("small-mlp")
def small_mlp(place: Place) -> Iterator[Case]:
    """A step of a small MLP through the trainer, which records it; beside plain loops and Lightning."""
    data = rows(place, BATCH * place.size(512, 4))
    warm, steps = place.size(200, 10), place.size(2000, 5)
    x, y = data.inputs[:BATCH], data.target[:BATCH]

    def body(batch: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], object]:
        model = network().to(place.device)
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True, capturable=place.on_gpu)
        return plain_step(model, functional.cross_entropy, batch, optimiser)

    def drawn() -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(data), (BATCH,), device=place.device)
        return data.inputs[chosen], data.target[chosen]

    contestants = {
        "quire": trainer(
            lambda: Supervised(network(), Categorical(SIZES[-1])), data, place, warm=warm, steps=steps,
            optim=OPTIM, train=TRAIN,
        ),
        "quire, not recorded": trainer(
            lambda: Supervised(network(), Categorical(SIZES[-1])), data, place, warm=warm, steps=steps,
            optim=OPTIM, train=Train(batch_size=BATCH, validate_every=10**9, capture=False),
        ),
        "plain loop": loop(lambda: body(drawn), place, warm=warm, steps=steps),
        "lightning": peer("lightning", lightning_loop(data, place, warm, steps)),
    }  # fmt: skip
    if place.on_gpu:
        contestants["one batch, one graph"] = loop(
            lambda: captured(body(lambda: (x, y))), place, warm=warm, steps=steps
        )
    yield Case(
        f"a step of an MLP {'-'.join(map(str, SIZES))}, batch {BATCH}, Adam, float32", contestants,
        unit="step", rounds=3, bars=(Bar("time", at_most=75e-6, machine="H200"),) if place.on_gpu else (),
    )  # fmt: skip


@SUBJECTS.register("bagged-mlps")
def bagged(place: Place) -> Iterator[Case]:
    """Sixty-four bagged MLPs at once, beside one."""
    members = place.size(64, 3)
    data = rows(place, BATCH * place.size(512, 4))
    warm, steps = place.size(200, 10), place.size(1000, 5)
    config = EnsembleConfig(members, SIZES[0], SIZES[-1], SIZES[1:-1])
    counts = torch.poisson(torch.ones(len(data), members)).to(place.device)
    drawn = TensorData({**data.fields, "counts": counts})
    yield Case(
        f"a step of {members} bagged MLPs {'-'.join(map(str, SIZES))}, batch {BATCH}, Adam, float32",
        {
            "quire": trainer(
                lambda: Bagging(MLPEnsemble(config), Categorical(SIZES[-1])), drawn, place, warm=warm,
                steps=steps, optim=OPTIM, train=TRAIN,
            ),
            "one net": trainer(
                lambda: Supervised(network(), Categorical(SIZES[-1])), data, place, warm=warm, steps=steps,
                optim=OPTIM, train=TRAIN,
            ),
        },
        unit="step", rounds=3, bars=(Bar("time", at_most=4.0, rival="one net"),) if place.on_gpu else (),
    )  # fmt: skip


def lightning_loop(data: TensorData, place: Place, warm: int, steps: int) -> Callable[[], object]:
    """Lightning with logging, checkpoints and progress off, on batches that lie on the device already."""

    def run() -> tuple[float, object]:
        import lightning as L  # type: ignore[import-not-found,unused-ignore]

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

        class Module(L.LightningModule):  # type: ignore[misc,name-defined,unused-ignore]
            def __init__(self) -> None:
                super().__init__()
                self.net = network()
                self.seen = 0
                self.seconds = 0.0

            def training_step(self, batch: list[Tensor], _: int) -> Tensor:
                self.seen += 1
                if self.seen in (warm, warm + steps):
                    wait(place.device)
                    self.seconds = time.perf_counter() - self.seconds
                return functional.cross_entropy(self.net(batch[0]), batch[1])

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)

        batches = list(zip(data.inputs.split(BATCH), data.target.split(BATCH), strict=True))
        loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fitter = L.Trainer(
                max_steps=warm + steps, accelerator="gpu" if place.on_gpu else "cpu", devices=1, logger=False,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            module = Module()
            fitter.fit(module, loader)
        return module.seconds / steps, None

    return Clocked(run)
