"""Weights in panels: every number stands where it is read, on every build, by any number of threads."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.threads import using
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels.c import panels as module
from detgen.kernels.c.library import BUILDS, build
from detgen.kernels.c.panels import arranged, panels
from detgen.kernels.c.quantizing import Quantized, empty
from detgen.program.arrays import BFLOAT16, FLOAT16, FLOAT32, same_bits, tensor
from detgen.program.operands import Scales
from detgen.program.storage import FORMATS, Storage, bf16, unpack

LIBRARIES = {name: library for name in BUILDS if (library := build(name)) is not None}
FLOATS = {Storage.FLOAT: FLOAT32, Storage.BFLOAT: BFLOAT16, Storage.HALF: FLOAT16}


def drawn(storage: Storage, outputs: int, inputs: int, seed: int) -> np.ndarray:
    """Whole numbers as a format has them, all of them likely."""
    random, made = np.random.default_rng(seed), FORMATS[storage]
    numbers = made.levels or range(made.least, made.least + (1 << made.bits))
    return random.choice(np.array(numbers, np.int8), (outputs, inputs))


def columns_of(parts: list[np.ndarray], columns: int) -> np.ndarray:
    """What a panel has, [panels, inputs, 32], in numpy."""
    if columns == 32:
        parts = [np.concatenate(parts)]
    padded = [np.pad(x, ((0, -len(x) % columns), (0, 0))) for x in parts]
    return np.concatenate([x.reshape(-1, columns, x.shape[1]) for x in padded], 1).swapaxes(1, 2)


@pytest.mark.parametrize("name", LIBRARIES)
@given(
    storage=st.sampled_from(Storage),
    outputs=st.integers(1, 70),
    groups=st.integers(1, 9),
    count=st.integers(1, 2),
    columns=st.sampled_from([16, 32]),
    threads=st.integers(1, 3),
    apart=st.integers(0, 3),
)
def test_every_number_is_where_it_is_read(
    name: str, storage: Storage, outputs: int, groups: int, count: int, columns: int, threads: int, apart: int
) -> None:
    """Rows may be apart in memory; of a gate and what it opens, or of one or two behind each other."""
    count, inputs = 2 if columns == 16 else count, 32 * groups
    if storage >= Storage.BYTE:
        wide = [drawn(storage, outputs, inputs + apart, i) for i in range(count)]
    else:
        random = np.random.default_rng(outputs)
        numbers = random.standard_normal((count, outputs, inputs + apart), np.float32)
        with np.errstate(over="ignore"):
            sizes = np.exp2(np.arange(-90, inputs + apart - 90), dtype=np.float32)
            wide = [(x * sizes).astype(FLOATS.get(storage, BFLOAT16)) for x in numbers]
    parts = [x[:, apart:] for x in wide]
    with using(threads), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "best_build", lambda: LIBRARIES[name])
        stored = arranged(parts, columns, empty, storage, FORMATS[storage].least)
        plain = arranged(parts, columns, empty)
    want = columns_of(parts, columns)
    assert same_bits(plain, want)
    if storage in FLOATS:
        assert same_bits(stored, plain)
    elif storage.paired:
        assert same_bits(unpack(storage, tensor(stored)), bf16(tensor(want)))
    else:
        none = np.int8((FORMATS[storage].levels or [0])[0])
        there = columns_of([np.ones_like(x) for x in parts], columns) != 0
        found = unpack(storage, tensor(stored), FORMATS[storage].least)
        assert same_bits(found, np.where(there, want, none))


def test_scales_stand_in_panels_as_weights_do() -> None:
    steps = np.arange(40 * 2, dtype=np.int8).reshape(40, 2)
    units = np.arange(40, dtype=np.float16)[:, None]
    few = Quantized(drawn(Storage.SIX, 40, 64, 1), Scales(steps=steps, units=units, storage=Storage.BYTE), Storage.SIX)
    found = panels([few, few]).scales
    assert found is not None
    assert found.units is not None
    assert same_bits(found.steps[1, :, 8:16], steps[:8].T)
    assert same_bits(found.units[2, 0], np.pad(units[24:, 0], (0, 16)))
