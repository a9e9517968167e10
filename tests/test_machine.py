from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest

from detgen.machine import cpu_name, forget_peak_memory, on_network, peak_memory, size


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


def test_a_network_file_system_is_known_by_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not on_network(tmp_path / "new")
    device = tmp_path.stat().st_dev
    for kind, expected in (("ext4", False), ("nfs4", True), ("fuse.sshfs", True), ("fuse.portal", False)):
        line = f"29 1 {os.major(device)}:{os.minor(device)} / / rw shared:1 - {kind} server:/x rw\n"
        monkeypatch.setattr(Path, "read_text", lambda path, line=line: f"30 1 0:1 / /x rw - nfs y rw\n{line}")
        assert on_network(tmp_path / "new") == expected
    monkeypatch.setattr(Path, "read_text", lambda path: (_ for _ in ()).throw(OSError))
    assert not on_network(tmp_path)


def test_size() -> None:
    assert [size(number) for number in (12, 2048, 412 * 2**20, 3 * 2**40)] == [
        "12 bytes",
        "2.0 KiB",
        "412.0 MiB",
        "3072.0 GiB",
    ]
