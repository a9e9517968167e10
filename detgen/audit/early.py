"""What stands in the way of an audit and can be seen before torch is imported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from detgen.engine.config import EngineConfig
from detgen.engine.sources import check_sources
from detgen.errors import CheckError, PromptsError
from detgen.progress import Observer
from detgen.prompts import open_prompts


def check_early(folder: Path, config: EngineConfig, prompts: str | None, observer: Observer) -> None:
    """Refuse an audit that cannot begin; whatever else is wrong with the manifest is found when it is read.

    Args:
        folder: the output folder.
        config: as the caller asks; the run's own model where it names none.
        prompts: the run's prompts; None takes them from where the manifest says.
        observer: is told of a download.

    Raises:
        CheckError: the folder holds no run, or its prompts are not where they should be.
        EngineError: the model cannot be loaded.
    """
    manifest: Any = None
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckError(f"{folder} has no manifest.json; give the output folder of a detgen run") from None
    except OSError as error:
        raise CheckError(f"cannot read {folder / 'manifest.json'}: {error.strerror}") from None
    except (ValueError, RecursionError):
        return
    if not isinstance(manifest, dict):
        return
    model, described = manifest.get("model"), manifest.get("input")
    place = prompts or (described.get("path") if isinstance(described, dict) else None)
    if isinstance(place, str) and place != "-":
        try:
            open_prompts(place)
        except PromptsError as error:
            raise CheckError(f"cannot read the run's prompts: {error}; name them as PROMPTS") from None
    if config.target is not None or isinstance(model, str | None):
        check_sources(replace(config, target=config.target or model, drafter="none", draft=None), observer)
