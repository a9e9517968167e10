"""What was compiled is taken where it was built for this processor and this version, and done without elsewhere."""

from __future__ import annotations

import ctypes
from struct import Struct
from typing import Any

import pytest

from detgen.errors import EngineError
from detgen.kernels import choosing, library
from detgen.kernels.native import layout
from detgen.kernels.native import library as native


def find() -> Any:
    """The plain build, looked for anew."""
    return native.build.__wrapped__("plain")


def test_a_build_for_another_processor_or_declaration_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    if find() is None:
        pytest.skip("it was not built")
    monkeypatch.setattr(library, "_CAPABLE", {bits: {"another"} for bits in (128, 256, 512)})
    assert find() is None
    monkeypatch.setattr(library, "_CAPABLE", {})
    assert find() is not None
    monkeypatch.setattr(layout, "DIGEST", layout.DIGEST ^ 1)
    assert find() is None


def test_a_library_that_cannot_be_loaded_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> ctypes.CDLL:
        raise OSError("built for another system")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert find() is None


def test_choosing_of_another_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "_DRAWS", Struct("=2q"))
    assert choosing._library.__wrapped__() is None


def test_a_library_of_an_older_version_is_left_alone() -> None:
    """One that lacks a function, and one that is not there."""
    assert library.load("native/_plain", bytes_of_what_came_later=8) is None
    assert library.load("_never_built") is None


def test_a_build_is_taken_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compare bits; another word, and one that this processor cannot run, are refused."""
    if native.build("plain") is None:
        pytest.skip("it was not built")
    monkeypatch.setenv(native.CHOICE, "plain")
    assert native.best_build() is native.build("plain")
    monkeypatch.setenv(native.CHOICE, "")
    assert native.best_build() is not None
    monkeypatch.setenv(native.CHOICE, "sse4")
    with pytest.raises(EngineError, match=r"DETGEN_BUILD is 'sse4'; choose one of avx512, avx2, plain"):
        native.best_build()
    monkeypatch.setenv(native.CHOICE, "avx2")
    monkeypatch.setattr(native, "build", lambda name: None)
    with pytest.raises(EngineError, match="cannot run"):
        native.best_build()
