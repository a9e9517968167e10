"""A run's manifest, read by a command that did not write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import detgen
from detgen.errors import OutputError
from detgen.outputs.directory import open_plain
from detgen.outputs.manifest import parse_manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run.

    Raises:
        OutputError: the folder holds no run, or its manifest is not one of this version of detgen.
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
    """The manifest of a run that generated texts; see `read_manifest`.

    Raises:
        OutputError: or it holds scores.
    """
    manifest = read_manifest(folder)
    if manifest.get("command") == "score":
        raise OutputError(f"{folder} holds scores, and this is for generated texts; read its outputs.jsonl instead")
    return manifest
