"""A worker's side: an engine that takes requests while it generates, and returns finished samples.

Knows nothing of Ray. One stream of the engine stays open across calls, so its batch never drains.
"""

from __future__ import annotations

import os
import platform
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import detgen
from detgen.engine.config import EngineConfig
from detgen.engine.engine_like import EngineLike
from detgen.engine.request import Chunk, Completion, Request
from detgen.engine.score_requests import Score
from detgen.engine.stats import EngineStats
from detgen.machine import usable_cores

_PATIENCE = 0.5  # seconds after which a call returns to report progress, even if nothing has finished


@dataclass(frozen=True, slots=True)
class Identity:
    """A worker's description of its engine, sent before it gets work.

    Attributes:
        instance: changes whenever a worker begins anew, which makes it forget its requests.
        node: name of its machine.
        version: detgen's version there.
        thinks: whether the model thinks while it reads.
        dated: whether its chat template prints the date.
        profile: everything that decides the bits of an output.
        draft: profile of the draft model, which decides none of them; None without one.
    """

    instance: str
    node: str
    version: str
    thinks: bool
    dated: bool
    profile: dict[str, Any]
    draft: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a call of `work`.

    Attributes:
        done: finished samples. Their requests have only the index, since the coordinator has the rest.
        stats: counts of the engine since it was loaded.
    """

    done: list[Completion | Score]
    stats: EngineStats


class ServedEngine(EngineLike, Protocol):
    """What a worker needs of `detgen.engine.Engine`: streams that go on when no further request is there yet."""

    def stream(self, requests: Iterable[Request | None]) -> Iterator[list[Completion]]:
        """See `Engine.stream`; a None among the requests means that there is no other yet."""

    def score_stream(self, requests: Iterable[Any]) -> Iterator[list[Score]]:
        """See `Engine.score_stream`; None as for `stream`."""


class Serving:
    """Serves one engine; calls run one after the other.

    Args:
        config: settings of the engine.
        folder: the coordinator's working directory, which paths are relative to.
        cores: cores that this worker may use, 0 for any number. It takes the same share of the memory as of the cores.
        build: makes the engine; None for detgen's own.
    """

    def __init__(
        self,
        config: EngineConfig,
        folder: str,
        cores: int = 0,
        build: Callable[[EngineConfig], ServedEngine] | None = None,
    ) -> None:
        self._config = config
        self._folder = folder
        self._cores = cores
        self._build = build or _load
        self._engine: ServedEngine | None = None
        self._instance = ""
        self._stream: Any = None
        self._coming: deque[Request] = deque()
        self._missing: dict[int, int] = {}  # number of missing samples, by the index of the request

    def begin(self) -> Identity:
        """Forget all requests; on the first call, load the engine.

        Raises:
            EngineError: if the engine cannot be built.
        """
        if self._engine is None:
            with suppress(OSError):  # another machine may not have it
                os.chdir(self._folder)
            self._engine = self._build(self._settled())
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._coming.clear()
        self._missing.clear()
        self._instance = uuid.uuid4().hex
        engine = self._engine
        return Identity(
            self._instance,
            platform.node(),
            detgen.__version__,
            engine.thinks,
            engine.dated,
            engine.profile(),
            engine.draft_profile(),
        )

    def work(
        self, instance: str, requests: list[Request], scoring: bool = False, seconds: float = 0.0
    ) -> Answer | None:
        """Take requests, and generate for some time or until all have finished.

        Args:
            instance: as returned by `begin`.
            requests: new requests, in addition to those that it has.
            scoring: whether they are `ScoreRequest`s; the same for all calls between two of `begin`.
            seconds: least time to generate if there is anything to do.

        Returns:
            The finished samples; None if the instance is another one, which has no earlier requests and takes none.
        """
        engine = self._engine
        if engine is None or instance != self._instance:
            return None
        self._coming.extend(requests)
        self._missing.update((request.index, request.samples) for request in requests)
        if self._stream is None:
            self._stream = (engine.score_stream if scoring else engine.stream)(self._next())
        done: list[Completion | Score] = []
        began = time.monotonic()
        while self._missing:
            for completion in next(self._stream):
                self._note(completion)
                done.append(replace(completion, request=_only_index(completion.request)))
            passed = time.monotonic() - began
            if passed > (seconds if done else max(seconds, _PATIENCE)):
                break
        return Answer(done, deepcopy(engine.stats))

    def chunks(self, request: Request, tokens: list[int], thoughts: dict[int, str]) -> list[Chunk]:
        """See `Engine.chunks`; call `begin` first."""
        assert self._engine is not None
        return self._engine.chunks(request, tokens, thoughts)

    def _next(self) -> Iterator[Any]:
        """Yield requests as they come; None when there is no other yet."""
        while True:
            yield self._coming.popleft() if self._coming else None

    def _note(self, completion: Completion | Score) -> None:
        index = completion.request.index
        self._missing[index] -= 1
        if completion.refused or not self._missing[index]:
            del self._missing[index]

    def _settled(self) -> EngineConfig:
        """Return the settings, with this worker's share of threads and memory if they specify none."""
        config, cores = self._config, self._cores
        if not cores:
            return config
        if config.kv_memory is None and config.device == "cpu":
            from detgen.machine import CPU
            from detgen.models.memory import free_memory

            free = free_memory(CPU)
            config = replace(config, kv_memory=max(free * cores // max(usable_cores(), cores), 1))
        return replace(config, threads=config.threads or cores)


def _only_index(request: Request) -> Any:
    """Return a request with nothing but the index."""
    return Request(request.index, "")


def _load(config: EngineConfig) -> ServedEngine:
    from detgen.engine import Engine

    return Engine(config)
