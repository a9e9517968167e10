"""A seed for each line: `--seed-per-line`."""

from __future__ import annotations

import hashlib
import json


def line_seed(seed: int, id: str | int) -> int:
    """The seed of a line that has none of its own: 0 <= seed < 2**63.

    The first eight bytes of the BLAKE2b digest of the JSON text `[seed,id]`, as a big-endian number without its highest
    bit. It depends on nothing but the two, so a line keeps its samples wherever it stands in whatever file.
    """
    text = json.dumps([seed, id], separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
