"""Settings of a generation_config.json that change greedy texts of transformers' `generate` but not detgen's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from detgen.models.folders import object_of, shown
from detgen.params import PARAMETERS, SamplingParams

# Each with the value that changes nothing, and the parameter of the same meaning, if there is one.
_SETTINGS: dict[str, tuple[Any, str | None]] = {
    "repetition_penalty": (1, "repetition_penalty"),
    "min_new_tokens": (0, "min_tokens"),
    "stop_strings": ([], "stop"),
    "min_length": (0, None),
    "no_repeat_ngram_size": (0, None),
    "exponential_decay_length_penalty": (None, None),
    "bad_words_ids": ([], None),
    "suppress_tokens": ([], None),
    "begin_suppress_tokens": ([], None),
    "forced_eos_token_id": (None, None),
    "sequence_bias": ([], None),
    "num_beams": (1, None),
    "guidance_scale": (1, None),
}


def unapplied_settings(folder: Path, params: SamplingParams) -> list[str]:
    """Return a sentence for each setting that makes `generate`'s greedy texts differ from detgen's; none for GGUF.

    Args:
        folder: folder of a loaded model.
        params: the defaults of all lines; a setting whose parameter the user has set is not mentioned.
    """
    path = folder / "generation_config.json"
    stored = object_of(path) if path.is_file() else {}
    found = []
    for name, (neutral, parameter) in _SETTINGS.items():
        value = stored.get(name)
        if value is None or value == neutral:
            continue
        if parameter is None:
            remedy = "it has no such setting"
        elif getattr(params, parameter) == PARAMETERS[parameter].default:
            remedy = f"the parameter {parameter} does the same here"
        else:
            continue
        found.append(
            f"{path.name} sets {name} to {shown(value)}, which generate() of transformers applies and detgen does not;"
            f" {remedy}"
        )
    return found
