"""Counter-based noise: it depends on the vocabulary entry and position, not on who draws it or what was drawn before.

Entry j at position t is word j of the Philox4x64-10 stream with key (seed, sample) and counter (j // 4, t, 0, 0)
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

import sys

import numpy as np

from detgen.program.fdlibm import logarithm

_SKIP = 1000  # words that can be drawn in the time of one skip
_LOG_OF_HALF = np.float32(32 * np.log(2))  # log of the range of half a word
_HIGH = 1 if sys.byteorder == "little" else 0  # index of the upper half of a word


def words(seed: int, sample: int, position: int, ids: np.ndarray | int) -> np.ndarray:
    """Return random words of vocabulary entries, uint64 [n].

    Args:
        seed: seed of the request.
        sample: index of the request's sample.
        position: position in the completion.
        ids: the entries, int64 [n], ascending, at least one; or n, for the first n entries.
    """
    counter = ((position << 64) - 1) % (1 << 256)  # numpy steps it before the first block
    generator = np.random.Philox(counter=counter, key=(sample << 64) | seed)
    if isinstance(ids, int):
        return generator.random_raw(ids)
    if len(ids) * _SKIP > ids[-1]:
        drawn: np.ndarray = generator.random_raw(int(ids[-1]) + 1)[ids]
        return drawn
    found = np.empty(len(ids), dtype=np.uint64)
    block = 0
    for i, entry in enumerate(ids.tolist()):
        generator.advance(entry // 4 - block)
        found[i] = generator.random_raw(4)[entry % 4]
        block = entry // 4 + 1
    return found


def gumbel(words: np.ndarray) -> np.ndarray:
    """Return Gumbel(0, 1) noise made from random words, float64 [n]."""
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -logarithm(-logarithm(np.minimum(uniform, 1 - 2.0**-53)))


def most_gumbel(words: np.ndarray) -> np.ndarray:
    """Return an upper bound of `gumbel` up to 1e-5, float32, at less than half the cost.

    With u uniform, -log(-log(u)) is at most -log(1 - u); the upper half of a word gives a lower bound of 1 - u.
    """
    halves: np.ndarray = (~words.view(np.uint32)[..., _HIGH::2]).astype(np.float32)
    halves += np.float32(2.0**-24)  # for 0, which means at least 2 ** -22; rounded away on others
    bound: np.ndarray = _LOG_OF_HALF - np.log(halves, out=halves)
    return bound
