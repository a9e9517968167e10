"""What an audit found: what is not as a run must have written it, and counts."""

from __future__ import annotations

from dataclasses import dataclass, field

_FOUND = 100  # findings that are kept


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as the run must have written it.

    Attributes:
        where: file, and line where there is one.
        what: in words.
        kind: "file", "line", "differs" or "tie"; a tie is no fault.
    """

    where: str
    what: str
    kind: str


@dataclass(slots=True)
class AuditResult:
    """What an audit found.

    Attributes:
        findings: the first hundred, ties among them.
        faults: all findings that are no ties.
        ties: tokens whose margin is within the tolerance, under another profile.
        differing: tokens that differ.
        samples: samples audited.
        tokens: tokens of them.
        unverified: samples of unverified requests, of which nothing is promised.
        missing: prompts that the run has not written, where it was stopped.
        other_profile: in what the profile differs; empty if bit equality is promised.
        tolerance: share of a row's largest logit within which a token is a tie.
        seconds: time taken by the tokens.
        run_speed: tokens a second of the run itself; None if unknown.
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

    def add(self, where: str, what: str, kind: str) -> None:
        """Note a finding."""
        if len(self.findings) < _FOUND:
            self.findings.append(Finding(where, what, kind))
        self.ties += kind == "tie"
        self.differing += kind == "differs"
        self.faults += kind != "tie"
