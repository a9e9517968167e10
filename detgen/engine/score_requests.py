"""Scoring: given completions go in, their log-probabilities come out. Plain data; knows no files and no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from detgen.engine.asking import request_of
from detgen.engine.request import Request
from detgen.engine.showing import call
from detgen.errors import RequestError
from detgen.params import SamplingParams

# Sampling parameters do not affect scores.
_ANY = SamplingParams()


@dataclass(frozen=True, slots=True, repr=False)
class ScoreRequest(Request):
    """A prompt with completions to be scored, or a text to be scored as a whole.

    Attributes:
        completions: each a text, or token ids that follow those of the prompt. None scores the prompt itself, which
            is a text or token ids, from its first token on.
    """

    completions: tuple[str | tuple[int, ...], ...] | None = None

    @property
    def wanted(self) -> Sequence[int]:
        """The scores to compute."""
        if self.only is not None:
            return self.only
        return range(1 if self.completions is None else len(self.completions))


@dataclass(frozen=True, slots=True, repr=False)
class Score:
    """The score of a completion, or the reason why it has none.

    Attributes:
        request: the request.
        sample: which of its completions, from 0; 0 if the prompt itself is scored.
        token_ids: the completion's tokens.
        logprobs: their natural log-probabilities under the model (temperature 1), each a float32 value.
        greedy: whether each is the most likely token at its position; among equal ones, the lowest id.
        prompt_tokens: tokens of the prompt; 0 if it is scored itself.
        error: why the request could not run or the completion has no score; None if it has one.
        refused: whether the request could not run at all, so that it has no other score.
    """

    request: ScoreRequest
    sample: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    greedy: tuple[bool, ...] = ()
    prompt_tokens: int = 0
    error: str | None = None
    refused: bool = False

    @property
    def logprob(self) -> float:
        """The log-probability of the completion: the exact sum over its tokens, rounded once."""
        return math.fsum(self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether greedy generation gives the completion, that is, whether all of its tokens are greedy."""
        return all(self.greedy)

    def __repr__(self) -> str:
        shown: dict[str, Any] = {"id": self.request.id, "sample": self.sample}
        if self.error is not None:
            return call("Score", {**shown, "error": self.error})
        return call("Score", {**shown, "logprob": self.logprob, "tokens": len(self.token_ids)})


# A text, or a prompt with one completion or several: texts or lists of token ids.
Scorable = str | tuple[Any, Any] | ScoreRequest


def score_requests_of(items: Scorable | Iterable[Scorable]) -> list[ScoreRequest]:
    """Turn the argument of `Engine.score` into requests, each a separate object.

    Args:
        items: one or several of: a text, which is scored as a whole; a tuple of a prompt, as `Engine.generate` takes
            it, and of a completion or a list of them, each a text or a list of token ids; a request.

    Raises:
        RequestError: if one is none of these.
    """
    several = [items] if isinstance(items, str | tuple | ScoreRequest) else items
    if isinstance(several, bytes | Mapping) or not isinstance(several, Iterable):
        raise RequestError(f"score takes texts, (prompt, completions) or ScoreRequests, got {type(items).__name__}")
    return [_request(i, item) for i, item in enumerate(several)]


def _request(i: int, item: Any) -> ScoreRequest:
    if isinstance(item, ScoreRequest):
        return item.numbered(i)
    if isinstance(item, str):
        return ScoreRequest(i, i, prompt=item)
    if not isinstance(item, tuple) or len(item) != 2:
        raise RequestError(
            f"item {i} must be a text, a tuple (prompt, completions) or a ScoreRequest, got {type(item).__name__}"
        )
    prompt = request_of(i, item[0], _ANY)
    return ScoreRequest(
        *(i, i, prompt.prompt, prompt.messages, prompt.token_ids), completions=tuple(_completions(i, item[1]))
    )


def _completions(i: int, given: Any) -> list[str | tuple[int, ...]]:
    """Return a list of completions, whether one or several are given."""
    if isinstance(given, str):
        return [given]
    plain = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(plain, Sequence) and plain and all(type(token) is int for token in plain):
        return [tuple(plain)]
    if not isinstance(plain, Sequence) or isinstance(plain, bytes):
        raise RequestError(
            f"the completions of item {i} must be texts or lists of token ids, got {type(plain).__name__}"
        )
    return [one if isinstance(one, str) else tuple(one) for one in plain]
