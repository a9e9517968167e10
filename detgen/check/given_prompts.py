"""A user's prompts as a check takes them: as `detgen run` reads them, whole, each with its own parameters."""

from __future__ import annotations

from dataclasses import replace

from detgen.check.budget import FEW
from detgen.check.pool import Pool, long_text
from detgen.engine.request import Request
from detgen.errors import PromptsError
from detgen.params import SamplingParams
from detgen.prompts import BadLine, open_prompts

_UNSET = 2**31 - 1  # the most that `max_tokens` can be: what a line has that sets none
_SHOWN = 3  # errors
COPY = "copy "  # what the ids of copies begin with


def read_given(prompts: str, most: int, lengths: tuple[tuple[int, int], ...], longest: int) -> Pool:
    """The prompts of a user's input.

    Args:
        prompts: as `detgen run` takes them.
        most: prompts to take.
        lengths: (requests, new tokens each) of the first requests, the next ones and so on, where a line sets none.
        longest: characters of a long neighbour.

    Raises:
        PromptsError: none can be read.
    """
    source = open_prompts(prompts)
    given = source.inspect().prompts
    sizes = [tokens for count, tokens in lengths for _ in range(count)]
    pool = Pool([], "", name=source.name, given=given)
    for i, item in enumerate(source.read(SamplingParams(max_tokens=_UNSET), most)):
        if isinstance(item, BadLine):
            pool.errors.append(item.error)
        elif not item.params.deterministic:
            pool.errors.append(f"{source.name}:{item.line}: asks not to be verified")
        else:
            pool.requests.append(_timed(item, sizes[min(i, len(sizes) - 1)], len(pool.requests)))
    if not pool.requests:
        raise PromptsError(f"no prompts in {source.given}: {pool.errors[0] if pool.errors else 'it is empty'}")
    pool.long = long_text(pool.requests, longest)
    return pool


def _timed(request: Request, tokens: int, index: int) -> Request:
    """A request of a check, called by its line; so many new tokens if the line sets no number."""
    own = request.params.max_tokens
    return replace(
        request.with_params(max_tokens=own if own != _UNSET else max(tokens, request.params.min_tokens)),
        index=index,
        id=request.line if request.line is not None else index + 1,
        metadata={},
    )


def shortened(requests: list[Request], count: int, most: int) -> list[Request]:
    """The first requests, with at most so many new tokens each."""
    return [
        r.with_params(max_tokens=min(r.params.max_tokens, most), min_tokens=min(r.params.min_tokens, most))
        for r in requests[:count]
    ]


def repeated(requests: list[Request]) -> list[Request]:
    """The requests, and copies of them where they are too few to make a batch."""
    copies = range(max(FEW - len(requests), 0))
    return requests + [
        replace(requests[i % len(requests)], index=len(requests) + i, id=f"{COPY}{i + 1}") for i in copies
    ]


def left_out(errors: list[str], prompts: int) -> list[str]:
    """Which prompts cannot be run, in words; nothing if all can."""
    if not errors:
        return []
    more = [f"  {len(errors) - _SHOWN:,} more"] if len(errors) > _SHOWN else []
    head = f"{len(errors):,} of {prompts:,} prompts could not be run and were left out:"
    return [head, *(f"  {error}" for error in errors[:_SHOWN]), *more]
