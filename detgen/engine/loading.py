"""Builds an engine from a configuration, for everything that generates in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from detgen.engine.config import EngineConfig
from detgen.engine.sources import check_sources
from detgen.progress import Observer

if TYPE_CHECKING:
    from detgen.engine.engine import Engine


def load_engine(config: EngineConfig, observer: Observer) -> Engine:
    """Check the models, download them from the hub if necessary, and load them.

    Raises:
        EngineError: if an engine cannot be built; the message names the remedy.
    """
    check_sources(config, observer)
    from detgen.engine import Engine

    return Engine(config, observer=observer)
