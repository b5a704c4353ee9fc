"""A product with the Hessian in gradients, and λmax; beside curvlinops and PyHessian."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.bench.case import SUBJECTS, Bar, Case, Place, peer
from quire.doctor.curvature import Hessian, largest_eigenvalue
from quire.doctor.curvature.hessian import split_like, twice_differentiable
from quire.models.gpt import GPT, GPTConfig
from quire.models.resnet import resnet18, resnet20


class ByToken(nn.Module):
    """Logits as rows, so that every contestant can use plain cross-entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens)
        return logits.flatten(0, 1)


@SUBJECTS.register("curvature")
def curvature(place: Place) -> Iterator[Case]:
    """A product with the Hessian of an MLP, a ResNet and a GPT; beside a gradient, curvlinops, PyHessian."""
    for make in (mlp, resnet, gpt):
        torch.manual_seed(0)
        model, inputs, target, title = make(place)
        model = model.to(place.device).eval()
        inputs, target = inputs.to(place.device), target.to(place.device)
        vector = torch.cat([torch.randn_like(parameter).flatten() for parameter in model.parameters()])
        kept = Hessian.of_model(model, F.cross_entropy, [(inputs, target)], keep=True)
        exact = Hessian.of_model(model, F.cross_entropy, [(inputs, target)])(vector)
        found = largest_eigenvalue(kept)

        def apart(product: object, exact: Tensor = exact) -> float:
            if not isinstance(product, Tensor):  # a gradient
                return 0.0
            return float((product.flatten() - exact).norm() / exact.norm())

        contestants = {"quire": lambda kept=kept, vector=vector: kept(vector)}
        if place.on_gpu:
            compiled = Hessian.of_model(model, F.cross_entropy, [(inputs, target)], compile=True)
            contestants = {
                "quire": lambda compiled=compiled, vector=vector: compiled(vector),
                "quire, not compiled": contestants["quire"],
            }
        yield Case(
            f"a product with the Hessian, {title}; λmax {found.value:.4g} in {found.products} products",
            {
                **contestants,
                "a gradient": gradient(model, inputs, target),
                "curvlinops": peer("curvlinops", curvlinops(model, inputs, target, vector)),
                "PyHessian": peer("pyhessian", pyhessian(model, inputs, target, vector)),
            },
            unit="product",
            error=apart,
            bars=(
                Bar("time", at_most=2.5, rival="a gradient"),
                Bar("time", at_most=1.0, rival="curvlinops"),
            ),
        )


@SUBJECTS.register("largest-eigenvalue")
def largest(place: Place) -> Iterator[Case]:
    """λmax of the Hessian of an MLP, a ResNet and a GPT to 1 %; beside curvlinops with SciPy's eigsh."""
    # SciPy's vectors lie on the host: twenty of GPT-2's size would take longer than all the rest.
    for make in (mlp, resnet) if place.on_gpu else (mlp, resnet, gpt):
        torch.manual_seed(0)
        yield eigenvalue_case(place, *make(place))


def eigenvalue_case(place: Place, model: nn.Module, inputs: Tensor, target: Tensor, title: str) -> Case:
    model = model.to(place.device).eval()
    inputs, target = inputs.to(place.device), target.to(place.device)
    ours = Hessian.of_model(
        model, F.cross_entropy, [(inputs, target)], compile=place.on_gpu, keep=not place.on_gpu
    )
    exact = largest_eigenvalue(ours, 1e-4, most=place.size(60, 25)).value
    operator = hessian_of_curvlinops(model, inputs, target)

    def found_by_scipy() -> float:
        from scipy.sparse.linalg import eigsh

        with twice_differentiable():
            values = eigsh(operator().to_scipy(), 1, which="LA", tol=0.01, return_eigenvectors=False)
        return float(values[0])

    return Case(
        f"λmax to 1 %, {title}",
        {
            "quire": lambda: largest_eigenvalue(ours).value,
            "curvlinops": peer("curvlinops", found_by_scipy),
        },
        unit="eigenvalue",
        whole=place.on_gpu,
        rounds=2 if place.on_gpu else None,
        error=lambda value: abs(value / exact - 1),
        bars=(Bar("error", at_most=0.01), Bar("time", at_most=1.0, rival="curvlinops")),
    )


def mlp(place: Place) -> tuple[nn.Module, Tensor, Tensor, str]:
    rows, width = (4096, 4096) if place.on_gpu else (256, 512)
    width = place.size(width, 16)
    layers = (nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    title = f"MLP 784-{width}-{width}-10, {rows} rows"
    return nn.Sequential(*layers), torch.randn(rows, 784), torch.randint(10, (rows,)), title


def resnet(place: Place) -> tuple[nn.Module, Tensor, Tensor, str]:
    rows, side = (128, 64) if place.on_gpu else (16, 32)
    rows = place.size(rows, 2)
    model = resnet18(10) if place.on_gpu else resnet20(10)
    title = f"ResNet-{18 if place.on_gpu else 20}, {rows} images of {side} × {side}"
    return model, torch.randn(rows, 3, side, side), torch.randint(10, (rows,)), title


def gpt(place: Place) -> tuple[nn.Module, Tensor, Tensor, str]:
    config = GPTConfig(50257, 256, 12, 12, 768)
    if not place.on_gpu:
        config = GPTConfig(256, 64, place.size(4, 1), 4, place.size(128, 16), activation="gelu")
    rows = 16 if place.on_gpu else place.size(8, 2)
    tokens = torch.randint(config.vocab_size, (rows, config.context + 1))
    title = f"GPT of {config.layers} layers of {config.width}, {rows} × {config.context} tokens"
    return ByToken(GPT(config)), tokens[:, :-1].contiguous(), tokens[:, 1:].flatten(), title


def gradient(model: nn.Module, inputs: Tensor, target: Tensor) -> Callable[[], object]:
    parameters = list(model.parameters())
    return lambda: torch.autograd.grad(F.cross_entropy(model(inputs), target), parameters)


def hessian_of_curvlinops(model: nn.Module, inputs: Tensor, target: Tensor) -> Callable[[], Any]:
    """Made when it is first asked for: the package may be absent."""

    @cache
    def operator() -> Any:
        from curvlinops import HessianLinearOperator  # type: ignore[import-not-found,unused-ignore]

        return HessianLinearOperator(
            model, nn.CrossEntropyLoss(), list(model.parameters()), [(inputs, target)],
            check_deterministic=False, num_data=len(inputs),
        )  # fmt: skip

    return operator


def curvlinops(model: nn.Module, inputs: Tensor, target: Tensor, vector: Tensor) -> Callable[[], object]:
    operator = hessian_of_curvlinops(model, inputs, target)

    def product() -> object:
        with twice_differentiable():
            return operator() @ vector

    return product


def pyhessian(model: nn.Module, inputs: Tensor, target: Tensor, vector: Tensor) -> Callable[[], object]:
    made: list[Any] = []

    def product() -> object:
        from pyhessian import hessian  # type: ignore[import-not-found,unused-ignore]
        from pyhessian.utils import hessian_vector_product  # type: ignore[import-not-found,unused-ignore]

        with twice_differentiable():
            if not made:
                made.append(hessian(model, nn.CrossEntropyLoss(), data=(inputs, target), cuda=inputs.is_cuda))
            kept = made[0]
            parts = hessian_vector_product(
                kept.gradsH,
                kept.params,
                split_like(vector, kept.params),
            )
        return torch.cat([part.reshape(-1) for part in parts])

    return product
