"""From what the options ask for to an engine of workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from detgen.engine.config import EngineConfig
from detgen.progress import Observer
from detgen.workers.cluster import RayCluster
from detgen.workers.team import WorkersEngine
from detgen.workers.worker_config import WorkersConfig


@contextmanager
def open_workers(config: WorkersConfig, engine: EngineConfig, observer: Observer) -> Iterator[WorkersEngine]:
    """An engine of workers, which end with the block.

    Raises:
        EngineError: as `RayCluster` and `WorkersEngine`.
    """
    cluster = RayCluster(config, engine, observer)
    try:
        yield WorkersEngine(cluster, engine.batch_size, observer)
    finally:
        cluster.close()
