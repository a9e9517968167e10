"""Runs workers on Ray: starts Ray or joins a cluster, gives each worker a process, and carries calls there and back.

The only module that knows Ray; it imports Ray when a cluster is opened.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from detgen.engine.config import EngineConfig
from detgen.errors import EngineError
from detgen.machine import usable_cores
from detgen.progress import Observer
from detgen.workers.serving import ServedEngine, Serving
from detgen.workers.sharing import Node, ScratchFolder, share_out
from detgen.workers.worker_config import WorkersConfig

_STORE = 256 << 20  # bytes of shared memory for data in transit, allocated as needed
_REACHED = 5.0  # seconds in which a cluster must answer
_TOKEN = secrets.token_hex(32)  # without it, nobody can use the Ray of this process


class WorkerDied(Exception):  # noqa: N818 (what happened, not an error)
    """A worker did not answer a call: its process died, or its machine is gone or cannot be reached.

    The message is the cause, if known.
    """


class Call(NamedTuple):
    """A call that has begun: the worker, and a reference to its answer."""

    worker: int
    answer: Any


class Cluster(Protocol):
    """Workers that can be called."""

    @property
    def number(self) -> int:
        """The number of workers."""

    def call(self, worker: int, method: str, *arguments: Any) -> Call:
        """Begin a call of a method of a worker's `Serving`.

        A worker runs its calls in the order in which they began. A worker that died is started again and answers once
        it is up.
        """

    def wait(self, calls: list[Call], seconds: float) -> list[Call]:
        """Wait until one of the calls is answered, at most this many seconds; return the answered ones."""

    def result(self, call: Call) -> Any:
        """Return the result of an answered call.

        Raises:
            WorkerDied: if it will never be answered.
            Exception: whatever the call raised.
        """

    def close(self) -> None:
        """End the workers."""


class RayCluster:
    """Workers as actors of Ray.

    Args:
        config: number of workers, and where they run.
        engine: settings of their engines.
        observer: receives progress.
        build: makes the engines instead of detgen's own.

    Raises:
        EngineError: if Ray is not installed, cannot be reached, or has no room for so many workers.
    """

    def __init__(
        self,
        config: WorkersConfig,
        engine: EngineConfig,
        observer: Observer,
        build: Callable[[EngineConfig], ServedEngine] | None = None,
    ) -> None:
        self._ray = _imported(local=config.ray is None)
        self._scratch: ScratchFolder | None = None
        self._opened = False
        self._actors: list[Any] = []
        self._dead: set[int] = set()
        self._build = build
        observer.stage("starting Ray" if config.ray is None else f"joining the Ray cluster at {config.ray}")
        try:
            self._open(config, engine)
            self._share = share_out(self._nodes(), config.number, engine.device)
            self._settings = engine if self._share.gpus else replace(engine, device="cpu")
            self._actors += [self._actor() for _ in range(self._share.number)]
        except BaseException:
            self.close()
            raise

    @property
    def number(self) -> int:
        """The number of workers."""
        return self._share.number

    def call(self, worker: int, method: str, *arguments: Any) -> Call:
        """See `Cluster.call`."""
        if worker in self._dead:
            self._actors[worker] = self._actor()
            self._dead.discard(worker)
        return Call(worker, getattr(self._actors[worker], method).remote(*arguments))

    def wait(self, calls: list[Call], seconds: float) -> list[Call]:
        """See `Cluster.wait`."""
        by_answer = {call.answer: call for call in calls}
        ready, others = self._ray.wait(list(by_answer), num_returns=1, timeout=seconds)
        if ready and others:
            ready += self._ray.wait(others, num_returns=len(others), timeout=0)[0]
        return [by_answer[answer] for answer in ready]

    def result(self, call: Call) -> Any:
        """See `Cluster.result`."""
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(call.answer)
        except exceptions.ActorDiedError as error:
            self._dead.add(call.worker)
            raise WorkerDied(_cause(error)) from None
        except exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from error
        except exceptions.RayError as error:
            raise WorkerDied(_cause(error)) from None

    def close(self) -> None:
        """End the workers, and the Ray that was started for them."""
        if self._opened:
            for actor in self._actors:
                with suppress(Exception):  # it may have died already
                    self._ray.kill(actor)
            self._ray.shutdown()
            self._opened = False
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None

    def _open(self, config: WorkersConfig, engine: EngineConfig) -> None:
        """Start Ray, or join a cluster."""
        quiet = {"log_to_driver": False, "configure_logging": False}
        asked: dict[str, Any] = {"address": config.ray}
        if config.ray is not None:
            _look_for(config.ray, self._ray)
        else:
            self._scratch = ScratchFolder()
            asked = {
                "address": "local",
                "num_cpus": usable_cores(),
                "num_gpus": 0 if engine.device == "cpu" else None,
                "include_dashboard": False,
                "object_store_memory": _STORE,
                "_temp_dir": str(self._scratch.path),
            }
        with _signals_kept():
            self._opened = True
            try:
                self._ray.init(**asked, **quiet)
            except (Exception, SystemExit) as error:
                if config.ray is None:
                    raise EngineError(f"Ray does not start here: {_first_line(error)}") from error
                raise EngineError(
                    f"cannot join the Ray cluster at {config.ray}: {_first_line(error)}; this machine must be part of"
                    " it (ray start --address=HOST:PORT), with the same versions of Python and Ray"
                ) from error

    def _nodes(self) -> list[Node]:
        resources = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return [Node(int(each.get("CPU", 0)), int(each.get("GPU", 0))) for each in resources]

    def _actor(self) -> Any:
        share = self._share
        kind = self._ray.remote(Serving).options(
            num_cpus=share.cores,
            num_gpus=share.gpus,
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )
        return kind.remote(self._settings, os.getcwd(), share.cores, self._build)


def _imported(*, local: bool) -> ModuleType:
    """Import Ray with its messages turned off; shield a local one from others.

    Raises:
        EngineError: if it is not installed.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if local:
        # Ports are on the loopback device only, and using them takes a token that only this process knows.
        os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=_TOKEN)
        os.environ.update(RAY_worker_niceness="0")  # as for a single process
    logging.getLogger("ray").setLevel(logging.CRITICAL + 1)
    try:
        import ray
        import ray.exceptions
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise EngineError("--workers and --ray need Ray, which is not installed: pip install 'detgen[ray]'") from None
    # Ray prints to standard output when a worker dies, which is reported elsewhere.
    ray._private.worker._worker_logs_enabled = False
    return ray


def _look_for(address: str, ray: ModuleType) -> None:
    """Check that a cluster answers; Ray itself would try for minutes.

    Raises:
        EngineError: if none does.
    """
    try:
        found = ray._private.services.canonicalize_bootstrap_address(address)
        if found is None:
            raise ConnectionError
        host, _, port = found.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _REACHED).close()
    except OSError as error:
        why = error.strerror or "none is known here"
        raise EngineError(
            f"no Ray cluster answers at {address} ({why}); start one with `ray start --head`, or leave --ray out"
        ) from error


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the caller's handler of SIGTERM, which Ray replaces."""
    former = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and former is not None:
            signal.signal(signal.SIGTERM, former)


def _cause(error: BaseException) -> str:
    """Return the exception at the end of a long report; "" if it names none."""
    named = [line.strip() for line in str(error).splitlines() if re.match(r"\s*\w+Error: ", line)]
    return named[-1] if named else ""


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
