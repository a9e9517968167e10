"""The models of a benchmark as its peers take them: loaded by detgen's own loader, or as a folder on the disk.

Runs in the peers' processes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from detgen.bench.interface import ModelSource
from detgen.bench.random_weights import random_model


class TokenIds:
    """Stands for a tokenizer where there is no text: every sequence of ids has the text ""."""

    all_special_ids: tuple[int, ...] = ()
    eos_token_id = None

    def get_vocab(self) -> dict[str, int]:
        """No token has a name."""
        return {}

    def decode(self, ids: list[int], **_: Any) -> str:
        """No token has a text."""
        return ""


def loaded(source: ModelSource, role: str) -> Any:
    """A `LoadedModel` that nothing ends before its number of tokens, its context cut to what the workloads need."""
    import torch

    from detgen.errors import DEMO
    from detgen.passes.loading import LoadedModel, load_model, pick_device

    device = pick_device(source.device)
    if source.random_weights is not None:
        dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
        dtype = dtypes.get(source.dtype, torch.float32 if device.type == "cpu" else torch.bfloat16)
        model = random_model(source.random_weights, role, dtype, device, source.seed)
        name = f"random:{source.random_weights}:{role}"
        return LoadedModel(name, model, TokenIds(), "", source.positions, frozenset(), dtype)
    given, quant = (source.target, source.target_quant) if role == "target" else (source.draft, source.draft_quant)
    found = load_model(given or DEMO / role, given or f"embedded:{role}", device, source.dtype, quant)
    return replace(found, eos=frozenset(), context=min(source.positions, found.context))


def folder(source: ModelSource, role: str) -> Path:
    """The model as a folder in the Hugging Face layout; random weights are written on first use."""
    from detgen.errors import DEMO

    if source.random_weights is not None:
        path = source.scratch / f"random-{role}"
        if not (path / "config.json").is_file():
            loaded(source, role).model.save_pretrained(path)
        return path
    given = source.target if role == "target" else source.draft
    if given is None:
        return DEMO / role
    if Path(given).is_dir():
        return Path(given)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(given, local_files_only=True))
