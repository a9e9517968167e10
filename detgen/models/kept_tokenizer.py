"""A transformers tokenizer without transformers: the tokenizers library does the work on texts.

Chats are rendered by transformers' own functions (`detgen/models/chat_functions.py`). Anything else is passed on to
transformers' tokenizer, which is loaded on demand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from detgen.models.chat_functions import CHAT_FUNCTIONS, chat_functions

# Methods replaced here; some of transformers' tokenizers override them.
_DONE_HERE = (
    *("__call__", "_encode_plus", "_convert_encoding", "set_truncation_and_padding", "decode", "_decode"),
    *("get_vocab", "convert_ids_to_tokens", "added_tokens_decoder", "backend_tokenizer"),
)
_FACTS = (
    *("eos_token_id", "bos_token_id", "all_special_ids", "chat_template", "special_tokens_map"),
    *("clean_up_tokenization_spaces", "response_template"),
)
_FILE = "tokenizer.json"


class Encoded(NamedTuple):
    """The encoding of a text."""

    input_ids: list[int]


def facts_of(tokenizer: Any, place: Path) -> dict[str, Any] | None:
    """Return the data for a `KeptTokenizer`, as JSON values; None for tokenizers that override its methods.

    Args:
        tokenizer: of transformers.
        place: folder or file of the model.
    """
    if isinstance(tokenizer, KeptTokenizer):
        return {name: getattr(tokenizer, name) for name in _FACTS} | {"state": tokenizer.backend_tokenizer.to_str()}
    from transformers import TokenizersBackend

    kind = type(tokenizer)
    if not isinstance(tokenizer, TokenizersBackend) or tokenizer.split_special_tokens:
        return None
    if any(
        getattr(kind, name) is not getattr(TokenizersBackend, name)
        for name in (*_DONE_HERE, *CHAT_FUNCTIONS, "special_tokens_map")
    ):
        return None
    facts = {name: getattr(tokenizer, name, None) for name in _FACTS}
    state, file = tokenizer.backend_tokenizer.to_str(), place / _FILE
    as_stored = file.is_file() and (
        _unbound(Tokenizer.from_file(str(file))).to_str() == _unbound(Tokenizer.from_str(state)).to_str()
    )
    return facts | {"state": None if as_stored else state}


def _unbound(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer set to encode whole texts, as transformers does by default."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class KeptTokenizer:
    """A tokenizer made of kept data.

    Args:
        facts: from `facts_of`; the state may be the tokenizer itself.
        place: folder or file of the model.
        load: loads transformers' own tokenizer.

    Attributes:
        backend_tokenizer: the tokenizer of the tokenizers library.
    """

    eos_token_id: int | None
    bos_token_id: int | None
    all_special_ids: list[int]
    chat_template: Any
    special_tokens_map: dict[str, str]
    clean_up_tokenization_spaces: bool
    response_template: Any

    def __init__(self, facts: dict[str, Any], place: Path, load: Callable[[], Any]) -> None:
        for name in _FACTS:
            setattr(self, name, facts[name])
        state = facts["state"]
        if not isinstance(state, Tokenizer):
            state = Tokenizer.from_file(str(place / _FILE)) if state is None else Tokenizer.from_str(state)
        self.backend_tokenizer = _unbound(state)
        self._load, self._own = load, None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_own", "_load"):
            raise AttributeError(name)
        if name in CHAT_FUNCTIONS:
            return MethodType(chat_functions()[name], self)
        if self._own is None:
            self._own = self._load()
        return getattr(self._own, name)

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Encoded:
        """Return the token ids of a text."""
        (encoding,) = self.backend_tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return Encoded(encoding.ids)

    def decode(
        self,
        token_ids: int | list[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Return the text of token ids."""
        cleaned = clean_up_tokenization_spaces
        if self.clean_up_tokenization_spaces if cleaned is None else cleaned:
            text: str = self.__getattr__("decode")(
                token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=cleaned
            )
            return text
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        """Return the token ids by text."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """Return the vocabulary entry of a token id."""
        return self.backend_tokenizer.id_to_token(ids)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Tokens besides the vocabulary, by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()
