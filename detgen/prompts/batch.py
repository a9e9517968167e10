"""Turn requests in the form of the OpenAI batch API into records of detgen's own form.

A line has a `custom_id`, the `method` and `url` of a call, and its `body`, with the prompt and its settings.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Any, get_args

from detgen.errors import RequestError
from detgen.params import SamplingParams
from detgen.prompts.kinds import CONTENTS, KEYS, BatchLine, Url, check, kind
from detgen.prompts.unsupported import check_body

_FORM = tuple(BatchLine.__annotations__)
_CHATS, _COMPLETIONS = get_args(Url)
_CONTENT = {_CHATS: "messages", _COMPLETIONS: "prompt"}


def is_batch(record: object) -> bool:
    """Return whether a record is a batch request, complete or with parts missing.

    A single key of that form is not enough: other data use these names, too, also beside a prompt.
    """
    if not isinstance(record, dict):
        return False
    given = [name for name in _FORM if name in record]
    if len(given) < len(_FORM) and any(name in record for name in CONTENTS):
        return False
    return len(given) >= 2 and ("custom_id" in record or isinstance(record.get("body"), dict))


def custom_id(record: object) -> str | None:
    """Return the id of a batch request; None if it has none, or is not a batch request."""
    found = record.get("custom_id") if isinstance(record, dict) and is_batch(record) else None
    return found if isinstance(found, str) else None


def settings(record: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a record with its settings: the body of a batch request, else the record itself."""
    body = record.get("body") if is_batch(record) else None
    return body if isinstance(body, dict) else record


def unpack(record: dict[str, Any], defaults: SamplingParams) -> tuple[dict[str, Any], SamplingParams]:
    """Return a batch request as a record of detgen's own form, and the defaults for what it does not set.

    Keys that are not settings, such as `model` and `user`, stay in the record and become metadata.

    Raises:
        RequestError: if it is incomplete, or asks for something that detgen does not do.
    """
    body = _checked(record)
    others = {name: value for name, value in record.items() if name not in _FORM}
    for name, value in others.items():
        if name in KEYS:
            raise RequestError(f"{name} stands beside body; put it into body, or leave it out")
        if name in body and body[name] != value:
            raise RequestError(f"{name!r} is given beside body and, with another value, inside it; keep one of them")
    url = _url(record["url"])
    for name in ("id", "prompt_token_ids"):
        if body.get(name) is not None:
            meant = "custom_id" if name == "id" else "prompt, as a list of token ids"
            raise RequestError(f"body has {name}, which a batch request does not have; give {meant}")
    if (model := body.get("model")) is not None and not isinstance(model, str):
        raise RequestError(f"model must be a string, got {kind(model)}")
    check_body(body)
    plain = {**others, **body, "id": record["custom_id"]}
    plain |= _content(url, body)
    if body.get("top_k") == -1:  # turns it off in vLLM
        plain["top_k"] = 0
    if url == _CHATS:
        defaults = _read_logprobs(plain, defaults)
    return plain, defaults


def _checked(record: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request after checking its parts, except the value of the url."""
    for name in _FORM:
        if record.get(name) is None:
            raise RequestError(f"{name} is missing; a batch request has {', '.join(_FORM[:-1])} and body")
    check("body", record)
    body: dict[str, Any] = record["body"]
    return body


def _url(given: str) -> str:
    """Return the url with its version, which some services leave out."""
    url = given if given.startswith("/v1/") else f"/v1{given}"
    if url not in _CONTENT:
        raise RequestError(f"url must be {_CHATS} or {_COMPLETIONS}, got {given[:80]!r}")
    return url


def _content(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the content to continue, under its key in a record."""
    wanted = _CONTENT[url]
    other, place = ("prompt", _COMPLETIONS) if wanted == "messages" else ("messages", _CHATS)
    content = body.get(wanted)
    if body.get(other) is not None:
        if content is not None:
            raise RequestError(f"body has both {wanted} and {other}; {url} takes {wanted} alone")
        raise RequestError(f"body has {other}, but {url} takes {wanted}; send {other} to {place}")
    if content is None:
        raise RequestError(f"body has no {wanted}, which {url} takes")
    if wanted == "messages" or not isinstance(content, list):
        return {wanted: content}
    if len(content) > 1 and isinstance(content[0], str | list):
        raise RequestError(f"prompt is a list of {len(content)} prompts; give each of them a line of its own")
    if not content or isinstance(content[0], str):
        return {"prompt": content[0] if content else ""}
    return {"prompt": None, "prompt_token_ids": content[0] if isinstance(content[0], list) else content}


def _read_logprobs(plain: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    """Read the number of log-probabilities of a chat from its two keys; false overrides the default."""
    wanted, top = plain.get("logprobs"), plain.pop("top_logprobs", None)
    if wanted is not None and not isinstance(wanted, bool):
        raise RequestError(f"logprobs of a chat must be true or false, got {kind(wanted)}; top_logprobs is the number")
    if top is not None:
        try:
            SamplingParams(logprobs=top)
        except RequestError as error:
            raise RequestError(f"top_{error}") from None
    if top and not wanted:
        raise RequestError("top_logprobs needs logprobs, which must be true")
    plain["logprobs"] = (top or 0) if wanted else None
    return defaults.with_(logprobs=None) if wanted is False else defaults


class Repeated:
    """Finds ids that occur more than once, with eight bytes of memory per id."""

    def __init__(self) -> None:
        self._digests = array("Q")

    def add(self, id: str) -> None:
        """Count an id."""
        self._digests.append(short_digest(id))

    def found(self) -> frozenset[int]:
        """Return digests that occur more than once, nearly always those of equal ids."""
        if len(self._digests) < 2:
            return frozenset()
        import numpy as np

        digests, counts = np.unique(np.frombuffer(self._digests, np.uint64), return_counts=True)
        return frozenset(digests[counts > 1].tolist())


def short_digest(text: str) -> int:
    """Return eight bytes of a text's BLAKE2b digest as a big-endian number."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())
