"""An engine that an earlier run has described in a store, and that is loaded only if it has to generate.

Only models that run whole are described: their profile names their files, the number format and the arithmetic, so it
is known without loading them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from detgen.engine.config import EngineConfig
from detgen.engine.engine_like import EngineLike
from detgen.engine.request import Chunk, Completion, Request
from detgen.engine.score_requests import Score, ScoreRequest
from detgen.engine.sources import uses_draft
from detgen.engine.stats import EngineStats
from detgen.errors import DEMO
from detgen.outputs import FolderStore, Samples, SharedStore
from detgen.progress import Observer
from detgen.prompts import Prompts
from detgen.run.interface import RunConfig, ScoreConfig

_WHOLE = {"target", "dtype", "kv_dtype", "arithmetic"}  # all that the profile of a model that runs whole has


class Unloaded:
    """An `EngineLike` made from a description; `load` makes the engine itself."""

    def __init__(self, described: dict[str, Any], load: Callable[[], EngineLike]) -> None:
        self._described = described
        self._load = load
        self._engine: EngineLike | None = None

    @property
    def stats(self) -> EngineStats:
        """Running totals."""
        return EngineStats() if self._engine is None else self._engine.stats

    @property
    def thinks(self) -> bool:
        """Whether the model thinks while it reads."""
        return bool(self._described["thinks"])

    @property
    def dated(self) -> bool:
        """Whether the text of a chat contains the date."""
        return bool(self._described["dated"])

    def profile(self) -> dict[str, Any]:
        """Return everything that decides the bits of an output."""
        return dict(self._described["profile"])

    def draft_profile(self) -> dict[str, Any] | None:
        """Return the profile of the draft model; None without one."""
        draft: dict[str, Any] | None = self._described["draft"]
        return draft

    def chunks(self, request: Request, tokens: Sequence[int], thoughts: Mapping[int, str]) -> list[Chunk]:
        """See `Engine.chunks`; loads the model."""
        return self._loaded().chunks(request, tokens, thoughts)

    def stream(self, requests: Iterable[Request]) -> Iterator[list[Completion]]:
        """See `Engine.stream`; loads the model for the first request."""
        left = iter(requests)
        for first in left:
            yield from self._loaded().stream(chain([first], left))

    def score_stream(self, requests: Iterable[ScoreRequest]) -> Iterator[list[Score]]:
        """See `Engine.score_stream`; loads the model for the first request."""
        left = iter(requests)
        for first in left:
            yield from self._loaded().score_stream(chain([first], left))

    def _loaded(self) -> EngineLike:
        if self._engine is None:
            self._engine = self._load()
            if self._engine.profile() != self.profile():
                raise RuntimeError("the model is not what the store says of it")
        return self._engine


def describe(engine: EngineLike, stamp: str | None, own: FolderStore, shared: SharedStore | None) -> None:
    """Describe an engine in the stores, under the stamp of its configuration, if its model runs whole.

    Raises:
        OutputError: if the folder's store cannot be written.
    """
    profile = engine.profile()
    if stamp is None or profile.keys() != _WHOLE:
        return
    described = {
        **{"profile": profile, "draft": engine.draft_profile()},
        **{"dated": engine.dated, "thinks": engine.thinks},
    }
    value = json.dumps(described).encode()
    for store in (own, shared):
        if store is not None and store.described(stamp) != value:
            store.describe(stamp, value)


def unloaded(
    config: RunConfig | ScoreConfig,
    source: Prompts,
    manifest: dict[str, Any],
    own: FolderStore | None,
    shared: SharedStore | None,
    observer: Observer,
    load: Callable[[], EngineLike],
) -> Unloaded | None:
    """Return an engine for a run whose samples all exist; None if some are missing or the model is not described.

    Args:
        config: the run's settings.
        source: the prompts.
        manifest: the run's manifest, without the profile.
        own: the store of the folder, if it has one.
        shared: the store of `--cache`, if given.
        observer: receives progress.
        load: makes the engine; called if a sample turns out to be missing.

    Raises:
        EngineError: if there is no such device or model.
        PromptsError: if the prompts cannot be read.
    """
    stamp = manifest["model_stamp"]
    stores = [store for store in (own, shared) if store is not None and stamp is not None]
    value = next((value for store in stores if (value := store.described(stamp)) is not None), None)
    if value is None:
        return None
    described: dict[str, Any] = json.loads(value)
    if not uses_draft(config.engine):
        described["draft"] = None
    known = manifest | {"profile": described["profile"]}
    samples = Samples(own, shared, known, source.name, dated=described["dated"])
    name = described["profile"]["target"]["name"]
    # The run itself tells a person of the input.
    items = config.items(source, lambda text: None, name)
    if not all(samples.has(item) for item in items if isinstance(item, Request)):
        return None
    if not _is_the_same(config.engine, described, observer):
        return None
    observer.message("all samples exist already: no model is loaded")
    return Unloaded(described, load)


def _is_the_same(config: EngineConfig, described: dict[str, Any], observer: Observer) -> bool:
    """Return whether the models are the described ones, by the bytes of their files, and would run as they did."""
    from detgen.engine import Engine  # noqa: F401 (before its other modules: it holds Ctrl-C back)
    from detgen.models.adapter_files import check_adapter
    from detgen.models.loading import adapter_digest_of, digest_of, pick_device

    if pick_device(config.device).type != "cpu":
        return False
    observer.stage("comparing the model's files")
    target, draft = described["profile"]["target"], described["draft"]
    asked = [(config.target, "target", config.target_quant, target)]
    if uses_draft(config):
        asked.append((config.draft, "draft", config.draft_quant, draft))
    for source, role, quant, known in asked:
        if source is not None and not isinstance(source, str | Path):
            return False
        name = str(source or f"embedded:{role}")
        if known is None or (known["name"], known["quant"]) != (name, quant):
            return False
        place, trusted = source or DEMO / role, config.trust_remote_code
        if known["digest"] != digest_of(place, name, trusted=trusted, observer=observer):
            return False
    adapter: str | None = target.get("adapter")
    if config.adapter is None:
        return adapter is None
    return adapter == adapter_digest_of(check_adapter(config.adapter, None), observer)
