"""Which parameters the tensors of a GGUF file are: by the tables of transformers and the gguf package, and beyond."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from detgen.models.gguf.families import GGUF_FAMILIES
from detgen.models.gguf.header import Header
from detgen.models.gguf.quickly import quick_gguf

# What all experts have, which parameters it belongs to, and which part of these it is.
_EXPERTS = re.compile(r"blk\.(?P<layer>\d+)\.ffn_(?P<part>gate|up|down)_exps\.(?P<kind>weight|bias)")
_PARTS = {"gate": ("gate_up_proj", 0), "up": ("gate_up_proj", 1), "down": ("down_proj", 0)}
_WITHIN = re.compile(r"(?P<path>.*\.(?P<layer>\d+)\..*)\.down_proj")  # a layer's experts, in a model
_SUFFIXES = {"weight": "", "bias": "_bias"}
# Factors of Gemma 4's routers, of which the tables know nothing.
_FACTORS = re.compile(r"blk\.(?P<layer>\d+)\.(?P<of>ffn_gate_inp|ffn_down_exps)\.scale")
_FACTORS_OF = {"ffn_gate_inp": "scale", "ffn_down_exps": "per_expert_scale"}
_BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>.*)")
# Stacks of weights, each of which is a parameter of this name.
_STACKS = {
    "altup_proj.weight": "model.altup_projections.{}.weight",
    "altup_unembd_proj.weight": "model.altup_unembed_projections.{}.weight",
}
# Queries, keys and values in one tensor, of models that have them in three.
_JOINED = re.compile(r"(?P<block>blk\.\d+\.attn_)qkv\.(?P<kind>weight|bias)")
# What layers have, too, that see the keys and values of others.
_UNREAD = re.compile(r"attn_(k|v|k_norm)\.weight")


def alone(tensor: str) -> str:
    """What queries, keys or values that are a part of a tensor are called where they are one; else what is given."""
    whole, _, part = tensor.partition("/")
    joined = _JOINED.fullmatch(whole)
    return f"{joined['block']}{part}.{joined['kind']}" if joined and part else tensor


class Names:
    """Names of parameters by those of tensors.

    Args:
        model: of transformers.
        processor: by which transformers changes the tensors of its family.
        header: of the file.
    """

    def __init__(self, model: Any, processor: Any, header: Header) -> None:
        from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

        config, self._gemma4 = model.config, header.architecture == "gemma4"
        family = GGUF_FAMILIES.get(header.architecture)
        kind = None if family is None else family.tables or header.architecture
        self._named = {} if family is None else family.names
        with quick_gguf():
            self._known = get_gguf_hf_weights_map(model, processor, {"mixtral": "llama"}.get(config.model_type, kind))
        names = list(dict(model.named_parameters()))
        self._experts = {int(one["layer"]): one["path"] for one in filter(None, map(_WITHIN.fullmatch, names))}
        self._layers = next((name.partition(".layers.")[0] for name in names if ".layers." in name), "")
        self._counted = range(config.num_hidden_layers, header.settings[f"{header.architecture}.block_count"])
        self._own = config.num_hidden_layers - getattr(config, "num_kv_shared_layers", 0)

    def tensors(self, header: Header) -> list[str]:
        """All tensors; of one that is several parameters, each with its number, or q, k and v, behind a slash."""
        found: list[str] = []
        for tensor, entry in header.tensors.items():
            parts: Iterable[Any] = range(entry.shape[0]) if tensor in _STACKS else ()
            if _JOINED.fullmatch(tensor) and self.of(tensor)[0] is None:
                parts = "qkv"
            found += [f"{tensor}/{part}" for part in parts] or [tensor]
        return found

    def are_unread(self, tensor: str) -> bool:
        """Whether no one reads a tensor: keys and values of a layer that sees those of others, layers that draft."""
        if (found := _BLOCK.fullmatch(tensor)) is None:
            return False
        layer = int(found["layer"])
        return layer in self._counted or (layer >= self._own and _UNREAD.fullmatch(found["part"]) is not None)

    def of(self, tensor: str) -> tuple[str | None, int | None]:
        """The parameter, or the buffer, that a tensor is, None if it is none; and which part of it, or None."""
        tensor = alone(tensor)
        stack, _, number = tensor.partition("/")
        if number:
            return _STACKS[stack].format(number), None
        if (block := _BLOCK.fullmatch(tensor)) and (named := self._named.get(block["part"])):
            return f"{self._layers}.layers.{int(block['layer'])}.{named[0]}", named[1]
        if found := _EXPERTS.fullmatch(tensor):
            joined, part = _PARTS[found["part"]]
            return f"{self._experts.get(int(found['layer']))}.{joined}{_SUFFIXES[found['kind']]}", part
        if self._gemma4 and (found := _FACTORS.fullmatch(tensor)):
            return f"model.layers.{int(found['layer'])}.router.{_FACTORS_OF[found['of']]}", None
        # The tables have no suffix for parameters of layers that are no modules'.
        return self._known.get(tensor) or self._known.get(tensor.removesuffix(".weight")), None
