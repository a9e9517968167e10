"""Generate under a setting, in this process or in another."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from detgen.drafters.oracle import AdversaryDrafter, Known, OracleDrafter
from detgen.drafters.protocol import Drafter
from detgen.engine import Engine
from detgen.engine.config import EngineConfig
from detgen.engine.request import Completion, Request
from detgen.engine.sequence import Sequence
from detgen.errors import EngineError, QuantName, RequestError
from detgen.machine import usable_cores
from detgen.models.gguf.loading import asking
from detgen.progress import Observer
from detgen.runner.block_manager import PAGE
from detgen.verify.perturb.axes import QUANTS, Setting
from detgen.verify.perturb.generation_digests import Key, Observed, Watching
from detgen.verify.perturb.pool import grows
from detgen.verify.perturb.timing import OutOfTime, check_time
from detgen.worker import Worker

_WHOLE = 1_000_000  # more chunks than any prompt has
_BEFORE = 16  # requests at a time when the prefix cache is filled


@dataclass(frozen=True, slots=True)
class Task:
    """A generation, as plain data.

    Attributes:
        setting: the setting.
        queue: the requests, in order.
        known: samples of the reference, for drafters that need them.
        seed: seed of the adversary.
        broken: a token whose embedding is NaN meanwhile, or None.
        before: requests that are generated first, so that the prefix cache holds them.
        thinks: whether the target thinks while it reads, so that reading ahead can be set.
    """

    setting: Setting
    queue: list[Request]
    known: list[Known]
    seed: int
    broken: int | None = None
    before: list[Request] = field(default_factory=list)
    thinks: bool = False

    def engine_settings(self, config: EngineConfig) -> dict[str, Any]:
        """Return the setting's engine settings that the command line also offers."""
        setting = self.setting
        ahead = _WHOLE if setting.speculative_prefill == "whole" else setting.speculative_prefill
        return {
            **({"speculative_prefill": ahead} if self.thinks else {}),
            "draft_tokens": setting.draft_tokens,
            "batch_size": max(len(self.queue), 1) if setting.batch == "all" else setting.batch,
            "threads": setting.threads or config.threads or usable_cores(),
        }


@dataclass(frozen=True, slots=True)
class Generated:
    """The result of a task.

    Attributes:
        samples: samples that ended without an error.
        preemptions: sequences that were preempted and replayed.
        kills: runs that were killed in the middle and resumed.
    """

    samples: dict[Key, Observed]
    preemptions: int = 0
    kills: int = 0


class Subject:
    """The engine under test, by quantization of the target.

    Args:
        config: configuration of the engine.
        engine: an existing one, with the quantization of `config`.
        observer: receives messages while the engine of `config` is built.
    """

    def __init__(self, config: EngineConfig, engine: Engine | None = None, observer: Observer | None = None) -> None:
        self._config, self._observer = config, observer
        self._engines: dict[str, Engine] = {"none": engine} if engine is not None else {}

    def engine(self, quant: str = "none") -> Engine:
        """Return the engine with this quantization of the target; "none" keeps the configuration's.

        Raises:
            EngineError: if the engine cannot be built.
        """
        if quant not in self._engines:
            if short_of_memory():
                self._engines.clear()
            asked = self._config
            if quant != "none":
                asked = replace(asked, target_quant=cast("QuantName", quant), kv_memory=asked.kv_memory or self._part())
            with asking():  # a run may have compared nothing
                self._engines[quant] = Engine(asked, observer=self._observer if quant == "none" else None)
        return self._engines[quant]

    def _part(self) -> int | None:
        """Return bytes for another KV cache on a CPU, where the first reserves memory that it does not use; else None.

        Reserving more than there is prevents a process from being forked, and chats are rendered in forks.
        """
        first = self._engines.get("none")
        if first is None or first.canonical.device.type != "cpu":
            return None
        return int(first.canonical.cache.keys[0].shape[0]) * PAGE * first.position_bytes // len(QUANTS)

    @contextlib.contextmanager
    def configured(self, task: Task) -> Iterator[Engine]:
        """Yield the engine configured for the task, after its first requests, with its broken token broken inside.

        Its prefix cache knows nothing else, so that the result does not depend on what ran before.
        """
        setting, engine = task.setting, self.engine(task.setting.quant)
        limits = {"kv_memory": engine.position_bytes * PAGE * _pages(engine, task.queue)} if setting.preemption else {}
        configured = engine.with_settings(
            drafter=_drafter(task, engine.vocabulary),
            prefill_chunk=setting.chunk,
            prefix_cache=setting.prefix_cache != "off",
            **task.engine_settings(self._config),
            **limits,
        )
        configured.reset_prefix_cache()
        first = engine.with_settings(drafter="none", batch_size=_BEFORE, prefix_cache=True)
        with contextlib.nullcontext() if task.broken is None else configured.canonical.decoder.breaking(task.broken):
            for _ in first.stream(task.before):
                pass
            yield configured

    def generate(self, task: Task, until: float | None = None) -> Generated:
        """Generate in this process.

        Raises:
            EngineError: if the engine cannot be built.
            OutOfTime: if it is not done at `until` (in the time of `time.monotonic`).
        """
        with self.configured(task) as engine:
            trace = Watching(engine.pieces, chains=task.setting.chains)
            before = engine.stats.preemptions
            done: list[Completion] = []
            stream: Any = engine.stream(task.queue, trace=trace)
            with contextlib.closing(stream):
                for finished in stream:
                    done += finished
                    check_time(until)
        samples = {(c.request.id, c.sample): trace.observed(c) for c in done if c.error is None}
        return Generated(samples, engine.stats.preemptions - before)


