"""Choosing compiled from choosing.c and judging.c when detgen was installed, if there was a C compiler.

Promise: the tokens, leads and log-probabilities are those of the plain way in `sampling` and `judging`, bit for bit.
Each function returns None where it cannot: there is no build for this processor, or torch is not as it expects.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from detgen.kernels.library import load

_BEST = struct.Struct("=8q")  # `Best` of judging.c
_JUDGED = struct.Struct("=11q")  # `Judged`, likewise
_DRAWS = struct.Struct("=17q")  # `Draws` of choosing.c
_LANES = {"AVX512": 16, "AVX2": 8}  # entries of torch's vectors
_STEP = 4099  # between the numbers at which the exponential is checked when it is first used
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


def best(logits: torch.Tensor) -> tuple[torch.Tensor, np.ndarray] | None:
    """The largest entry of each row, the first one of ties, int64 [rows], and its lead, float64 [rows].

    Args:
        logits: [rows, vocabulary].
    """
    library = _library() if _fits(logits) else None
    if library is None:
        return None
    tokens, leads = torch.empty(len(logits), dtype=torch.int64), np.empty(len(logits))
    library.best(_BEST.pack(*_rows(logits, None, logits.numel() > _LARGE), tokens.data_ptr(), leads.ctypes.data))
    return tokens, leads


def chosen_logprobs(logits: torch.Tensor, tokens: torch.Tensor, rows: np.ndarray | None) -> np.ndarray | None:
    """Log-probabilities of the rows' tokens, float32 [rows].

    Args:
        logits: [all rows, vocabulary].
        tokens: int64 [all rows].
        rows: int64 [rows], which are wanted; None for all.
    """
    torch_has = _of_torch() if _fits(logits) else None
    return None if torch_has is None else _judge(torch_has, logits, tokens, rows)


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
) -> Candidates | None:
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
    library = _library() if _fits(logits) else None
    if library is None:
        return None
    count, most = len(temperature), library.candidates()
    ids, words = np.empty((count, most), np.int64), np.empty((count, most), np.uint64)
    found, peaks = np.empty(count, np.int64), np.empty(count, np.float32)
    arrays = temperature, top_p, floor, top_k, seed, sample, position, ids, words, found, peaks
    several = count > 1 and count * logits.shape[1] > _LARGE // 4
    library.draws(_DRAWS.pack(*_rows(logits, rows, several), *(x.ctypes.data for x in arrays)))
    kept = np.arange(most) < found[:, None]
    return Candidates(found, ids[kept], words[kept], peaks)


@cache
def _library() -> ctypes.CDLL | None:
    """The library; None if it is missing or built for another processor or version."""
    return load("_choosing", best_bytes=_BEST.size, judged_bytes=_JUDGED.size, draws_bytes=_DRAWS.size)


@cache
def _of_torch() -> tuple[ctypes.CDLL, int, int, int] | None:
    """The library, the addresses of torch's own vector exponential and logarithm, and entries of its vectors.

    None where torch does not have them, or where log-probabilities do not come out as torch's.
    """
    library, lanes = _library(), _LANES.get(torch.backends.cpu.get_cpu_capability())
    if library is None or lanes is None:
        return None
    try:
        own = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        functions = [getattr(own, f"Sleef_{name}f{lanes}_u10") for name in ("exp", "log")]
    except (OSError, AttributeError):
        return None
    exponential, logarithm = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in functions)
    if not same_exponential(library, exponential, lanes, _STEP):
        return None
    found = library, exponential, logarithm, lanes
    random, spreads = np.random.default_rng(0), np.geomspace(0.1, 30, 64)[:, None]
    for width in (1, lanes - 1, lanes, 5 * lanes + 3, 4099):
        logits = torch.from_numpy((spreads * random.standard_normal((64, width))).astype(np.float32))
        tokens = logits.argmax(-1)
        expected = torch.log_softmax(logits, -1).gather(-1, tokens[:, None])[:, 0].numpy()
        given = _judge(found, logits, tokens, None)
        if given is None or given.tobytes() != expected.tobytes():
            return None
    return found


def same_exponential(library: ctypes.CDLL, exponential: int, lanes: int, step: int) -> bool:
    """Whether the compiled exponential has the bits of torch's at every step-th float32 up to 0."""
    return bool(library.same_exponential(ctypes.c_void_p(exponential), ctypes.c_int64(lanes), ctypes.c_int64(step)))


def _judge(
    torch_has: tuple[ctypes.CDLL, int, int, int], logits: torch.Tensor, tokens: torch.Tensor, rows: np.ndarray | None
) -> np.ndarray | None:
    library, *functions = torch_has
    chosen = np.empty(len(logits) if rows is None else len(rows), np.float32)
    given = _rows(logits, rows, len(chosen) * logits.shape[1] > _LARGE)
    done = library.judge(_JUDGED.pack(*given, tokens.data_ptr(), chosen.ctypes.data, *functions))
    return chosen if done else None


def _fits(logits: torch.Tensor) -> bool:
    """Whether rows are as the compiled functions take them."""
    return (
        logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(1) == 1 and logits.numel() > 0
    )


def _rows(logits: torch.Tensor, rows: np.ndarray | None, several: bool) -> tuple[int, ...]:
    """`Rows` of rows.h; `several`: whether threads share the work."""
    place, count = (0, len(logits)) if rows is None else (rows.ctypes.data, len(rows))
    threads = torch.get_num_threads() if several else 1
    return logits.data_ptr(), place, logits.stride(0), count, logits.shape[1], threads
