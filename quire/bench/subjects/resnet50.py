"""Training ResNet-50 on one GPU, beside torchvision's network in a compiled loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.bench.case import SUBJECTS, Bar, Case, Contestant, Place, Work, peer
from quire.bench.training import loop, plain_step, trainer
from quire.data.batch import TensorData
from quire.models import resnet50
from quire.nn.heads import Categorical
from quire.nn.images import ImageInputs
from quire.options import Optim, Train
from quire.tasks.supervised import Supervised

OPERATIONS = 4.09e9 * 2 * 3
"""Of an image of 224 × 224: multiplications and additions, forward and twice as many backward."""


@SUBJECTS.register("resnet50")
def resnet(place: Place) -> Iterator[Case]:
    """Training ResNet-50 in bfloat16; the peer has one float batch ready, Quire gathers and scales bytes."""
    if not (place.on_gpu or place.small):
        return
    batch, side, classes = place.size(256, 2), place.size(224, 32), place.size(1000, 4)
    warm, steps = place.size(12, 1), place.size(60, 1)
    torch.manual_seed(0)
    images = torch.randint(256, (8 * batch, 3, side, side), dtype=torch.uint8, device=place.device)
    labels = torch.randint(classes, (8 * batch,), device=place.device)
    inputs = ImageInputs((123.7, 116.3, 103.5), (58.4, 57.1, 57.4))
    units = float(batch)

    def theirs(compiled: bool) -> Contestant:
        def body() -> Callable[[], object]:
            import torchvision  # type: ignore[import-not-found,import-untyped,unused-ignore]

            torch.compiler.reset()
            net: nn.Module = torchvision.models.resnet50(num_classes=classes)
            net = net.to(place.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            optimiser = torch.optim.SGD(
                net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=place.on_gpu
            )
            x = torch.randn(batch, 3, side, side, device=place.device).to(memory_format=torch.channels_last)
            model = torch.compile(net) if compiled else net
            fixed: tuple[Tensor, Tensor] = (x, labels[:batch])
            return plain_step(model, functional.cross_entropy, lambda: fixed, optimiser, half=True)  # type: ignore[arg-type]

        return peer("torchvision", loop(body, place, warm=warm, steps=steps, units=units))

    yield Case(
        f"ResNet-50, batch {batch}, {side} × {side}, bfloat16",
        {
            "quire": trainer(
                lambda: Supervised(resnet50(classes), Categorical(classes), inputs=inputs),
                TensorData({"inputs": images, "target": labels}), place, warm=warm, steps=steps,
                optim=Optim("sgd", lr=0.1, momentum=0.9, weight_decay=1e-4, decay="l2"),
                train=Train(
                    batch_size=batch, precision="bfloat16", compile=place.on_gpu, validate_every=10**9
                ),
                units=units,
            ),
            "torchvision, compiled": theirs(compiled=place.on_gpu),
        },
        work=Work(operations={"bfloat16": OPERATIONS * batch}), amount=units, unit="image", rounds=1,
        bars=(
            Bar("rate", at_least=7000, machine="H200"),
            Bar("time", at_most=1.0, rival="torchvision, compiled"),
        ),
    )  # fmt: skip