def short_of_memory() -> bool:
    """Return whether there is too little memory to load the models once more."""
    try:
        import psutil
    except ImportError:
        return False
    return bool(psutil.virtual_memory().available < 2 * psutil.Process().memory_info().rss)


def _drafter(task: Task, vocabulary: int) -> Any:
    name = task.setting.drafter
    if name not in ("oracle", "adversary"):
        return name

    def make(named: Mapping[str, Drafter]) -> Drafter:
        oracle = OracleDrafter(task.known)
        return oracle if name == "oracle" else AdversaryDrafter(oracle, vocabulary, task.seed, task.broken)

    return make


def size(engine: Engine, request: Request) -> tuple[int, int]:
    """Return the tokens of a request's prompt and the most with its completion; zeros if it cannot run."""
    try:
        sample = next(engine.sequences(request))
    except RequestError:
        return 0, 0
    return sample.prompt_length, sample.limit


def _pages(engine: Engine, queue: list[Request]) -> int:
    """Return the pages of a cache that holds each request by itself, and both that outgrow it until they do."""
    sizes = [(request, *size(engine, request)) for request in queue]
    growing = sum(-(-prompt // PAGE) for request, prompt, _ in sizes if grows(request))
    return max([growing + 1, *(-(-most // PAGE) for _, _, most in sizes)])  # one page too few for both to go on


def breaking(
    prompts: Mapping[str | int, list[int]], reference: Mapping[Key, Observed], vocabulary: int
) -> tuple[int, ...]:
    """Return a token id that no sample has and the longest prompt's ids; nothing if there is no such id.

    Args:
        prompts: tokens of the prompts, by the ids of their requests.
        reference: samples of the reference.
        vocabulary: number of ids.
    """
    used = {t for tokens in prompts.values() for t in tokens} | {t for seen in reference.values() for t in seen.tokens}
    free = next((t for t in reversed(range(vocabulary)) if t not in used), None)
    longest = max(prompts.values(), key=len, default=[])
    return () if free is None or not longest else (free, *longest)


def known(
    requests: Iterable[Request], prompts: Mapping[str | int, list[int]], reference: Mapping[Key, Observed]
) -> list[Known]:
    """Return the reference's samples of requests, for drafters that look ahead; `prompts` as for `breaking`."""
    found = []
    for request in requests:
        prompt = prompts.get(request.id, [])
        for sample in range(request.params.n):
            if (seen := reference.get((request.id, sample))) is not None:
                choice = Sequence(request, sample, list(prompt), len(prompt), 0).choice()
                found.append(Known(choice, (*prompt, *seen.tokens)))
    return found


class FreshProcess:
    """Another process with the same models, started on first use.

    Args:
        config: configuration of its engines.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._worker: Worker | None = None
        self._quant: str | None = None  # what is loaded or loading
        self._loads = 0  # calls not yet waited for

    def load(self, quant: str) -> Worker:
        """Start loading the models with this quantization of the target in the other process, without waiting.

        Raises:
            WorkerError: if the process has died.
        """
        if self._worker is None or not self._worker.alive:
            self._worker, self._quant, self._loads = Worker("detgen-fresh"), None, 0
        if quant != self._quant:
            self._worker.begin(_load, self._config, quant)
            self._quant = quant
            self._loads += 1
        return self._worker

    def loaded(self, quant: str) -> bool:
        """Return whether it can generate with this quantization at once."""
        return quant == self._quant and (not self._loads or (self._worker is not None and self._worker.ready(0)))

    def generate(self, task: Task, until: float | None = None) -> Generated:
        """Generate in the other process.

        Raises:
            WorkerError: if that failed or the process has died.
            OutOfTime: if it is not done at `until` (in the time of `time.monotonic`); the process has ended.
        """
        worker = self.load(task.setting.quant)
        worker.begin(_generate, self._config, task)
        for _ in range(self._loads):
            self._finish(worker, until)
            self._loads -= 1
        found: Generated = self._finish(worker, until)
        return found

    def _finish(self, worker: Worker, until: float | None) -> Any:
        if until is not None and not worker.ready(until - time.monotonic()):
            self.close()
            raise OutOfTime
        return worker.finish()

    def close(self) -> None:
        """End the process at once; it keeps nothing."""
        if self._worker is not None:
            self._worker.close(patience=0.0)
            self._worker = None


_there: Subject | None = None  # the worker's, kept between calls


def _load(config: EngineConfig, quant: str) -> None:
    with contextlib.suppress(EngineError):  # the generation will report it
        _subject(config).engine(quant)


def _generate(config: EngineConfig, task: Task) -> Generated:
    return _subject(config).generate(task)


def _subject(config: EngineConfig) -> Subject:
    global _there
    _there = _there or Subject(config)
    return _there
