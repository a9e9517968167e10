"""What an audit needs of a run before the engine is imported: its model and prompts, and whether they are there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from detgen.engine.config import EngineConfig
from detgen.engine.sources import check_sources
from detgen.errors import CheckError, PromptsError
from detgen.outputs.finished import input_place
from detgen.progress import Observer
from detgen.prompts import open_prompts
from detgen.verify.replay.claims import read_manifest

# Largest error of a logit by another profile's rounding, as a share of the row's largest logit.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2, "bfloat16-tc25": 5e-2, "bfloat16-tc24": 5e-2}


def check_early(folder: Path, config: EngineConfig, prompts: str | None, observer: Observer) -> None:
    """Refuse an audit that cannot begin.

    Args:
        folder: the output folder.
        config: as the caller asks; the run's own model and adapter where it names none.
        prompts: the run's prompts; None takes them from where the manifest says.
        observer: is told of a download.

    Raises:
        CheckError: the folder holds no run, or its prompts are not where they should be.
        EngineError: the model cannot be loaded.
    """
    manifest = read_manifest(folder)
    place = prompts or input_place(folder, manifest)
    if place != "-":
        with readable():
            open_prompts(place)
    check_sources(config_of(manifest, config), observer)


@contextmanager
def readable() -> Iterator[None]:
    """Where the run's prompts are read; that they cannot be is a CheckError, with the remedy."""
    try:
        yield
    except PromptsError as error:
        raise CheckError(f"cannot read the run's prompts: {error}; name them as PROMPTS") from None


def config_of(manifest: dict[str, Any], config: EngineConfig) -> EngineConfig:
    """The engine that audits a run: as the caller asks, with the run's own model and adapter where he names none."""
    profile = manifest["profile"]
    changes: dict[str, Any] = {}
    if config.target is None:
        changes["target"] = manifest["model"]
    if config.adapter is None:
        changes["adapter"] = manifest.get("adapter")
    if config.target_quant == "none":
        changes["target_quant"] = profile["target"]["quant"]
    dtype = profile["dtype"]
    # Merged weights are rounded to what the checkpoint has, if no other format was asked for.
    kept = dtype.partition("-")[0]
    if config.dtype == "auto" and dtype in TOLERANCE and profile["target"].get("adapter_dtype", kept) == kept:
        changes["dtype"] = dtype
    if config.kv_dtype == "auto":
        changes["kv_dtype"] = profile["kv_dtype"]
    return replace(config, drafter="none", draft=None, **changes)
