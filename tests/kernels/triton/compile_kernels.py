"""Compiles every kernel at the shapes of Llama-3.1-8B; prints what each asks of a processor and is made of, as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from helpers.breaking import broken
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from detgen.kernels.triton import (
    attend,
    core_linear,
    drafted_rounds,
    filter_kernels,
    growing_lists,
    launching,
    likely_tokens,
    linear,
    norms,
    peaks,
    row_reading,
    rowwise,
    sampling_kernels,
    state_kernels,
    whole_linear,
)
from detgen.program.operands import Activation, Scoring
from detgen.program.storage import FORMATS, Storage

HALF, FLOAT, DOUBLE, BYTE, INT, LONG = "*bf16", "*fp32", "*fp64", "*i8", "*i32", "*i64"
IN_UNITS = Storage.TWO, Storage.SIX, Storage.THREE
SECTIONS = 32  # of 128,256 logits
HEADS = [8, 4, 128]  # of a group, and their size


def _linear(
    storage: Storage, items: int, *, gated: bool = False, limited: bool = False, picks: int = 0, heads: int = 1
) -> tuple[Any, list[str], list[Any]]:
    data = {Storage.FLOAT: FLOAT, Storage.BFLOAT: HALF, Storage.PAIR: HALF}.get(storage, "*u8")
    activation = Activation.SILU if gated else Activation.NONE
    kernel, types, kinds = linear._linear, [FLOAT, FLOAT, data, FLOAT], [int(storage)]
    if storage.whole:
        made = FORMATS[storage]
        (halves, minima), (low, high) = made.grouped[0], (*made.planes, 0)[:2]
        scales = [BYTE, "*fp16"] if storage in IN_UNITS else ["*fp16", "*fp16"]
        kernel, types = whole_linear.whole_linear, [BYTE, FLOAT, data, BYTE, *scales, *scales]
        kinds = [low, high, bool(made.levels), 0 if minima else made.least, halves, storage in IN_UNITS, minima]
    how = [int(activation), gated, limited, limited, False, not gated and not picks, False, picks, bool(picks), heads]
    types += [FLOAT, FLOAT, FLOAT, *["i32"] * 6, *["fp32"] * 5]
    return kernel, types, [*kinds, *how, items, linear._COLUMNS]


def _cores(rows: int, *, gated: bool = False, picks: int = 0) -> tuple[Any, list[str], list[Any]]:
    activation = Activation.SILU if gated else Activation.NONE
    types = [HALF, HALF, FLOAT, FLOAT, FLOAT, *["i32"] * 6, *["fp32"] * 5]
    how = [int(activation), gated, False, False, False, not gated, False, picks, bool(picks), 1]
    return core_linear.core_linear, types, [0, core_linear._DEPTH, *how, rows, core_linear.COLUMNS]


# Kernel, types of its arguments, constants.
KERNELS: dict[str, tuple[Any, list[str], list[Any]]] = {
    **{
        name: (
            attend._read,
            [FLOAT, FLOAT, FLOAT, LONG, LONG, FLOAT, FLOAT, FLOAT, FLOAT, "fp32", "fp32", *["i32"] * 7],
            [kv_heads, 1, group, size, values, values < size, wide, capped, capped, values, values, 8, attend._QUERIES],
        )
        for name, kv_heads, group, size, values, wide, capped in (
            ("attend: sections", *HEADS, 128, 6144, False),
            ("attend: sections, capped and sloped", 8, 2, 256, 256, 8192, True),
            ("attend: sections, values in keys", 1, 16, 576, 512, 17 * 576, False),
        )
    },
    "attend: joined": (
        attend._join,
        [LONG, *[FLOAT] * 5, *["i32"] * 5],
        [32, 4, 128, True, 128, 128, 8, attend._QUERIES],
    ),
    **{
        f"{name}, {storage.name.lower()}, {items} rows": _linear(storage, items, **how)
        for name, storage, items, how in (
            ("linear", Storage.FLOAT, linear._ROWS, {}),
            ("linear", Storage.BFLOAT, 1, {}),
            ("heads", Storage.BFLOAT, linear._ROWS, {"heads": 128}),
            ("linear", Storage.PAIR, linear._ROWS, {}),
            ("linear", Storage.BYTE, linear._ROWS, {}),
            ("gated", Storage.NIBBLE, linear._ROWS, {"gated": True}),
            ("linear", Storage.CODE, linear._ROWS, {}),
            ("experts", Storage.NIBBLE, linear._ROWS, {"picks": 2}),
            ("experts, clamped", Storage.MICRO, linear._ROWS, {"gated": True, "limited": True, "picks": 2}),
            ("experts, clamped", Storage.BFLOAT, linear._ROWS, {"gated": True, "limited": True, "picks": 2}),
            *(("linear", storage, linear._ROWS, {}) for storage in (*IN_UNITS, Storage.FIVE, Storage.LEVEL)),
        )
    },
    "cores, 16 rows": _cores(16),
    "cores, 64 rows": _cores(64),
    "gated cores, 64 rows": _cores(64, gated=True),
    "experts on cores, 16 rows": _cores(16, gated=True, picks=2),
    "narrow": (linear._narrow, [FLOAT, FLOAT, "i32"], [linear._ENTRIES]),
    "round": (whole_linear._round, [FLOAT, BYTE, FLOAT, "i32"], [whole_linear._GROUPS]),
    "norm": (
        norms._norm,
        [*[FLOAT] * 4, *["i32"] * 6, "fp32", "fp32", "fp32"],
        [False, True, False, False, False, False, 1, 16],
    ),
    "layer norm": (
        norms._norm,
        [*[FLOAT] * 4, *["i32"] * 6, "fp32", "fp32", "fp32"],
        [True, True, True, False, True, True, 1, 16],
    ),
    "gaussian top-k": (norms._gaussian_top_k, [FLOAT, FLOAT, "i32", "i32", "fp32"], [1, 16]),
    "xielu": (rowwise._xielu, [FLOAT, FLOAT, "i32", "i32", *4 * ["fp32"]], [8, 128]),
    "softmax": (norms._softmax, [FLOAT, FLOAT, "i32", "i32"], [1, 16]),
    "sum": (norms._sum, [FLOAT, FLOAT, "i32", "i32"], [1, 16]),
    "route": (
        norms._route,
        [*4 * [FLOAT], "i32", "i32", "fp32", "fp32", "fp32"],
        [8, True, int(Scoring.OVER_ALL), False, 1, 1, 1, False, False, 128, 2, norms._ROUTED, 1],
    ),
    "route: groups": (
        norms._route,
        [*4 * [FLOAT], "i32", "i32", "fp32", "fp32", "fp32"],
        [8, True, int(Scoring.SIGMOIDS), True, 8, 4, 2, True, True, 256, 8, norms._ROUTED, 2],
    ),
    "route: sparse": (
        norms._route,
        [*4 * [FLOAT], "i32", "i32", "fp32", "fp32", "fp32"],
        [2, False, int(Scoring.SPARSE), False, 1, 1, 1, False, False, 16, 2, norms._ROUTED, 1],
    ),
    "embed": (rowwise._embed, [HALF, LONG, FLOAT, "i32", "i32", "i32", "fp32"], [1, 1, 0, False, True, 1, 256]),
    "embed: pairs": (rowwise._embed, [HALF, LONG, FLOAT, "i32", "i32", "i32", "fp32"], [32, 2, 0, False, True, 1, 256]),
    "embed: columns": (
        whole_linear._embed_column,
        ["*u8", BYTE, BYTE, "*fp16", BYTE, "*fp16", LONG, FLOAT, "i32", "i32", "fp32"],
        [2, 0, False, 0, 2, True, True, False, True, 1, 256],
    ),
    **{
        f"copy: {name}": (
            rowwise._copy,
            [FLOAT, LONG if name == "taken" else FLOAT, FLOAT, *["i32"] * 5, "fp32", "fp32"],
            [name == "taken", int(name == "gated"), function, name == "clamped", *2 * [name == "gated"], 1, 256],
        )
        for name, function in {
            "taken": 0,
            "clamped": 0,
            "gated": 6,
            "GELU": 3,
            "GELU by tanh": 2,
            "1 / root": 9,
        }.items()
    },
    "mix": (rowwise._mix, [FLOAT, FLOAT, FLOAT, "i32", "i32", "fp32"], [4, 4, True, False, 1, 256]),
    "convolve": (
        state_kernels._convolve,
        [*[FLOAT] * 4, LONG, FLOAT, "i32"],
        [4, 19, int(Activation.SILU), False, state_kernels._ROWS, state_kernels._CHANNELS],
    ),
    **{
        name: (
            state_kernels._recur,
            [*[FLOAT] * 8, LONG, FLOAT, FLOAT, "i32", "fp32", "fp32"],
            [space, heads, key_heads, 128, size, 31, state_kernels._VALUES],
        )
        for name, space, heads, key_heads, size in (
            ("delta rule", False, 32, 16, 128),
            ("state space", True, 80, 8, 64),
        )
    },
    "selective scan": (
        state_kernels._scan,
        [*[FLOAT] * 8, LONG, FLOAT, FLOAT, "i32"],
        [16, 8192, 31, state_kernels._VALUES],
    ),
    "watch": (rowwise._watch, [FLOAT, BYTE, "i32", "i32"], [1, 256]),
    "weigh": (rowwise._weigh, [FLOAT, FLOAT, FLOAT, "i32", "i32"], [8, 1, 256]),
    "combine": (rowwise._combine, [FLOAT, FLOAT, FLOAT, "i32", "i32", "fp32"], [8, True, True, True, 1, 256]),
    **{
        f"rotate, interleaved: {interleaved}": (
            rowwise._rotate,
            [FLOAT, LONG, LONG, *3 * [FLOAT], *2 * [HALF if interleaved else FLOAT], BYTE, "i32", "i32", "fp32"],
            [32, 8, 128, 128, 128, interleaved, interleaved, True, interleaved, 1, 128],
        )
        for interleaved in (False, True)  # into a cache in bf16, too
    },
    "peaks: blocks": (peaks._of_blocks, [FLOAT, FLOAT, "i32", "i32"], [peaks._BLOCKS]),
    "peaks: rows": (peaks._of_row, [FLOAT, FLOAT, "i32"], [1024]),
    **{
        f"choose: {name}": (kernel, types, [True, *constants])
        for name, kernel, types, constants in (
            (
                "read",
                row_reading._read,
                [FLOAT, FLOAT, LONG, INT, FLOAT, FLOAT, FLOAT, FLOAT, INT, FLOAT, INT, *["i32"] * 5],
                [row_reading.SECTION, row_reading._MANY],
            ),
            (
                "weigh",
                filter_kernels._weigh,
                [FLOAT, FLOAT, LONG, LONG, FLOAT, INT, LONG, *["i32"] * 4],
                [row_reading.SECTION, SECTIONS, filter_kernels.BUCKETS],
            ),
            (
                "list",
                filter_kernels._list,
                [FLOAT, FLOAT, LONG, LONG, FLOAT, INT, LONG, INT, *["i32"] * 4],
                [row_reading.SECTION, SECTIONS, filter_kernels.BUCKETS],
            ),
            (
                "settle",
                filter_kernels._settle,
                [FLOAT, FLOAT, LONG, LONG, FLOAT, INT, LONG, INT, LONG, *["i32"] * 4],
                [SECTIONS, filter_kernels.BUCKETS, filter_kernels._TILE, filter_kernels._PIVOTS],
            ),
            (
                "score",
                sampling_kernels._score,
                [FLOAT, FLOAT, LONG, LONG, FLOAT, INT, LONG, DOUBLE, INT, DOUBLE, *["i32"] * 4],
                [True, row_reading.SECTION, SECTIONS, sampling_kernels._TILE],
            ),
        )
    },
    "choose: put together": (
        sampling_kernels._choose,
        [FLOAT, LONG, FLOAT, FLOAT, FLOAT, INT, FLOAT, INT, DOUBLE, INT, DOUBLE, LONG, INT, *["i32"] * 5],
        [True, True, SECTIONS, sampling_kernels.BROKEN],
    ),
    "grow": (
        growing_lists._grow,
        [INT, FLOAT, FLOAT, LONG, LONG, LONG, LONG, FLOAT, "i32", "i32"],
        [growing_lists._MANY],
    ),
    "rounds: drafted lists": (
        growing_lists._draft,
        [INT, FLOAT, FLOAT, INT, FLOAT, FLOAT, LONG, LONG, FLOAT, *["i32"] * 6],
        [growing_lists._MANY],
    ),
    "rounds: lists that stand": (
        growing_lists._stand,
        [INT, FLOAT, FLOAT, LONG, LONG, LONG, INT, FLOAT, *["i32"] * 5],
        [growing_lists._MANY],
    ),
    "rounds: place": (drafted_rounds._place, [*[LONG] * 6, "i32", LONG, *["i32"] * 6], [16]),
    "rounds: note": (drafted_rounds._note, [INT, "i32", LONG, "i32", LONG, "i32", LONG, "i32"], []),
    "rounds: look up": (drafted_rounds._look_up, [*[LONG] * 4, "i32"], [16, drafted_rounds._MANY]),
    "rounds: judge": (drafted_rounds._judge, [INT, "i32", BYTE, LONG, "i32", LONG, "i32", LONG], [16]),
    "likely: sections": (
        likely_tokens._of_sections,
        [FLOAT, FLOAT, FLOAT, LONG, LONG, *["i32"] * 5],
        [row_reading.SECTION],
    ),
    "likely: rows": (likely_tokens._of_rows, [LONG, LONG, INT, "i32", "i32"], [SECTIONS, 32]),
}


# Instructions of floating-point numbers, and what they have after their name.
FLOATING = re.compile(
    r"^\s*(?:@\S+\s+)?((?:add|sub|mul|fma|div|sqrt|rsqrt|rcp|ex2|lg2|sin|cos|tanh|mma|wgmma|tcgen05\.mma)\b\S*)", re.M
)


def compiled(kernel: Any, types: list[str], constants: list[Any], capability: int) -> dict[str, Any]:
    """What the kernel takes of a processor of this compute capability, and how often it has which instruction.

    Registers, stack, local and shared memory; of instructions, those of floating-point numbers; `chains`.
    """
    names = kernel.arg_names
    signature = dict(zip(names, [*types, *["constexpr"] * len(constants)], strict=True))
    constexprs = dict(zip(names[len(types) :], constants, strict=True))
    # As at launches: addresses, and the sizes of row_reading, are multiples of 16.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(zip(names, types, strict=False))
        if kind[0] == "*"
        or name
        in ("size", "width", "x_width", "to_width", "inputs", "outputs", "to_row", "to_head", "stride", "vocabulary")
    }
    source = ASTSource(kernel, signature, constexprs, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launching.OPTIONS)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        said = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name.lower(): int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    named = [name for name in FLOATING.findall(made.asm["ptx"]) if re.search(r"\.[bf](16|32|64)|approx|mma", name)]
    shared, placed = made.metadata.shared, chains(made.asm["ptx"])
    return {**found, "shared": shared, "instructions": Counter(named), "chains": placed}


def chains(ptx: str) -> list[list[int]]:
    """Of each sum that products of matrices in bf16 are added to, where their rows of inputs lie in shared memory.

    In the order of the products. Bytes for the first thread, of which what it does not know counts as zero.
    """
    made: dict[str, list[tuple[str, str]]] = {}
    for name, to, of in re.findall(r"^\s*([a-z0-9.]+)\s+(%\w+), ([^;{}]+);", ptx, re.M):
        made.setdefault(to, []).append((name.partition(".")[0], of))

    def value(word: str) -> int:
        if not word.startswith("%"):
            return int(word, 0) if re.fullmatch(r"-?\d+|0x[0-9a-f]+", word) else 0
        if len(made.get(word, ())) != 1:  # of a loop
            return 0
        name, of = made[word][0]
        kinds = {"add": int.__add__, "or": int.__or__, "xor": int.__xor__, "and": int.__and__, "shl": int.__lshift__}
        if name in ("mov", "cvt", "cvta"):
            return value(of)
        words = of.split(", ")
        if name == "bfe":
            return value(words[0]) >> value(words[1]) & (1 << value(words[2])) - 1
        return kinds[name](*map(value, words)) if name in kinds else 0

    read = {
        to: value(at) + int(beyond or 0)
        for tos, at, beyond in re.findall(r"ldmatrix\.\S+ \{([^}]*)\}, \[(%\w+)\+?(\d*)\]", ptx)
        for to in tos.split(", ")
    }
    found: dict[str, list[int]] = {}
    for sums, inputs, before in re.findall(
        r"mma\.sync\S*bf16\S* \{ ([^}]*) \}, \{ (%\w+)[^}]*\}, .*?\{ ([^}]*) \};", ptx
    ):
        assert sums == before, "a sum is that of the product before it"
        found.setdefault(sums, []).append(read[inputs])
    for sums, inputs in re.findall(r"wgmma\.mma_async\S*bf16 \{([^}]*)\}, (%\w+),", ptx):
        found.setdefault(sums, []).append((value(inputs) & 0x3FFF) << 4)
    return [*found.values()]


# Those that are broken on purpose: a module, what is changed in it, its kernel, and the one that it is compiled like.
BROKEN: dict[str, tuple[Any, list[tuple[str, str]], str, str]] = {
    "parts that are folded": (
        linear,
        [
            ("part = tl.zeros((ROWS, COLUMNS), tl.float32)", "part = of_section"),
            ("behind(of_section, part, first == section)", "part"),
        ],
        "_linear",
        "linear, float, 16 rows",
    ),
    "parts on cores that are folded": (
        core_linear,
        [
            ("part = tl.zeros((ROWS, COLUMNS), tl.float32)", "part = of_section"),
            ("behind(of_section, part, first == section)", "part"),
        ],
        "core_linear",
        "cores, 16 rows",
    ),
    "products that are rounded": (
        linear,
        [
            ("part = tl.fma(_weights(", "part += (_weights("),
            ("wanted, STORAGE), entry, part)", "wanted, STORAGE) * entry)"),
        ],
        "_linear",
        "linear, float, 16 rows",
    ),
    "an approximate exponential": (norms, [("exponential(", "tl.exp(")], "_softmax", "softmax"),
    "an approximate quotient": (norms, [("tl.div_rn(v, divisor)", "v / divisor")], "_softmax", "softmax"),
    "an approximate root": (norms, [("tl.sqrt_rn(", "tl.rsqrt(")], "_norm", "norm"),
}


def compiled_broken(name: str, folder: Path) -> dict[str, Any]:
    """What one of `BROKEN` takes of Ampere."""
    module, changes, kernel, like = BROKEN[name]
    _, types, constants = KERNELS[like]
    return compiled(getattr(broken(module, folder, *changes), kernel), types, constants, 80)


if __name__ == "__main__":
    found = {
        name: {str(capability): compiled(*what, capability) for capability in (80, 90, 100)}
        for name, what in KERNELS.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        found |= {name: {"80": compiled_broken(name, Path(folder))} for name in BROKEN}
    sys.stdout.write(json.dumps(found))
