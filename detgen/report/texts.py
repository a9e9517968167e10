"""The texts of tokens, from the tokenizer of the run's model if it is on this machine.

No model is loaded, no code of a model runs, and nothing is downloaded. Only the tokenizers library is used, except for
GGUF files, whose tokenizers transformers makes from their headers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from detgen.errors import DEMO, EngineError
from detgen.interruption import interrupted_later
from detgen.models.folders import local_place
from detgen.report.streaming import Fields


class Texts:
    """Texts of tokens; none if there is no tokenizer.

    Args:
        manifest: manifest of the run.

    Attributes:
        why: why there are no texts, as a sentence; "" if there are.
        chunk: tokens per chunk of a thinking model; None if unknown.
        keeps: whether the state of such a model stays until its next thought.
    """

    def __init__(self, manifest: Fields) -> None:
        self.why = ""
        self.chunk: int | None = None
        self.keeps = False
        self._tokenizer: Any = None
        self._known: dict[int, str] = {}
        folder = _folder(manifest["model"])
        name = manifest["profile"]["target"]["name"]
        if folder is not None and folder.is_file():
            self._tokenizer = _load_gguf(folder, name)
            if self._tokenizer is None:
                self.why = f"The tokenizer in {name} cannot be read here, so tokens are shown by their numbers."
            return
        if folder is None or not (folder / "tokenizer.json").is_file():
            self.why = (
                f"The tokenizer of {name} is not on this machine as a tokenizer.json, so tokens are shown by their"
                " numbers."
            )
            return
        self._tokenizer = _load(folder / "tokenizer.json")
        if self._tokenizer is None:
            self.why = f"The tokenizer.json of {name} cannot be read here, so tokens are shown by their numbers."
        self._read_chunks(folder)

    def check(self, line: Fields) -> None:
        """Stop using the tokenizer if it does not give the text of an output line."""
        if self._tokenizer is None:
            return
        text = self._decode(line["token_ids"], special=False)
        if text is None or not text.startswith(line["text"]):
            self._tokenizer = None
            self._known.clear()
            self.why = (
                "The tokenizer that is in the model's place now gives other texts than the run's, so tokens are shown"
                " by their numbers."
            )

    def of(self, token: int) -> str | None:
        """Return the text of a token within a text; None if unknown."""
        if self._tokenizer is None:
            return None
        if token not in self._known:
            once, twice = self._decode([token]), self._decode([token, token])
            if once is None or twice is None:
                return None
            # Some tokenizers drop the space at the beginning of a text; the second of two tokens keeps it.
            text = twice[len(once) :] if twice.startswith(once) and len(twice) > len(once) else once
            if "\ufffd" in text:  # only some of the bytes of a character
                text = self._tokenizer.id_to_token(token) or text
            self._known[token] = text
        return self._known[token]

    def of_all(self, tokens: list[int]) -> str | None:
        """Return the text of tokens, including special ones; None if unknown."""
        return None if self._tokenizer is None else self._decode(tokens)

    def encode(self, prompt: str) -> list[int] | None:
        """Return the tokens of a prompt; None if unknown."""
        if self._tokenizer is None:
            return None
        try:
            found: list[int] = self._tokenizer.encode(prompt).ids
        except TypeError:  # half a character, which no run accepts
            return None
        return found

    def _read_chunks(self, folder: Path) -> None:
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return
        size = config.get("chunk_size") if isinstance(config, dict) else None
        if type(size) is int and size > 0:
            self.chunk, self.keeps = size, config.get("empty_state") == "keep"

    def _decode(self, tokens: list[int], *, special: bool = True) -> str | None:
        try:
            found: str = self._tokenizer.decode(tokens, skip_special_tokens=not special)
        except (OverflowError, TypeError):  # not ids of a vocabulary
            return None
        return found


def _folder(model: str | None) -> Path | None:
    """Return the folder or file of a model on this machine; None if there is none."""
    if model is None:
        return DEMO / "target"
    try:
        place = local_place(model, model)
    except EngineError:
        return None
    if place is not None:
        return place
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "tokenizer.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _load(path: Path) -> Any:
    """Load a tokenizer; return None if it is damaged."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # the library's panics are not `Exception`s
        return None


def _load_gguf(path: Path, name: str) -> Any:
    """Load the tokenizer of a GGUF file; return None if it is damaged."""
    with interrupted_later():  # imports transformers
        from detgen.models.loading import load_tokenizer
    try:
        return load_tokenizer(path, name).backend_tokenizer
    except EngineError:
        return None
