"""What a manifest holds, and the check that one holds just that.

A manifest may come from a damaged disk or from a stranger, so nothing of it is used before its keys, types and ranges
are checked. That of another version of detgen is only checked as far as saying so needs.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import detgen
from detgen.drafters.registry import DRAFTERS
from detgen.engine.request import SamplingParams
from detgen.engine.stats import DrafterStats
from detgen.errors import OutputError, QuantName, RequestError
from detgen.prompts.record_values import kind

STATUSES = ("running", "interrupted", "finished")
FILES = ("outputs.jsonl", "acceptance.jsonl")
RESULTS = "results.jsonl"  # if they were asked for

_MOST = 2**63 - 1
_SHOWN = 60  # characters of a wrong value in a message
_HEX = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"[0-9A-Za-z.+!_-]{1,40}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00")


class _SchemaError(ValueError):
    """A value that is not what it must be, and where; joined, they are a sentence."""


Rule = Callable[[str, Any], None]  # given the path and the value, raises `_SchemaError`


def parse_manifest(data: bytes, path: Path) -> dict[str, Any]:
    """The manifest that a file holds.

    Args:
        data: the file's bytes.
        path: its name in messages.

    Raises:
        OutputError: it is not a manifest of detgen; one line names the file, the key and the reason.
    """
    try:
        manifest = _decode(data)
        version = manifest.get("detgen")
        if isinstance(version, str) and version != detgen.__version__:
            _OTHER_VERSION("", manifest)
        else:
            (_SCORES if manifest.get("command") == "score" else _MANIFEST)("", manifest)
            _check_status(manifest)
    except _SchemaError as error:
        what = f"{path}: {error}; detgen writes no such manifest"
        raise OutputError(f"{what}: restore the file, or use another folder") from None
    return manifest


def sampling_params(parameters: dict[str, Any]) -> SamplingParams:
    """The defaults of a run from the `parameters` of its manifest.

    Raises:
        RequestError: one is out of range.
    """
    return SamplingParams(**{name: parameters[name] for name in _HINTS})


def _decode(data: bytes) -> dict[str, Any]:
    """The object that the bytes spell."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise _SchemaError("it is not UTF-8") from None
    except RecursionError:
        raise _SchemaError("it is nested too deep") from None
    except _SchemaError:
        raise
    except ValueError as error:
        raise _SchemaError(f"it is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise _SchemaError(f"it must be an object, got {kind(value)}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _SchemaError(f"{_key('', next(n for n in names if names.count(n) > 1))} is given twice")
    return found


def _no_constant(name: str) -> None:
    raise _SchemaError(f"{name} is not a number of JSON")


def _key(path: str, name: str) -> str:
    """The path of a key; what detgen did not write is shown escaped and cut."""
    shown = name if name.isidentifier() and name.isascii() else ascii(name)[:_SHOWN]
    return f"{path}.{shown}" if path else shown


def _wrong(path: str, needed: str, value: object) -> _SchemaError:
    """A value that is not what is needed."""
    shown = kind(value) if isinstance(value, dict | list) or value is None else ascii(value)[:_SHOWN]
    return _SchemaError(f"{path} must be {needed}, got {shown}")


def _whole(low: int = 0, high: int = _MOST) -> Rule:
    def check(path: str, value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            span = f"of at least {low}" if high == _MOST else f"from {low} to {high}"
            raise _wrong(path, f"a whole number {span}", value)

    return check


def _number(low: float = 0.0, high: float = math.inf) -> Rule:
    def check(path: str, value: Any) -> None:
        if type(value) not in (int, float):
            raise _wrong(path, "a number", value)
        if not (low <= value <= high and abs(value) <= sys.float_info.max):
            raise _wrong(path, f"a finite number from {low:g} to {high:g}", value)

    return check


def _text(path: str, value: Any) -> None:
    if not isinstance(value, str):
        raise _wrong(path, "a string", value)


def _flag(path: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _wrong(path, "true or false", value)


def _like(pattern: re.Pattern[str], needed: str) -> Rule:
    def check(path: str, value: Any) -> None:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise _wrong(path, needed, value)

    return check


def _one_of(*allowed: str) -> Rule:
    def check(path: str, value: Any) -> None:
        if not isinstance(value, str) or value not in allowed:
            raise _wrong(path, f"one of {', '.join(allowed)}", value)

    return check


def _or_null(rule: Rule) -> Rule:
    def check(path: str, value: Any) -> None:
        if value is not None:
            rule(path, value)

    return check


def _list(rule: Rule) -> Rule:
    def check(path: str, value: Any) -> None:
        if not isinstance(value, list):
            raise _wrong(path, "a list", value)
        for i, part in enumerate(value):
            rule(f"{path}[{i}]", part)

    return check


def _mapping(rule: Rule, names: tuple[str, ...] | None = None) -> Rule:
    """An object with any keys, or with keys among some names, and values of one kind."""

    def check(path: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise _wrong(path, "an object", value)
        for name, part in value.items():
            if names is not None and name not in names:
                raise _SchemaError(f"{_key(path, name)} is unknown")
            rule(_key(path, name), part)

    return check


def _record(required: dict[str, Rule], optional: dict[str, Rule] | None = None, *, closed: bool = True) -> Rule:
    """An object with these keys; if it is closed, with no others."""
    known = {**required, **(optional or {})}

    def check(path: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise _wrong(path or "it", "an object", value)
        for name in required:
            if name not in value:
                raise _SchemaError(f"{_key(path, name)} is missing")
        for name, part in value.items():
            if name in known:
                known[name](_key(path, name), part)
            elif closed:
                raise _SchemaError(f"{_key(path, name)} is unknown")

    return check


def _anything(path: str, value: Any) -> None:
    pass


def _typed(hint: Any) -> Rule:
    """What a field of `SamplingParams` looks like in JSON, by its type; `SamplingParams` itself knows the ranges."""
    plain = {int: _whole(-_MOST), float: _number(-math.inf), str: _text, bool: _flag, type(None): _or_null(_anything)}
    if hint in plain:
        return plain[hint]
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType) and type(None) in parts and len(parts) == 2:
        return _or_null(_typed(next(p for p in parts if p is not type(None))))
    if origin is tuple and len(parts) == 2 and parts[1] is ...:
        return _list(_typed(parts[0]))
    if origin is tuple:
        return _list(_anything)
    if origin is dict:
        return _mapping(_typed(parts[1]))
    return _anything


_HINTS = get_type_hints(SamplingParams)
_PARAMETERS = _record(
    {
        **{name: _typed(hint) for name, hint in _HINTS.items()},
        "limit": _or_null(_whole(1)),
        "seed_per_line": _flag,
        "echo": _flag,
    }
)


def _parameters(path: str, value: Any) -> None:
    _PARAMETERS(path, value)
    try:
        sampling_params(value)
    except RequestError as error:  # it begins with the name of the parameter
        raise _SchemaError(f"{path}.{ascii(str(error))[1:-1]}") from None


def _chunks(path: str, value: Any) -> None:
    if value not in ("auto", "off") and type(value) is not int:
        raise _wrong(path, "auto, off or a number of chunks", value)
    if type(value) is int:
        _whole(1)(path, value)


_digest = _like(_HEX, "64 hexadecimal digits")
_version = _like(_VERSION, "a version such as 1.2.3")
_count = _whole()
_counts = _record({field.name: _count for field in fields(DrafterStats)})
_names = tuple(name for name in DRAFTERS if name != "auto")
_model = _record({"name": _text, "digest": _text, "quant": _one_of(*get_args(QuantName))})
_file = _record({"sha256": _digest, "bytes": _count})
_TOTALS = ("prompts", "samples", "errors", "tokens", "prompt_tokens")

_SETTINGS: dict[str, Rule] = {
    "draft": _or_null(_text),
    "drafter": _one_of(*DRAFTERS),
    "draft_tokens": _or_null(_whole(1)),
    "batch_size": _whole(1),
    "draft_quant": _one_of(*get_args(QuantName)),
    "threads": _or_null(_whole(1)),
    "kv_memory": _or_null(_whole(1)),
    "prefix_cache": _flag,
    "speculative_prefill": _chunks,
}
_PROFILE: dict[str, Rule] = {"target": _model, "dtype": _text, "arithmetic": _text}
_TORCH: dict[str, Rule] = {  # what torch's arithmetic depends on besides
    "device": _text,
    "capability": _or_null(_text),
    "cuda": _record(
        {
            "capability": _text,
            "toolkit": _or_null(_text),
            "triton": _text,
        }
    ),
    "versions": _record({}, dict.fromkeys(("transformers", "torch", "triton", "bitsandbytes"), _text)),
    "operators": _list(_text),
}
_SUMMARY: dict[str, Rule] = {
    **dict.fromkeys(_TOTALS, _count),
    "drafters": _mapping(_counts, _names),
    "total": _counts,
}
_INPUT: dict[str, Rule] = {"path": _text, "format": _text, "sha256": _text}
_KEYS: dict[str, Rule] = {
    "detgen": _version,
    "status": _one_of(*STATUSES),
    "created": _like(_TIME, "a time in UTC such as 2026-01-31T12:00:00+00:00"),
    "input": _record({**_INPUT, "prompts": _or_null(_count), "prompt_column": _or_null(_text)}, {"folder": _text}),
    "settings": _record(_SETTINGS, {"workers": _or_null(_whole(1))}),
    "model": _or_null(_text),
    "model_stamp": _or_null(_text),
    "seconds": _number(),
    "profile": _record(_PROFILE, _TORCH),
    "draft": _or_null(_model),
}
_ENDED: dict[str, Rule] = {"summary": _record(_SUMMARY)}
_MANIFEST = _record(
    {**_KEYS, "parameters": _parameters},
    {**_ENDED, "files": _record(dict.fromkeys(FILES, _file), {RESULTS: _file})},
)
_SCORES = _record(
    {**_KEYS, "command": _one_of("score"), "parameters": _record({"limit": _or_null(_whole(1)), "echo": _flag})},
    {**_ENDED, "files": _record({FILES[0]: _file})},
)
_OTHER_VERSION = _record(
    {
        "detgen": _version,
        "status": _text,
        "input": _record(_INPUT, closed=False),
        "parameters": _record({}, closed=False),
    },
    closed=False,
)


def _check_status(manifest: dict[str, Any]) -> None:
    """The keys that a run adds when it ends."""
    status = manifest["status"]
    ended = {"summary": status != "running", "files": status == "finished"}
    for name, needed in ended.items():
        if needed and name not in manifest:
            raise _SchemaError(f"{name} is missing, though the status is {status}")
        if not needed and name in manifest:
            raise _SchemaError(f"{name} is given, though the status is {status}")
