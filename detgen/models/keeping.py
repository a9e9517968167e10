"""Facts about a model learned from transformers, kept between runs: asking again takes seconds, mostly to import it.

What is kept: the model's modules without weights, its tokenizer, and the results of its own forward (`OwnForward`); all
follow from the model's files, the settings and the versions of libraries. Packed passes are compared each time a model
is prepared, kept or not (`detgen/runner/comparing.py`). Nothing is kept for models with code of their own, models that
transformers itself has to load, GGUF files that need no answers from it (`detgen/models/gguf/plain.py`), or where the
user's cache cannot be written.

The facts about the embedded models are shipped with them, so that not even their first run asks. They come from the
library versions of the release, whatever is installed: the models belong to the release, too. A test compares them with
today's answers (`tests/tools/test_keep_demo_models.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

import detgen
from detgen.errors import DEMO
from detgen.kernels.attention import AttentionTraits
from detgen.kernels.decoder import StateShape
from detgen.machine import user_cache
from detgen.models.own_forward import Depth, Layout, OwnForward

_PACKAGES = ("transformers", "torch", "tokenizers", "gguf", "numpy", "ml_dtypes")
_MOST = 32  # number of models to keep, those written last
_DIGEST = hashlib.sha256().digest_size
_FACTS = "facts"
# Embedded models with shipped facts, each in its own role, and the settings that the facts are for: number format,
# quantization, adapter.
_SHIPPED, _USUAL = ("target", "draft"), ("auto", "none", None)


class Kept(NamedTuple):
    """What is kept about a model.

    Attributes:
        facts: everything that JSON can hold.
        arrays: the rest, by name.
    """

    facts: dict[str, Any]
    arrays: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, facts: dict[str, Any], arrays: Mapping[str, np.ndarray], own: OwnForward) -> Kept:
        """Add the results of a model's own forward to facts and arrays."""
        layout, depth = own.layout, own.depth
        traits = [t and asdict(t) for t in layout.traits]
        found = {"cached": layout.cached, "traits": traits, "group": layout.group, "states": layout.states}
        found["agreed"] = own.agreed
        made = dict(arrays)
        if own.reference is not None:
            made["reference"] = own.reference
        if depth is not None:
            made["depth"] = depth.logits
            found["depth"] = {"at": depth.at, "tokens": depth.tokens, "pages": depth.pages}
        return cls({**facts, "own": found}, made)

    @property
    def own(self) -> OwnForward:
        """The results of its own forward."""
        found, arrays = self.facts["own"], self.arrays
        traits = [traits and AttentionTraits(**traits) for traits in found["traits"]]
        states = tuple(shape and StateShape(*shape) for shape in found["states"])
        cached = [(h, dk, dv) for h, dk, dv in found["cached"]]
        layout = Layout(cached, traits, found["group"], states=states)
        depth = Depth(**found["depth"], logits=arrays["depth"]) if "depth" in found else None
        return OwnForward(layout, arrays.get("reference"), depth, found["agreed"])

    @classmethod
    def read(cls, path: Path) -> Kept | None:
        """Read a file; return None if it is missing or damaged."""
        try:
            content = path.read_bytes()
            if hashlib.sha256(content[_DIGEST:]).digest() != content[:_DIGEST]:
                return None
            arrays = load(content[_DIGEST:])
            facts = json.loads(arrays.pop(_FACTS).tobytes())
        except (OSError, SafetensorError):
            return None
        return cls(facts, arrays)

    def packed(self) -> bytes:
        """Return the content of such a file."""
        facts = np.frombuffer(json.dumps(self.facts).encode(), dtype=np.uint8)
        content = save({**self.arrays, _FACTS: facts})
        return hashlib.sha256(content).digest() + content


def shipped(path: Path, *asked: object) -> Path | None:
    """Return the shipped file about a model used in one way, None if there is none; arguments as for `Place`."""
    for role in _SHIPPED:
        if asked == (role, *_USUAL) and os.path.realpath(path) == os.path.realpath(DEMO / role):
            return DEMO / f"{role}.kept"
    return None


class Place:
    """Where facts about one model, used in one way, are kept.

    Args:
        path: folder or file of the model.
        asked: everything that the facts depend on besides the model's files.
    """

    def __init__(self, path: Path, *asked: object) -> None:
        versions = _versions()
        facts = repr((versions, os.path.realpath(path), *asked)).encode()
        self._path: Path | None = None
        self._shipped = shipped(path, *asked)
        with suppress(RuntimeError):  # there is no home directory
            self._path = None if versions is None else user_cache() / "models" / hashlib.sha256(facts).hexdigest()

    def read(self) -> Kept | None:
        """Return what is kept, else what is shipped; None if both are missing or damaged."""
        return next((kept for path in (self._path, self._shipped) if path and (kept := Kept.read(path))), None)

    def write(self, kept: Kept) -> None:
        """Keep facts, if the folder can be written."""
        if self._path is None:
            return
        folder = self._path.parent
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=folder, prefix=".", delete=False) as file:
                try:
                    file.write(kept.packed())
                    os.replace(file.name, self._path)
                except OSError:
                    os.unlink(file.name)
                    raise
            for old in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[:-_MOST]:
                old.unlink()


@cache
def _versions() -> tuple[object, ...] | None:
    """Return the versions of everything that decides the facts: libraries and code here; None if any has none."""
    try:
        versions = [version(package) for package in _PACKAGES]
    except PackageNotFoundError:
        return None
    if any("dev" in one for one in versions):  # one version number, many contents
        return None
    code, root = hashlib.sha256(), Path(detgen.__file__).parent
    for part in ("models", "runner", "kernels", "program", "thinking"):
        for path in sorted((root / part).rglob("*.py")):
            code.update(path.read_bytes())
    return (*versions, code.digest())
