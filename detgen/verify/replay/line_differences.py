"""Lines beside what they must be, byte for byte; and what differs, in words."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from itertools import pairwise

from detgen.engine.request import TokenLogprobs
from detgen.verify.replay.run_files import Line, in_words

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 120


def shown(value: object) -> str:
    """A value of a line, which may be long or nested deep, in few characters."""
    return _SHOWN.repr(value)


def compare_line(line: Line, derived: bytes) -> Iterator[tuple[str, str]]:
    """Where an output line differs from what it must be, and how."""
    if line.raw == derived:
        return
    wanted = json.loads(derived)
    wrong = [name for name, want in wanted.items() if line.fields.get(name) != want]
    for name in wrong:
        yield line.where, f"{name} is {shown(line.fields.get(name))}, its tokens give {shown(wanted[name])}"
    unknown = [name for name in line.fields if name not in wanted]
    if unknown:
        yield line.where, f"has {', '.join(map(ascii, unknown))[:200]}, which no run writes here"
    if not wrong and not unknown:
        yield line.where, _spelling(line.raw, derived)


def compare_log(lines: list[Line], derived: bytes) -> Iterator[tuple[str, str]]:
    """Where the acceptance log of a sample differs from what it must be, and how."""
    if b"".join(line.raw for line in lines) == derived:
        return
    wants = derived.splitlines(keepends=True)
    for line in lines[len(wants) :]:
        yield line.where, f"is one too many of {in_words(line.key)}"
    for line, want in zip(lines, wants, strict=False):
        if line.raw == want:
            continue
        wanted = json.loads(want)
        wrong = [
            f"{name} is {shown(line.fields.get(name))}, should be {shown(wanted[name])}"
            for name in wanted
            if line.fields.get(name) != wanted[name]
        ]
        unknown = [f"{ascii(name)[:60]} is no field of it" for name in line.fields if name not in wanted]
        yield line.where, "; ".join(wrong + unknown) or _spelling(line.raw, want)


def plausible(entry: TokenLogprobs, token: int, wanted: int, greedy: bool, vocabulary: int) -> bool:
    """Whether some logits give a token's own and the most likely log-probabilities."""
    ids, values = [t for t, _ in entry.top], [p for _, p in entry.top]
    ordered = all((-p, t) < (-q, u) for (t, p), (u, q) in pairwise(entry.top))
    if len(ids) != wanted or not ordered or not all(0 <= t < vocabulary for t in ids) or len(set(ids)) < len(ids):
        return False
    if not all(value <= 0 for value in (entry.logprob, *values)) or (greedy and ids and ids[0] != token):
        return False
    if token in ids:
        return values[ids.index(token)] == entry.logprob
    return not values or entry.logprob <= values[-1]


def _spelling(found: bytes, wanted: bytes) -> str:
    """Where two spellings of a line begin to differ."""
    at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted)))
    there, instead = found[at : at + 20], wanted[at : at + 20]
    return f"is spelled as no run spells it, from byte {at}: {there!r} instead of {instead!r}"
