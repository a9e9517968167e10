"""How the page writes what it is given: counts, shares, and texts in which nothing is hidden."""

from __future__ import annotations

import json
import unicodedata

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp", "Co", "Cn"})  # categories that are not seen, or move what is seen
_SHOWN = {"\n": "↵", "\t": "⇥", "\r": "␍"}
_MOST_NAME = 1000  # characters of a text on one line
_MOST_TEXT = 20_000  # of one of several lines


def counted(count: int, word: str) -> str:
    """So many of something: "1 token", "2 tokens"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def share(part: float, whole: float) -> str:
    """A share in percent; a dash where there is nothing to share."""
    return f"{part / whole:.1%}" if whole else "–"


def visible(text: str) -> str:
    """A text on one line in which nothing is hidden: line ends as arrows, what cannot be seen by its number.

    A text that is too long for a line is cut.
    """
    if len(text) > _MOST_NAME:
        text = f"{text[: _MOST_NAME - 1]}…"
    return "".join(_SHOWN.get(c) or (_escaped(c) if unicodedata.category(c) in _HIDDEN else c) for c in text)


def harmless(text: str) -> str:
    """A text of several lines in which nothing is hidden but its line ends and tabs."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in _HIDDEN else _escaped(c) for c in text)


def text_of(text: object) -> str:
    """A text as the page shows it."""
    whole = harmless(text if isinstance(text, str) else json.dumps(text, ensure_ascii=False, indent=1))
    return whole if len(whole) <= _MOST_TEXT else f"{whole[:_MOST_TEXT]}\n[{len(whole) - _MOST_TEXT:,} more characters]"


def _escaped(c: str) -> str:
    return ascii(c)[1:-1]
