"""Plain decoders in GGUF files as transformers makes them, without it: Llama's, Qwen's, Gemma's and Phi-3's kinds.

A first start would ask transformers for seconds, mostly to import it. Each setting and each tensor of a file has to be
understood here; where one is not, transformers is asked. Tests ask it for these, too: modules, tokenizer, places of
weights and bits are the same (`tests/models/gguf/test_plain.py`).
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
    """What there is to know of a file.

    Attributes:
        skeleton: its modules, see `detgen/models/skeleton.py`.
        places: of its weights, as `kept_places` has them.
        orders: of their rows, likewise.
        tokenizer: see `tokenizer_facts`.
        own: the layout of its layers.
    """

    skeleton: dict[str, Any]
    places: dict[str, Any]
    orders: dict[str, np.ndarray]
    tokenizer: dict[str, Any]
    own: OwnForward


def plain_model(header: Header, path: Path) -> Plain | None:
    """What a file's header says of the model; None if that is for transformers to find out, or to say what is wrong."""
    kind = kind_of(header)
    if kind is None:
        return None
    try:
        config = settings_of(header, path, kind)
        made = Modules(header, kind, config)
        skeleton = made.skeleton()
        tokenizer = tokenizer_facts(header, path)
    except Exception:  # of whatever the tokenizers library raises
        return None
    heads, kept, size = config["num_attention_heads"], config["num_key_value_heads"], made.head
    scale, window = config.get("query_pre_attn_scalar", size) ** -0.5, config.get("sliding_window")
    within = AttentionTraits(scale, window, config.get("attn_logit_softcapping"))
    full = [one == "full_attention" for one in config.get("layer_types", [""] * config["num_hidden_layers"])]
    traits = [replace(within, window=None) if one else within for one in full]
    layout = Layout([(kept, size, size)] * len(traits), [*traits], heads // kept)
    return Plain(skeleton, made.places, made.orders, tokenizer, OwnForward(layout))
