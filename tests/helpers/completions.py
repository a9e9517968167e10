"""Requests and completions to write, and the lines that were written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from detgen.engine.pieces import Piece, Pieces
from detgen.engine.request import Completion, Request, TokenRecord
from detgen.params import SamplingParams
from helpers.records import count_records

_DRAFTERS = ("model", "ngram")


class Numbered(Pieces):
    """Pieces of a vocabulary in which each token is its number; 255 is half a character."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def of(self, token: int) -> Piece:
        return Piece.of([255] if token == 255 else f"<{token}>")


NUMBERED = Numbered()


def request(index: int, n: int = 1, **fields: Any) -> Request:
    return Request(index=index, id=index + 1, prompt=f"prompt {index}", params=SamplingParams(n=n), **fields)


def records(length: int) -> tuple[TokenRecord, ...]:
    out = []
    for p in range(length):
        status, drafted = (("accepted", 100 + p), ("corrected", 7), ("bonus", None), ("plain", None))[p % 4]
        out.append(TokenRecord(p, p // 4, 100 + p, _DRAFTERS[p // 4 % 2], drafted, status, -0.5 * p, 1.25))
    out.append(TokenRecord(length, length // 4, None, _DRAFTERS[length // 4 % 2], 9, "rolled_back", None, None))
    return tuple(out)


def completion(req: Request, sample: int = 0, length: int = 5) -> Completion:
    tokens = tuple(100 + p for p in range(length))
    log = records(length)
    text = f"text {req.index}.{sample}"
    return Completion(req, sample, text, tokens, "length", 3, None, log, count_records(log))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
