"""When a sequence ends, and its text.

Whether a token ends a sequence is a function of the tokens up to it, checked after each one, so a window that commits
several tokens at once ends at the same token as single steps do.
"""

from __future__ import annotations

from typing import Any

from detgen.engine.sequence import Sequence


class Stopping:
    """Checks end-of-sequence tokens, stop strings and length.

    Args:
        tokenizer: the target's.
        eos: token ids that end a sequence.
    """

    def __init__(self, tokenizer: Any, eos: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.eos = eos
        self._special = frozenset(tokenizer.all_special_ids)

    def ends(self, seq: Sequence, pending: list[int]) -> bool:
        """Whether the sequence ends with the last of the `pending` tokens; if so, sets `seq.finish_reason`.

        Args:
            seq: the sequence, without the pending tokens.
            pending: tokens to be committed; all but the last one were checked before.
        """
        if pending[-1] in self.eos or self._stopped(seq, pending):
            seq.finish_reason = "stop"
        elif len(pending) >= seq.remaining:
            seq.finish_reason = "length"
        return seq.finish_reason is not None

    def _stopped(self, seq: Sequence, pending: list[int]) -> bool:
        stop = seq.request.params.stop
        if not stop:
            return False
        # A stop string that the last token completes lies within the last few tokens: each has at least one byte.
        reach = 4 * max(map(len, stop)) + 16
        completion = seq.tokens[seq.prompt_length :] + pending
        tail = [t for t in completion if t not in self._special][-reach:]
        near = self._decode(tail)
        return any(s in near for s in stop) and any(s in self._decode(completion) for s in stop)

    def text(self, seq: Sequence) -> str:
        """The completion's text, without special tokens, cut before the first stop string."""
        text = self._decode(seq.tokens[seq.prompt_length :])
        cuts = [text.find(s) for s in seq.request.params.stop]
        return text[: min((c for c in cuts if c >= 0), default=len(text))]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
