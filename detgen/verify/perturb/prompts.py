"""The prompts of a check: a user's, as for `detgen run`, or the embedded ones; too few are repeated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from detgen.engine.request import Request
from detgen.errors import DEMO, PromptsError
from detgen.models.folders import EMBEDDED
from detgen.params import SamplingParams
from detgen.prompts import BadLine, open_prompts
from detgen.verify.perturb.pool import Pool

FEW = 4  # least number of requests of a check; fewer prompts are copied
COPY = "copy "  # prefix of the ids of copies

# Forms of some embedded prompts, by index.
_FORMS: dict[int, dict[str, Any]] = {
    1: {"guided_json": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}},
    5: {"guided_regex": "[a-z_]+ = [0-9]+"},
    9: {"guided_choice": ("none", "other")},
    13: {"guided_grammar": 'root ::= term (" + " term){1,3}\nterm ::= [a-z] | [1-9]'},
}
# Index of the first embedded prompt that calls a tool, if the model can.
_CALLING = 3
_CALL: dict[str, Any] = {
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "look_up",
                "description": "Look a name up.",
                "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            },
        }
    ],
    "tool_choice": "required",
}
_UNSET = 2**31 - 1  # largest possible `max_tokens`: the default of lines that set none
_SHOWN = 3  # number of errors shown


@dataclass(frozen=True, slots=True)
class Extent:
    """The extent of a check.

    prompts: number of prompts; too few embedded ones are repeated with another beginning.
        lengths: (requests, tokens each) of the first requests, the next ones, and so on; the last length holds for the
        rest. Batches of 64 need many short ones. A user's line may set its own.
        longest: characters of the long neighbour.
        cut: characters to which all embedded prompts but the first are cut; None does not cut.
        random: random settings after the pairwise ones.
    """

    prompts: int
    lengths: tuple[tuple[int, int], ...]
    longest: int
    cut: int | None
    random: int


QUICK = Extent(66, ((1, 24), (3, 8), (12, 4), (1, 2)), 600, 40, 0)
FULL = Extent(96, ((4, 80), (12, 40), (1, 16)), 4000, None, 300)


def read_pool(prompts: str | None, target: object, limit: int | None, extent: Extent) -> Pool:
    """Read the prompts of a check.

    Args:
        prompts: a user's, as for `detgen run`; used as they are, with their own parameters. None takes the prompts
            embedded beside the target, or beside the usual one if the target is not embedded.
        target: the model to prompt.
        limit: most prompts to read.
        extent: most prompts to read, and number and lengths of the embedded ones.

    Raises:
        PromptsError: if none can be read.
    """
    source = open_prompts(prompts or str(EMBEDDED.get(str(target), DEMO) / "prompts.jsonl"))
    given = None if prompts is None else source.inspect().prompts
    read, errors = list[Request](), list[str]()
    for item in source.read(SamplingParams(max_tokens=_UNSET), min(limit or extent.prompts, extent.prompts)):
        if isinstance(item, BadLine):
            errors.append(item.error)
        elif not item.params.deterministic:
            errors.append(f"{source.name}:{item.line}: asks not to be verified")
        else:
            read.append(item)
    if not read:
        raise PromptsError(f"no prompts in {source.given}: {errors[0] if errors else 'it is empty'}")
    if prompts is None:
        again = (replace(r, line=None, prompt=f"{n}. {r.prompt}") for n in itertools.count(1) for r in read)
        read = list(itertools.islice(itertools.chain(read, again), extent.prompts))
    long = _long_text(read, extent.longest)
    if prompts is None:
        read[1:] = [replace(r, prompt=(r.prompt or "")[: extent.cut]) for r in read[1:]]
    sizes = [tokens for count, tokens in extent.lengths for _ in range(count)]
    requests = [_timed(request, sizes[min(i, len(sizes) - 1)], i) for i, request in enumerate(read)]
    if prompts is None:
        requests = [r.with_params(**_FORMS[i % 16]) if i % 16 in _FORMS else r for i, r in enumerate(requests)]
    return Pool(requests, long, name=source.name, given=given, errors=errors)


def with_calls(requests: list[Request], can_run: Callable[[Request], bool]) -> list[Request]:
    """Turn some embedded prompts into chats that must call a tool, if the model's chat template has calls."""
    found = list(requests)
    for i in range(_CALLING, len(found), 16):
        calling = replace(found[i], prompt=None, messages=[{"role": "user", "content": found[i].prompt}], **_CALL)
        if not can_run(calling):
            break
        found[i] = calling
    return found


def _timed(request: Request, tokens: int, index: int) -> Request:
    """Return a request with its line as its id, and so many new tokens if the line sets no number."""
    own = request.params.max_tokens
    return replace(
        request.with_params(max_tokens=own if own != _UNSET else max(tokens, request.params.min_tokens)),
        index=index,
        id=request.line if request.line is not None else index + 1,
        metadata={},
    )


def _long_text(requests: list[Request], longest: int) -> str:
    """Repeat the texts of requests up to so many characters."""
    joined = "\n".join(filter(None, map(_said, requests))) or "text "
    return (joined * (longest // len(joined) + 1))[:longest]


def _said(request: Request) -> str:
    """Return the text of a prompt or of a chat's messages; "" for token ids."""
    contents = [m.get("content") for m in request.messages or []]
    parts = [part for c in contents for part in (c if isinstance(c, list) else [{"text": c}]) if isinstance(part, dict)]
    return request.prompt or "\n".join(text for part in parts if isinstance(text := part.get("text"), str))


def shortened(requests: list[Request], count: int, most: int) -> list[Request]:
    """Return the first requests, with at most so many new tokens each."""
    return [
        r.with_params(max_tokens=min(r.params.max_tokens, most), min_tokens=min(r.params.min_tokens, most))
        for r in requests[:count]
    ]


def repeated(requests: list[Request]) -> list[Request]:
    """Return the requests, with copies if they are too few for a batch."""
    copies = range(max(FEW - len(requests), 0))
    return requests + [
        replace(requests[i % len(requests)], index=len(requests) + i, id=f"{COPY}{i + 1}") for i in copies
    ]


def left_out(errors: list[str], prompts: int) -> list[str]:
    """Return lines that say which prompts cannot run; none if all can."""
    if not errors:
        return []
    more = [f"  {len(errors) - _SHOWN:,} more"] if len(errors) > _SHOWN else []
    head = f"{len(errors):,} of {prompts:,} prompts could not be run and were left out:"
    return [head, *(f"  {error}" for error in errors[:_SHOWN]), *more]
