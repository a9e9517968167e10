"""What two runs differ in, as far as it can change an output.

By the keys of a store's entries later runs find what they need not generate.
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
_DIGEST = 16  # bytes before those of an entry
_PROMPTING = ("transformers", "tokenizers", "jinja2")  # what turns a prompt into tokens


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The differences between two manifests that can change an output, each as "what: old -> new".

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
    """Those `differences` after which no sample of the one run is one of the other: command, version and profile."""
    return [line for line in differences(old, new) if line.startswith(_KINDS)]


def other_arithmetic(manifest: dict[str, Any]) -> str:
    """By what a run was computed, as a clause, if this version of detgen now computes something else; "" if not."""
    if manifest["detgen"] != detgen.__version__:
        return ""  # which says enough; nothing is known of its profile
    made = manifest["profile"]["arithmetic"].partition(" ")[0]  # without "and torch"
    if made == ARITHMETIC:
        return ""
    return f"was made by the arithmetic {ascii(made)[1:-1][:40]}; this detgen computes {ARITHMETIC}"


def profile_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The differences between two engines that can change an output, each as "what: old -> new".

    Args:
        old: what is to be equal, such as `detgen` (the version) and `profile`, by name.
        new: the same of the other one.
    """
    return [line for name in old for line in _compare(name, old[name], new[name])]


def fingerprint(profile: dict[str, Any], size: int = 6) -> str:
    """Digits for so many bytes that change if anything does on which outputs depend besides the request."""

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
    """A digest that changes if the target, the libraries or the machine do; computed without loading anything.

    None if that is not possible: then the model must be loaded and the profiles compared.
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
    except importlib.metadata.PackageNotFoundError:  # whoever loads the model says it
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
    """Where the hub's cache has a model; the path names the commit."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return found if isinstance(found, str) else None


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
