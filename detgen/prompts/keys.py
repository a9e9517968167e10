"""The keys of a record: which are understood, under which names, and of what kind their values are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

from detgen.errors import RequestError
from detgen.params import PARAMETERS
from detgen.prompts.kinds import CHAT_KEYS, CONTENTS, Line
from detgen.prompts.unsupported import OTHER_NAMES, UNSUPPORTED

ALIASES = {alias: name for name, parameter in PARAMETERS.items() for alias in parameter.aliases}
KEYS = frozenset({*CONTENTS, *Line.__annotations__, *CHAT_KEYS, *PARAMETERS, *ALIASES})

_KINDS: dict[str, type] = {name: parameter.kind for name, parameter in PARAMETERS.items()}
_KINDS |= {alias: _KINDS[name] for alias, name in ALIASES.items()} | {"id": str, "prompt": str}
_KINDS |= {"continue_final_message": bool}
INTEGERS, BOOLEANS, _FLOATS, _TEXTS = (
    frozenset(name for name, kind in _KINDS.items() if kind is its) for its in (int, bool, float, str)
)
NUMBERS = INTEGERS | _FLOATS
STRUCTURES = KEYS - NUMBERS - BOOLEANS - _TEXTS  # their values are lists or objects, or may be

# A typing error keeps the first letter, nearly always; so many edits may a name of so many letters have. Shorter names
# have too many neighbours that are words of their own ("step" beside "stop"): in them only slips count.
_EDITS = ((11, 2), (6, 1))
# Names of metadata that are one edit away from a key.
_ORDINARY = frozenset({"logprob"})
# Whoever misspells what holds the prompt is told by an error; `id` and `n` are too short to be near anything; and short
# names of what is refused are words of everyday.
_MISSPELT = sorted(
    (KEYS - {"id", "n", "metadata", *CONTENTS}) | {name for name in {*UNSUPPORTED, *OTHER_NAMES} if len(name) > 10}
)
_LONGEST = max(map(len, _MISSPELT)) + 4


def without_aliases(record: dict[str, Any]) -> dict[str, Any]:
    """The record with each key under the name that it has in `SamplingParams`.

    Raises:
        RequestError: it has two names of one key, with different values.
    """
    given = [alias for alias in ALIASES if alias in record]
    if not given:
        return record
    plain = {key: value for key, value in record.items() if key not in ALIASES}
    spelled: dict[str, str] = {}
    for alias in given:
        name, value = ALIASES[alias], record[alias]
        if value is None:
            continue
        if plain.get(name) is not None and plain[name] != value:
            other = spelled.get(name, name)
            raise RequestError(
                f"{other} and {alias} mean the same and are given as {plain[name]!r} and {value!r}; give one of them"
            )
        plain[name] = value
        spelled.setdefault(name, alias)
    return plain


@lru_cache(maxsize=4096)
def misspelt(key: str) -> str | None:
    """The key that an unknown one was probably meant to be; None if it looks like a name of its own."""
    if key in KEYS or key in UNSUPPORTED or key in OTHER_NAMES or key in _ORDINARY or len(key) > _LONGEST:
        return None
    letters = _letters(key)
    if len(letters) < 4:
        return None
    return next((known for known, its in _known_letters().items() if _near(letters, its)), None)


@cache
def _known_letters() -> dict[str, str]:
    return {known: _letters(known) for known in _MISSPELT}


def _letters(name: str) -> str:
    """What is left of a name without capitals and separators: "topP" is as "top_p"."""
    return re.sub(r"[\s_-]", "", name).lower()


def _near(name: str, known: str) -> bool:
    if name == known:
        return True
    if name[0] != known[0]:
        return False
    allowed = next((edits for length, edits in _EDITS if len(known) >= length), 0)
    return _edits(name, known, allowed) <= allowed if allowed else name in _slips(known)


def _slips(known: str) -> Iterator[str]:
    """The name with a letter twice, or with two letters swapped."""
    for i, letter in enumerate(known):
        yield known[:i] + letter + known[i:]
        yield known[:i] + known[i + 1 : i + 2] + letter + known[i + 2 :]


def _edits(a: str, b: str, most: int) -> int:
    """Letters to insert, delete, replace or swap with their neighbour, to make one of the other; or above `most`."""
    if abs(len(a) - len(b)) > most:
        return most + 1
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        older, before, row = before, row, [i]
        for j, y in enumerate(b, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, older[j - 2] + 1)
            row.append(cost)
    return row[-1]
