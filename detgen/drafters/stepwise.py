"""Drafting token by token, one pass for all sequences together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from detgen.drafters.protocol import Draft, Drafting

# One pass: called with sequences and their drafts so far, returns the next token of each.
Decode = Callable[[list[tuple[Drafting, list[int]]]], list[int]]


def draft_stepwise(drafter: str, seqs: Sequence[Drafting], lengths: list[int], decode: Decode) -> list[Draft]:
    """At most lengths[i] tokens for seqs[i]; stops after a token that ends it.

    Args:
        drafter: name of the drafter.
        seqs: the sequences.
        lengths: most draft tokens of each; nothing is drafted for 0 and less.
        decode: runs a pass.
    """
    drafts: list[list[int]] = [[] for _ in seqs]
    going = [i for i, n in enumerate(lengths) if n > 0]
    while going:
        tokens = decode([(seqs[i], drafts[i]) for i in going])
        for i, token in zip(going, tokens, strict=True):
            drafts[i].append(token)
        going = [i for i in going if len(drafts[i]) < lengths[i] and drafts[i][-1] not in seqs[i].ending]
    return [Draft(d, drafter) for d in drafts]
