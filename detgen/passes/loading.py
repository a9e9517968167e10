"""Loads models and tokenizers with transformers and bitsandbytes, and checks that they fit together.

Knows folders, hub names and digests; knows no passes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from detgen.errors import DTypeName, EngineError, QuantName

DTYPES: dict[DTypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model and its tokenizer.

    Attributes:
        name: the folder or hub name it was loaded from; "embedded:target" and "embedded:draft" for the demo models.
        model: the transformers module, in evaluation mode.
        tokenizer: its tokenizer.
        digest: SHA-256 over its weights, configuration and tokenizer.
        context: most positions of a sequence.
        eos: token ids that end a sequence.
        dtype: of the weights that are not quantized.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Any
    digest: str
    context: int
    eos: frozenset[int]
    dtype: torch.dtype

    @property
    def vocabulary(self) -> int:
        """Entries of the logits."""
        return int(self.model.config.get_text_config().vocab_size)


def pick_device(name: str) -> torch.device:
    """The torch device of `--device`.

    Raises:
        EngineError: if there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise EngineError(f"no device named {name!r}; use auto, cpu, cuda or cuda:N") from e
    if device.type not in ("cpu", "cuda"):
        raise EngineError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineError(f"device {name!r} was asked for, but torch finds no CUDA device here; use --device cpu")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise EngineError(f"device {name!r} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    return device


def load_model(source: str | Path, name: str, device: torch.device, dtype: DTypeName, quant: QuantName) -> LoadedModel:
    """Load a decoder with transformers.

    Args:
        source: folder in the Hugging Face layout, or a hub name.
        name: its name in messages and in the manifest.
        device: where to put it.
        dtype: auto is float32 on the CPU and the checkpoint's own elsewhere.
        quant: bitsandbytes quantization of its linear layers.

    Raises:
        EngineError: if there is no such model, it cannot be loaded or it is not a decoder.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    _quiet()
    path = Path(source)
    if path.is_dir() and not (path / "config.json").is_file():
        raise EngineError(f"{source}: no config.json in this folder; give a folder in the Hugging Face layout")
    if not path.exists() and str(source).startswith((".", "/", "~")):
        raise EngineError(f"cannot load the model {name}: there is no such folder")
    chosen: Any = DTYPES.get(dtype, torch.float32 if device.type == "cpu" else "auto")
    options: dict[str, Any] = {"dtype": chosen}
    if quant != "none":
        options["quantization_config"] = _quantization(quant, chosen)
        options["device_map"] = {"": device}
    try:
        config = AutoConfig.from_pretrained(source)
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
        except ValueError as e:
            raise EngineError(f"cannot load the tokenizer of {name}: put its tokenizer.json next to config.json") from e
        model = AutoModelForCausalLM.from_pretrained(source, config=config, **options)
    except ImportError as e:
        raise EngineError(f"{name}: {str(e).strip().splitlines()[0]}") from e
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        where = "" if path.exists() else " (not a local folder, and not available from the hub)"
        raise EngineError(f"cannot load the model {name}{where}: {reason}") from e
    if quant == "none":
        model = model.to(device)
    model.eval().requires_grad_(False)
    context = context_of(model.config.get_text_config())
    return LoadedModel(name, model, tokenizer, _digest(source), context, _eos(model, tokenizer), model.dtype)


def context_of(config: Any) -> int:
    """Most positions of a sequence.

    Some rotary embeddings change their frequencies when a pass has a position beyond the original context, which would
    make a row depend on its neighbours' positions: such models are limited to that context.
    """
    context = int(getattr(config, "max_position_embeddings", 0) or getattr(config, "n_positions", 2048))
    rope = getattr(config, "rope_parameters", None) or {}
    for settings in (rope, *(r for r in rope.values() if isinstance(r, dict))):
        if settings.get("rope_type") in ("dynamic", "longrope"):
            original = settings.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            context = min(context, int(original or context))
    return context


def _quantization(quant: QuantName, dtype: Any) -> Any:
    """The bitsandbytes configuration; int8 without outlier columns, which depend on the batch."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as e:
        raise EngineError("quantization needs bitsandbytes: pip install bitsandbytes") from e
    from transformers import BitsAndBytesConfig

    if quant == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    compute = torch.float32 if dtype == "auto" else dtype
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)


def _eos(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence ids of the generation settings and of the tokenizer."""
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for ids in (getattr(generation, "eos_token_id", None), tokenizer.eos_token_id):
        if isinstance(ids, int):
            found.add(ids)
        elif ids is not None:
            found.update(int(i) for i in ids)
    return frozenset(found)


def _digest(source: str | Path) -> str:
    """SHA-256 over name and content of each file that can change an output, in order of names."""
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(str(source), local_files_only=True))
    total = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt"):
            with file.open("rb") as f:
                total.update(f"{file.name} {hashlib.file_digest(f, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def check_vocabularies(target: LoadedModel, draft: LoadedModel) -> None:
    """Check that draft and target give each token the same id.

    Raises:
        EngineError: if they do not; names what differs.
    """
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours == theirs:
        return
    differing = sorted(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
    shown = "; ".join(
        f"{json.dumps(t, ensure_ascii=False)}: {ours.get(t, 'absent')} and {theirs.get(t, 'absent')}"
        for t in differing[:3]
    )
    raise EngineError(
        f"the draft model {draft.name} does not share the vocabulary of {target.name}: "
        f"{len(theirs)} tokens and {len(ours)}, {len(differing)} have other ids (target and draft: {shown}). "
        "Use a draft model of the same family, or --drafter ngram"
    )


def _quiet() -> None:
    """Silence transformers' progress bars and advice; detgen reports the errors."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="MatMul8bitLt")
