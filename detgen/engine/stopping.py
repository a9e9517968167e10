"""When a sequence ends, and its text.

Whether a token ends a sequence is a function of the tokens up to it, checked after each one, so a window that commits
several tokens at once ends at the same token as single steps do.
"""

from __future__ import annotations

from typing import Any

from detgen.engine.sequence import Sequence


class Stopping:
    """Checks tokens that end a sequence, stop strings and length.

    Args:
        tokenizer: the target's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)

    def ends(self, seq: Sequence, pending: list[int]) -> bool:
        """Return whether the sequence ends with the last of the `pending` tokens; if so, set `seq.finish_reason`.

        Args:
            seq: the sequence, without the pending tokens.
            pending: tokens to be committed; all but the last one were checked before.
        """
        produced = seq.generated + len(pending)
        ended = produced > seq.least and pending[-1] in seq.ending
        if ended or (produced > seq.request.params.min_tokens and self._stopped(seq, pending)):
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
        near = self.decode(tail)
        return any(s in near for s in stop) and self._cut(seq, completion)[1] is not None

    def text(self, seq: Sequence) -> str:
        """Return the completion's text, without special tokens and a stop token, cut before the first stop string."""
        completion = seq.tokens[seq.prompt_length :]
        if completion and completion[-1] in seq.request.params.stop_token_ids:
            del completion[-1]
        return self._cut(seq, completion)[0]

    def reason(self, seq: Sequence) -> str | int | None:
        """Return which of `stop_token_ids` or `stop` ended it; of strings at the same place, the first one given.

        None if neither did.
        """
        params = seq.request.params
        if seq.finish_reason != "stop":
            return None
        completion = seq.tokens[seq.prompt_length :]
        return completion[-1] if completion[-1] in params.stop_token_ids else self._cut(seq, completion)[1]

    def _cut(self, seq: Sequence, completion: list[int]) -> tuple[str, str | None]:
        """Return the text of a completion up to the first stop string, and that string if there is one.

        Stop strings that end within the text of the first `min_tokens` tokens do not count.
        """
        params, text = seq.request.params, self.decode(completion)
        held = 0
        if params.stop and params.min_tokens:  # a character counts only when all of its bytes are there
            held = len(self.decode(completion[: params.min_tokens]).rstrip("\ufffd"))
        cuts = [(text.find(s, max(held - len(s) + 1, 0)), i) for i, s in enumerate(params.stop)]
        cut, i = min((found for found in cuts if found[0] >= 0), default=(None, -1))
        return text[:cut], None if cut is None else params.stop[i]

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        """Return the text of token ids, without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
