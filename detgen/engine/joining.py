"""From prompts with completions, and from whole texts, to tokens with those among them that are scored.

Both as EleutherAI's harness does it (lm-evaluation-harness, `TemplateLM._encode_pair` and
`utils.get_rolling_token_windows`), so that scores can be compared with what is published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

Encode = Callable[[str], list[int]]


class Scored(NamedTuple):
    """Tokens that are read together, and how many of them are scored.

    Attributes:
        tokens: those that the others follow, at least one, then those that are scored.
        scored: how many of them are, at least one.
    """

    tokens: list[int]
    scored: int


def move_space(prompt: str, completion: str) -> tuple[str, str]:
    """Move the white space at the end of a prompt to its completion: words begin with it in most vocabularies."""
    kept = prompt.rstrip()
    return kept, prompt[len(kept) :] + completion


def completion_tokens(prompt: str, prompt_tokens: list[int], completion: str, encode: Encode) -> list[int]:
    """The tokens of a completion: those of prompt and completion together, without as many as the prompt has alone.

    Args:
        prompt: a text.
        prompt_tokens: its tokens.
        completion: the text behind it.
        encode: as the prompt was encoded.
    """
    return encode(prompt + completion)[len(prompt_tokens) :]


def rolling_windows(tokens: list[int], prefix: int, context: int) -> Iterator[Scored]:
    """Cut a text that is scored from its first token on into windows that a model has room for.

    The first token is scored behind `prefix`. A text that is too long is cut into windows in each of which as many
    tokens are read as there is room for: behind the first window, one token comes before those that are scored, and
    before those of the last window as many as fill it. Each token of the text is scored once.

    Args:
        tokens: of the text, at least one.
        prefix: the token before the text.
        context: most tokens that the model reads, at least one.
    """
    first = min(context, len(tokens))
    yield Scored([prefix, *tokens[:first]], first)
    done = first
    while done < len(tokens):
        count = min(context, len(tokens) - done)
        done += count
        yield Scored(tokens[done - context - 1 : done], count)
