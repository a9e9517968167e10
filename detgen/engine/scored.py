"""The sequences of score requests: how they are made, and how their results become a score.

Prompts with completions, and whole texts, are tokenized as in EleutherAI's harness (lm-evaluation-harness,
`TemplateLM._encode_pair` and `utils.get_rolling_token_windows`), so that scores are comparable with published ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from detgen.engine.encoding import Encoder
from detgen.engine.rendering import render_chat
from detgen.engine.scheduler import Scheduler
from detgen.engine.score_requests import Score, ScoreRequest
from detgen.engine.sequence import Sequence
from detgen.errors import RequestError
from detgen.models.loaded import LoadedModel

Encode = Callable[[str], list[int]]


class Scored(NamedTuple):
    """Tokens that are read together, and how many of them are scored.

    Attributes:
        tokens: at least one token that is not scored, then those that are.
        scored: number of scored tokens, at least one.
    """

    tokens: list[int]
    scored: int


def move_space(prompt: str, completion: str) -> tuple[str, str]:
    """Move white space at the end of a prompt to its completion: in most vocabularies, words begin with it."""
    kept = prompt.rstrip()
    return kept, prompt[len(kept) :] + completion


def completion_tokens(prompt: str, prompt_tokens: list[int], completion: str, encode: Encode) -> list[int]:
    """Return the tokens of a completion: those of prompt and completion together, minus the prompt's number of tokens.

    Args:
        prompt: a text.
        prompt_tokens: its tokens.
        completion: the text that follows it.
        encode: the encoder of the prompt.
    """
    return encode(prompt + completion)[len(prompt_tokens) :]


def rolling_windows(tokens: list[int], prefix: int, context: int) -> Iterator[Scored]:
    """Cut a text that is scored from its first token on into windows that fit the model's context.

    `prefix` precedes the first token. A text that is too long is cut into windows that each read as many tokens as fit:
    after the first window, one token precedes the scored ones, and before those of the last window as many as fill it.
    Each token of the text is scored once.

    Args:
        tokens: tokens of the text, at least one.
        prefix: the token before the text.
        context: largest number of tokens that the model reads, at least one.
    """
    first = min(context, len(tokens))
    yield Scored([prefix, *tokens[:first]], first)
    done = first
    while done < len(tokens):
        count = min(context, len(tokens) - done)
        done += count
        yield Scored(tokens[done - context - 1 : done], count)


@dataclass(slots=True, eq=False)
class Tally:
    """A score whose sequences are being read.

    Attributes:
        request: the request.
        sample: number of its completion.
        prompt_tokens: number of tokens of the prompt; 0 if it is scored itself.
        parts: number of sequences: one, or the windows of a text.
        done: sequences that have ended, by part.
    """

    request: ScoreRequest
    sample: int
    prompt_tokens: int
    parts: int
    done: dict[int, ScoredSequence] = field(default_factory=dict)

    def end(self, seq: ScoredSequence) -> Score | None:
        """Record the end of a sequence; return the score if it was the last one."""
        self.done[seq.part] = seq
        if len(self.done) < self.parts:
            return None
        parts = [self.done[i] for i in range(self.parts)]
        error = next((part.error for part in parts if part.error is not None), None)
        if error is not None:
            return Score(self.request, self.sample, prompt_tokens=self.prompt_tokens, error=error)
        return Score(
            self.request,
            self.sample,
            tuple(token for part in parts for token in part.scored),
            tuple(logprob for part in parts for logprob in part.found),
            tuple(greedy for part in parts for greedy in part.greedy),
            self.prompt_tokens,
        )


@dataclass(slots=True, eq=False)
class ScoredSequence(Sequence):
    """A prompt with its completion, or a window of a text, while it is read.

    Its tokens exclude the last scored one, since nothing after that is scored.

    Attributes:
        tally: the score that it belongs to.
        part: number of the part, from 0.
        first: index, within everything that is scored, of the first token that this part scores.
        scored: tokens to score.
        found: log-probabilities of these tokens so far.
        greedy: whether each of these is the most likely token.
    """

    tally: Tally = field(kw_only=True)
    part: int = 0
    first: int = 0
    scored: list[int] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    greedy: list[bool] = field(default_factory=list)

    @property
    def asked_from(self) -> int:
        """Position of the first token whose logits are wanted: the one before the scored tokens."""
        return self.prompt_length - 1

    def break_off(self, position: int, fault: str = "") -> None:
        """End the sequence with an error: the model's results are not finite at this position, counted from 0."""
        if self.tally.request.completions is not None:
            Sequence.break_off(self, position, fault)
            return
        token = self.first + position - self.asked_from
        self.finish_reason = "error"
        self.error = f"the model's hidden states or logits are not finite before token {token} of the text"


