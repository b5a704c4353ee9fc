"""What a benchmark runs on: its description, and the rates that set the limits, measured on the spot."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from quire.bench.case import Kind, Work

PEERS = ("scikit-learn", "numpy", "triton", "torchvision", "transformers", "peft", "lightning", "skorch")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(device: torch.device) -> str:
    """Processor, cores, threads, GPU, and the versions of what takes part."""
    cpu = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        names = re.findall(r"^model name\s*:\s*(.+)$", information.read_text(), re.MULTILINE)
        cpu = names[0] if names else cpu
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    first = (
        f"{cpu}, {cores} cores, {torch.get_num_threads()} threads{gpu}, Python {platform.python_version()}"
    )
    versions = [f"{name} {number}" for name in ("torch", *PEERS) if (number := version(name))]
    return first + "\n" + ", ".join(versions)


def short_name(device: torch.device) -> str:
    """For file names: "h200", "amd-epyc-2-cores"."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device).removeprefix("NVIDIA ")
    else:
        name = describe(device).split(" cores", 1)[0].replace(",", "") + " cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """The best of several, after a warm-up."""
    best = float("inf")
    for turn in range(8):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn >= 2:
            best = min(best, time.perf_counter() - began)
    return best


@cache
def copy_rate(device: torch.device) -> float:
    """Bytes a second that can be read and written, both counted, beyond any cache."""
    numbers = 1 << (29 if device.type == "cuda" else 26)
    source = torch.ones(numbers, device=device)
    target = torch.empty_like(source)
    return 8 * numbers / _seconds(device, lambda: target.copy_(source))


@cache
def operation_rate(device: torch.device, kind: Kind) -> float:
    """Operations a second of large matrix products in this type; for "special" from the device's clock."""
    if kind == "special":
        return _special_rate(device)
    gpu = device.type == "cuda"
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(kind, torch.float32)
    size = (8192 if kind != "float64" else 4096) if gpu else 1536
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    try:
        return 2.0 * size**3 / _seconds(device, lambda: a @ b)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _special_rate(device: torch.device) -> float:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        # 16 special-function units on each multiprocessor since Volta, one result a clock.
        return 16 * properties.multi_processor_count * getattr(properties, "clock_rate", 1.98e6) * 1e3
    x = torch.rand(1 << 20, device=device)
    return len(x) / _seconds(device, lambda: x.exp())


def limit(device: torch.device, work: Work | None) -> tuple[float, str] | None:
    """Seconds the work takes at least, and what sets them; kinds of work may overlap."""
    if work is None:
        return None
    times: list[tuple[float, str]] = []
    for kind, amount in work.operations.items():
        times.append((amount / operation_rate(device, kind), kind))
    if work.moved:
        times.append((work.moved / copy_rate(device), "memory"))
    return max(times) if times else None
