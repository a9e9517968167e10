from __future__ import annotations

import pytest
from helpers.rows import make_row

from detgen.bench import noise_levels
from detgen.bench.noise_levels import busy_cells, busy_now
from detgen.bench.processor_time import Others


@pytest.fixture(autouse=True)
def _two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_levels, "usable_cores", lambda: 2)


def test_a_busy_machine_is_warned_of_before() -> None:
    (line,) = busy_now(Others(1.6, 4.0))
    assert line.startswith("this machine is busy: other processes take 40% of 2 processors; speeds are lower")
    for quiet in (None, Others(0.3, 4.0), Others(-0.02, 4.0), Others(0.04, 0.1)):
        assert busy_now(quiet) == [], quiet


def test_the_cells_beside_others_work_are_named_with_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        make_row(others=[(0.5, 2.0), (0.7, 2.0)]),
        make_row("detgen auto", others=[(0.0, 2.0), (0.0, 2.0)]),
        make_row(batch_size=1, others=[(0.1, 2.0), (-0.1, 2.0)]),
        make_row(batch_size=16, others=[(2.0, 2.0)]),
        make_row("vllm plain", workload="arxiv"),
    ]
    (line,) = busy_cells(rows)
    assert line.startswith(
        "measured while other processes worked: sample, batch 4 (15% of 2 processors), sample, batch 16 (100% of"
    )
    assert "batch 1 (" not in line
    assert busy_cells(rows[2:3]) == []
    assert busy_cells([]) == []
    monkeypatch.setattr(noise_levels, "usable_cores", lambda: 1)
    assert "batch 4 (15% of the processor)" in busy_cells(rows)[0]


def test_runs_of_a_moment_warn_of_nothing() -> None:
    """What is read of the system is off by some hundredths of a second."""
    assert busy_cells([make_row(others=[(0.01, 0.04), (0.02, 0.04)])]) == []
