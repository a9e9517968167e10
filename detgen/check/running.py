"""Generates under a setting, in this process or in one of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import psutil

from detgen.check.axes import Setting
from detgen.check.comparing import Key, Observed, Watching
from detgen.drafters.known_text import AdversaryDrafter, Known, OracleDrafter
from detgen.drafters.protocol import Drafter
from detgen.engine import Engine
from detgen.engine.config import EngineConfig
from detgen.engine.request import Request
from detgen.engine.sequence import Sequence
from detgen.errors import EngineError, QuantName
from detgen.machine import usable_cores
from detgen.passes.embedding import broken_embedding
from detgen.progress import Observer
from detgen.worker import Worker


@dataclass(frozen=True, slots=True)
class Task:
    """A generation, as plain data.

    Attributes:
        setting: how.
        queue: what, in order.
        known: samples of the reference, for the drafters that need them.
        seed: of the adversary.
        broken: a token whose embedding is NaN meanwhile; None for none.
    """

    setting: Setting
    queue: list[Request]
    known: list[Known]
    seed: int
    broken: int | None = None

    def engine_settings(self, config: EngineConfig) -> dict[str, Any]:
        """What the setting asks of an engine, as far as the command line has it, too."""
        setting = self.setting
        return {
            "draft_tokens": setting.draft_tokens,
            "verify_window": setting.verify_window or 8,
            "batch_size": max(len(self.queue), 1) if setting.batch == "all" else setting.batch,
            "threads": setting.threads or config.threads or usable_cores(),
        }


class Subject:
    """The engine under test, by quantization of the target.

    Args:
        config: how to build it.
        engine: an existing one, with the quantization of `config`.
        observer: is told what is being done while one is built.
    """

    def __init__(self, config: EngineConfig, engine: Engine | None = None, observer: Observer | None = None) -> None:
        self._config, self._observer = config, observer
        self._engines: dict[str, Engine] = {"none": engine} if engine is not None else {}

    def engine(self, quant: str = "none") -> Engine:
        """The engine with this quantization of the target; "none" is what the configuration asks for.

        Raises:
            EngineError: as building an engine does.
        """
        if quant not in self._engines:
            if short_of_memory():
                self._engines.clear()
            asked = self._config if quant == "none" else replace(self._config, target_quant=cast("QuantName", quant))
            self._engines[quant] = Engine(asked, observer=self._observer)
        return self._engines[quant]

    @contextlib.contextmanager
    def configured(self, task: Task) -> Iterator[Engine]:
        """The engine as the task wants it; inside the block, its broken token is broken."""
        setting, engine = task.setting, self.engine(task.setting.quant)
        configured = engine.with_settings(
            drafter=_drafter(task, engine.vocabulary),
            prefill_chunk=setting.chunk,
            prefix_cache=setting.reuse,
            **task.engine_settings(self._config),
        )
        with (
            contextlib.nullcontext()
            if task.broken is None
            else broken_embedding(configured.canonical[0].model, task.broken)
        ):
            yield configured

    def generate(self, task: Task) -> dict[Key, Observed]:
        """Generate in this process.

        Raises:
            EngineError: as building an engine does.
        """
        trace = Watching()
        with self.configured(task) as engine:
            done = [c for finished in engine.stream(task.queue, trace=trace) for c in finished]
        return {(c.request.id, c.sample): trace.observed(c) for c in done if c.error is None}


def short_of_memory() -> bool:
    """Whether there is no room for the models once more."""
    return bool(psutil.virtual_memory().available < 2 * psutil.Process().memory_info().rss)


def _drafter(task: Task, vocabulary: int) -> Any:
    name = task.setting.drafter
    if name not in ("oracle", "adversary"):
        return name

    def make(named: Mapping[str, Drafter]) -> Drafter:
        oracle = OracleDrafter(task.known)
        return oracle if name == "oracle" else AdversaryDrafter(oracle, vocabulary, task.seed, task.broken)

    return make


def breaking(requests: Iterable[Request], reference: Mapping[Key, Observed], engine: Engine) -> tuple[int, ...]:
    """A token id that no sample of the requests has, and ids that they do have; nothing if they have all there are."""
    prompts = {r.id: engine.encode(r) for r in requests if (r.id, 0) in reference}
    used = {t for tokens in prompts.values() for t in tokens} | {t for seen in reference.values() for t in seen.tokens}
    free = next((t for t in reversed(range(engine.vocabulary)) if t not in used), None)
    longest = max(prompts.values(), key=len, default=[])
    return () if free is None or not longest else (free, *longest)


def known(requests: Iterable[Request], reference: Mapping[Key, Observed], engine: Engine) -> list[Known]:
    """The reference's samples, for drafters that look ahead."""
    found = []
    for request in requests:
        prompt = engine.encode(request)
        for sample in range(request.params.n):
            seen = reference.get((request.id, sample))
            if seen is not None:
                choice = Sequence(request, sample, list(prompt), len(prompt), 0).choice()
                found.append(Known(choice, (*prompt, *seen.tokens)))
    return found


class FreshProcess:
    """Another process with the same models, started on first use.

    Args:
        config: how it builds its engines.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._worker: Worker | None = None
        self._quant: str | None = None  # what it has loaded, or is loading
        self._loads = 0  # calls that nobody has waited for

    def load(self, quant: str) -> Worker:
        """Have it load the models with this quantization of the target; this process goes on meanwhile.

        Raises:
            WorkerError: it has died.
        """
        if self._worker is None or not self._worker.alive:
            self._worker, self._quant, self._loads = Worker("detgen-fresh"), None, 0
        if quant != self._quant:
            self._worker.begin(_load, self._config, quant)
            self._quant = quant
            self._loads += 1
        return self._worker

    def generate(self, task: Task) -> dict[Key, Observed]:
        """Generate there.

        Raises:
            WorkerError: that failed, or it has died.
        """
        worker = self.load(task.setting.quant)
        worker.begin(_generate, self._config, task)
        while self._loads:
            self._loads -= 1
            worker.finish()
        found: dict[Key, Observed] = worker.finish()
        return found

    def close(self) -> None:
        """End it."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


_there: Subject | None = None  # of the worker, kept between calls


def _load(config: EngineConfig, quant: str) -> None:
    with contextlib.suppress(EngineError):  # the generation will say so
        _subject(config).engine(quant)


def _generate(config: EngineConfig, task: Task) -> dict[Key, Observed]:
    return _subject(config).generate(task)


def _subject(config: EngineConfig) -> Subject:
    global _there
    _there = _there or Subject(config)
    return _there
