"""What goes into the engine and what comes out: requests, sampling parameters, completions.

Plain data. Knows no files and no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from detgen.engine.showing import brief, call
from detgen.engine.stats import DraftCounts
from detgen.errors import RequestError

FinishReason = Literal["stop", "length", "error"]
Status = Literal["accepted", "corrected", "bonus", "plain", "rolled_back", "unverified"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Attributes:
        max_tokens: most tokens to generate per sample, at least 1.
        temperature: 0 is greedy; otherwise the logits are divided by it.
        top_p: nucleus, in (0, 1]; 1 is off.
        top_k: keep the k most likely tokens; 0 is off.
        min_p: drop tokens less likely than min_p times the most likely one, in [0, 1]; 0 is off.
        seed: key of the sampling noise, 0 <= seed < 2**63.
        n: samples of the prompt, at least 1.
        stop: the text ends before the first occurrence of any of these.
        logprobs: report the log-probabilities of each chosen token and of this many most likely ones; None for none.
        deterministic: whether the tokens are verified by canonical passes; if not, the request is unverified.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    deterministic: bool = True

    def __post_init__(self) -> None:
        """Check types and ranges.

        Raises:
            RequestError: if one is out of range; names the parameter, its range and its value.
        """
        _integer("max_tokens", self.max_tokens, 1)
        _number("temperature", self.temperature, 0.0, 1e4)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p must be above 0 (1 turns it off), got 0")
        _integer("top_k", self.top_k, 0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("seed", self.seed, 0, 2**63 - 1)
        _integer("n", self.n, 1)
        if not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(f"stop must be a non-empty string or a list of them, got {list(self.stop)!r}")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, 100)
        if not isinstance(self.deterministic, bool):
            raise RequestError(f"deterministic must be true or false, got {self.deterministic!r}")


def _integer(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        span = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be a whole number {span}, got {value!r}")


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise RequestError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")


@dataclass(frozen=True, slots=True, repr=False)
class Request:
    """One prompt to be continued.

    Exactly one of `prompt`, `messages` and `token_ids` is given.

    Attributes:
        index: place in the input, from 0; outputs are written in this order.
        id: the user's name for it; its line number if none was given.
        prompt: text, tokenized with the tokenizer's special tokens.
        messages: a chat, rendered with the tokenizer's chat template.
        token_ids: a tokenized prompt.
        params: how its tokens are chosen.
        metadata: the line's unknown keys, copied to the output.
        line: line (or record) number in the input, from 1; None if it did not come from a file.
    """

    index: int
    id: str | int
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: tuple[int, ...] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    metadata: dict[str, Any] = field(default_factory=dict)
    line: int | None = None

    def __repr__(self) -> str:
        return brief(self)

    def with_params(self, **changes: Any) -> Request:
        """The same request with other sampling parameters."""
        return replace(self, params=replace(self.params, **changes))


class TokenRecord(NamedTuple):
    """One line of the acceptance log: a committed token, or a draft token that was rolled back.

    Attributes:
        position: index in the completion, from 0.
        round: which round of the sample it comes from, from 0.
        token: the committed token; None if rolled back.
        drafter: the drafter of the round ("model", "self", "ngram", "none"); "fast" for unverified requests.
        drafted: the token drafted for this position; None if there was none.
        status: accepted (the draft token was right), corrected (it was wrong; the verifier's own token is committed),
            bonus (the verifier's token after a wholly accepted draft), plain (nothing was drafted),
            rolled_back (drafted after a correction or an end), unverified (from an unverified request).
        logprob: natural log-probability of the token under the model (temperature 1); None if rolled back.
        margin: the token's lead over the runner-up, in the scores that decided (logits at temperature 0, else
            perturbed log-probabilities); None if rolled back or if there was no other candidate.
    """

    position: int
    round: int
    token: int | None
    drafter: str
    drafted: int | None
    status: Status
    logprob: float | None
    margin: float | None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the chosen token, and id and value of the most likely ones, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """One finished sample of one request, or the reason why there is none.

    Attributes:
        request: the request.
        sample: which of its n samples, from 0.
        text: the generated text, without special tokens, cut before a stop string.
        token_ids: the committed tokens, including an end-of-sequence token.
        finish_reason: "stop" (end of sequence or stop string), "length", or "error" if the sample ended with one; None
            if the request could not run at all.
        prompt_tokens: tokens of the prompt.
        logprobs: one entry per token if the request asked for them, else None.
        records: the sample's part of the acceptance log, by round and position.
        drafts: the counts of the records, by drafter.
        error: why the request could not run or the sample ended; None if it is a text.
    """

    request: Request
    sample: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    records: tuple[TokenRecord, ...] = ()
    drafts: DraftCounts = field(default_factory=DraftCounts)
    error: str | None = None

    def __repr__(self) -> str:
        shown: dict[str, Any] = {"id": self.request.id, "sample": self.sample}
        if self.error is not None:
            return call("Completion", {**shown, "error": self.error})
        return call(
            "Completion",
            {**shown, "text": self.text, "tokens": len(self.token_ids), "finish_reason": self.finish_reason},
        )
