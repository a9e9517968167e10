"""Turns requests into samples: tokenizes prompts and checks that the model and the cache have room for them.

The length of a text gives a lower bound on its number of tokens: no token stands for more than the longest entry of the
vocabulary. The bound is sound only if no text is lost during tokenization: a tokenizer whose normalizers or splitters
may drop text, or that joins unknown characters into one token, has no bound.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers.pre_tokenizers import ByteLevel

from detgen.engine.answering import Answering
from detgen.engine.bounded import Bounded
from detgen.engine.calling import grammar_of
from detgen.engine.rendering import chat_renderer, render_chat
from detgen.engine.request import Completion, Request
from detgen.engine.scheduler import Scheduler
from detgen.engine.sequence import Sequence
from detgen.engine.structure import Structures
from detgen.engine.tokenizing import Tokenize
from detgen.errors import RequestError
from detgen.kernels.sampling import check_filters
from detgen.models.loaded import LoadedModel

_LETTERS = string.ascii_letters.encode()
_OTHERS = bytes(set(range(256)) - set(_LETTERS))
_COMPOSED = 4  # most characters that normalization joins into one
# Normalizers that join characters but never drop one, and leave ASCII alone or change its letters one by one.
_JOINING = {"NFC", "NFKC", "NFD", "NFKD", "Lowercase"}
# Splitters that keep all of the text, unless their behaviour says otherwise.
_SPLITTERS = {"ByteLevel", "Split", "Digits", "Punctuation", "Metaspace", "UnicodeScripts"}
_LARGE = 1_000_000  # characters above which a text's length is checked before it is tokenized


class _Limits(NamedTuple):
    """The most that one token stands for, and how texts are measured.

    Attributes:
        size: bytes, or characters where the vocabulary is of characters.
        letters: ASCII letters.
        in_bytes: whether size counts bytes.
        joined: whether a normalizer may join characters that are not ASCII.
        stripped: whether an added token swallows the white space next to it.
    """

    size: int
    letters: int
    in_bytes: bool
    joined: bool
    stripped: bool


class LeastTokens:
    """Lower bounds on numbers of tokens. The tokenizer's state is read on first use.

    Args:
        tokenizer: a tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _limits(self) -> _Limits | None:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if backend is None else _limits(json.loads(backend.to_str()))

    def of(self, text: str) -> int:
        """Return the minimum number of tokens of a text, without special ones; 0 if there is no bound."""
        limits = self._limits
        if limits is None:
            return 0
        if limits.stripped:
            text = "".join(text.split())
        plain = text.isascii() or not limits.joined
        data = text.encode("utf-8", "surrogatepass")
        size = len(data) if limits.in_bytes and plain else len(text)
        by_size = -(-size // (limits.size if plain else limits.size * _COMPOSED))
        letters = len(data.translate(None, _OTHERS)) if plain else 0
        return max(by_size, -(-letters // limits.letters))


def _limits(state: dict[str, Any]) -> _Limits | None:
    """Return the limits of a tokenizer, given its tokenizer.json; None if there is no sound bound."""
    normalizers, splitters = _parts(state["normalizer"], "normalizers"), _parts(state["pre_tokenizer"], "pretokenizers")
    if not all(_keeps(n) for n in normalizers) or not all(_splits(s) for s in splitters):
        return None
    in_bytes = any(s["type"] == "ByteLevel" for s in splitters)
    vocabulary = _vocabulary(state["model"], in_bytes)
    if vocabulary is None:
        return None
    added = [token["content"] for token in state["added_tokens"]]
    measure: Callable[[str], int] = (lambda token: len(token.encode())) if in_bytes else len
    letters = (len(t.encode().translate(None, _OTHERS)) for t in (*vocabulary, *added))
    return _Limits(
        size=max(*map(len, vocabulary), *map(measure, added), 1),
        letters=max(1, *letters),
        in_bytes=in_bytes,
        joined=any(n["type"] in _JOINING for n in normalizers),
        stripped=any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"]),
    )


def _parts(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """Return the components of a part of the state, with sequences flattened."""
    if part is None:
        return []
    return [p for each in part[inner] for p in _parts(each, inner)] if part["type"] == "Sequence" else [part]


def _keeps(normalizer: dict[str, Any]) -> bool:
    """Return whether a normalizer drops no text."""
    if normalizer["type"] == "Replace":
        old, new = normalizer["pattern"].get("String"), normalizer["content"]
        return old is not None and len(new) >= len(old) and not set(old) & set(string.ascii_letters)
    return normalizer["type"] in _JOINING | {"Prepend"}


def _splits(splitter: dict[str, Any]) -> bool:
    """Return whether a splitter drops no text."""
    return splitter["type"] in _SPLITTERS and splitter.get("behavior") != "Removed"


def _vocabulary(model: dict[str, Any], in_bytes: bool) -> Iterable[str] | None:
    """Return the vocabulary of a model that knows every text; None for other models."""
    entries = model.get("vocab")
    if model.get("type") == "Unigram" and isinstance(entries, list):
        known: set[str] = {entry[0] for entry in entries}
    elif model.get("type") == "BPE" and isinstance(entries, dict):
        known = set(entries)
        if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            return None
    else:
        return None
    if in_bytes:
        return known if known.issuperset(ByteLevel.alphabet()) else None
    whole = model.get("byte_fallback") and known.issuperset(f"<0x{byte:02X}>" for byte in range(256))
    return known if whole else None


class Encoder:
    """Encodes prompts and creates the samples of requests.

    Args:
        target: has the tokenizer, the vocabulary and the context.
        scheduler: says how long a sequence may get in the KV caches.
        device: "cpu" or "cuda", where tokens are chosen.
        answering: knows what the chat template is like.

    Attributes:
        render: applies the tokenizer's chat template.
        tokenize: gives the token ids of texts.
    """

    def __init__(self, target: LoadedModel, scheduler: Scheduler, device: str, answering: Answering) -> None:
        self.render = chat_renderer(target.tokenizer)
        self.tokenize = Tokenize(target.tokenizer, target.name)
        self._target = target
        self._device, self._answering = device, answering
        self._scheduler = scheduler
        self._least_tokens = LeastTokens(target.tokenizer)
        self._structures = Structures(target.tokenizer, target.name, target.vocabulary, target.eos)

    def samples(self, requests: Iterable[Request | None], refused: list[Completion]) -> Iterator[Sequence | None]:
        """Yield the samples of the requests that can run; the others go to `refused`. None is passed through."""
        for request in requests:
            if request is None:
                yield None
                continue
            if not isinstance(request, Request):
                raise RequestError(f"stream takes Requests, got {type(request).__name__}; generate takes other prompts")
            try:
                yield from self.sequences(request)
            except RequestError as e:
                refused.append(Completion(request, error=str(e)))

    def sequences(self, request: Request) -> Iterator[Sequence]:
        """See `Engine.sequences`."""
        tokens = self.encode(request)
        context, capacity = self._target.context, self._scheduler.capacity
        if len(tokens) >= context:
            raise RequestError(f"the prompt has {len(tokens)} tokens, the model's context is {context}")
        limit = min(len(tokens) + request.params.max_tokens, context)
        if limit > capacity:  # a lower limit would make the output depend on the memory
            raise RequestError(
                f"the prompt has {len(tokens)} tokens and may grow to {limit}, the KV cache holds sequences of "
                f"{capacity}; give it more with --kv-memory, or ask for fewer --max-tokens"
            )
        request.params.check_ids(self._target.vocabulary)
        check_filters(request.params, self._device)
        calls = None
        if request.messages is not None:
            calls = grammar_of(request, tokens, self._answering)
        eos, structure = self._target.eos, self._structures.of(request.params, calls, request.form_key)
        return (Sequence(request, i, list(tokens), len(tokens), limit, eos, structure) for i in request.wanted)

    def encode(self, request: Request) -> list[int]:
        """See `Engine.encode`."""
        target = self._target

        def check(text: str) -> None:
            self.check_length(text, request.params.max_tokens)

        return prompt_tokens(
            request, target.tokenizer, target.name, target.vocabulary, self.render, self.tokenize, check
        )

    def check_length(self, text: str, max_tokens: int) -> None:
        """Refuse a text that cannot fit, by its length alone: tokenizing it would take a minute and gigabytes.

        Raises:
            RequestError: if it cannot fit. Shorter texts are counted in tokens, by `sequences`.
        """
        if len(text) < _LARGE:
            return
        least, context = self._least_tokens.of(text), self._target.context
        size = f"the prompt has {len(text)} characters, which are at least {least} tokens"
        if least >= context:
            raise RequestError(f"{size}, the model's context is {context}")
        if min(least + max_tokens, context) > self._scheduler.capacity:
            raise RequestError(
                f"{size}, the KV cache holds sequences of {self._scheduler.capacity}; give it more with --kv-memory"
            )


def prompt_tokens(
    request: Request,
    tokenizer: Any,
    model: str,
    vocabulary: int,
    render: Bounded[str],
    tokenize: Tokenize,
    check: Callable[[str], None] = lambda text: None,
) -> list[int]:
    """Return the token ids of a request's prompt; a chat is rendered by the model's template.

    Args:
        request: a prompt, messages or token ids.
        tokenizer: the model's tokenizer.
        model: the model's name in errors.
        vocabulary: number of entries of its logits.
        render: `chat_renderer` of the tokenizer.
        tokenize: gives the token ids of a text.
        check: refuses a text that is too long before it is tokenized.

    Raises:
        RequestError: if the prompt is empty, a chat cannot be rendered, a text cannot be tokenized, or a token does not
            exist.
        EngineError: if the machine has too little memory.
    """
    if request.token_ids is not None:
        tokens = list(request.token_ids)
        if (wrong := next((token for token in tokens if not 0 <= token < vocabulary), None)) is not None:
            raise RequestError(f"token_ids must be from 0 to {vocabulary - 1}, got {wrong}")
    elif request.messages is not None:
        text = render_chat(tokenizer, model, request, render)
        check(text)
        tokens = tokenize(text, special=False)
    elif request.prompt is None:
        raise RequestError("the request has no prompt: give prompt, messages or token_ids by name")
    else:
        check(request.prompt)
        tokens = tokenize(request.prompt) if request.prompt else []
    if not tokens:
        raise RequestError("the prompt is empty")
    if max(tokens) >= vocabulary:
        raise RequestError(
            f"the tokenizer of {model} does not fit its config.json: the prompt has the token {max(tokens)}, and"
            f" vocab_size is {vocabulary}"
        )
    return tokens
