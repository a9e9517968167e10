from __future__ import annotations

import mmap
import sys

import pytest

from detgen.machine import cpu_name, forget_peak_memory, peak_memory


def test_the_processor_has_a_name() -> None:
    assert cpu_name()


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are forgotten on Linux only")
def test_a_peak_lasts_until_it_is_forgotten() -> None:
    forget_peak_memory()
    before = peak_memory()
    assert 10 << 20 < before < 1 << 40
    with mmap.mmap(-1, 128 << 20) as block:  # and given back at once, which an allocator might not do
        for _ in range(128):
            block.write(bytes(1 << 20))
    assert peak_memory() > before + (100 << 20)
    forget_peak_memory()
    assert peak_memory() < before + (64 << 20)
