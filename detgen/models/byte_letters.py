"""How vocabularies of bytes are written, GPT-2's way: a letter stands for each byte."""

from __future__ import annotations

import itertools


def byte_letters() -> list[str]:
    """The letter of each byte: its own if it is one to be seen.

    The others get, in their order, the characters from 256 on.
    """
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = itertools.count(256)
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]
