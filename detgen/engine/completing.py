"""From a sequence that ended to the completion that callers get."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from detgen.engine.answering import Answering
from detgen.engine.request import Completion, Thought
from detgen.engine.sequence import Sequence


def completion_of(
    seq: Sequence, chunk: int | None, decode: Callable[[tuple[int, ...]], str], answering: Answering
) -> Completion:
    """What became of a sequence.

    Args:
        seq: a sequence that ended.
        chunk: tokens of a chunk; None if the target does not think.
        decode: the text of a thought's tokens.
        answering: takes answers apart.
    """
    if seq.error is not None:
        return Completion(
            seq.request, seq.sample, finish_reason="error", prompt_tokens=seq.prompt_length, error=seq.error
        )
    return Completion(
        request=seq.request,
        sample=seq.sample,
        text=seq.text,
        token_ids=tuple(seq.tokens[seq.prompt_length :]),
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        prompt_tokens=seq.prompt_length,
        logprobs=tuple(seq.logprobs) if seq.request.params.logprobs is not None else None,
        records=tuple(seq.records),
        drafts=seq.drafts,
        thoughts=None if chunk is None else tuple(_thoughts(seq, chunk, decode)),
        answer=answering.answer(seq),
    )


def _thoughts(seq: Sequence, chunk: int, decode: Callable[[tuple[int, ...]], str]) -> Iterator[Thought]:
    """What the chunks thought that did."""
    for i, tokens in enumerate(seq.thoughts):
        if tokens:
            yield Thought(i * chunk, tokens, decode(tokens))
