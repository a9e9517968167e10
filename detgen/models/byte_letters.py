"""How byte-level vocabularies are written, in GPT-2's way: a letter stands for each byte."""

from __future__ import annotations

import itertools


def byte_letters() -> list[str]:
    """Return the letter of each byte: its own character if that is visible.

    The other bytes get the characters from 256 on, in order.
    """
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = itertools.count(256)
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]
