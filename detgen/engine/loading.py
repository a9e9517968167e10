"""From a configuration to an engine, for all that generate in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from detgen.engine.config import EngineConfig
from detgen.engine.sources import check_sources
from detgen.progress import Observer

if TYPE_CHECKING:
    from detgen.engine.engine import Engine


def load_engine(config: EngineConfig, observer: Observer) -> Engine:
    """Check the models that are named, fetch what is on the hub, then load the models.

    Raises:
        EngineError: an engine cannot be built; the message names the remedy.
    """
    check_sources(config, observer)
    from detgen.engine import Engine

    return Engine(config, observer=observer)
