"""The entries of a store: the keys by which later runs find what they need not generate, and whether one is whole."""

from __future__ import annotations

import hashlib
import importlib.metadata
from dataclasses import dataclass
from typing import Any

from detgen.engine.request import Request
from detgen.outputs.identity import fingerprint
from detgen.outputs.lines import content_digest, request_digest

_SIZE = 32  # bytes of a key
_DIGEST = 16  # bytes before those of an entry
_PROMPTING = ("transformers", "tokenizers", "jinja2")  # what turns a prompt into tokens


@dataclass(frozen=True, slots=True)
class Entry:
    """A sample to be kept.

    Attributes:
        key: see `entry_key`.
        tokens: its number of tokens.
        value: its bytes.
        place: index of its request in the input.
    """

    key: bytes
    tokens: int
    value: bytes
    place: int = 0


def profile_digest(profile: dict[str, Any]) -> str:
    """Digest of everything on which a sample depends beside the request, the reading of prompts included."""
    versions = [importlib.metadata.version(package) for package in _PROMPTING]
    text = "\n".join((fingerprint(profile, 32), *versions))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def entry_key(profile: str, asked: str, sample: int) -> bytes:
    """The key of a sample.

    Args:
        profile: `profile_digest`.
        asked: of `asked_anywhere` or `asked_here`.
        sample: which of the request's samples, from 0.
    """
    return hashlib.blake2b(f"{profile}\n{asked}\n{sample}".encode(), digest_size=_SIZE).digest()


def asked_anywhere(request: Request, day: str = "") -> str | None:
    """What the samples of a request depend on beside the profile; None if they depend on more.

    Args:
        request: the request.
        day: the present one, if the text of a chat has it; a chat's samples are those of a day then.
    """
    content = content_digest(request)
    return content and content + (day if request.messages is not None else "")


def asked_here(request: Request, source: str) -> str:
    """A request in its place: what is no function of the request, or names its place, is taken again only there.

    Those are samples of unverified requests, errors of samples, and scores.

    Args:
        request: the request.
        source: what errors call the input.
    """
    return f"{request.index} {source}:{request.line} {request_digest(request)}"


def sound(key: bytes, value: object) -> bytes | None:
    """The bytes of an entry without their digest; None if it is not the one of key and bytes."""
    if not isinstance(key, bytes) or not isinstance(value, bytes) or digest(key, value[_DIGEST:]) != value[:_DIGEST]:
        return None
    return value[_DIGEST:]


def digest(key: bytes, value: bytes) -> bytes:
    """The digest that stands before the bytes of an entry."""
    return hashlib.blake2b(value, digest_size=_DIGEST, key=key[:64]).digest()
