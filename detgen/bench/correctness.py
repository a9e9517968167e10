"""Whether outputs are what they should be: equal between batch sizes, and equal to the canonical ones.

Fast and wrong is wrong: a verified row that differs from `none`, or from itself at another batch size, says so, and
so does any row most of whose first tokens differ from the canonical ones, or all of them where it computes in fewer
bits. A float32 peer that picks another token at a near-tie later on is not wrong; how many of its prompts are equal is
shown.
"""

from __future__ import annotations

from collections import defaultdict

from detgen.bench.bench_results import Row
from detgen.bench.cells import is_verified

Tokens = list[list[int]]
Outputs = defaultdict[tuple[str, str], dict[int, Tokens]]
"""Generated tokens of each prompt, by workload and label, then by batch size; empty for what never ran."""

REFERENCE = "detgen none"


def judge(rows: list[Row], outputs: Outputs) -> None:
    """Fill in what the rows' outputs have in common with others, and what is wrong with them."""
    for row in rows:
        own = outputs[row.workload, row.label]
        if row.error is not None or row.batch_size not in own:
            continue
        tokens = own[row.batch_size]
        share = row.fraction or 1.0
        # The furthest batch size is the likeliest to run other kernels.
        others = [size for size in own if size != row.batch_size]
        other = max(others, key=lambda size: max(size, row.batch_size) / min(size, row.batch_size), default=None)
        if other is not None:
            row.same_bytes = (*_equal(tokens, own[other], share), other)
        canonical = _reference(outputs, row, REFERENCE)
        if canonical is not None:
            row.agreement = _equal(tokens, canonical, share)
        # Weights in fewer bits have texts of their own, which all drafters must agree on.
        expected = canonical if row.reference == REFERENCE else _reference(outputs, row, row.reference)
        row.wrong = row.wrong or _wrong(row, tokens, expected)


def _reference(outputs: Outputs, row: Row, label: str) -> Tokens | None:
    """What the row of this label gave, at the batch size of another row if it ran it."""
    found = outputs[row.workload, label]
    return found.get(row.batch_size) or next(iter(found.values()), None)


def _equal(a: Tokens, b: Tokens, share: float) -> tuple[int, int]:
    """How many of the verified prompts that both have got the same tokens, and how many there are."""
    pairs = [(x, y) for i, (x, y) in enumerate(zip(a, b, strict=False)) if is_verified(i, share)]
    return sum(x == y for x, y in pairs), len(pairs)


def _wrong(row: Row, tokens: Tokens, expected: Tokens | None) -> str | None:
    if row.fraction:
        same, of = (0, 0) if expected is None else _equal(tokens, expected, row.fraction)
        if same < of:
            return f"{of - same} of {of} verified prompts differ from drafter none"
        if row.same_bytes is not None and row.same_bytes[0] < row.same_bytes[1]:
            return f"verified prompts differ between batch sizes {row.batch_size} and {row.same_bytes[2]}"
    if expected is None:
        return None
    firsts = [a[0] == b[0] for a, b in zip(tokens, expected, strict=False)]
    if sum(firsts) < (1 if row.fewer_bits else len(firsts) / 2):
        return f"only {sum(firsts)} of {len(firsts)} first tokens are right"
    return None
