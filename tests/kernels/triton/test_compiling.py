"""Every kernel compiles for GPUs that are not there, of exact instructions, and spills next to nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from detgen.program.storage import Storage

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes of a block
SPILLED = 32  # bytes of a thread's stack: Triton 3.6 to 3.8 spill up to 24 in the longest kernels, 3.9 none

_ROOT = Path(__file__).parents[3]
_NUMBER = r"([\d,]+)"
_ROW = re.compile(rf"^\| (.+?) \| {_NUMBER} \| {_NUMBER} \| {_NUMBER} \| {_NUMBER} \|$", re.M)
# Registers of a thread and bytes of shared memory of a block, as docs/kernels.md says: for Ampere, and for what came
# after it. What takes much more has become slower.
KEPT = {
    name: ((found[0], found[1]), (found[2], found[3]))
    for name, *numbers in _ROW.findall((_ROOT / "docs" / "kernels.md").read_text())
    for found in [[int(number.replace(",", "")) for number in numbers]]
}
# Kernels that `compile_kernels` breaks: those they were, and what is found.
BROKEN = {
    "parts that are folded": ("linear, float, 16 rows", "16 sums of 8 outputs"),
    "parts on cores that are folded": ("cores, 16 rows", "8 sums of 4 outputs"),
    "products that are rounded": ("linear, float, 16 rows", "0 fused products of 8 outputs"),
    "an approximate exponential": ("softmax", "ex2.approx"),
    "an approximate quotient": ("softmax", "div.full.f32"),
    "an approximate root": ("norm", "rsqrt.approx"),
}
COLUMNS, CORE_COLUMNS, THREADS = 64, 32, 128  # of a tile of a linear layer
# Of tensor cores, for bf16 and float32: their products, and what these wait for.
CORES = re.compile(
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32|tcgen05\.mma\.cta_group::1\.kind::f16"
    r"|wgmma\.(mma_async\.sync\.aligned\.m64n32k16\.f32\.bf16\.bf16|(fence|commit_group|wait_group)\.sync\.aligned);?"
)
ROOM = 1.3  # times what was kept that a later Triton may take


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, dict[str, Any]]]:
    """By kernel and processor: registers, stack, local and shared memory. Compiled where the interpreter is off."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    known = [str(_ROOT), str(_ROOT / "tests"), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(known)
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(run.stdout)
    return found


def test_all_kernels_are_there(compiled: dict[str, dict[str, dict[str, Any]]]) -> None:
    assert set(compiled) == set(KEPT) | set(BROKEN)


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
    for of in compiled[name].values():
        assert list(faults(name, of["instructions"])) == []


@pytest.mark.parametrize("name", [name for name in KEPT if "cores" in name])
@pytest.mark.parametrize("capability", [80, 90])
def test_products_on_cores_are_added_in_order(
    compiled: dict[str, dict[str, dict[str, Any]]], name: str, capability: int
) -> None:
    """A part is a chain of eight products; each half of it lies in one stretch of memory, read from its start."""
    chains = compiled[name][str(capability)]["chains"]
    assert chains
    for places in chains:
        assert [at - places[0] for at in places[:4]] == [0, 32, 64, 96]
        assert [at - places[4] for at in places[4:]] == [0, 32, 64, 96]
        assert places[0] != places[4]


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_on_purpose_is_found(compiled: dict[str, dict[str, dict[str, Any]]], name: str) -> None:
    like, fault = BROKEN[name]
    assert fault in " ".join(faults(like, compiled[name]["80"]["instructions"]))


def faults(name: str, instructions: dict[str, int]) -> Iterator[str]:
    """What a kernel has that it should not have, or lacks.

    No approximation, no flush to zero; products of matrices are of whole numbers; sums of products are fused where it
    is written, one for each output and input, and parts, sections and what results are added to are one sum each.
    """
    products = {one for one in instructions if one.startswith("mma.sync.") and one.endswith(".s32.s8.s8.s32")}
    whole, cores = any(f" {storage.name.lower()}," in name for storage in Storage if storage.whole), "cores" in name
    if cores:
        products = {one for one in instructions if CORES.fullmatch(one)}
    if bool(products) != (whole or cores):
        yield f"products of matrices: {products}"
    # Of a bound, which decides only whose scores are computed.
    bounded = {"fma.rn.ftz.f32"} if name == "choose: score" else set()
    for one in sorted(set(instructions) - products - bounded):
        if not re.fullmatch(r"(add|sub|mul|fma|div|sqrt)\.rn\.(f32|f32x2|f64)", one):
            yield f"{one}"
    if name.startswith(("linear", "gated", "experts", "attend")) and not instructions.keys() & {
        "fma.rn.f32",
        "fma.rn.f32x2",
    }:
        yield "no products that are added up in one"
    if found := re.fullmatch(r"cores, (\d+) rows", name):
        outputs = int(found[1]) * CORE_COLUMNS // THREADS
        each = {"mma": int(found[1]) // 2, "wgmma": 8, "tcgen05": 8}  # instructions of a part; a turn may stand apart
        parts = sum(
            instructions[one] / each[one.partition(".")[0]] for one in products if "mma_async" in one or "wg" not in one
        )
        if (adds := _each(instructions, "add")) != (parts + 2) * outputs:
            yield f"{adds} sums of {outputs} outputs"
    if found := re.fullmatch(r"linear, \w+, (\d+) rows", name):
        outputs = max(int(found[1]) * COLUMNS // THREADS, 1)
        if (adds := _each(instructions, "add")) != (2 if whole else 3) * outputs:
            yield f"{adds} sums of {outputs} outputs"
        if not whole and (products_of := _each(instructions, "fma")) != outputs:
            yield f"{products_of} fused products of {outputs} outputs"


def _each(instructions: dict[str, int], kind: str) -> int:
    """How many float32 results instructions of a kind have."""
    return instructions.get(f"{kind}.rn.f32", 0) + 2 * instructions.get(f"{kind}.rn.f32x2", 0)
