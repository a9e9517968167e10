"""Split a JSON array of any length into its elements, holding one at a time."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import BinaryIO

from detgen.errors import PromptsError

LONGEST = 64 << 20  # bytes of a line, characters of an element or a row; more than any context holds
_CHUNK = 1 << 16
_OUTER, _NESTED = re.compile(r'["\[\]{},]'), re.compile(r'["\[\]{}]')  # marks of an element, and within it
_QUOTED = re.compile(r'\\.|"', re.DOTALL)
_SPACE = re.compile(r"[ \t\n\r]*")

# Finds the end of an element; whether its value is valid is judged when it is decoded.
_SCANNER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)

# The longest start of a literal or escape that a chunk may cut off, such as "-Infinit" or "\\ud83d\\ude0".
_CUT = 32


def array_elements(file: BinaryIO, name: str) -> Iterator[tuple[int, str]]:
    """Yield each element of the array in `file` as text, with its number from 1; "" if it is too long to hold.

    Bytes that are not UTF-8 become lone surrogates, which are refused with their element.

    Raises:
        PromptsError: if it is not an array, or not JSON.
    """
    with io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        yield from _elements(_Window(text, name), name)


def _elements(window: _Window, name: str) -> Iterator[tuple[int, str]]:
    if not (first := window.peek()):
        return
    if first != "[":
        raise PromptsError(
            f"{name}: not a JSON array of prompts (objects or strings); if there is one per line, rename it to .jsonl"
        )
    window.skip()
    number = 0
    if window.peek() != "]":
        while True:
            number += 1
            yield number, window.element(number)
            after = window.peek()
            if after == "]":
                break
            if after != ",":
                raise window.error("expected a comma or ] after element", number)
            window.skip()
            if window.peek() == "]":
                raise window.error("a comma without an element after element", number)
    window.skip()
    if window.peek():
        raise window.error("text after the end of the array, after element", number)


class _Window:
    """The part of the text that is in memory."""

    def __init__(self, file: io.TextIOWrapper, name: str) -> None:
        self._file = file
        self._name = name
        self._text = ""
        self._at = 0
        self._line = 1
        self._ended = False

    def peek(self) -> str:
        """Return the next character that is not white space; "" at the end."""
        while True:
            self._at = self._match_space()
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._more()

    def skip(self) -> None:
        self._at += 1

    def element(self, number: int) -> str:
        self.peek()
        while True:
            try:
                _, end = _SCANNER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos > len(self._text) - _CUT
                if self._ended or not cut:
                    raise self.error(f"{error.msg.removesuffix(' at')} in element", number, error.pos) from None
            except RecursionError:
                raise self.error("nested too deeply: element", number) from None
            else:
                if self._ended or end < len(self._text) - _CUT:
                    element, self._at = self._text[self._at : end], end
                    return element if len(element) <= LONGEST else ""
            if len(self._text) - self._at > LONGEST + _CUT:
                self._pass_over(number)
                return ""
            self._more()

    def _pass_over(self, number: int) -> None:
        """Skip to the end of an element, holding little of it.

        Raises:
            PromptsError: if it has no end.
        """
        depth, quoted, ended = 0, False, False
        while not ended:
            marks = _QUOTED if quoted else _NESTED if depth else _OUTER
            mark = marks.search(self._text, self._at)
            if mark is None:
                if self._ended:
                    raise self.error("no end of element", number)
                self._at = len(self._text) - self._text.endswith("\\", self._at)  # half of an escape
                self._more()
                continue
            if mark[0] in (",", "]", "}") and not depth:  # after a number
                self._at = mark.start()
                return
            if mark[0] == '"':
                quoted = not quoted
            depth += (mark[0] in ("[", "{")) - (mark[0] in ("]", "}"))
            ended, self._at = not depth and not quoted, mark.end()

    def error(self, reason: str, number: int, at: int | None = None) -> PromptsError:
        line = self._line + self._text.count("\n", 0, self._at if at is None else at)
        return PromptsError(f"{self._name}:{line}: not valid JSON: {reason} {number}")

    def _match_space(self) -> int:
        match = _SPACE.match(self._text, self._at)
        return match.end() if match else self._at

    def _more(self) -> None:
        # Doubling the buffer keeps the work for a long element linear.
        held = len(self._text) - self._at
        chunk = self._file.read(max(_CHUNK, min(held, LONGEST - held)))
        self._ended = not chunk
        self._line += self._text.count("\n", 0, self._at)
        self._text = self._text[self._at :] + chunk
        self._at = 0
