"""Turns the arguments of `Engine.generate` into requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from numbers import Integral
from typing import Any

from detgen.engine.request import Request
from detgen.errors import RequestError
from detgen.params import SamplingParams

# A text, a tokenized prompt, a chat, or a request.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Request
_KINDS = "a text, a list of token ids, a list of messages or a Request"


def requests_of(
    prompts: Prompt | Iterable[Prompt], params: SamplingParams | None, sampling: Mapping[str, Any]
) -> list[Request]:
    """Return one request per prompt, each a separate object.

    Args:
        prompts: one prompt or several. A list of token ids is one prompt, and so is a list of messages.
        params: the parameters of prompts that are not requests; None for the defaults.
        sampling: fields of `SamplingParams` that replace those of `params`.

    Raises:
        RequestError: if a prompt is invalid, a parameter is out of range, or parameters are given for requests, which
            have their own.
        TypeError: if there is no such parameter.
    """
    return list(_requests(_several(prompts), params, sampling))


def requests_from(
    prompts: Prompt | Iterable[Prompt], params: SamplingParams | None, sampling: Mapping[str, Any]
) -> Iterator[Request]:
    """Like `requests_of`, but lazy: an iterator of prompts is read only as far as requests are taken."""
    given: Any = prompts
    lazy = isinstance(given, Iterable) and not isinstance(given, Sequence | Mapping) and not hasattr(given, "tolist")
    return _requests(given if lazy else _several(given), params, sampling)


def _requests(prompts: Iterable[Any], params: SamplingParams | None, sampling: Mapping[str, Any]) -> Iterator[Request]:
    chosen = (params or SamplingParams()).with_(**sampling)
    known: set[int] = set()
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, Request):
            if sampling or params is not None:
                names = ", ".join(sampling) or "params"
                raise RequestError(f"a Request has parameters of its own: set {names} there, Request(..., params=...)")
            yield (replace(prompt) if id(prompt) in known else prompt).numbered(i)
            known.add(id(prompt))
        else:
            yield request_of(i, prompt, chosen)


def numbered(requests: Iterable[Any]) -> Iterator[Any]:
    """Yield the requests with an index each; anything else is passed through."""
    place = count()
    for request in requests:
        yield request.numbered(next(place)) if isinstance(request, Request) else request


def _several(prompts: Any) -> list[Any]:
    """Return a list of prompts, whether one or several are given."""
    prompts = _plain(prompts)
    if isinstance(prompts, str | Request):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise RequestError(f"a prompt must be {_KINDS}, got {_kind(prompts)}")
    items = list(prompts)
    return [items] if items and (_tokens(items) or _messages(items)) else items


def request_of(i: int, prompt: Any, params: SamplingParams) -> Request:
    """Return a request for prompt `i`.

    Raises:
        RequestError: if it is not a prompt.
    """
    prompt = _plain(prompt)
    if isinstance(prompt, str):
        return Request(i, i, prompt=prompt, params=params)
    if isinstance(prompt, list | tuple):
        if _tokens(prompt):
            return Request(i, i, token_ids=tuple(map(int, prompt)), params=params)
        if _messages(prompt):
            return Request(i, i, messages=[dict(m) for m in prompt], params=params)
        raise RequestError(f"prompt {i} must be {_KINDS}, got a list of other things")
    raise RequestError(f"prompt {i} must be {_KINDS}, got {_kind(prompt)}")


def _plain(value: Any) -> Any:
    """Return an array or a tensor as a list."""
    return value.tolist() if hasattr(value, "tolist") else value


def _tokens(items: Sequence[Any]) -> bool:
    return all(isinstance(item, Integral) and not isinstance(item, bool) for item in items)


def _messages(items: Sequence[Any]) -> bool:
    return all(isinstance(item, Mapping) for item in items)


def _kind(value: object) -> str:
    return "a dictionary (a chat is a list of them)" if isinstance(value, Mapping) else type(value).__name__
