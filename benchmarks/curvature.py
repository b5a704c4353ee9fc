"""What a product with the Hessian costs, in gradients, beside curvlinops and PyHessian in one run.

    gradient            autograd, as in training (fused attention where there is one)
    compiled gradient   the same through torch.compile
    quire               Hessian.of_model: nothing kept between products
    quire kept          keep=True: the graph of the gradient is built once
    quire compiled      compile=True: the kept graph is traced and compiled
    curvlinops          HessianLinearOperator
    PyHessian           hessian_vector_product on its kept gradients

for an MLP, a ResNet and a GPT, in evaluation mode, float32. Eager products are compared with the eager
gradient, compiled ones with the faster of the two gradients. Contestants take turns; medians of the rounds
are shown. Each product is compared with that of the first contestant, and λmax is found at the end. Peers
that cannot be imported are named as absent.

    python -m benchmarks.curvature [--device cuda] [--models mlp resnet gpt] [--rounds 7] [--no-compile]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.machine import describe, machine
from quire.doctor.curvature import Hessian, largest_eigenvalue
from quire.doctor.curvature.hessian import split_like, twice_differentiable
from quire.models.gpt import GPT, GPTConfig
from quire.models.resnet import resnet18, resnet20

BAR = 2.5
Contestant = Callable[[], Any]


class ByToken(nn.Module):
    """Logits as rows, so that every contestant can use plain cross-entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).flatten(0, 1)


def subject(name: str, device: str) -> tuple[nn.Module, Tensor, Tensor, str]:
    """Small enough for two cores on a CPU; on a GPU large enough to keep it busy."""
    large = device == "cuda"
    if name == "mlp":
        rows, width = (4096, 4096) if large else (256, 512)
        model: nn.Module = nn.Sequential(
            nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )
        inputs, target = torch.randn(rows, 784), torch.randint(10, (rows,))
        title = f"MLP 784-{width}-{width}-10, {rows} rows"
    elif name == "resnet":
        rows, side = (128, 64) if large else (16, 32)
        model = resnet18(10) if large else resnet20(10)
        inputs, target = torch.randn(rows, 3, side, side), torch.randint(10, (rows,))
        title = f"ResNet-{18 if large else 20}, {rows} images of {side}×{side}"
    else:
        config = (
            GPTConfig(50257, 256, 12, 12, 768) if large else GPTConfig(256, 64, 4, 4, 128, activation="gelu")
        )
        rows = 16 if large else 8
        model = ByToken(GPT(config))
        tokens = torch.randint(config.vocab_size, (rows, config.context + 1))
        inputs, target = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
        title = f"GPT of {config.layers} layers of {config.width}, {rows}×{config.context} tokens"
    return model.to(device).eval(), inputs.to(device), target.to(device), title


def contestants(
    model: nn.Module, inputs: Tensor, target: Tensor, vector: Tensor, *, compile: bool
) -> tuple[dict[str, Contestant], dict[str, str]]:
    """By name, and the reasons of those that are absent."""
    parameters = list(model.parameters())
    batches = [(inputs, target)]

    def gradient(forward: Callable[[Tensor], Tensor]) -> Contestant:
        return lambda: torch.autograd.grad(F.cross_entropy(forward(inputs), target), parameters)

    def quire(**options: bool) -> Contestant:
        hessian = Hessian.of_model(model, F.cross_entropy, batches, **options)
        return lambda: hessian(vector)

    entries: dict[str, Contestant] = {"gradient": gradient(model)}
    entries |= {"quire": quire(), "quire kept": quire(keep=True)}
    if compile:
        entries["compiled gradient"] = gradient(torch.compile(model))
        entries["quire compiled"] = quire(compile=True)
    absent: dict[str, str] = {}
    for name, make in (("curvlinops", curvlinops), ("PyHessian", pyhessian)):
        try:
            entries[name] = make(model, inputs, target, vector)
            entries[name]()
        except Exception as problem:
            entries.pop(name, None)
            absent[name] = f"{type(problem).__name__}: {str(problem).splitlines()[0][:100]}"
    return entries, absent


