"""What goes into the engine and what comes out: requests, sampling parameters, completions.

Plain data. Knows no files and no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple, Self, cast

from pydantic import Field

from detgen.engine.showing import brief, call
from detgen.engine.stats import DraftCounts
from detgen.errors import RequestError

_MOST = 2**31 - 1  # of tokens, and of a token's id; more is a slip
_MOST_SAMPLES = 1_000_000
_MOST_STRINGS = 1_000
_MOST_STOP_IDS = 10_000
_MOST_BIASES = 300_000  # more than any vocabulary has

UNNUMBERED = -1  # index of a request that was given none
NOT_FINITE = "are not finite"  # in each error of a sample that has begun

FinishReason = Literal["stop", "length", "error"]
Status = Literal["accepted", "corrected", "bonus", "plain", "rolled_back", "unverified"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. Lists and objects, as JSON has them, become tuples.

    The logits are adjusted first, in vLLM's order: `logit_bias`, `repetition_penalty`, `frequency_penalty`,
    `presence_penalty`, and what `min_tokens` rules out (`detgen.kernels.penalties`). Then come temperature, top_k,
    top_p and min_p. All of it is a function of the request's own tokens. Reported log-probabilities are those of the
    logits as the model gives them.

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
        min_tokens: before so many tokens of a sample there is no end-of-sequence token and none of `stop_token_ids`,
            also with `ignore_eos`, and no stop string within their text counts; at most `max_tokens`.
        stop_token_ids: a sample ends with any of these; its text ends before it.
        ignore_eos: an end-of-sequence token is a token like others.
        repetition_penalty: logits of tokens of prompt or completion are divided by it where positive, multiplied where
            negative, from 0.01 to 100; 1 is off.
        frequency_penalty: taken off a token's logit for each time that the completion has it, from -2 to 2.
        presence_penalty: taken off the logit of each token that the completion has, from -2 to 2.
        logit_bias: (token id, what is added to its logit, from -100 to 100), by id. May be given as a mapping.
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
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        """Check types and ranges.

        Raises:
            RequestError: if one is out of range; names the parameter, its range and its value.
        """
        for name, plain in (("stop", _strings), ("stop_token_ids", _token_ids), ("logit_bias", _biases)):
            object.__setattr__(self, name, plain(getattr(self, name)))
        _integer("max_tokens", self.max_tokens, 1)
        _at_most("max_tokens", self.max_tokens, _MOST)
        _integer("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        _number("temperature", self.temperature, 0.0, 1e4)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p must be above 0 (1 turns it off), got 0")
        _integer("top_k", self.top_k, 0)
        _at_most("top_k", self.top_k, _MOST)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("seed", self.seed, 0, 2**63 - 1)
        _integer("n", self.n, 1)
        _at_most("n", self.n, _MOST_SAMPLES)
        if not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(f"stop must be a non-empty string or a list of them, got {list(self.stop)!r}")
        _at_most("stop", len(self.stop), _MOST_STRINGS, " strings")
        _at_most("stop_token_ids", len(self.stop_token_ids), _MOST_STOP_IDS, " ids")
        _boolean("ignore_eos", self.ignore_eos)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _at_most("logit_bias", len(self.logit_bias), _MOST_BIASES, " ids")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, 100)
        _boolean("deterministic", self.deterministic)

    def check_ids(self, vocabulary: int) -> None:
        """Check that all token ids are of a vocabulary of this size.

        Raises:
            RequestError: if one is not; names the parameter and the id.
        """
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", [i for i, _ in self.logit_bias])):
            if (largest := max(ids, default=0)) >= vocabulary:
                raise RequestError(f"{name} must have ids from 0 to {vocabulary - 1} for this model, got {largest}")


def _strings(value: Any) -> tuple[Any, ...]:
    """`stop` as a tuple."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _token_ids(value: Any) -> tuple[int, ...]:
    """`stop_token_ids` as a tuple."""
    if not isinstance(value, list | tuple) or not all(type(i) is int and i >= 0 for i in value):
        raise RequestError(f"stop_token_ids must be a list of token ids, got {_short(value)}")
    if (largest := max(value, default=0)) > _MOST:  # a manifest has no place for it
        raise RequestError(f"stop_token_ids must have ids of at most {_MOST}, got {_short(largest)}")
    return tuple(value)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """`logit_bias`, an object or what it was made into before, as pairs by id."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs):
        raise RequestError(
            f"logit_bias must be an object from token ids to numbers from -100 to 100, got {_short(value)}"
        )
    found: dict[int, float] = {}
    for key, bias in pairs:
        token = int(key) if isinstance(key, str) and len(key) < 20 and key.isascii() and key.isdecimal() else key
        if type(token) is not int or token < 0:
            raise RequestError(f"logit_bias must have token ids as keys, got {_short(key)}")
        if token in found:
            raise RequestError(f"logit_bias names token {token} twice")
        _number(f"logit_bias of token {token}", bias, -100.0, 100.0)
        found[token] = float(bias)
    return tuple(sorted(found.items()))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {value!r}")


def _at_most(name: str, value: int, most: int, what: str = "") -> None:
    if value > most:
        raise RequestError(f"{name} must be at most {most}{what}, got {value}")


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
        index: place in the input, from 0; outputs are written in this order. If none is given, `Engine` takes the place
            among the requests of the call.
        id: the user's name for it; its index if none was given.
        prompt: text, tokenized with the tokenizer's special tokens.
        messages: a chat, rendered with the tokenizer's chat template.
        token_ids: a tokenized prompt.
        tools: what a chat may call, given to the chat template.
        chat_template_kwargs: further variables of the chat template.
        continue_final_message: whether a chat's last message, the assistant's, is continued rather than answered.
        params: how its tokens are chosen.
        metadata: the line's unknown keys, copied to the output.
        echo: whether the prompt is written beside the output.
        line: line (or record) number in the input, from 1; None if it did not come from a file.
        only: which of its samples to run, from 0; None for all. The others are known already.
    """

    index: int = UNNUMBERED
    id: str | int = cast("str | int", None)  # never after construction
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: tuple[int, ...] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    metadata: dict[str, Any] = field(default_factory=dict)
    line: int | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False
    echo: bool = False
    only: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        given: object = self.id
        if given is None:
            object.__setattr__(self, "id", self.index)

    def numbered(self, place: int) -> Self:
        """The same request; with this place as its index, and as its id if it has none, where it has no index."""
        if self.index != UNNUMBERED:
            return self
        return replace(self, index=place, id=place if self.id == UNNUMBERED else self.id)

    def __repr__(self) -> str:
        return brief(self)

    def with_params(self, **changes: Any) -> Request:
        """The same request with other sampling parameters."""
        return replace(self, params=replace(self.params, **changes))

    @property
    def wanted(self) -> Sequence[int]:
        """Which of its samples to run."""
        return range(self.params.n) if self.only is None else self.only

    @property
    def samples(self) -> int:
        """How many samples it gives."""
        return len(self.wanted)