class ScoreEncoder:
    """Encodes prompts and completions and creates their sequences.

    Args:
        target: provides the tokenizer, the vocabulary and the context.
        scheduler: knows the longest sequence that fits the KV cache.
        encoder: encodes prompts.
    """

    def __init__(self, target: LoadedModel, scheduler: Scheduler, encoder: Encoder) -> None:
        self._target = target
        self._scheduler = scheduler
        self._encoder = encoder

    def all(self, requests: Iterable[ScoreRequest | None], refused: list[Score]) -> Iterator[ScoredSequence | None]:
        """Yield the sequences of requests that can run; others go to `refused`. A None is yielded as it is."""
        for request in requests:
            if request is None:
                yield None
                continue
            if not isinstance(request, ScoreRequest):
                raise RequestError(f"score_stream takes ScoreRequests, got {type(request).__name__}")
            try:
                found = self.sequences(request)
            except RequestError as error:
                refused.append(Score(request, error=str(error), refused=True))
            else:
                yield from found

    def sequences(self, request: ScoreRequest) -> Iterator[ScoredSequence]:
        """Return a request's sequences, made one by one; the request is encoded and checked at once.

        Raises:
            RequestError: if it can never run.
        """
        if request.completions is None:
            return self._rolling(request)
        if not request.completions:
            raise RequestError("completions is empty")
        pairs = list(self._pairs(request, request.completions))
        return (
            self._sequence(Tally(request, i, len(pairs[i].tokens) - pairs[i].scored, 1), 0, 0, pairs[i])
            for i in request.wanted
        )

    def _sequence(self, tally: Tally, part: int, first: int, pair: Scored) -> ScoredSequence:
        tokens, ahead = pair.tokens[:-1], len(pair.tokens) - pair.scored
        made = ScoredSequence(tally.request, tally.sample, tokens, ahead, len(tokens), tally=tally)
        made.part, made.first, made.scored = part, first, pair.tokens[ahead:]
        return made

    def _pairs(self, request: ScoreRequest, completions: tuple[str | tuple[int, ...], ...]) -> Iterator[Scored]:
        """Yield the tokens of a prompt with each of its completions."""
        text, encode = self._text(request)
        prompts: dict[str | None, list[int]] = {}
        for i, completion in enumerate(completions):
            name = f"completions[{i}]" if len(completions) > 1 else "the completion"
            prompt = text
            if isinstance(completion, str):
                _check(bool(completion), f"{name} is empty")
                if text is not None and request.messages is None and text.strip():
                    prompt, completion = move_space(text, completion)
            if prompt not in prompts:
                prompts[prompt] = self._prompt(request, prompt, encode)
            before = prompts[prompt]
            if not isinstance(completion, str):
                behind = list(completion)
                _check(bool(behind), f"{name} is empty")
            elif prompt is None:
                behind = encode(completion)
                _check(bool(behind), f"{name} has no token")
            else:
                self._encoder.check_length(prompt + completion, 0)
                behind = completion_tokens(prompt, before, completion, encode)
                _check(bool(behind), f"{name} adds no token to the prompt")
            self._check_tokens(name, behind)
            self._check_room(f"the prompt has {len(before)} tokens and {name} {len(behind)}", len(before) + len(behind))
            yield Scored(before + behind, len(behind))

    def _text(self, request: ScoreRequest) -> tuple[str | None, Encode]:
        """Return the text of a prompt, None for token ids, and the encoder of it and its completions."""
        target, special = self._target, request.token_ids is None and request.messages is None
        text = request.prompt
        if request.messages is not None:
            text = render_chat(target.tokenizer, target.name, request, self._encoder.render)

        encode = partial(self._encoder.tokenize, special=special)
        return (None if request.token_ids is not None else text), encode

    def _prompt(self, request: ScoreRequest, text: str | None, encode: Encode) -> list[int]:
        """Return the tokens of a prompt."""
        if text is None:
            return self._encoder.encode(request)
        self._encoder.check_length(text, 0)
        found = encode(text) if text else []
        _check(bool(found), "the prompt is empty")
        self._check_tokens("the prompt", found)
        return found

    def _rolling(self, request: ScoreRequest) -> Iterator[ScoredSequence]:
        """Yield the windows of a text that is scored as a whole."""
        target, tokenizer = self._target, self._target.tokenizer
        if request.messages is not None:
            raise RequestError("messages are scored with a completion only; give one, or a text")
        prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if prefix is None:
            raise RequestError(
                f"the tokenizer of {target.name} has neither a BOS nor an EOS token, so nothing can come before the"
                " first token of a text; give prompt and completion"
            )
        tokens = list(request.token_ids or ())
        if request.token_ids is None:
            tokens = self._encoder.tokenize(request.prompt or "", special=False)
        _check(bool(tokens), "the text is empty")
        self._check_tokens("the text", tokens)
        context = target.context
        longest = min(len(tokens), context)
        self._check_room(f"the text has windows of {longest} tokens", longest + 1)
        tally = Tally(request, 0, 0, -(-len(tokens) // context))
        return (
            self._sequence(tally, part, part * context, window)
            for part, window in enumerate(rolling_windows(tokens, prefix, context))
        )

    def _check_tokens(self, name: str, tokens: list[int]) -> None:
        """Check that all tokens are in the vocabulary."""
        most = self._target.vocabulary - 1
        if not all(type(token) is int and 0 <= token <= most for token in tokens):
            raise RequestError(f"{name} must have token ids from 0 to {most}")

    def _check_room(self, size: str, tokens: int) -> None:
        """Check that the model, and then the KV cache, has room for that many tokens; the last one is not read."""
        context, capacity = self._target.context, self._scheduler.capacity
        _check(tokens - 1 <= context, f"{size}, the model's context is {context}")
        room = f"{size}, the KV cache holds sequences of {capacity}; give it more with --kv-memory"
        _check(tokens - 1 <= capacity, room)


def _check(right: bool, otherwise: str) -> None:
    if not right:
        raise RequestError(otherwise)
