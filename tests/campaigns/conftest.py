"""Campaigns: hundreds of tries at breaking a promise. `docs/reliability.md` says what each of them found.

    pytest -m slow tests/campaigns                                 # an hour
    DETGEN_CAMPAIGN_SHARE=0.05 pytest -m slow tests/campaigns      # a twentieth of the tries

Tries are drawn from fixed seeds: a try that fails does so again.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

_TALLY = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TALLY] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show what the campaigns counted."""
    if config.stash[_TALLY]:
        terminalreporter.section("campaigns")
        for line in config.stash[_TALLY]:
            terminalreporter.line(line)


@pytest.fixture
def tries() -> Callable[[int], int]:
    """How many tries of a whole campaign to make: `tries(1000)`; at least one."""
    share = float(os.environ.get("DETGEN_CAMPAIGN_SHARE", "1"))
    return lambda whole: max(round(whole * share), 1)


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Show counts after the tests: `tally(tries=1000, differing=0)`."""

    def note(**counts: int) -> None:
        shown = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items())
        request.config.stash[_TALLY].append(f"{request.node.name}: {shown}")

    return note
