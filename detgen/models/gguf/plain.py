"""Plain decoders (Llama, Qwen, Gemma, Phi-3 and similar) from GGUF files, made as transformers does but without it.

Asking transformers would take seconds on a first start, mostly to import it. Each setting and tensor of a file must be
understood here; otherwise transformers is asked. Tests compare the two: modules, tokenizer, places of weights and bits
are the same (`tests/models/gguf/test_plain.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from detgen.kernels.attention import AttentionTraits
from detgen.models.gguf.header import Header
from detgen.models.gguf.plain_modules import Modules
from detgen.models.gguf.plain_settings import kind_of, settings_of
from detgen.models.gguf.tokenizer import tokenizer_facts
from detgen.models.own_forward import Layout, OwnForward


class Plain(NamedTuple):
    """Everything that a run needs to know about a GGUF file.

    Attributes:
        skeleton: its modules, see `detgen/models/skeleton.py`.
        places: places of its weights, as in `kept_places`.
        orders: orders of their rows, as in `kept_places`.
        tokenizer: see `tokenizer_facts`.
        own: layout of its layers.
    """

    skeleton: dict[str, Any]
    places: dict[str, Any]
    orders: dict[str, np.ndarray]
    tokenizer: dict[str, Any]
    own: OwnForward


def plain_model(header: Header, path: Path) -> Plain | None:
    """Return what a file's header says about the model; None if transformers has to find out, or report errors."""
    kind = kind_of(header)
    if kind is None:
        return None
    try:
        config = settings_of(header, path, kind)
        made = Modules(header, kind, config)
        skeleton = made.skeleton()
        tokenizer = tokenizer_facts(header, path)
    except Exception:  # including whatever the tokenizers library raises
        return None
    heads, kept, size = config["num_attention_heads"], config["num_key_value_heads"], made.head
    scale, window = config.get("query_pre_attn_scalar", size) ** -0.5, config.get("sliding_window")
    within = AttentionTraits(scale, window, config.get("attn_logit_softcapping"))
    full = [one == "full_attention" for one in config.get("layer_types", [""] * config["num_hidden_layers"])]
    traits = [replace(within, window=None) if one else within for one in full]
    layout = Layout([(kept, size, size)] * len(traits), [*traits], heads // kept)
    return Plain(skeleton, made.places, made.orders, tokenizer, OwnForward(layout))
