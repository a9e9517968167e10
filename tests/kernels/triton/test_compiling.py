"""Every kernel compiles for GPUs that are not there, of exact instructions, and spills next to nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from detgen.program.storage import Storage

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes of a block
SPILLED = 32  # bytes of a thread's stack: Triton 3.6 to 3.8 spill up to 24 in the longest kernels, 3.9 none

# Registers of a thread and bytes of shared memory of a block, at the shapes of Llama-3.1-8B: for Ampere,
# and for what came after it. What takes much more has become slower.
KEPT = {
    "attend: sections": ((164, 4096), (148, 2048)),
    "attend: sections, capped and sloped": ((231, 8192), (218, 2048)),
    "attend: joined": ((55, 0), (62, 0)),
    "linear, float, 16 rows": ((64, 4096), (56, 2048)),
    "linear, bfloat, 1 rows": ((32, 0), (32, 0)),
    "linear, pair, 16 rows": ((72, 4096), (64, 2048)),
    "linear, byte, 16 rows": ((80, 5120), (72, 5120)),
    "gated, nibble, 16 rows": ((128, 11264), (128, 11264)),
    "linear, code, 16 rows": ((72, 4096), (64, 2048)),
    "experts, nibble, 16 rows": ((96, 7168), (80, 7168)),
    "experts, clamped, micro, 16 rows": ((149, 4096), (96, 4096)),
    "experts, clamped, bfloat, 16 rows": ((72, 4096), (72, 4096)),
    "linear, two, 16 rows": ((127, 4096), (106, 4096)),
    "linear, three, 16 rows": ((128, 4096), (107, 4096)),
    "linear, five, 16 rows": ((124, 4096), (96, 4096)),
    "linear, six, 16 rows": ((128, 4096), (107, 4096)),
    "linear, level, 16 rows": ((96, 4096), (72, 4096)),
    "narrow": ((21, 0), (24, 0)),
    "round": ((40, 1024), (40, 1024)),
    "norm": ((40, 1024), (32, 1024)),
    "layer norm": ((40, 1024), (40, 1024)),
    "softmax": ((40, 1024), (56, 1024)),
    "sum": ((32, 1024), (32, 1024)),
    "route": ((32, 128), (40, 128)),
    "route: groups": ((56, 4096), (56, 4096)),
    "embed": ((14, 0), (16, 0)),
    "embed: pairs": ((16, 0), (18, 0)),
    "embed: columns": ((30, 0), (29, 0)),
    "copy: taken": ((16, 0), (18, 0)),
    "copy: gated": ((21, 0), (19, 0)),
    "copy: GELU": ((23, 0), (22, 0)),
    "copy: GELU by tanh": ((25, 0), (25, 0)),
    "copy: 1 / root": ((19, 0), (20, 0)),
    "convolve": ((87, 0), (64, 0)),
    "delta rule": ((64, 0), (48, 0)),
    "state space": ((64, 0), (63, 0)),
    "watch": ((12, 16), (14, 16)),
    "weigh": ((24, 0), (24, 0)),
    "combine": ((32, 0), (31, 0)),
    "rotate, interleaved: False": ((24, 16), (24, 16)),
    "rotate, interleaved: True": ((24, 16), (24, 16)),
    "peaks: blocks": ((32, 512), (32, 512)),
    "peaks: rows": ((40, 64), (47, 64)),
    "choose: read": ((118, 2048), (110, 512)),
    "choose: weigh": ((200, 32), (204, 32)),
    "choose: list": ((96, 2048), (96, 2048)),
    "choose: settle": ((96, 4096), (150, 4096)),
    "choose: score": ((142, 32), (155, 32)),
    "choose: put together": ((32, 64), (40, 64)),
    "given": ((31, 64), (32, 64)),
}
ROOM = 1.3  # times what was kept that a later Triton may take


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, dict[str, Any]]]:
    """By kernel and processor: registers, stack, local and shared memory. Compiled where the interpreter is off."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(run.stdout)
    return found


def test_all_kernels_are_there(compiled: dict[str, dict[str, dict[str, Any]]]) -> None:
    assert set(compiled) == set(KEPT)


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("capability", SHARED)
def test_what_a_kernel_takes(compiled: dict[str, dict[str, dict[str, Any]]], name: str, capability: int) -> None:
    found = compiled[name][str(capability)]
    assert found["stack"] <= SPILLED
    assert found["local"] == 0
    assert found["shared"] <= SHARED[capability]
    registers, shared = KEPT[name][capability >= 90]
    assert found["reg"] <= ROOM * registers
    assert found["shared"] <= ROOM * max(shared, 1024)


@pytest.mark.parametrize("name", KEPT)
def test_each_instruction_rounds_as_ieee_754_says(compiled: dict[str, dict[str, dict[str, Any]]], name: str) -> None:
    """No approximation, no flush to zero; products of matrices are of whole numbers; sums of products are fused where
    it is written.
    """
    found = {name for of in compiled[name].values() for name in of["instructions"]}
    products = {one for one in found if one.startswith("mma.sync.") and one.endswith(".s32.s8.s8.s32")}
    assert bool(products) == any(f" {storage.name.lower()}," in name for storage in Storage if storage.whole)
    found -= products
    if name == "choose: score":
        found -= {"fma.rn.ftz.f32"}  # of a bound, which decides only whose scores are computed
    assert [one for one in found if not re.fullmatch(r"(add|sub|mul|fma|div|sqrt)\.rn\.(f32|f32x2|f64)", one)] == []
    if name.startswith(("linear", "gated", "experts", "attend")):
        assert found & {"fma.rn.f32", "fma.rn.f32x2"}
