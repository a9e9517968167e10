"""What can change an output, and so distinguishes two runs.

Later runs find samples that they need not generate by the keys of a store's entries.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import detgen
from detgen.engine.config import EngineConfig
from detgen.engine.request import Request
from detgen.errors import DEMO
from detgen.models.folders import EMBEDDED
from detgen.outputs.lines import content_digest, request_digest
from detgen.program.operands import ARITHMETIC

# Parts of a profile that cannot change an output.
_IRRELEVANT = ("name", "path", "threads")
_KINDS = ("command: ", "detgen: ", "profile.")
_SIZE = 32  # bytes of a key
_DIGEST = 16  # bytes of the digest before an entry's value
_PROMPTING = ("transformers", "tokenizers", "jinja2")  # the packages that turn a prompt into tokens


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the differences between two manifests that can change an output, each as "what: old -> new".

    A part that `new` does not have yet (the profile, before a model is loaded) is not compared.
    """
    found = _compare("command", old.get("command", "run"), new.get("command", "run"))
    if found:
        return found  # nothing else can be compared
    if any(old["input"][key] != new["input"][key] for key in ("sha256", "format")):
        found.append(f"input: {_input(old['input'])} -> {_input(new['input'])}")
    found += _compare("prompt column", old["input"].get("prompt_column"), new["input"].get("prompt_column"))
    for part in ("detgen", "parameters", "profile"):
        if part in new:
            found += _compare(part, old.get(part), new[part])
    return found


def differences_in_kind(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return those `differences` that leave the runs no sample in common: of command, version or profile."""
    return [line for line in differences(old, new) if line.startswith(_KINDS)]


def other_arithmetic(manifest: dict[str, Any]) -> str:
    """Return a clause on a run's arithmetic if this version of detgen now computes with another; "" if not."""
    if manifest["detgen"] != detgen.__version__:
        return ""  # the version already says so, and its profile is unknown
    made = manifest["profile"]["arithmetic"].partition(" ")[0]  # without "and torch"
    if made == ARITHMETIC:
        return ""
    return f"was made by the arithmetic {ascii(made)[1:-1][:40]}; this detgen computes {ARITHMETIC}"


def profile_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the differences between two engines that can change an output, each as "what: old -> new".

    Args:
        old: what has to be equal, by name, such as `detgen` (the version) and `profile`.
        new: the same of the other engine.
    """
    return [line for name in old for line in _compare(name, old[name], new[name])]


def fingerprint(profile: dict[str, Any], size: int = 6) -> str:
    """Return a hexadecimal digest of `size` bytes of everything besides the request that outputs depend on."""

    def relevant(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: relevant(part) for key, part in value.items() if key not in _IRRELEVANT}

    text = json.dumps([detgen.__version__, relevant(profile)], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def _input(described: dict[str, Any]) -> str:
    return f"{described['path']} (sha256 {described['sha256'][:12]})"


def _compare(name: str, old: object, new: object) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [key for key in {**old, **new} if not key.startswith("draft") and key not in _IRRELEVANT]
        shown = "" if name == "parameters" else f"{name}."
        return [line for key in keys for line in _compare(f"{shown}{key}", old.get(key), new.get(key))]
    return [] if old == new else [f"{name}: {old} -> {new}"]


def model_stamp(config: EngineConfig) -> str | None:
    """Return a digest that changes with the target, the libraries or the machine; computed without loading anything.

    None if that is impossible: then the model must be loaded and the profiles compared.
    """
    files: list[tuple[str, int, int]] | str | None
    if config.target is None:
        files = _files(DEMO)
    elif not isinstance(config.target, str | Path):
        files = None
    elif isinstance(config.target, str) and config.target in EMBEDDED:
        files = _files(EMBEDDED[config.target])
    elif Path(config.target).is_dir():
        files = _files(Path(config.target))
    elif Path(config.target).is_file():
        files = _stats(Path(config.target).parent, [Path(config.target)])
    else:
        files = _cached(str(config.target))
    if not files:
        return None
    packages = ["torch", "transformers", "tokenizers", *["bitsandbytes"] * (config.target_quant in ("nf4", "int8"))]
    try:
        versions = [importlib.metadata.version(package) for package in packages]
    except importlib.metadata.PackageNotFoundError:  # loading the model reports it
        return None
    adapter = () if config.adapter is None else _files(Path(config.adapter))
    asked = (config.device, config.dtype, config.kv_dtype, config.target_quant, config.trust_remote_code)
    facts = (detgen.__version__, ARITHMETIC, platform.node(), *versions, *asked, files, *adapter)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _files(folder: Path) -> list[tuple[str, int, int]]:
    return _stats(folder, sorted(path for path in folder.rglob("*") if path.is_file()))


def _stats(folder: Path, files: list[Path]) -> list[tuple[str, int, int]]:
    stats = ((path, path.stat()) for path in files)
    return [(path.relative_to(folder).as_posix(), stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def _cached(name: str) -> str | None:
    """Return the path of a model's config in the hub's cache; the path names the commit."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return found if isinstance(found, str) else None


@dataclass(frozen=True, slots=True)
class Entry:
    """A sample to store.

    Attributes:
        key: see `entry_key`.
        tokens: number of its tokens.
        value: the packed sample.
        place: index of its request in the input.
    """

    key: bytes
    tokens: int
    value: bytes
    place: int = 0


def profile_digest(profile: dict[str, Any]) -> str:
    """Return the digest of everything besides the request that a sample depends on, including how prompts are read."""
    versions = [importlib.metadata.version(package) for package in _PROMPTING]
    text = "\n".join((fingerprint(profile, 32), *versions))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def entry_key(profile: str, asked: str, sample: int) -> bytes:
    """Return the key of a sample.

    Args:
        profile: `profile_digest`.
        asked: from `asked_anywhere` or `asked_here`.
        sample: which of the request's samples, from 0.
    """
    return hashlib.blake2b(f"{profile}\n{asked}\n{sample}".encode(), digest_size=_SIZE).digest()


def asked_anywhere(request: Request, day: str = "") -> str | None:
    """Return what the samples of a request depend on besides the profile; None if they depend on more.

    Args:
        request: the request.
        day: the current day if chats are rendered with it; samples of a chat are then those of that day.
    """
    content = content_digest(request)
    return content and content + (day if request.messages is not None else "")


def asked_here(request: Request, source: str) -> str:
    """Return a request together with its place in the input, for samples that are reused only in that place.

    These are samples of unverified requests, errors of samples, and scores.

    Args:
        request: the request.
        source: name of the input in errors.
    """
    return f"{request.index} {source}:{request.line} {request_digest(request)}"


def sound(key: bytes, value: object) -> bytes | None:
    """Return the value of an entry without its digest; None if the digest does not match key and value."""
    if not isinstance(key, bytes) or not isinstance(value, bytes) or digest(key, value[_DIGEST:]) != value[:_DIGEST]:
        return None
    return value[_DIGEST:]


def digest(key: bytes, value: bytes) -> bytes:
    """Return the digest that precedes the value of an entry."""
    return hashlib.blake2b(value, digest_size=_DIGEST, key=key[:64]).digest()
