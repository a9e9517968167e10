"""Checks the models that a configuration names, as far as possible before the engine is imported."""

from __future__ import annotations

from pathlib import Path

from detgen.drafters.registry import DRAFTERS
from detgen.engine.config import EngineConfig
from detgen.errors import EngineError
from detgen.models.adapter_files import check_adapter
from detgen.models.folders import check_folder, local_place
from detgen.models.generation_settings import unapplied_settings
from detgen.models.gguf.header import check_gguf
from detgen.models.hub import fetched
from detgen.params import SamplingParams
from detgen.progress import Observer


def uses_draft(config: EngineConfig) -> bool:
    """Return whether a draft model is loaded: one is given, and the drafter uses it.

    Raises:
        EngineError: if the drafter needs one and there is none.
    """
    use = DRAFTERS[config.drafter].draft_model if isinstance(config.drafter, str) else "optional"
    available = config.draft is not None or config.target is None
    if use == "required" and not available:
        raise EngineError(
            f"--drafter {config.drafter} needs a draft model: give one with --draft, or use --drafter ngram"
        )
    return available and use != "unused"


def check_adapted(config: EngineConfig) -> None:
    """Refuse an adapter for a model that is already loaded.

    Raises:
        EngineError: if there is one.
    """
    if config.adapter is not None and not isinstance(config.target, str | Path | None):
        raise EngineError("an adapter is merged while a model is loaded; give both as folders, target and adapter")


def unapplied(config: EngineConfig, params: SamplingParams, observer: Observer) -> list[str]:
    """Return a sentence for each setting that transformers' `generate` would apply and detgen does not.

    Args:
        config: names the target, which can be loaded.
        params: the defaults of requests.
        observer: receives the progress of downloads from the hub.
    """
    target = config.target
    if not isinstance(target, str | Path):
        return []
    name = str(target)
    folder = local_place(target, name) or fetched(name, observer, trusted=config.trust_remote_code)
    return [f"{name}: {text}" for text in unapplied_settings(folder, params)]


def check_sources(config: EngineConfig, observer: Observer | None = None) -> None:
    """Check what can be checked of the models without loading them: names, folders, settings, headers of weights.

    Args:
        config: names the models.
        observer: receives the progress of downloads from the hub; if None, the hub is not asked.

    Raises:
        EngineError: if a model cannot be loaded; names it, the file and the reason.
    """
    draft = config.draft if uses_draft(config) else None
    check_adapted(config)
    if config.adapter is not None and config.target is None:
        check_adapter(config.adapter, None)
    for model, quant, adapter in (
        (config.target, config.target_quant, config.adapter),
        (draft, config.draft_quant, None),
    ):
        if isinstance(model, str | Path):
            name, trusted = str(model), config.trust_remote_code
            place = local_place(model, name)
            if adapter is not None:
                check_adapter(adapter, place)
            if place is None and observer is not None:
                place = fetched(name, observer, trusted=trusted)
            if place is not None and place.is_file():
                check_gguf(place, name, quant)
            elif place is not None:
                check_folder(place, name, trusted=trusted)
