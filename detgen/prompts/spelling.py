"""Keys that are probably typing errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from detgen.prompts.kinds import CONTENTS, KEYS
from detgen.prompts.unsupported import OTHER_NAMES, UNSUPPORTED

# A typing error nearly always keeps the first letter. A name of at least so many letters may differ by so many edits.
# Shorter names are too close to words of their own ("step" beside "stop"): only slips count there.
_EDITS = ((11, 2), (6, 1))
# Names of metadata that are one edit away from a key.
_ORDINARY = frozenset({"logprob"})


@lru_cache(maxsize=4096)
def misspelt(key: str) -> str | None:
    """The key that an unknown one was probably meant to be; None if it looks like a name of its own."""
    if key in KEYS or key in UNSUPPORTED or key in OTHER_NAMES or key in _ORDINARY or len(key) > _LONGEST:
        return None
    letters = _letters(key)
    if len(letters) < 4:
        return None
    return next((known for known, its in _MISSPELT.items() if _near(letters, its)), None)


def _letters(name: str) -> str:
    """What is left of a name without capitals and separators: "topP" becomes the same as "top_p"."""
    return re.sub(r"[\s_-]", "", name).lower()


# An error says so already where the key of the prompt is misspelt; `id` and `n` are too short to be close to anything;
# and short names of what is refused are everyday words.
_MISSPELT = {
    known: _letters(known)
    for known in sorted(
        KEYS - {"id", "n", "metadata", *CONTENTS} | {name for name in {*UNSUPPORTED, *OTHER_NAMES} if len(name) > 10}
    )
}
_LONGEST = max(map(len, _MISSPELT)) + 4


def _near(name: str, known: str) -> bool:
    if name == known:
        return True
    if name[0] != known[0]:
        return False
    allowed = next((edits for length, edits in _EDITS if len(known) >= length), 0)
    return _edits(name, known, allowed) <= allowed if allowed else name in _slips(known)


def _slips(known: str) -> Iterator[str]:
    """The name with a letter doubled, or with two letters swapped."""
    for i, letter in enumerate(known):
        yield known[:i] + letter + known[i:]
        yield known[:i] + known[i + 1 : i + 2] + letter + known[i + 2 :]


def _edits(a: str, b: str, most: int) -> int:
    """Letters to insert, delete, replace or swap with their neighbour to turn one name into the other; or > `most`."""
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
