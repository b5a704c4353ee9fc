"""Additive attention and Gaussian pooling on one GPU, beside the same formulas in PyTorch, in one run.

    additive    Σ_m softmax_m(w·tanh(q + k_m)) v_m, batch 8, 1024 queries, 1024 keys, hidden width 128,
                values of width 128, float32, forward and backward with gradients of everything
    gaussian    Σ_m softmax_m(−½‖q − k_m‖²) v_m, 32,768 queries and keys in 16 dimensions, one value, float32,
                forward, and forward and backward

    quire       quire.functional with backend="triton"
    compiled    the formula through torch.compile, all scores in memory; compiling is not counted
    eager       the same without torch.compile

Extra memory is the peak above what was there before. The limit is the time of the special functions alone: 16
a clock on each multiprocessor; two reciprocals share one.

    python -m benchmarks.pooling [--rounds 5] [--only additive]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.machine import describe, machine
from quire.functional import additive_attention, gaussian_pooling

MEGABYTE = 1 << 20
CLOCK = 1.98e9


class Contestant(NamedTuple):
    run: Callable[[], object]
    milliseconds: float
    extra: float
    """MiB"""
    error: float
    """Largest error of the result against float64, of its largest value."""


def special_functions(count: float) -> float:
    """Milliseconds that this many take at least."""
    units = 16 * torch.cuda.get_device_properties(0).multi_processor_count
    return 1000 * count / (units * CLOCK)


def additive(query: Tensor, key: Tensor, value: Tensor, vector: Tensor) -> Tensor:
    return ((query[:, :, None] + key[:, None]).tanh() @ vector).softmax(-1) @ value


def gaussian(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    score = query @ key.mT - 0.5 * key.square().sum(-1) - 0.5 * query.square().sum(-1, keepdim=True)
    return score.softmax(-1) @ value


def both_ways(function: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], object]:
    """Forward, and backward from random numbers, which are drawn once."""
    factor = torch.randn_like(inputs[2])  # as many queries as keys

    def run() -> object:
        return torch.autograd.grad(function(*inputs), inputs, factor)

    return run


def forward(function: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return function(*inputs)

    return run


def clock(run: Callable[[], object], calls: int) -> float:
    """Milliseconds of a call, from events around several."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / calls


def extra_memory(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MEGABYTE


def compare(
    contestants: dict[str, Callable[..., Tensor]],
    mode: Callable[[Callable[..., Tensor], list[Tensor]], Callable[[], object]],
    inputs: list[Tensor],
    exact: Tensor,
    rounds: int,
    calls: int,
) -> dict[str, Contestant]:
    """Each warmed up, then timed in turns; medians of the rounds."""
    runs = {name: mode(function, inputs) for name, function in contestants.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    extra, errors = {}, {}
    for name, run in runs.items():
        for _ in range(3):
            run()
        extra[name] = extra_memory(run)
        with torch.no_grad():
            found = contestants[name](*inputs)
        part = found[..., : exact.shape[-2], :].double()
        errors[name] = ((part - exact).abs().max() / exact.abs().max()).item()
        del found
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(clock(run, calls))
    return {
        name: Contestant(run, statistics.median(times[name]), extra[name], errors[name])
        for name, run in runs.items()
    }


def show(title: str, results: dict[str, Contestant], limit: float) -> None:
    print(f"\n{title}; limit {limit:.2f} ms")
    own = results["quire"]
    for name, result in results.items():
        print(
            f"  {name:10}{result.milliseconds:9.3f} ms"
            f"{result.milliseconds / own.milliseconds:8.2f} of Quire's"
            f"{result.extra:10.1f} MiB extra{100 * limit / result.milliseconds:7.1f}% of the limit"
            f"   error {result.error:.1e}"
        )


def run_additive(rounds: int) -> None:
    batch, size, hidden = 8, 1024, 128
    inputs = [torch.randn(batch, size, hidden, device="cuda") for _ in range(3)]
    inputs.append(torch.randn(hidden, device="cuda") / hidden**0.5)
    for tensor in inputs:
        tensor.requires_grad_()
    with torch.no_grad():
        some = [inputs[0][:, :64].double(), *(t.double() for t in inputs[1:])]
        exact = additive(*some)
    contestants: dict[str, Callable[..., Tensor]] = {
        "quire": lambda *given: additive_attention(*given, backend="triton"),
        "compiled": torch.compile(additive),
        "eager": additive,
    }
    reciprocals = batch * size * size * hidden / 2
    title = f"additive attention, batch {batch}, {size}×{size}, width {hidden}, float32"
    found = compare(contestants, forward, inputs, exact, rounds, 10)
    show(f"{title}, forward", found, special_functions(reciprocals))
    found = compare(contestants, both_ways, inputs, exact, rounds, 10)
    show(f"{title}, forward and backward", found, special_functions(4 * reciprocals))


def run_gaussian(rounds: int) -> None:
    size, dimensions, width = 32_768, 16, 1
    inputs = [
        torch.randn(size, n, device="cuda", requires_grad=True) for n in (dimensions, dimensions, width)
    ]
    with torch.no_grad():
        exact = gaussian(inputs[0][:1024].double(), *(t.double() for t in inputs[1:]))
    contestants: dict[str, Callable[..., Tensor]] = {
        "quire": lambda *given: gaussian_pooling(*given, backend="triton"),
        "compiled": torch.compile(gaussian),
        "eager": gaussian,
    }
    title = f"Gaussian pooling, {size}×{size}, {dimensions} dimensions, {width} value, float32"
    found = compare(contestants, forward, inputs, exact, rounds, 10)
    show(f"{title}, forward", found, special_functions(size * size))
    found = compare(contestants, both_ways, inputs, exact, rounds, 5)
    show(f"{title}, forward and backward", found, special_functions(3 * size * size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("additive", "gaussian"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    torch.manual_seed(0)
    print(describe(machine(("triton",))))
    if options.only != "gaussian":
        run_additive(options.rounds)
    if options.only != "additive":
        run_gaussian(options.rounds)


if __name__ == "__main__":
    main()
