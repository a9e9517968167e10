"""Runs peers in processes of their own, kept alive between runs, so that libraries do not disturb each other."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from detgen.bench.peer_interface import Contender, Job, ModelSource, Outcome, Peer
from detgen.bench.peers import APART, peer_class
from detgen.machine import forget_peak_memory, peak_memory
from detgen.worker import Worker


class Processes:
    """The workers of a benchmark, started on first use, and again if they have died.

    Args:
        source: the models.
        batch_sizes: all batch sizes that will be asked for.
        logs: folder for their output.
        pythons: Python of peers that have their own, by the peer's name.
    """

    def __init__(
        self, source: ModelSource, batch_sizes: tuple[int, ...], logs: Path, pythons: Mapping[str, str] | None = None
    ) -> None:
        self._source = source
        self._plain: ModelSource | None = None  # for peers in environments of their own
        self._pythons = pythons or {}
        self._batch_sizes = batch_sizes
        self._logs = logs
        self._workers: dict[str, Worker] = {}

    def run(self, contender: Contender, job: Job) -> Outcome:
        """Run a job in the contender's process.

        Raises:
            WorkerError: if it fails.
        """
        outcome: Outcome = self.call(contender, run_job, contender, job)
        return outcome

    def call(self, contender: Contender, function: Callable[..., object], *arguments: Any) -> Any:
        """Call a function with the peer of the contender's process, which is made on first use, and further arguments.

        Raises:
            WorkerError: if it fails.
        """
        worker = self._workers.get(contender.process)
        if worker is None or not worker.alive:
            if worker is not None:
                worker.close()
            environment: dict[str, str | None] = dict(contender.environment)
            if contender.peer != "detgen":
                # How long OpenMP's threads spin is detgen's choice for itself; its peers run as they would alone.
                environment["GOMP_SPINCOUNT"] = None
            python = self._pythons.get(contender.peer)
            worker = start_worker(contender.process, self._source.threads, self._logs, environment, python)
            self._workers[contender.process] = worker
        source = self._source_apart() if contender.peer in APART else self._source
        return worker.call(with_peer, source, contender, self._batch_sizes, function, arguments)

    def _source_apart(self) -> ModelSource:
        """Return the models as plain data and folders; models that are not in folders are written to some first."""
        if self._plain is None:
            with start_worker("folders", self._source.threads, self._logs) as worker:
                self._plain = worker.call(plain, self._source)
        return self._plain

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers.values():
            worker.close()


def start_worker(
    name: str,
    threads: int,
    logs: Path,
    environment: Mapping[str, str | None] | None = None,
    python: str | None = None,
) -> Worker:
    """Start a worker with that many CPU threads that prints into a log of its name; `python` as for `Worker`."""
    log = logs / (re.sub(r"[^\w.-]+", "-", name) + ".log")
    return Worker(name, {"OMP_NUM_THREADS": str(threads), **(environment or {})}, log, python)


def plain(source: ModelSource) -> ModelSource:
    """Return the source with `engine` as plain data and the models as folders; random weights are written to some."""
    from detgen.bench.model_source import folder

    names = ("device", "dtype", "threads", "target_quant", "draft_quant", "trust_remote_code")
    settings: Any = SimpleNamespace(**{name: getattr(source.engine, name) for name in names})
    settings.target = str(folder(source, "target"))
    settings.draft = str(folder(source, "draft")) if source.has_draft else None
    return replace(source, engine=settings, random_weights=None)


_peer: Peer | None = None  # the peer of this process


def with_peer(
    source: ModelSource,
    contender: Contender,
    batch_sizes: tuple[int, ...],
    function: Callable[..., object],
    arguments: tuple[Any, ...],
) -> object:
    """Call a function with this process's peer, made on the first call, and further arguments."""
    global _peer
    if _peer is None:
        _peer = peer_class(contender.peer)(source, contender, batch_sizes)
    return function(_peer, *arguments)


def run_job(peer: Peer, contender: Contender, job: Job) -> Outcome:
    """Run a job; the outcome includes the memory peaks."""
    torch = sys.modules.get("torch")
    cuda = torch.cuda if torch is not None and torch.cuda.is_available() else None
    forget_peak_memory()
    if cuda is not None:
        cuda.reset_peak_memory_stats()
    outcome = peer.run(contender, job)
    outcome.memory = peak_memory()
    if cuda is not None:
        # None if the library computes in processes of its own.
        outcome.gpu_memory = int(cuda.max_memory_reserved()) or None
    return outcome
