"""What an examination says: findings, each with a stable name, a place, numbers and a way out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quire.errors import unknown_name
from quire.registry import Registry

if TYPE_CHECKING:
    from quire.doctor.case import Case
    from quire.doctor.course import Course

Severity = Literal["error", "warning", "note"]
RANKS: dict[Severity, int] = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Finding:
    """Something that keeps a model from learning, or may."""

    severity: Severity
    what: str
    where: str
    """A layer, a parameter, a column, or "loss", "inputs", "target"."""
    evidence: str
    """In numbers."""
    fix: str
    code: str = ""
    """The name that the check is registered by, which silences it; `examine` writes it in."""

    def __str__(self) -> str:
        lines = [f"{self.severity}: {self.what} ({self.code})", f"  where: {self.where}"]
        return "\n".join([*lines, f"  evidence: {self.evidence}", f"  fix: {self.fix}"])


class Diagnosis(tuple[Finding, ...]):
    """Findings, the gravest first."""

    def __new__(cls, findings: Iterable[Finding]) -> Diagnosis:
        return super().__new__(cls, sorted(findings, key=lambda finding: RANKS[finding.severity]))

    def codes(self, *severities: Severity) -> list[str]:
        """Names of the findings of these severities, of all without any."""
        return [finding.code for finding in self if not severities or finding.severity in severities]

    def __str__(self) -> str:
        if not self:
            return "nothing found that would keep this model from learning"
        return "\n".join(str(finding) for finding in self)


Check = Callable[["Case"], Iterator[Finding]]
CHECKS: Registry[Check] = Registry("check")
"""Before the first step."""

Sign = Callable[["Course"], Iterator[Finding]]
SIGNS: Registry[Sign] = Registry("sign")
"""In training."""


def require_known(names: Iterable[str], known: Iterable[str]) -> None:
    """Only a check or sign that there is can be silenced."""
    every = list(known)
    for name in names:
        if name not in every:
            raise unknown_name("check", name, every)
