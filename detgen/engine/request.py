"""Input and output of the engine: requests, completions, and the chunks in which models that think read.

Plain data. Knows no files and no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple, Self, cast

from pydantic import Field

from detgen.engine.answer import Answer
from detgen.engine.showing import brief, call
from detgen.engine.stats import DraftCounts
from detgen.params import SamplingParams

UNNUMBERED = -1  # index of a request without one
NOT_FINITE = "are not finite"  # part of every error of a sample that has begun

FinishReason = Literal["stop", "length", "error"]
Status = Literal["accepted", "corrected", "bonus", "plain", "rolled_back", "unverified"]


@dataclass(frozen=True, slots=True, repr=False)
class Request:
    """One prompt to be continued.

    Exactly one of `prompt`, `messages` and `token_ids` is given.

    Attributes:
        index: place in the input, from 0; outputs are written in this order. If none is given, it is the place among
            the prompts of the call.
        id: the user's name for it; by default, its index.
        prompt: text, tokenized with the tokenizer's special tokens.
        messages: a chat, rendered with the tokenizer's chat template.
        token_ids: a tokenized prompt.
        tools: the tools that a chat may call, passed to the chat template.
        tool_choice: whether the model calls them: "auto" (it decides), "none" (nothing that it writes is a call),
            "required", or the tool that it must call, as in the OpenAI API.
        parallel_tool_calls: whether an answer may have several calls.
        chat_template_kwargs: more variables of the chat template.
        continue_final_message: whether a chat's last message, the assistant's, is continued rather than answered.
        params: how its tokens are chosen.
        metadata: the line's unknown keys, copied to the output.
        echo: whether the prompt is written beside the output.
        line: line (or record) number in the input, from 1; None if it did not come from a file.
        only: which of its samples to run, from 0; None for all. The others are known already.
        form_key: the key or option that asked for a form, to be named in errors; None for the parameter.
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
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    continue_final_message: bool = False
    echo: bool = False
    only: tuple[int, ...] | None = None
    form_key: str | None = None

    def __post_init__(self) -> None:
        given: object = self.id
        if given is None:
            object.__setattr__(self, "id", self.index)

    def numbered(self, place: int) -> Self:
        """Return the request with `place` as its index, unless it has one, and as its id, unless it has one."""
        if self.index != UNNUMBERED:
            return self
        return replace(self, index=place, id=place if self.id == UNNUMBERED else self.id)

    def __repr__(self) -> str:
        return brief(self)

    def with_params(self, **changes: Any) -> Request:
        """Return the request with other sampling parameters."""
        return replace(self, params=self.params.with_(**changes))

    @property
    def wanted(self) -> Sequence[int]:
        """The samples to run."""
        return range(self.params.n) if self.only is None else self.only

    @property
    def samples(self) -> int:
        """The number of samples."""
        return len(self.wanted)


class TokenRecord(NamedTuple):
    """A committed token, or a draft token that was rolled back: the content of a line of the acceptance log.

    Keys that the line leaves out are None here, or "none" for the drafter. Both floats are float32 numbers.
    """

    position: Annotated[int, Field(ge=0, description="place in the completion, from 0")]
    round: Annotated[int, Field(ge=0, description="round of the sample, from 0")]
    token: Annotated[int | None, Field(ge=0, description="the committed token; left out if rolled back")]
    drafter: Annotated[
        str,
        Field(
            description="who drafted in the round: `model`, `self`, `ngram` or `grammar`; left out if nothing was"
            " drafted"
        ),
    ]
    drafted: Annotated[
        int | None,
        Field(ge=0, description="the token drafted for this position; left out if none was, or if it was accepted"),
    ]
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
        Field(
            description="natural log-probability of the token under the model (temperature 1); left out if rolled back"
        ),
    ]
    margin: Annotated[
        float | None,
        Field(
            description="the token's lead over the runner-up in the scores that decided: logits at temperature 0, else"
            " perturbed log-probabilities; left out if rolled back or without a runner-up"
        ),
    ]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the chosen token, and of the most likely ones with ids, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class Thought(NamedTuple):
    """A thought that a thinking model wrote after a chunk.

    Attributes:
        first: position of the chunk's first token in prompt and completion, from 0.
        tokens: the tokens of the thought, without its end; at least one.
        text: the decoded tokens, without special ones.
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
        stop_reason: the string of `stop` or the id of `stop_token_ids` that ended it; None if neither did.
        answer: the parts of a chat's answer: reasoning, content and tool calls; None if it has no such parts.
        thoughts: the thoughts of the chunks of prompt and completion, in order; None if the model does not think.
        error: why the request could not run or the sample ended; None if there was no error.
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
    stop_reason: str | int | None = None
    answer: Answer | None = None

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


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of prompt and completion.

    Attributes:
        first: position of its first token, from 0.
        end: the position after its last token.
        text: the text of its tokens.
        state: the thought whose state was added to its rows; None for the zero state.
        thought: the thought after it; None if it is empty, and for the last, partial chunk.
    """

    first: int
    end: int
    text: str
    state: str | None
    thought: str | None


def chunks_of(
    tokens: list[int], thoughts: Mapping[int, str], size: int, decode: Callable[[list[int]], str], *, keeps: bool
) -> list[Chunk]:
    """Divide a text into the chunks that the model read.

    Args:
        tokens: prompt and completion.
        thoughts: the thoughts, by the position of the chunk's first token.
        size: tokens of a chunk.
        decode: gives the text of tokens.
        keeps: whether a state lasts until the next thought; otherwise, it is zero after a chunk without one.
    """
    found: list[Chunk] = []
    state = None
    for first in range(0, len(tokens), size):
        part, thought = tokens[first : first + size], thoughts.get(first)
        found.append(Chunk(first, first + len(part), decode(part), state, thought))
        state = thought if thought is not None or not keeps else state
    return found
