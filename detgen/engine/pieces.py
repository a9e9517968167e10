"""The text and the bytes of single tokens, which need not be whole characters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from detgen.errors import DEMO
from detgen.interruption import interrupted_later
from detgen.models.byte_letters import byte_letters

if TYPE_CHECKING:
    from detgen.models.loaded import LoadedModel

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how tokenizers with a byte fallback call the token of a byte


class Piece(NamedTuple):
    """A token.

    Attributes:
        text: its characters; where its bytes are no whole characters, each byte as `\\\\xe2`.
        data: its bytes.
        whole: whether the bytes are whole characters.
    """

    text: str
    data: bytes
    whole: bool

    @property
    def written(self) -> str | list[int]:
        """The form in output lines: its characters, or its bytes if they are not whole characters."""
        return self.text if self.whole else list(self.data)

    @classmethod
    def of(cls, written: str | list[int]) -> Piece:
        """Return the piece that an output line has."""
        if isinstance(written, str):
            return cls(written, written.encode(), True)
        return cls("".join(f"\\x{byte:02x}" for byte in written), bytes(written), False)


class Pieces:
    """The pieces of a tokenizer, which is loaded on first use.

    Args:
        load: loads the tokenizer of transformers.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._known: dict[int, Piece] = {}

    def of(self, token: int) -> Piece:
        """Return the piece of a token; an empty one for an id that only pads the vocabulary.

        Raises:
            EngineError: if the tokenizer cannot be loaded.
        """
        found = self._known.get(token)
        if found is None:
            data = self._bytes(token)
            try:
                found = Piece(data.decode(), data, True)
            except UnicodeDecodeError:
                found = Piece.of(list(data))
            self._known[token] = found
        return found

    @cached_property
    def _tokenizer(self) -> Any:
        return self._load()

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """The kinds of the decoder's parts."""
        decoder = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "decoder", None)
        return frozenset(_kinds(json.loads(decoder.__getstate__()))) if decoder is not None else frozenset()

    @cached_property
    def _letters(self) -> dict[str, int]:
        """The byte that each letter of a vocabulary of bytes stands for."""
        return {letter: byte for byte, letter in enumerate(byte_letters())}

    def _bytes(self, token: int) -> bytes:
        try:
            entry = self._tokenizer.convert_ids_to_tokens(token)
        except OverflowError:  # no vocabulary has it, but a tampered line may
            entry = None
        if entry is None:
            return b""
        if token in self._tokenizer.added_tokens_decoder:
            return str(entry).encode()
        if "ByteLevel" in self._decoders and all(letter in self._letters for letter in entry):
            return bytes(self._letters[letter] for letter in entry)
        if match := _BYTE.fullmatch(entry):
            return bytes([int(match[1], 16)])
        if self._decoders & {"Metaspace", "Replace"}:
            entry = entry.replace("\u2581", " ")
        return str(entry).encode()


def _kinds(part: dict[str, Any]) -> list[str]:
    return [part["type"], *(kind for inner in part.get("decoders", ()) for kind in _kinds(inner))]


def pieces_of(target: str | Path | LoadedModel | None, *, trusted: bool = False) -> Pieces:
    """Return the pieces of a model's tokenizer.

    Args:
        target: see `EngineConfig`.
        trusted: whether the model's own code may run.
    """

    def load() -> Any:
        if target is not None and not isinstance(target, str | Path):
            return target.tokenizer
        with interrupted_later():
            from detgen.models.loading import load_tokenizer

        return load_tokenizer(target or DEMO / "target", str(target or "embedded:target"), trusted=trusted)

    return Pieces(load)
