"""Choosing by native/choosing.c and judging.c.

Promise: the tokens and leads are those of `sampling.scores`, bit for bit; log-probabilities are those of
docs/numerics.md. Logits are float32 on the CPU.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from detgen.errors import EngineError
from detgen.kernels.native.library import REINSTALL, best_build

_BEST = struct.Struct("=8q")  # `Best` of native/judging.c
_JUDGED = struct.Struct("=9q")  # `Judged`, likewise
_DRAWS = struct.Struct("=17q")  # `Draws` of native/draws.h
_HOW = "temperature", "top_p", "floor", "top_k", "seed", "sample", "position"  # in its order
_LARGE = 1 << 20  # entries from which rows are divided among threads where each takes little


class Candidates(NamedTuple):
    """The entries of some sampled rows that can have a row's two best scores.

    Attributes:
        found: int64 [rows], how many; 0 where a row's largest logit is not finite, -1 where they could not be told.
        ids: int64 [sum of those above 0], ascending in each row.
        words: uint64, their random words.
        peaks: float32 [rows], the largest logits.
    """

    found: np.ndarray
    ids: np.ndarray
    words: np.ndarray
    peaks: np.ndarray


def best(logits: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
    """The largest entry of each row, the first one of ties, int64 [rows], and its lead, float64 [rows].

    Args:
        logits: [rows, vocabulary].
    """
    logits = _by_rows(logits)
    tokens, leads = torch.empty(len(logits), dtype=torch.int64), np.empty(len(logits))
    _library().best(_BEST.pack(*_rows(logits, None, logits.numel() > _LARGE), tokens.data_ptr(), leads.ctypes.data))
    return tokens, leads


def logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, rows: np.ndarray | None, *, full: bool
) -> tuple[np.ndarray, torch.Tensor | None]:
    """Log-probabilities of the rows' tokens, float32 [rows], and of all entries, float32 [rows, vocabulary].

    Args:
        logits: [all rows, vocabulary].
        tokens: int64 [all rows].
        rows: int64 [rows], which are wanted; None for all.
        full: whether those of all entries are wanted.
    """
    logits = _by_rows(logits)
    count = len(logits) if rows is None else len(rows)
    chosen = np.empty(count, np.float32)
    every = torch.empty(count, logits.shape[1]) if full else None
    given = _rows(logits, rows, count * logits.shape[1] > _LARGE)
    _library().judge(
        _JUDGED.pack(*given, tokens.data_ptr(), chosen.ctypes.data, 0 if every is None else every.data_ptr())
    )
    return chosen, every


class Draws(NamedTuple):
    """How the tokens of some sequences are sampled, for passes that go on with what is likely to be chosen.

    Attributes:
        packed: `Draws` of native/draws.h.
        arrays: what it points to.
    """

    packed: bytes
    arrays: tuple[np.ndarray, ...]


def draws(vocabulary: int, **how: np.ndarray) -> Draws:
    """That of rows of so many logits, of which `how` tells what `draw` is told."""
    arrays = tuple(how[name] for name in _HOW)
    given = (0, 0, vocabulary, len(arrays[0]), vocabulary, 1)
    return Draws(_DRAWS.pack(*given, *(x.ctypes.data for x in arrays), 0, 0, 0, 0), arrays)


def draw(
    logits: torch.Tensor,
    rows: np.ndarray,
    *,
    temperature: np.ndarray,
    top_p: np.ndarray,
    floor: np.ndarray,
    top_k: np.ndarray,
    seed: np.ndarray,
    sample: np.ndarray,
    position: np.ndarray,
) -> Candidates:
    """The candidates of sampled rows.

    Args:
        logits: [all rows, vocabulary].
        rows: int64 [rows], which are sampled.
        temperature: float64 [rows], above 0.
        top_p: float64, 1 for none.
        floor: float64, the logarithm of min_p, -inf for none.
        top_k: int64, 0 for none.
        seed: uint64, like sample and position.
        sample: of the request.
        position: in the completion.
    """
    library, logits = _library(), _by_rows(logits)
    count, most = len(temperature), library.candidates()
    ids, words = np.empty((count, most), np.int64), np.empty((count, most), np.uint64)
    found, peaks = np.empty(count, np.int64), np.empty(count, np.float32)
    arrays = temperature, top_p, floor, top_k, seed, sample, position, ids, words, found, peaks
    several = count > 1 and count * logits.shape[1] > _LARGE // 4
    library.draws(_DRAWS.pack(*_rows(logits, rows, several), *(x.ctypes.data for x in arrays)))
    kept = np.arange(most) < found[:, None]
    return Candidates(found, ids[kept], words[kept], peaks)


@cache
def _library() -> ctypes.CDLL:
    """The library.

    Raises:
        EngineError: if it is missing, or was built by another version.
    """
    found = best_build()
    if (found.best_bytes(), found.judged_bytes(), found.draws_bytes()) != (_BEST.size, _JUDGED.size, _DRAWS.size):
        raise EngineError(f"detgen's compiled library is of another version: {REINSTALL}")
    return found


def _by_rows(logits: torch.Tensor) -> torch.Tensor:
    """The same, the entries of a row side by side."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _rows(logits: torch.Tensor, rows: np.ndarray | None, several: bool) -> tuple[int, ...]:
    """`Rows` of logits.h; `several`: whether threads share the work."""
    assert logits.device.type == "cpu"
    assert logits.dtype == torch.float32
    place, count = (0, len(logits)) if rows is None else (rows.ctypes.data, len(rows))
    threads = torch.get_num_threads() if several else 1
    return logits.data_ptr(), place, logits.stride(0), count, logits.shape[1], threads
