"""Peers in processes of their own, kept alive between runs, so that libraries do not disturb each other."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from detgen.bench.peer_interface import Contender, Job, ModelSource, Outcome, Peer
from detgen.bench.peers import peer_class
from detgen.machine import forget_peak_memory, peak_memory
from detgen.worker import Worker


class Processes:
    """The workers of a benchmark, started when they are first needed, and again if they have died.

    Args:
        source: the models.
        batch_sizes: all that will be asked for.
        logs: folder for what they print.
    """

    def __init__(self, source: ModelSource, batch_sizes: tuple[int, ...], logs: Path) -> None:
        self._source = source
        self._batch_sizes = batch_sizes
        self._logs = logs
        self._workers: dict[str, Worker] = {}

    def run(self, contender: Contender, job: Job) -> Outcome:
        """Run a job in the contender's process.

        Raises:
            WorkerError: it failed.
        """
        outcome: Outcome = self.call(contender, run_job, contender, job)
        return outcome

    def call(self, contender: Contender, function: Callable[..., object], *arguments: Any) -> Any:
        """Call a function with the peer of the contender's process, made where there is none, and further arguments.

        Raises:
            WorkerError: it failed.
        """
        worker = self._workers.get(contender.process)
        if worker is None or not worker.alive:
            if worker is not None:
                worker.close()
            environment: dict[str, str | None] = dict(contender.environment)
            if contender.peer != "detgen":
                # How long OpenMP's threads spin is detgen's choice for itself; its peers run as they do alone.
                environment["GOMP_SPINCOUNT"] = None
            worker = start_worker(contender.process, self._source.threads, self._logs, environment)
            self._workers[contender.process] = worker
        return worker.call(with_peer, self._source, contender, self._batch_sizes, function, arguments)

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers.values():
            worker.close()


def start_worker(name: str, threads: int, logs: Path, environment: Mapping[str, str | None] | None = None) -> Worker:
    """A worker with so many CPU threads that prints into a log of its name."""
    log = logs / (re.sub(r"[^\w.-]+", "-", name) + ".log")
    return Worker(name, {"OMP_NUM_THREADS": str(threads), **(environment or {})}, log)


_peer: Peer | None = None  # of this process


def with_peer(
    source: ModelSource,
    contender: Contender,
    batch_sizes: tuple[int, ...],
    function: Callable[..., object],
    arguments: tuple[Any, ...],
) -> object:
    """Call a function with this process's peer, made at the first call, and further arguments."""
    global _peer
    if _peer is None:
        _peer = peer_class(contender.peer)(source, contender, batch_sizes)
    return function(_peer, *arguments)


def run_job(peer: Peer, contender: Contender, job: Job) -> Outcome:
    """Run a job; the outcome has the peaks of memory."""
    torch = sys.modules.get("torch")
    cuda = torch.cuda if torch is not None and torch.cuda.is_available() else None
    forget_peak_memory()
    if cuda is not None:
        cuda.reset_peak_memory_stats()
    outcome = peer.run(contender, job)
    outcome.memory = peak_memory()
    if cuda is not None:
        # Nothing where the library computes in processes of its own.
        outcome.gpu_memory = int(cuda.max_memory_reserved()) or None
    return outcome
