"""A seed for each line: `--seed-per-line`."""

from __future__ import annotations

import hashlib
import json


def line_seed(seed: int, id: str | int) -> int:
    """The seed of a line that has none of its own: 0 <= seed < 2**63.

    The BLAKE2b digest of eight bytes of the JSON text `[seed,id]` (ASCII, without spaces), as a big-endian number,
    shifted right by one bit. It depends on nothing but the two, so a line keeps its samples wherever it stands in
    whatever file.
    """
    text = json.dumps([seed, id], separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
