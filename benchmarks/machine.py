"""What a benchmark ran on, so that a figure never stands without it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine(packages: Sequence[str]) -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        names = [line for line in information.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu,
        "cores": cores,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", *packages)},
    }


def describe(about: dict[str, Any]) -> str:
    gpu = f", {about['gpu']}" if about["gpu"] else ""
    first = (
        f"{about['cpu']}, {about['cores']} cores, {about['threads']} threads{gpu}, Python {about['python']}"
    )
    return (
        first + "\n" + ", ".join(f"{name} {number or 'absent'}" for name, number in about["versions"].items())
    )
