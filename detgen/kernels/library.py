"""Finding what was compiled from C when detgen was installed, if there was a C compiler."""

from __future__ import annotations

import ctypes
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

# By vector width in bits: the CPU capabilities, as torch names them, that can run it.
_CAPABLE = {512: {"AVX512"}, 256: {"AVX512", "AVX2"}}


def load(name: str, **sizes: int) -> ctypes.CDLL | None:
    """A library; None if it is missing or built for another processor or version.

    Args:
        name: of its file, from this folder on and without the suffix.
        sizes: bytes of the structures that it takes, by the name of its function that says them.
    """
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).parent / f"{name}{suffix}"
        if not path.is_file():
            continue
        try:
            library = ctypes.CDLL(str(path))
            found, bits = {function: library[function]() for function in sizes}, library.vector_bits()
        except (OSError, AttributeError):  # built for another system, another OpenMP or by an older version
            continue
        if found == sizes and (bits not in _CAPABLE or torch.backends.cpu.get_cpu_capability() in _CAPABLE[bits]):
            return library
    return None
