"""Compares packed rows with the model's own forward deep in a sequence, beyond windows, chunks and the like.

What comes before these rows is made up: pages of random keys and values, different for near and far positions, so that
a row that sees farther than in the model's own forward, or less far, gives another result. So a depth of thousands of
positions takes a pass of a few rows. If nothing can be made up, the rows follow a text.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from detgen.kernels.input_batch import Window
from detgen.models.own_forward import Depth
from detgen.program.arrays import Array
from detgen.runner.block_manager import PAGE
from detgen.runner.model_runner import ModelRunner
from detgen.runner.reference import check_logits

ROWS = 8
ROOM = 6  # least pages of a cache
PAGES = 4  # made-up pages: for the farther half of what is before, for the farther half of the rest, and so on


def entries(shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return made-up pages: keys and values, float32 [pages, PAGE, kv_heads, size]; values lean one way in each."""
    heads, *sizes = shape
    maker = np.random.default_rng(22)
    keys, values = (maker.standard_normal((PAGES, PAGE, heads, size), np.float32) for size in sizes)
    return keys, values + 2 * maker.standard_normal((PAGES, 1, heads, sizes[1]), np.float32)


def check_depth(runner: ModelRunner, depth: Depth) -> None:
    """Compare packed rows with the model's own forward; clears the cache.

    Args:
        runner: the model's passes.
        depth: results of its own forward.

    Raises:
        EngineError: if they differ by more than rounding explains.
    """
    with runner.decoder.exactly():
        found = deep_rows(runner, depth)
    check_logits(runner, found, depth.logits, f" at position {depth.at + len(depth.tokens) - ROWS:,}")


def deep_rows(runner: ModelRunner, depth: Depth) -> Array:
    """Return logits of the same rows by a packed pass, float32 [rows, vocabulary]; clears the cache."""
    return _after_pages(runner, depth) if depth.pages else _after_text(runner, depth)


def _after_text(runner: ModelRunner, depth: Depth) -> Array:
    runner.cache.pages.lay_out(1, len(depth.tokens))
    return runner.run([Window(0, 0, depth.tokens, ROWS)])


def _after_pages(runner: ModelRunner, depth: Depth) -> Array:
    cache = runner.cache
    *whole, cut = depth.pages
    cache.pages.lay_out_one([*whole, PAGES, PAGES + 1])  # the page that is written to is not used elsewhere
    at = np.arange((PAGES + 1) * PAGE)

    @lru_cache  # most layers have the same shapes
    def made(shape: tuple[int, int, int]) -> list[np.ndarray]:
        found = (np.concatenate([x, x[cut:][:1]]) for x in entries(shape))
        return [x.reshape(len(at), *x.shape[2:]) for x in found]

    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        cache.write(layer, at, *made((values.shape[1], keys.shape[2], values.shape[3])))
    return runner.run([Window(0, depth.at, depth.tokens, ROWS)])
