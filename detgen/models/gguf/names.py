"""Maps the tensors of a GGUF file to parameters: by tables of transformers and the gguf package, and beyond them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from detgen.models.gguf.families import GGUF_FAMILIES
from detgen.models.gguf.header import Header
from detgen.models.gguf.quickly import quick_gguf

# Tensors of all experts, the parameters that they belong to, and their part there.
_EXPERTS = re.compile(r"blk\.(?P<layer>\d+)\.ffn_(?P<part>gate|up|down)_exps\.(?P<kind>weight|bias)")
_PARTS = {"gate": ("gate_up_proj", 0), "up": ("gate_up_proj", 1), "down": ("down_proj", 0)}
_WITHIN = re.compile(r"(?P<path>.*\.(?P<layer>\d+)\..*)\.down_proj")  # experts of a layer in a model
_SUFFIXES = {"weight": "", "bias": "_bias"}
# Factors of Gemma 4's routers, which the tables lack.
_FACTORS = re.compile(r"blk\.(?P<layer>\d+)\.(?P<of>ffn_gate_inp|ffn_down_exps)\.scale")
_FACTORS_OF = {"ffn_gate_inp": "scale", "ffn_down_exps": "per_expert_scale"}
_BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>.*)")
# Stacks of weights, each of which is a parameter with this name.
_STACKS = {
    "altup_proj.weight": "model.altup_projections.{}.weight",
    "altup_unembd_proj.weight": "model.altup_unembed_projections.{}.weight",
}
# Queries, keys and values in one tensor, for models that have three parameters.
_JOINED = re.compile(r"(?P<block>blk\.\d+\.attn_)qkv\.(?P<kind>weight|bias)")
# Tensors of layers that use the keys and values of other layers, which files have nevertheless.
_UNREAD = re.compile(r"attn_(k|v|k_norm)\.weight")


def alone(tensor: str) -> str:
    """Return the name that a part of a joined tensor of queries, keys and values has by itself; others unchanged."""
    whole, _, part = tensor.partition("/")
    joined = _JOINED.fullmatch(whole)
    return f"{joined['block']}{part}.{joined['kind']}" if joined and part else tensor


class Names:
    """Names of parameters by names of tensors.

    Args:
        model: the model of transformers.
        processor: transformers' processor of the family's tensors.
        header: the file's header.
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
        """Return all tensors; one of several parameters, once for each, with its number or q, k, v after a slash."""
        found: list[str] = []
        for tensor, entry in header.tensors.items():
            parts: Iterable[Any] = range(entry.shape[0]) if tensor in _STACKS else ()
            if _JOINED.fullmatch(tensor) and self.of(tensor)[0] is None:
                parts = "qkv"
            found += [f"{tensor}/{part}" for part in parts] or [tensor]
        return found

    def are_unread(self, tensor: str) -> bool:
        """Return whether a tensor is unused: of layers that draft, or keys and values of a layer that uses others'."""
        if (found := _BLOCK.fullmatch(tensor)) is None:
            return False
        layer = int(found["layer"])
        return layer in self._counted or (layer >= self._own and _UNREAD.fullmatch(found["part"]) is not None)

    def of(self, tensor: str) -> tuple[str | None, int | None]:
        """Return the parameter or buffer of a tensor, None if it is none, and its part there, or None."""
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
        # The tables have no suffix for parameters of layers that belong to no module.
        return self._known.get(tensor) or self._known.get(tensor.removesuffix(".weight")), None