class TokenRecord(NamedTuple):
    """A committed token, or a draft token that was rolled back: the figures of a line of the acceptance log."""

    position: Annotated[int, Field(ge=0, description="place in the completion, from 0")]
    round: Annotated[int, Field(ge=0, description="round of the sample, from 0")]
    token: Annotated[int | None, Field(ge=0, description="the committed token; null if rolled back")]
    drafter: Annotated[str, Field(description="who drafted in the round: `model`, `ngram` or `none`")]
    drafted: Annotated[int | None, Field(ge=0, description="the token drafted for this position; null for none")]
    status: Annotated[
        Status,
        Field(
            description="`accepted` (the draft token was right), `corrected` (it was wrong; the verifier's own is"
            " committed), `bonus` (the verifier's token after a wholly accepted draft), `plain` (nothing was drafted),"
            " `rolled_back` (drafted after a correction or an end), `unverified` (of an unverified request)"
        ),
    ]
    logprob: Annotated[
        float | None,
        Field(description="natural log-probability of the token under the model (temperature 1); null if rolled back"),
    ]
    margin: Annotated[
        float | None,
        Field(
            description="the token's lead over the runner-up in the scores that decided: logits at temperature 0, else"
            " perturbed log-probabilities; null if rolled back or without a runner-up"
        ),
    ]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the chosen token, and id and value of the most likely ones, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class Thought(NamedTuple):
    """What a model that thinks while it reads wrote after one chunk.

    Attributes:
        first: position of the chunk's first token in prompt and completion, from 0.
        tokens: the thought's, without its end; at least one.
        text: they decoded, without special tokens.
    """

    first: int
    tokens: tuple[int, ...]
    text: str


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
        thoughts: of the chunks of prompt and completion that thought, in order; None if the model does not think.
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
    thoughts: tuple[Thought, ...] | None = None
    error: str | None = None

    @property
    def refused(self) -> bool:
        """Whether the request could not run at all, so that it has no other sample."""
        return self.error is not None and self.finish_reason is None

    def __repr__(self) -> str:
        shown: dict[str, Any] = {"id": self.request.id, "sample": self.sample}
        if self.error is not None:
            return call("Completion", {**shown, "error": self.error})
        return call(
            "Completion",
            {**shown, "text": self.text, "tokens": len(self.token_ids), "finish_reason": self.finish_reason},
        )
