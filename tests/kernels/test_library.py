"""What was compiled is taken where it was built for this processor and this version, and done without elsewhere."""

from __future__ import annotations

import ctypes
from struct import Struct
from types import ModuleType

import pytest

from detgen.kernels import choosing, compiled, library

LIBRARIES = pytest.mark.parametrize(("module", "structure"), [(compiled, "_PASS"), (choosing, "_DRAWS")])


@LIBRARIES
def test_a_build_for_another_processor_or_version_is_left_alone(
    module: ModuleType, structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if module._library() is None:
        pytest.skip("it was not built")
    monkeypatch.setattr(library, "_CAPABLE", {bits: {"another"} for bits in (128, 256, 512)})
    assert module._library.__wrapped__() is None
    monkeypatch.setattr(library, "_CAPABLE", {})
    assert module._library.__wrapped__() is not None
    monkeypatch.setattr(module, structure, Struct("=2q"))
    assert module._library.__wrapped__() is None


@LIBRARIES
def test_a_library_that_cannot_be_loaded_is_left_alone(
    module: ModuleType, structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> ctypes.CDLL:
        raise OSError("built for another system")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert module._library.__wrapped__() is None


def test_a_library_of_an_older_version_is_left_alone() -> None:
    """One that lacks a function, and one that is not there."""
    assert library.load("_attention", bytes_of_what_came_later=8) is None
    assert library.load("_never_built") is None
