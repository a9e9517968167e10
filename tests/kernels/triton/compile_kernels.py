"""Compiles every kernel at the shapes of Llama-3.1-8B in bfloat16; prints what each asks of a processor, as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from detgen.kernels.triton import (
    attend,
    filters,
    gate,
    given,
    launching,
    linear,
    norm,
    reading,
    rotate,
    rows,
    sampling,
)

HALF, FLOAT, DOUBLE, INT, LONG = "*bf16", "*fp32", "*fp64", "*i32", "*i64"
SECTIONS = 32  # of 128,256 logits
# Kernel, types of its arguments, constants.
KERNELS: dict[str, tuple[Any, list[str], list[Any]]] = {
    "attend: splits": (
        attend._split,
        [HALF, HALF, HALF, LONG, LONG, FLOAT, FLOAT, FLOAT, "fp32", "fp32", *["i32"] * 5],
        [4, attend.tile_rows(4), 128, 128, 128, 128, attend.BLOCK, attend.SPLIT, False, False],
    ),
    "attend: splits of 256 entries, capped": (
        attend._split,
        [HALF, HALF, HALF, LONG, LONG, FLOAT, FLOAT, FLOAT, "fp32", "fp32", *["i32"] * 5],
        [2, attend.tile_rows(2), 256, 256, 256, 256, attend.BLOCK, attend.SPLIT, True, False],
    ),
    "attend: sum": (
        attend._add,
        [FLOAT, FLOAT, FLOAT, LONG, HALF, *["i32"] * 4],
        [128, 128, attend.SPLIT],
    ),
    "norm": (norm._norm, [HALF, HALF, HALF, HALF, "i32", "fp32"], [True, 4096]),
    "gate": (gate._gate, [HALF, HALF, "i32"], [1024, 1]),
    "gate, GELU": (gate._gate, [HALF, HALF, "i32"], [1024, 3]),
    "gate, GELU by tanh": (gate._gate, [HALF, HALF, "i32"], [1024, 2]),
    "rotate": (
        rotate._rotate,
        [HALF, FLOAT, FLOAT, LONG, HALF, HALF, HALF, HALF, "fp32", "i32", "i32"],
        [False, 128, 128, 128, 64, 16, 128, 1e18],
    ),
    "rotate, normed": (
        rotate._rotate,
        [HALF, FLOAT, FLOAT, LONG, HALF, HALF, HALF, HALF, "fp32", "i32", "i32"],
        [True, 128, 128, 128, 64, 16, 128, 1e18],
    ),
    **{
        f"linear: {height} rows": (
            linear._linear,
            [HALF, HALF, HALF, HALF, "i32", "i32", "i32"],
            [False, height, linear._COLUMNS, linear._DEPTH, linear._GROUPED, False],
        )
        for height in linear._HEIGHTS
    },
    **{
        f"choose: {name}": (kernel, types, [True, *constants])
        for name, kernel, types, constants in (
            (
                "read",
                reading._read,
                [FLOAT, FLOAT, LONG, INT, FLOAT, FLOAT, FLOAT, FLOAT, INT, FLOAT, INT, *["i32"] * 5],
                [rows.SECTION, reading._MANY],
            ),
            (
                "weigh",
                filters._weigh,
                [FLOAT, FLOAT, LONG, LONG, FLOAT, INT, LONG, *["i32"] * 4],
                [rows.SECTION, SECTIONS, filters.BUCKETS],
            ),
            (
                "list",
                filters._list,
                [FLOAT, FLOAT, LONG, LONG, FLOAT, INT, LONG, INT, *["i32"] * 4],
                [rows.SECTION, SECTIONS, filters.BUCKETS],
            ),
            (
                "settle",
                filters._settle,
                [FLOAT, FLOAT, LONG, LONG, FLOAT, INT, LONG, INT, LONG, *["i32"] * 4],
                [SECTIONS, filters.BUCKETS, filters._TILE, filters._PIVOTS],
            ),
            (
                "score",
                sampling._score,
                [FLOAT, FLOAT, LONG, LONG, FLOAT, INT, LONG, DOUBLE, INT, DOUBLE, *["i32"] * 4],
                [True, rows.SECTION, SECTIONS, sampling._TILE],
            ),
        )
    },
    "choose: put together": (
        sampling._choose,
        [FLOAT, LONG, FLOAT, FLOAT, FLOAT, INT, FLOAT, INT, DOUBLE, INT, DOUBLE, INT, *["i32"] * 5],
        [True, SECTIONS, sampling.BROKEN],
    ),
    "given": (given._given, [FLOAT, LONG, FLOAT, FLOAT, FLOAT, "i32", "i32"], []),
}


def compiled(kernel: Any, types: list[str], constants: list[Any], capability: int) -> dict[str, int]:
    """What the kernel takes of a processor of this compute capability: registers, stack, local and shared memory."""
    names = kernel.arg_names
    signature = dict(zip(names, [*types, *["constexpr"] * len(constants)], strict=True))
    constexprs = dict(zip(names[len(types) :], constants, strict=True))
    # As at launches: addresses, and the sizes of rows, are multiples of 16.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(zip(names, types, strict=False))
        if kind[0] == "*" or name in ("size", "inputs", "outputs", "stride", "vocabulary")
    }
    source = ASTSource(kernel, signature, constexprs, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launching.OPTIONS)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        said = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name.lower(): int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    return {**found, "shared": made.metadata.shared}


if __name__ == "__main__":
    found = {
        name: {str(capability): compiled(*what, capability) for capability in (80, 90, 100)}
        for name, what in KERNELS.items()
    }
    sys.stdout.write(json.dumps(found))
