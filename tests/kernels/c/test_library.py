"""What was compiled is taken where it was built for this processor and this version, and refused elsewhere."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from detgen.errors import EngineError
from detgen.kernels.c import layout
from detgen.kernels.c import library as native


def find() -> Any:
    """The plain build, looked for anew."""
    return native.build.__wrapped__("plain")


def test_a_build_for_another_processor_or_declaration_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class ForAnother(ctypes.CDLL):
        runs_here = staticmethod(lambda: 0)

    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", ForAnother)
        assert find() is None
    assert find() is not None
    monkeypatch.setattr(layout, "DIGEST", layout.DIGEST ^ 1)
    assert find() is None


def test_a_library_that_cannot_be_loaded_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> ctypes.CDLL:
        raise OSError("built for another system")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert find() is None


def test_no_library_is_one_line_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.CHOICE, raising=False)
    monkeypatch.setattr(native, "build", lambda name: None)
    with pytest.raises(EngineError, match=r"compiled library is missing, .*: reinstall detgen") as caught:
        native.best_build()
    assert "\n" not in str(caught.value)


def test_a_build_is_taken_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compare bits; another word, and one that this processor cannot run, are refused."""
    monkeypatch.setenv(native.CHOICE, "plain")
    assert native.best_build() is native.build("plain")
    monkeypatch.setenv(native.CHOICE, "")
    assert native.best_build()
    monkeypatch.setenv(native.CHOICE, "sse4")
    with pytest.raises(
        EngineError, match=r"DETGEN_BUILD is 'sse4'; choose one of bf16, vnni, avx512, avxvnni, avx2, dotprod, plain"
    ):
        native.best_build()
    monkeypatch.setenv(native.CHOICE, "avx2")
    monkeypatch.setattr(native, "build", lambda name: None)
    with pytest.raises(EngineError, match="cannot run"):
        native.best_build()
