"""What transformers has told of a model, kept between runs: asking it again takes seconds, mostly to import it.

Kept are the model's modules without their weights, its tokenizer, and what its own forward gave (`OwnForward`), all of
which follow from the model's files, the settings and the versions of libraries. Packed passes are compared each time a
model is prepared, kept or not (`detgen/runner/comparing.py`). Nothing is kept of models with code of their own, of
those that transformers itself has to load, of GGUF files about which it need not be asked
(`detgen/models/gguf/plain.py`), and where the user's cache cannot be written.

What was told of the embedded models is shipped beside them, so that not even their first run asks. It is what the
versions of the release told, by its own code, whatever is installed: the models are the release's, too. A test compares
it with what is told today (`tests/tools/test_keep_demo_models.py`).
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
_MOST = 32  # models that are kept, the ones written last
_DIGEST = hashlib.sha256().digest_size
_FACTS = "facts"
# Embedded models of which it is shipped what was told, each in its own role, and the settings for which it is: number
# format, quantization, adapter.
_SHIPPED, _USUAL = ("target", "draft"), ("auto", "none", None)


class Kept(NamedTuple):
    """What is kept of a model.

    Attributes:
        facts: what JSON can hold.
        arrays: the rest, by names.
    """

    facts: dict[str, Any]
    arrays: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, facts: dict[str, Any], arrays: Mapping[str, np.ndarray], own: OwnForward) -> Kept:
        """With what a model's own forward has told."""
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
        """What its own forward has told."""
        found, arrays = self.facts["own"], self.arrays
        traits = [traits and AttentionTraits(**traits) for traits in found["traits"]]
        states = tuple(shape and StateShape(*shape) for shape in found["states"])
        cached = [(h, dk, dv) for h, dk, dv in found["cached"]]
        layout = Layout(cached, traits, found["group"], states=states)
        depth = Depth(**found["depth"], logits=arrays["depth"]) if "depth" in found else None
        return OwnForward(layout, arrays.get("reference"), depth, found["agreed"])

    @classmethod
    def read(cls, path: Path) -> Kept | None:
        """What a file holds; None if there is none, or if it is damaged."""
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
        """The content of such a file."""
        facts = np.frombuffer(json.dumps(self.facts).encode(), dtype=np.uint8)
        content = save({**self.arrays, _FACTS: facts})
        return hashlib.sha256(content).digest() + content


def shipped(path: Path, *asked: object) -> Path | None:
    """The file in which it is shipped what was told of a model used in one way, if it is; arguments as `Place`."""
    for role in _SHIPPED:
        if asked == (role, *_USUAL) and os.path.realpath(path) == os.path.realpath(DEMO / role):
            return DEMO / f"{role}.kept"
    return None


class Place:
    """Where something is kept of one model, used in one way.

    Args:
        path: folder or file of the model.
        asked: all that it depends on besides the model's files.
    """

    def __init__(self, path: Path, *asked: object) -> None:
        versions = _versions()
        facts = repr((versions, os.path.realpath(path), *asked)).encode()
        self._path: Path | None = None
        self._shipped = shipped(path, *asked)
        with suppress(RuntimeError):  # there is no home
            self._path = None if versions is None else user_cache() / "models" / hashlib.sha256(facts).hexdigest()

    def read(self) -> Kept | None:
        """What is kept, else what is shipped; None if there is neither, or it is damaged."""
        return next((kept for path in (self._path, self._shipped) if path and (kept := Kept.read(path))), None)

    def write(self, kept: Kept) -> None:
        """Keep that, if the folder can be written."""
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
    """Of all that decides what is told: libraries and the code here that asks; None if some of that has no version."""
    try:
        versions = [version(package) for package in _PACKAGES]
    except PackageNotFoundError:
        return None
    if any("dev" in one for one in versions):  # one version, many contents
        return None
    code, root = hashlib.sha256(), Path(detgen.__file__).parent
    for part in ("models", "runner", "kernels", "program", "thinking"):
        for path in sorted((root / part).rglob("*.py")):
            code.update(path.read_bytes())
    return (*versions, code.digest())
