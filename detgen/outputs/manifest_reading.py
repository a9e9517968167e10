"""Reads manifests. They may be damaged or come from a stranger, so each is checked before anything in it is used.

A manifest of another version of detgen is checked only as far as reporting the version needs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

import detgen
from detgen.errors import OutputError, RequestError
from detgen.outputs.directory import open_plain
from detgen.outputs.manifest import LOGS, OtherManifest, RunManifest, ScoreManifest, log_name
from detgen.params import PARAMETERS, SamplingParams
from detgen.prompts.json_text import parse_json
from detgen.prompts.kinds import kind

_SHOWN = 60  # characters of a wrong value in a message
_NEEDED = {  # by the type of pydantic's error, with its context in {}
    "string_type": "a string",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "list_type": "a list",
    "dict_type": "an object",
    "greater_than_equal": "at least {ge:.20g}",
    "less_than": "below {lt}",
}


class _SchemaError(ValueError):
    """A manifest is wrong; the message says where."""


def parse_manifest(data: bytes, path: Path) -> dict[str, Any]:
    """Return the manifest in a file: a `RunManifest` or `ScoreManifest`, or an `OtherManifest` of another version.

    Args:
        data: the file's bytes.
        path: its name in messages.

    Raises:
        OutputError: if it is not a manifest of detgen; one line names the file, the key and the reason.
    """
    try:
        manifest = _decode(data)
        _check(manifest)
    except _SchemaError as error:
        what = f"{path}: {error}; detgen writes no such manifest"
        raise OutputError(f"{what}: restore the file, or use another folder") from None
    return manifest


def sampling_params(parameters: dict[str, Any]) -> SamplingParams:
    """Return the defaults of a run from the `parameters` of its manifest.

    Raises:
        RequestError: if one is out of range.
    """
    return SamplingParams(**{name: parameters[name] for name in PARAMETERS})


def _check(manifest: dict[str, Any]) -> None:
    version = manifest.get("detgen")
    if isinstance(version, str) and version != detgen.__version__:
        _validate(OtherManifest, manifest)
        return
    scores = manifest.get("command") == "score"
    _validate(ScoreManifest if scores else RunManifest, manifest)
    if not scores:
        try:
            sampling_params(manifest["parameters"])
        except RequestError as error:  # the message begins with the name of the parameter
            raise _SchemaError(f"parameters.{ascii(str(error))[1:-1][: 3 * _SHOWN]}") from None
    status = manifest["status"]
    for name, needed in {"summary": status != "running", "files": status == "finished"}.items():
        if needed and name not in manifest:
            raise _SchemaError(f"{name} is missing, though the status is {status}")
        if not needed and name in manifest:
            raise _SchemaError(f"{name} is given, though the status is {status}")
    log = log_name(manifest)
    for name in filter(None, () if scores or "files" not in manifest else LOGS.values()):
        if (name == log) != (name in manifest["files"]):
            what = "missing" if name == log else "given"
            raise _SchemaError(f"files.{name!r} is {what}, though acceptance_log is {manifest['acceptance_log']}")


@cache
def _checked(declared: type) -> TypeAdapter[Any]:
    return TypeAdapter(declared)


def _validate(declared: type, manifest: dict[str, Any]) -> None:
    try:
        _checked(declared).validate_python(manifest)
    except ValidationError as error:
        # A string may hold half a surrogate pair, such as a path that is not UTF-8, where pydantic's cannot.
        wrong = [each for each in error.errors(include_url=False) if each["type"] != "string_unicode"]
        if wrong:
            unknown = (each for each in wrong if each["type"] == "extra_forbidden")
            raise _SchemaError(_in_words(next(unknown, wrong[0]))) from None


def _in_words(error: ErrorDetails) -> str:
    """Return an error in words; what detgen did not write is shown escaped and shortened."""
    place = ""
    for part in error["loc"]:
        if isinstance(part, int):
            place += f"[{part}]"
            continue
        shown = part if part.isidentifier() and part.isascii() else ascii(part)[:_SHOWN]
        place += f".{shown}" if place else shown
    if error["type"] in ("missing", "extra_forbidden"):
        return f"{place} is {'missing' if error['type'] == 'missing' else 'unknown'}"
    needed = _NEEDED.get(error["type"], error["msg"]).format(**error.get("ctx", {}))
    value = error["input"]
    shown = kind(value) if isinstance(value, dict | list) or value is None else ascii(value)[:_SHOWN]
    return f"{place} must be {needed}, got {shown}"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a run.

    Raises:
        OutputError: if the folder holds no run, or its manifest is not one of this version of detgen.
    """
    path = folder / "manifest.json"
    try:
        with open(open_plain(path), "rb") as file:
            manifest = parse_manifest(file.read(), path)
    except (FileNotFoundError, NotADirectoryError):
        raise OutputError(f"{folder} has no manifest.json; give the output folder of a detgen run") from None
    except OSError as error:
        raise OutputError(f"cannot read {path}: {error.strerror}; give the output folder of a detgen run") from None
    if manifest["detgen"] != detgen.__version__:
        raise OutputError(
            f"{folder} was written by detgen {manifest['detgen']!a:.40}, this is {detgen.__version__};"
            " read it with the version that wrote it"
        )
    return manifest


def read_manifest_of_texts(folder: Path) -> dict[str, Any]:
    """Read the manifest of a run that generated texts.

    Raises:
        OutputError: as for `read_manifest`, or if the run holds scores.
    """
    manifest = read_manifest(folder)
    if manifest.get("command") == "score":
        raise OutputError(f"{folder} holds scores, and this is for generated texts; read its outputs.jsonl instead")
    return manifest


def _decode(data: bytes) -> dict[str, Any]:
    """Parse the object in the bytes."""
    try:
        value = parse_json(data.decode())
    except UnicodeDecodeError:
        raise _SchemaError("it is not UTF-8") from None
    except RequestError as error:
        raise _SchemaError(ascii(str(error))[1:-1][: 3 * _SHOWN]) from None
    if not isinstance(value, dict):
        raise _SchemaError(f"it must be an object, got {kind(value)}")
    return value