def curvlinops(model: nn.Module, inputs: Tensor, target: Tensor, vector: Tensor) -> Contestant:
    from curvlinops import HessianLinearOperator

    operator = HessianLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        list(model.parameters()),
        [(inputs, target)],
        check_deterministic=False,
        num_data=len(inputs),
    )

    def product() -> Tensor:
        with twice_differentiable():
            return operator @ vector

    return product


def pyhessian(model: nn.Module, inputs: Tensor, target: Tensor, vector: Tensor) -> Contestant:
    from pyhessian import hessian
    from pyhessian.utils import hessian_vector_product

    with twice_differentiable():
        kept = hessian(model, nn.CrossEntropyLoss(), data=(inputs, target), cuda=inputs.is_cuda)
    pieces = split_like(vector, kept.params)

    def product() -> Tensor:
        with twice_differentiable():
            parts = hessian_vector_product(kept.gradsH, kept.params, pieces)
        return torch.cat([part.reshape(-1) for part in parts])

    return product


def measure(entries: dict[str, Contestant], rounds: int, device: str) -> dict[str, float]:
    """Median seconds of a call; the contestants take turns."""

    def once(run: Contestant) -> float:
        repeats = 3
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / repeats

    for run in entries.values():
        once(run)
    times: dict[str, list[float]] = {name: [] for name in entries}
    for _ in range(rounds):
        for name, run in entries.items():
            times[name].append(once(run))
    return {name: statistics.median(values) for name, values in times.items()}


def judge(name: str, device: str, rounds: int, compile: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model, inputs, target, title = subject(name, device)
    vector = torch.cat([torch.randn_like(parameter).flatten() for parameter in model.parameters()])
    entries, absent = contestants(model, inputs, target, vector, compile=compile)
    products = [entry for entry in entries if "gradient" not in entry]
    reference = entries["quire"]()
    errors = {
        entry: ((entries[entry]().flatten() - reference).norm() / reference.norm()).item()
        for entry in products
    }
    seconds = measure(entries, rounds, device)
    eager = seconds["gradient"]
    # Compiling does not always make a gradient faster; a slow one would flatter the product.
    fastest = min(eager, seconds.get("compiled gradient", eager))
    ratios = {entry: seconds[entry] / (fastest if entry == "quire compiled" else eager) for entry in products}
    hessian = Hessian.of_model(model, F.cross_entropy, [(inputs, target)], keep=True)
    largest = largest_eigenvalue(hessian)
    return {
        "model": title, "parameters": hessian.size, "milliseconds": {k: 1e3 * v for k, v in seconds.items()},
        "gradients": ratios, "errors": errors, "absent": absent,
        "largest": {"value": largest.value, "error": largest.error, "products": largest.products},
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['model']}, {result['parameters']:,} parameters")
    for entry, milliseconds in result["milliseconds"].items():
        line = f"  {entry:18}{milliseconds:10.2f} ms"
        if entry in result["gradients"]:
            line += f"{result['gradients'][entry]:7.2f} gradients   differs by {result['errors'][entry]:.0e}"
        print(line)
    for entry, reason in result["absent"].items():
        print(f"  {entry:18}absent ({reason})")
    largest = result["largest"]
    print(f"  λmax {largest['value']:.4g} ± {largest['error']:.1g} in {largest['products']} products")
    name = "quire compiled" if "quire compiled" in result["gradients"] else "quire kept"
    print(f"  {name}: {result['gradients'][name]:.2f} gradients (bar: at most {BAR:g})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--models", nargs="+", default=["mlp", "resnet", "gpt"], choices=("mlp", "resnet", "gpt")
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    # The same arithmetic for all; on a GPU that of training.
    torch.set_float32_matmul_precision("high")
    results = []
    about = machine(("curvlinops-for-pytorch", "PyHessian"))
    if not options.json:
        print(describe(about))
    for name in options.models:
        results.append(judge(name, options.device, options.rounds, not options.no_compile))
        if not options.json:
            show(results[-1])
    if options.json:
        print(json.dumps({"machine": about, "results": results}))


if __name__ == "__main__":
    main()
