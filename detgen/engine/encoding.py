"""From requests to their samples: the token ids of the prompts, and whether model and cache have room for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from detgen.engine.answering import Answering
from detgen.engine.bounded import Bounded
from detgen.engine.calling import grammar_of
from detgen.engine.lengths import LeastTokens
from detgen.engine.rendering import chat_renderer, render_chat
from detgen.engine.request import Completion, Request
from detgen.engine.scheduler import Scheduler
from detgen.engine.sequence import Sequence
from detgen.engine.structure import Structures
from detgen.engine.tokenizing import Tokenize
from detgen.errors import RequestError
from detgen.kernels.sampling import check_filters
from detgen.models.loading import LoadedModel

_LARGE = 1_000_000  # characters of a text from which its length is looked at first


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
        """The samples of the requests that can run; the others go to `refused`. None stays None."""
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
        """As `Engine.sequences`."""
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
        """As `Engine.encode`."""
        target = self._target

        def check(text: str) -> None:
            self.check_length(text, request.params.max_tokens)

        return prompt_tokens(
            request, target.tokenizer, target.name, target.vocabulary, self.render, self.tokenize, check
        )

    def check_length(self, text: str, max_tokens: int) -> None:
        """Refuse a text whose length says that it cannot fit; reading it would take a minute and gigabytes.

        Raises:
            RequestError: if so. Shorter texts are counted in tokens, by `sequences`.
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
    """The token ids of a request's prompt; a chat is rendered by the model's template.

    Args:
        request: a prompt, messages or token ids.
        tokenizer: the model's.
        model: what errors call it.
        vocabulary: entries of its logits.
        render: `chat_renderer` of the tokenizer.
        tokenize: gives its token ids.
        check: is given the text before it is read, and refuses it if it is too long.

    Raises:
        RequestError: if the prompt is empty, a chat cannot be rendered, a text cannot be tokenized, or there is no such
            token.
        EngineError: the machine has no room for that.
    """
    if request.token_ids is not None:
        tokens = list(request.token_ids)
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocabulary):
            raise RequestError(f"token_ids must be from 0 to {vocabulary - 1}")
    elif request.messages is not None:
        text = render_chat(tokenizer, model, request, render)
        check(text)
        tokens = tokenize(text, special=False)
    else:
        check(request.prompt or "")
        tokens = tokenize(request.prompt) if request.prompt else []
    if not tokens:
        raise RequestError("the prompt is empty")
    if max(tokens) >= vocabulary:
        raise RequestError(
            f"the tokenizer of {model} does not fit its config.json: the prompt has the token {max(tokens)}, and"
            f" vocab_size is {vocabulary}"
        )
    return tokens
