"""What is known of the target before it is loaded: its configuration, size and tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from detgen.bench.interface import BenchConfig
from detgen.bench.random_weights import settings_of
from detgen.errors import BenchError, DTypeName
from detgen.interruption import interrupted_later

_DTYPES: dict[str, DTypeName] = {"torch.float32": "float32", "torch.bfloat16": "bfloat16", "torch.float16": "float16"}


@dataclass(frozen=True, slots=True)
class Target:
    """The target in figures.

    Attributes:
        device: torch's name of where the models run.
        dtype: of its weights there; never auto.
        vocabulary: entries of its logits.
        context: most positions of a sequence.
        weights: how many a pass reads; an embedding of its own is left out, since a pass reads but a row a token.
        encode: text to token ids; with random weights, by the embedded tokenizer.
    """

    device: str
    dtype: DTypeName
    vocabulary: int
    context: int
    weights: float
    encode: Callable[[str], Any]


def resolve(config: BenchConfig) -> Target:
    """Look at a benchmark's target.

    Raises:
        BenchError: if there is no such model.
        EngineError: if there is no such device.
    """
    with interrupted_later():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        from detgen.errors import DEMO
        from detgen.passes.loading import context_of, pick_device

    device = pick_device(config.device)
    place = config.target or DEMO / "target"
    try:
        if config.random_weights is not None:
            settings = settings_of(config.random_weights)
            found = AutoConfig.for_model(settings.pop("model_type"), **settings)
            tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
        else:
            found = AutoConfig.from_pretrained(place)
            tokenizer = AutoTokenizer.from_pretrained(place)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(found)
    except (OSError, ValueError, KeyError) as error:
        name = config.random_weights or config.target or "the embedded model"
        raise BenchError(f"cannot read the configuration of {name}: {str(error).strip().splitlines()[0]}") from error
    text = found.get_text_config()
    dtype = config.dtype
    if dtype == "auto":
        own = _DTYPES.get(str(getattr(found, "dtype", None)), "bfloat16")
        dtype = "float32" if device.type == "cpu" else own
    tied = bool(getattr(text, "tie_word_embeddings", False))
    embedding = 0 if tied else model.get_input_embeddings().weight.numel()
    return Target(
        device=str(device),
        dtype=dtype,
        vocabulary=int(text.vocab_size),
        context=context_of(text),
        weights=float(sum(p.numel() for p in model.parameters()) - embedding),
        encode=lambda words: tokenizer(words).input_ids,
    )
