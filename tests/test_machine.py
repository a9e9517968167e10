from __future__ import annotations

import sys

import numpy as np
import pytest

from detgen.machine import cpu_name, forget_peak_memory, peak_memory


def test_the_processor_has_a_name() -> None:
    assert cpu_name()


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are forgotten on Linux only")
def test_a_peak_lasts_until_it_is_forgotten() -> None:
    forget_peak_memory()
    before = peak_memory()
    assert 10 << 20 < before < 1 << 40
    np.ones(16 << 20)  # 128 MiB, freed at once
    assert peak_memory() > before + (100 << 20)
    forget_peak_memory()
    assert peak_memory() < before + (64 << 20)
