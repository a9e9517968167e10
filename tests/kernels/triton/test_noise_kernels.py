"""Random words in Triton are numpy's, and the noise made of them has the bits of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

import triton
import triton.language as tl
from helpers.examples import examples

from detgen.kernels import noise as reference
from detgen.kernels.triton.launching import OPTIONS
from detgen.kernels.triton.noise_kernels import gumbel, most_gumbel, word_of, words_of

WORD = 2**64 - 1


@triton.jit
def _draw(key, first, out, single, entries, BLOCKS: tl.constexpr):  # noqa: N803
    seed, sample = tl.load(key).to(tl.uint64, bitcast=True), tl.load(key + 1).to(tl.uint64, bitcast=True)
    position = tl.load(key + 2).to(tl.uint64, bitcast=True)
    at = tl.arange(0, BLOCKS)
    words = words_of(seed, sample, position, first + at, BLOCKS)
    tl.store(out + 4 * at[:, None] + tl.arange(0, 4)[None, :], words.to(tl.int64, bitcast=True))
    entry = tl.load(entries + at)
    tl.store(single + at, word_of(seed, sample, position, entry).to(tl.int64, bitcast=True))


def draw(seed: int, sample: int, position: int, first: int, entries: np.ndarray, device: str) -> list[np.ndarray]:
    """The words of 64 entries from 4 * first on, and those of 16 others."""
    key = torch.from_numpy(np.array([seed, sample, position], np.uint64).view(np.int64)).to(device)
    out, single = (torch.empty(n, dtype=torch.int64, device=device) for n in (64, 16))
    _draw[(1,)](key, first, out, single, torch.from_numpy(entries).to(device), 16, **OPTIONS)
    return [x.cpu().numpy().view(np.uint64) for x in (out, single)]


NUMBERS = st.one_of(st.integers(0, WORD), st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63, WORD - 1, WORD]))


@examples(20)
@given(seed=NUMBERS, sample=NUMBERS, position=NUMBERS, first=st.integers(0, 2**16), number=st.integers(0, 2**20))
def test_words_are_those_of_numpy(device: str, seed: int, sample: int, position: int, first: int, number: int) -> None:
    entries = np.random.default_rng(number).choice(2**18, 16, replace=False).astype(np.int32)
    found, single = draw(seed, sample, position, first, entries, device)
    assert np.array_equal(found, reference.words(seed, sample, position, 4 * first + np.arange(64)))
    order = np.argsort(entries)
    assert np.array_equal(single[order], reference.words(seed, sample, position, entries[order].astype(np.int64)))


def test_edges_of_all_arguments(device: str) -> None:
    """The largest of each, where an additional bit would be lost."""
    entries = np.arange(2**31 - 16, 2**31, dtype=np.int64).astype(np.int32)
    for key in ((WORD, WORD, WORD), (0, 0, 0), (WORD, 0, 2**63), (2**63, WORD, 1)):
        found, single = draw(*key, 2**29 - 16, entries, device)
        assert np.array_equal(found, reference.words(*key, np.arange(2**31 - 64, 2**31)))
        assert np.array_equal(single, found[-16:])


@triton.jit
def _make(words, noise, bounds, SIZE: tl.constexpr):  # noqa: N803
    at = tl.arange(0, SIZE)
    word = tl.load(words + at).to(tl.uint64, bitcast=True)
    tl.store(noise + at, gumbel(word))
    tl.store(bounds + at, most_gumbel(word))


def make(words: np.ndarray, device: str) -> tuple[np.ndarray, np.ndarray]:
    """Noise and bounds of 1,024 words."""
    noise = torch.empty(1024, dtype=torch.float64, device=device)
    bounds = torch.empty(1024, dtype=torch.float32, device=device)
    _make[(1,)](torch.from_numpy(words.view(np.int64)).to(device), noise, bounds, 1024, **OPTIONS)
    return noise.cpu().numpy(), bounds.cpu().numpy()


@pytest.mark.parametrize("seed", range(3))
def test_noise_has_the_same_bits(device: str, seed: int) -> None:
    """Words at both ends among them: the last would be 1, whose noise is infinite."""
    words = np.random.default_rng(seed).integers(0, WORD, 1024, np.uint64, endpoint=True)
    near = np.arange(100, dtype=np.uint64)
    words[:400] = np.concatenate([near, WORD - near, near << np.uint64(11), WORD - (near << np.uint64(32))])
    noise, bounds = make(words, device)
    wanted = reference.gumbel(words)
    assert noise.tobytes() == wanted.tobytes()
    assert np.isfinite(noise).all()
    assert noise.max() < 37
    assert (wanted <= bounds + 1e-5).all()
    assert np.allclose(bounds, reference.most_gumbel(words), rtol=1e-6, atol=1e-6)
