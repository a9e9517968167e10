"""Writes the floors of the kernels for CUDA into docs/kernels.md: the least that a pass of Llama-3.1-8B can take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "kernels.md"
HEADING = "## The least that a pass takes\n"

# An H100 SXM by its maker's figures: bytes, and operations per second in float32 and in bf16 on tensor cores.
MEMORY, FLOAT, TENSOR = 3.35e12, 66.9e12, 989e12
# Groups of whole numbers per second: a sum is converted to float32, at half the rate of multiply-adds (half of FLOAT),
# followed by one product and one multiply-add.
GROUPS = FLOAT / 2 / 4
HIDDEN, INNER, HEADS, KV_HEADS, SIZE, LAYERS, VOCABULARY, GROUP = 4096, 14336, 32, 8, 128, 32, 128256, 32
WEIGHTS = LAYERS * HIDDEN * ((HEADS + 2 * KV_HEADS) * SIZE + HEADS * SIZE + 3 * INNER) + HIDDEN * VOCABULARY
# Bytes of a weight; whole numbers have a float16 scale per group.
STORED = {"bfloat16": 2.0, "q8": 1 + 2 / GROUP, "q4": 0.5 + 2 / GROUP}
ROWS = 1, 32, 128, 256
CONTEXTS = 1024, 8192


def linear(stored: str, rows: int) -> tuple[float, float, float, float]:
    """Return bytes, operations, seconds of memory and seconds of arithmetic of all linear layers."""
    moved, operations = WEIGHTS * STORED[stored], 2.0 * WEIGHTS * rows
    arithmetic = operations / FLOAT if stored == "bfloat16" else WEIGHTS / GROUP * rows / GROUPS
    return moved, operations, moved / MEMORY, arithmetic


def attention(context: int, rows: int) -> tuple[float, float, float, float]:
    """Return the same for attention of all layers over a float32 cache."""
    moved = 4.0 * LAYERS * 2 * KV_HEADS * SIZE * context * rows
    operations = 4.0 * LAYERS * HEADS * SIZE * context * rows
    return moved, operations, moved / MEMORY, operations / FLOAT


def lines() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| kernels | rows | GB | 10^9 operations | ms, memory | ms, arithmetic | times the least of any |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    kinds = [(f"linear, {stored}", rows, linear(stored, rows)) for stored in STORED for rows in ROWS]
    kinds += [(f"attention, {context:,} keys", rows, attention(context, rows)) for context in CONTEXTS for rows in ROWS]
    for name, rows, (moved, operations, memory, arithmetic) in kinds:
        least = max(memory, operations / TENSOR)
        ratio = max(memory, arithmetic) / least
        numbers = f"{moved / 1e9:,.1f} | {operations / 1e9:,.0f} | {1e3 * memory:.2f} | {1e3 * arithmetic:.2f}"
        yield f"| {name} | {rows} | {numbers} | {ratio:.1f} |"


def page(text: str) -> str:
    """Return the page with the present table."""
    before, heading, after = text.partition(HEADING)
    assert heading, f"{PAGE} has no {HEADING!r}"
    words, _, _ = after.partition("| kernels |")
    return before + heading + words + "\n".join(lines()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
