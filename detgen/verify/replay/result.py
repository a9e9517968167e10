"""The result of an audit: findings and counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

_FOUND = 100  # findings that are kept


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that the run cannot have written.

    Attributes:
        where: file, and line if there is one.
        what: in words.
        kind: "file", "line", "differs" or "tie"; a tie is not a fault.
    """

    where: str
    what: str
    kind: str


@dataclass(slots=True)
class AuditResult:
    """The result of an audit.

    Attributes:
        findings: the first hundred, including ties.
        faults: all findings except ties.
        ties: tokens, and lines with values, that rounding explains under another profile.
        differing: tokens that differ.
        samples: samples audited.
        tokens: tokens of these samples.
        unverified: samples of unverified requests, for which nothing is promised.
        missing: samples that a stopped run has not written.
        other_profile: differences of the profile; empty if equal bits are promised.
        tolerance: share of a row's largest logit within which a differing token is a tie.
        seconds: time spent on the tokens.
        run_speed: tokens per second of the run itself; None if unknown.
        logged: whether there is an acceptance log to judge, unless there were none in any case.
    """

    findings: list[Finding] = field(default_factory=list)
    faults: int = 0
    ties: int = 0
    differing: int = 0
    samples: int = 0
    tokens: int = 0
    unverified: int = 0
    missing: int = 0
    other_profile: list[str] = field(default_factory=list)
    tolerance: float = 0.0
    seconds: float = 0.0
    run_speed: float | None = None
    logged: bool = True

    def add(self, where: str, what: str, kind: str) -> None:
        """Record a finding."""
        if len(self.findings) < _FOUND:
            self.findings.append(Finding(where, what, kind))
        self.ties += kind == "tie"
        self.differing += kind == "differs"
        self.faults += kind != "tie"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"equal": not self.faults, **asdict(self)}
