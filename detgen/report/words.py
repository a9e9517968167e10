"""How the page writes counts, shares, and texts without hidden characters."""

from __future__ import annotations

import json
import unicodedata

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp", "Co", "Cn"})  # categories that are invisible or move what is visible
_SHOWN = {"\n": "↵", "\t": "⇥", "\r": "␍"}
_MOST_NAME = 1000  # characters of a one-line text
_MOST_TEXT = 20_000  # characters of a longer text


def counted(count: int, word: str) -> str:
    """Return a count with its noun: "1 token", "2 tokens"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def share(part: float, whole: float) -> str:
    """Return a share in percent; a dash if the whole is zero."""
    return f"{part / whole:.1%}" if whole else "–"


def visible(text: str) -> str:
    """Return a text on one line with nothing hidden: line ends as arrows, invisible characters escaped.

    A text that is too long for a line is cut.
    """
    if len(text) > _MOST_NAME:
        text = f"{text[: _MOST_NAME - 1]}…"
    return "".join(_SHOWN.get(c) or (_escaped(c) if unicodedata.category(c) in _HIDDEN else c) for c in text)


def harmless(text: str) -> str:
    """Return a text of several lines with nothing hidden but line ends and tabs."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in _HIDDEN else _escaped(c) for c in text)


def text_of(text: object) -> str:
    """Return a text, or JSON, as the page shows it."""
    whole = harmless(text if isinstance(text, str) else json.dumps(text, ensure_ascii=False, indent=1))
    return whole if len(whole) <= _MOST_TEXT else f"{whole[:_MOST_TEXT]}\n[{len(whole) - _MOST_TEXT:,} more characters]"


def _escaped(c: str) -> str:
    return ascii(c)[1:-1]
