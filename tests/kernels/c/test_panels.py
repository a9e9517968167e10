"""Weights in panels: every number stands where it is read, on every build, by any number of threads."""

from __future__ import annotations

import pytest
import torch
from helpers.threads import using
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels.bits import same_bits
from detgen.kernels.c import panels as module
from detgen.kernels.c.library import BUILDS, build
from detgen.kernels.c.panels import arranged, panels
from detgen.kernels.c.quantizing import Quantized
from detgen.program.operands import Scales
from detgen.program.storage import FORMATS, Storage, bf16, unpack

LIBRARIES = {name: library for name in BUILDS if (library := build(name)) is not None}
FLOATS = {Storage.FLOAT: torch.float32, Storage.BFLOAT: torch.bfloat16, Storage.HALF: torch.float16}


def drawn(storage: Storage, outputs: int, inputs: int, seed: int) -> torch.Tensor:
    """Whole numbers as a format has them, all of them likely."""
    random, made = torch.Generator().manual_seed(seed), FORMATS[storage]
    if made.levels:
        return torch.tensor(made.levels)[torch.randint(0, 16, (outputs, inputs), generator=random)].to(torch.int8)
    most = made.least + (1 << made.bits)
    return torch.randint(made.least, most, (outputs, inputs), generator=random).to(torch.int8)


def columns_of(parts: list[torch.Tensor], columns: int) -> torch.Tensor:
    """What a panel has, [panels, inputs, 32], in PyTorch."""
    if columns == 32:
        parts = [torch.cat(parts)]
    padded = [torch.cat([x, x.new_zeros(-len(x) % columns, x.shape[1])]) for x in parts]
    return torch.cat([x.unflatten(0, (-1, columns)) for x in padded], 1).transpose(1, 2)


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
        random = torch.Generator().manual_seed(outputs)
        numbers = [torch.randn(outputs, inputs + apart, generator=random) for _ in range(count)]
        wide = [
            (x * 2.0 ** torch.arange(-90, inputs + apart - 90)).to(FLOATS.get(storage, torch.bfloat16)) for x in numbers
        ]
    parts = [x[:, apart:] for x in wide]
    with using(threads), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "best_build", lambda: LIBRARIES[name])
        stored = arranged(parts, columns, torch.empty, storage, FORMATS[storage].least)
        plain = arranged(parts, columns, torch.empty)
    want = columns_of(parts, columns)
    assert same_bits(plain, want.contiguous())
    if storage in FLOATS:
        assert same_bits(stored, plain)
    elif storage is Storage.PAIR:
        assert same_bits(unpack(storage, stored), bf16(want))
    else:
        none = torch.tensor(FORMATS[storage].levels[:1] or [0], dtype=torch.int8)
        there = columns_of([torch.ones_like(x) for x in parts], columns) != 0
        assert torch.equal(unpack(storage, stored, FORMATS[storage].least), torch.where(there, want, none))


def test_scales_stand_in_panels_as_weights_do() -> None:
    steps = torch.arange(40 * 2, dtype=torch.int8).view(40, 2)
    units = torch.arange(40).half()[:, None]
    few = Quantized(drawn(Storage.SIX, 40, 64, 1), Scales(steps=steps, units=units, storage=Storage.BYTE), Storage.SIX)
    found = panels([few, few]).scales
    assert found is not None
    assert torch.equal(found.steps[1, :, 8:16], steps[:8].T)
    assert torch.equal(found.units[2, 0], torch.nn.functional.pad(units[24:, 0], (0, 16)))
