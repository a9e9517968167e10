"""What `detgen doctor` finds, on machines that lack something."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from detgen.cli import app
from detgen.doctor import Finding, examining
from detgen.kernels.c import library


def test_this_machine_is_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It generates; what is shown has a line for each thing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    for name in ("detgen", "processor", "memory", "model cache", "hub cache", "build", "generation"):
        assert f"\n{name} " in f"\n{done.output}"
    assert "with and without drafts the same text" in done.output


def test_what_is_broken_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Finding("a", "well"), Finding("b", "lacking", "type this"), Finding("c", "gone", "type that", broken=True)]
    monkeypatch.setattr("detgen.doctor.examine", lambda: iter(found))
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "-> type this" in done.output
    quiet = CliRunner().invoke(app, ["doctor", "-q"])
    assert "lacking" not in quiet.output
    assert "gone" in quiet.output


def test_a_library_that_is_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        examining, "requires", lambda name: ["torch>=99", "no-such-thing>=1", "rich", "other>=2; extra == 'ray'"]
    )
    broken, extra = examining._libraries()
    assert broken.broken
    assert broken.remedy == "pip install 'torch>=99' 'no-such-thing>=1'"
    assert (extra.broken, extra.remedy) == (False, "pip install 'other>=2'")


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = examining._folder("hub cache", tmp_path / "not" / "made", "nothing can be fetched", "HF_HOME")
    assert "cannot be written: nothing can be fetched" in found.what
    assert found.remedy == "export HF_HOME=FOLDER, one that you can write"


def test_a_build_that_was_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.CHOICE, raising=False)
    monkeypatch.setattr(examining, "_flags", lambda: {"avx512_bf16", "avx2"})
    monkeypatch.setattr(library, "build", lambda name: object() if name in ("avx2", "plain") else None)
    found = examining._build()
    assert "avx2 runs" in found.what
    assert "bf16, which would be faster" in found.what
    monkeypatch.setenv(library.CHOICE, "plain")
    assert examining._build().remedy == f"unset {library.CHOICE}"
    monkeypatch.delenv(library.CHOICE)
    monkeypatch.setattr(library, "build", lambda name: None)
    assert examining._build().broken
    assert "reinstall" in str(examining._build().remedy)


def test_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 29, total=1 << 33))
    assert "detgen models" in str(examining._memory().remedy)


def test_an_engine_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.CHOICE, "nonsense")
    assert examining._generation().broken
