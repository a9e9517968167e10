"""What stands in the way of an audit and can be seen before torch is imported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from detgen.engine.config import EngineConfig
from detgen.engine.sources import check_sources
from detgen.errors import CheckError, PromptsError
from detgen.outputs.finished import input_place
from detgen.progress import Observer
from detgen.prompts import open_prompts
from detgen.verify.replay.claims import read_manifest


def check_early(folder: Path, config: EngineConfig, prompts: str | None, observer: Observer) -> None:
    """Refuse an audit that cannot begin.

    Args:
        folder: the output folder.
        config: as the caller asks; the run's own model where it names none.
        prompts: the run's prompts; None takes them from where the manifest says.
        observer: is told of a download.

    Raises:
        CheckError: the folder holds no run, or its prompts are not where they should be.
        EngineError: the model cannot be loaded.
    """
    manifest = read_manifest(folder)
    place = prompts or input_place(folder, manifest)
    if place != "-":
        try:
            open_prompts(place)
        except PromptsError as error:
            raise CheckError(f"cannot read the run's prompts: {error}; name them as PROMPTS") from None
    target = manifest["model"] if config.target is None else config.target
    check_sources(replace(config, target=target, drafter="none", draft=None), observer)
