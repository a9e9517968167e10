"""Notices about an input: keys that look misspelt, equal samples and ids, requests for other models."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from detgen.engine.request import Request
from detgen.prompts.batch import is_batch, settings, short_digest
from detgen.prompts.kinds import CONTENTS, KEYS
from detgen.prompts.unsupported import OTHER_NAMES, UNSUPPORTED

# A typing error nearly always keeps the first letter. Names of at least so many letters may differ by so many edits.
# Shorter names are too close to other words ("step" and "stop"), so only slips count.
_EDITS = ((11, 2), (6, 1))
# Common names of metadata that are one edit away from a key.
_ORDINARY = frozenset({"logprob"})
_PLACES = 1 << 16  # 512 KiB per table
_KEYS = 100  # misspelt keys that are counted separately
_SHOWN = 3


@lru_cache(maxsize=4096)
def misspelt(key: str) -> str | None:
    """Return the key that an unknown one was probably meant to be; None if it looks like a name of its own."""
    if key in KEYS or key in UNSUPPORTED or key in OTHER_NAMES or key in _ORDINARY or len(key) > _LONGEST:
        return None
    letters = _letters(key)
    if len(letters) < 4:
        return None
    return next((known for known, its in _MISSPELT.items() if _near(letters, its)), None)


def _letters(name: str) -> str:
    """Return a name without capitals and separators: "topP" and "top_p" become the same."""
    return re.sub(r"[\s_-]", "", name).lower()


# A misspelt key of the prompt is an error already; `id` and `n` are too short to be close to anything; and short names
# of unsupported keys are everyday words.
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
    """Yield the name with a letter doubled or two letters swapped."""
    for i, letter in enumerate(known):
        yield known[:i] + letter + known[i:]
        yield known[:i] + known[i + 1 : i + 2] + letter + known[i + 2 :]


def _edits(a: str, b: str, most: int) -> int:
    """Return how many edits (insert, delete, replace or swap letters) two names differ by, or a number above `most`."""
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


@dataclass(slots=True)
class _Count:
    lines: int
    first: int
    meant: str


class Notices:
    """Examines records and requests as they are read.

    Its memory is bounded, however long the input is. A repetition of the request just before is always noticed, of one
    of the last ten thousand nearly always.

    Args:
        name: name of the input, before line numbers.
        say: receives notices, lines of text.
        seed_per_line: whether lines already have seeds of their own.
        model: name of the model that runs, or None.
    """

    def __init__(self, name: str, say: Callable[[str], None], *, seed_per_line: bool, model: str | None = None) -> None:
        self._name, self._say, self._seed_per_line = name, say, seed_per_line
        self._model = model
        self._misspelt: dict[str, _Count] = {}
        self._lines = 0
        self._sampled: _Seen | None = _Seen()
        self._ids: _Seen | None = _Seen()

    def record(self, record: object, line: int) -> None:
        """Count a record's keys that look misspelt; report once that a batch request asks for another model."""
        if not isinstance(record, dict):
            return
        if self._model is not None and is_batch(record):
            self._check_model(settings(record).get("model"), self._model, line)
        found = [(key, meant) for key in settings(record) if (meant := misspelt(key))]
        self._lines += bool(found)
        for key, meant in found:
            if count := self._misspelt.get(key):
                count.lines += 1
            elif len(self._misspelt) < _KEYS:
                self._misspelt[key] = _Count(1, line, meant)

    def _check_model(self, asked: object, model: str, line: int) -> None:
        if isinstance(asked, str) and asked not in (model, model.rpartition("/")[2]):
            self._model = None
            self._say(f"{self._name}:{line} asks for the model {asked}; --target decides, and all lines run on {model}")

    def request(self, request: Request) -> None:
        """Report once that a request is repeated, and once that an id is."""
        place = f"{self._name}:{request.line}"
        if self._ids is not None and self._ids.again(request.id):
            self._ids = None
            self._say(f"{place} has the id of an earlier line; tell their outputs apart by index")
        if request.params.temperature and self._sampled is not None and self._sampled.again(_asked(request)):
            self._sampled = None
            remedy = (
                "give such lines another id, or another seed where they have one of their own"
                if self._seed_per_line
                else "--seed-per-line derives a seed from --seed and the id for each line that sets none"
            )
            self._say(
                f"{place} has the prompt, the settings and the seed of an earlier line, so their samples are equal;"
                f" {remedy}"
            )

    def end(self) -> None:
        """Report the keys that look misspelt."""
        counts = sorted(self._misspelt.items(), key=lambda item: (-item[1].lines, item[1].first))
        shown = [
            f"{key} in {count.lines:,} (first in {self._name}:{count.first}; did you mean {count.meant}?)"
            for key, count in counts[:_SHOWN]
        ]
        if len(counts) > _SHOWN:
            shown.append(f"and {len(counts) - _SHOWN:,} more")
        if shown:
            one = self._lines == 1
            found = "line has a key that looks" if one else "lines have keys that look"
            self._say(
                f"{self._lines:,} {found} like a typing error and {'changes' if one else 'change'} nothing (copied to"
                f" metadata): {', '.join(shown)}"
            )


class _Seen:
    """Remembers values in a table of fixed size, in which new ones replace old ones."""

    def __init__(self) -> None:
        self._table = array("Q", bytes(8 * _PLACES))

    def again(self, value: Any) -> bool:
        """Return whether a value was seen before, and remember it."""
        digest = short_digest(repr(value))
        place = digest % _PLACES
        found = self._table[place] == digest
        self._table[place] = digest
        return found


def _asked(request: Request) -> tuple[Any, ...]:
    """Return everything that decides a sample."""
    calls = (request.tools, request.tool_choice, request.parallel_tool_calls)
    chat = (*calls, request.chat_template_kwargs, request.continue_final_message)
    return request.prompt, request.messages, request.token_ids, chat, request.params
