"""The run that is killed and run again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.examples import thorough

from detgen.verify.perturb import resuming
from detgen.verify.perturb.axes import Setting
from detgen.verify.perturb.checking import Check
from detgen.verify.perturb.pool import Pool

# detgen, but the first process goes on after the end of its run, as one does that has yet to free its memory.
LINGERING = """
import pathlib, sys, time
from detgen.__main__ import main
ended = pathlib.Path(sys.argv.pop(1))
try:
    main()
finally:
    first = not ended.exists()
    ended.touch()
    if first:
        time.sleep(600)
"""


@thorough
@pytest.mark.usefixtures("kept_models")
def test_a_run_that_had_ended_is_run_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_check: Callable[..., Check], pool: Pool
) -> None:
    """Killing what has ended tries nothing: the run after it would take all from the folder's files."""
    ended = tmp_path / "ended"
    monkeypatch.setattr(resuming, "DETGEN", (sys.executable, "-c", LINGERING, str(ended)))
    count = resuming.KeptSamples.count
    seen: list[int] = []

    def late(self: resuming.KeptSamples) -> int:
        """Looks at the first run when it has ended, and at the second in time."""
        seen.append(count(self) if ended.exists() else 0)
        return seen[-1]

    monkeypatch.setattr(resuming.KeptSamples, "count", late)
    check = make_check(pool)
    check.learn()
    result = check.run([Setting(batch=2, drafter="ngram", process="resumed", prefix_cache="cold")])
    assert result.failures == []
    assert result.kills == 1
    assert max(seen) > seen[-1] > 0  # the run that was killed in the end had samples to come, the first did not
