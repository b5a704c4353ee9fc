r"""The sheet: each formula as an entry, tied to public code and to a proof that can fail.

An entry is registered by decorating its proof:

    @entry("maths/hadamard", "Element-wise product", r"(x \odot y)_i = x_i y_i",
           code=F.hadamard, wrong=lambda x, y: x + y, tolerance=0.0)
    def _(hadamard):
        ...
        return gap(hadamard(x, y), explicit_loop(x, y))

The proof receives the code under test as its arguments and returns an error; it passes when that
error is at most the tolerance. `wrong` is a deliberately wrong version with the same interface:
the same proof run on it must fail, which is how each proof is shown to be able to. Where common
formula sheets print the formula wrong, `wrong` is the printed form and `erratum` says so; `verify`
then also demands that the proof refutes it.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quire.registry import Registry

Proof = Callable[..., float]


@dataclass(frozen=True)
class Verdict:
    """The outcome of one proof; field names are those of `quire sheet verify --json`."""

    id: str
    error: float
    tolerance: float
    passed: bool
    seconds: float
    refuted: float | None = None  # the error of the wrong printed form, where there is an erratum
    detail: str = ""  # the exception, where the proof could not run to its end


@dataclass(frozen=True)
class Entry:
    id: str
    title: str
    latex: str
    code: tuple[Callable[..., Any], ...]
    wrong: tuple[Callable[..., Any], ...]
    tolerance: float
    proof: Proof
    erratum: str = ""
    picture: Callable[[], Any] | None = None  # returns a matplotlib Figure

    @property
    def chapter(self) -> str:
        return self.id.split("/")[0]

    def verify(self) -> Verdict:
        start = time.perf_counter()
        error, detail = run_proof(self.proof, self.code)
        refuted = self.sabotage() if self.erratum else None
        passed = error <= self.tolerance and (refuted is None or refuted > self.tolerance)
        seconds = time.perf_counter() - start
        return Verdict(self.id, error, self.tolerance, passed, seconds, refuted, detail)

    def sabotage(self) -> float:
        """The error that the proof reports for the deliberately wrong version."""
        return run_proof(self.proof, self.wrong)[0]

    def locations(self) -> list[str]:
        """``module.qualname (file:line)`` of the code, relative to the package."""
        return [locate(item) for item in self.code]


ENTRIES: Registry[Entry] = Registry("sheet entry")


def run_proof(proof: Proof, code: tuple[Callable[..., Any], ...]) -> tuple[float, str]:
    """The error of one run, seeded alike each time. Code that raises has an infinite error."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            error = float(proof(*code))
        except Exception as problem:
            return math.inf, f"{type(problem).__name__}: {problem}"
    return (math.inf if math.isnan(error) else error), ""


def entry(
    id: str,
    title: str,
    latex: str,
    *,
    code: Callable[..., Any] | tuple[Callable[..., Any], ...],
    wrong: Callable[..., Any] | tuple[Callable[..., Any], ...],
    tolerance: float,
    erratum: str = "",
    picture: Callable[[], Any] | None = None,
) -> Callable[[Proof], Proof]:
    """Register the decorated proof. `wrong` has as many parts as `code`."""

    def add(proof: Proof) -> Proof:
        as_tuple = code if isinstance(code, tuple) else (code,)
        wrong_tuple = wrong if isinstance(wrong, tuple) else (wrong,)
        if len(as_tuple) != len(wrong_tuple):
            raise ValueError(f"entry '{id}': {len(as_tuple)} parts of code, {len(wrong_tuple)} wrong ones")
        ENTRIES.register(id)(
            Entry(id, title, latex, as_tuple, wrong_tuple, tolerance, proof, erratum, picture)
        )
        return proof

    return add


def locate(item: Callable[..., Any]) -> str:
    plain = inspect.unwrap(item)
    name = f"{plain.__module__}.{plain.__qualname__}"
    try:
        file = inspect.getsourcefile(plain) or ""
        line = inspect.getsourcelines(plain)[1]
    except (TypeError, OSError):
        return name
    package = file.rfind("quire/")
    return f"{name} ({file[package:] if package >= 0 else file}:{line})"


# Small vocabulary of proofs -------------------------------------------------------------------


def gap(actual: Any, expected: Any) -> float:
    """Largest difference, relative where the expected value is above 1; NaN or shape mismatch is infinite."""
    # Python numbers are float64 already; torch would make float32 of them.
    a, b = (
        v if isinstance(v, torch.Tensor) else torch.as_tensor(v, dtype=torch.float64)
        for v in (actual, expected)
    )
    if a.shape != b.shape:
        return math.inf
    if a.numel() == 0:
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    same = a == b  # equal infinities
    error = torch.where(same, 0.0, (a - b).abs() / b.abs().clamp(min=1.0))
    worst = error.max().item()
    return math.inf if math.isnan(worst) else worst


def require(condition: object) -> float:
    """0 when it holds, infinity when it does not: a yes-or-no step of a proof."""
    return 0.0 if bool(condition) else math.inf


def worst(*errors: float) -> float:
    """The largest error; NaN counts as infinite."""
    return max(math.inf if math.isnan(error) else error for error in errors)
