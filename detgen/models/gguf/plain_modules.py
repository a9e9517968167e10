"""Modules of plain decoders in GGUF files, as data for `detgen/models/skeleton.py`, and places of their weights."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from detgen.models.gguf.configs import FACTORS, not_understood
from detgen.models.gguf.header import Header
from detgen.models.gguf.plain_settings import Kind
from detgen.models.rotary import frequencies_of

_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_GEMMAS_NORMS = {
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"},
    **{"pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm"},
}


class Modules:
    """Makes the modules of a model, and records the places of weights.

    Args:
        header: the file's header.
        kind: kind of its decoder.
        config: its settings.

    Attributes:
        places: see `Plain`.
        orders: see `Plain`.
        head: size of heads.
    """

    def __init__(self, header: Header, kind: Kind, config: dict[str, Any]) -> None:
        self.places: dict[str, Any] = {}
        self.orders: dict[str, np.ndarray] = {}
        self.head: int = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        self._tensors, self._kind, self._config, self._of = header.tensors, kind, config, SimpleNamespace(**config)
        self._shapes: list[list[Any]] = []

    def skeleton(self) -> dict[str, Any]:
        """Return the whole model.

        Raises:
            ValueError: if a tensor is missing, has another shape, or is unknown.
        """
        of, name = self._of, self._kind.name
        table = self._parameter("model.embed_tokens.weight", "token_embd.weight", of.vocab_size, of.hidden_size)
        embedding = _module("Embedding", torch=True, parameters={"weight": table})
        if self._kind.gemma:
            scale = {"embed_scale": float(np.float32(of.hidden_size**0.5))}
            embedding = _module(f"{name}TextScaledWordEmbedding", parameters={"weight": table}) | {"buffers": scale}
        layers = {str(i): self._layer(f"model.layers.{i}.", f"blk.{i}.") for i in range(of.num_hidden_layers)}
        norm = self._norm("model.norm", "output_norm", of.hidden_size)
        head = _module("Linear", torch=True, parameters={"weight": table, "bias": None})
        if not of.tie_word_embeddings:
            head = self._linear("lm_head", "output", of.vocab_size, of.hidden_size)
        read = {tensor for place in self.places.values() for tensor in place["tensors"]}
        if left := self._tensors.keys() - read - {FACTORS}:
            raise not_understood("tensors", left)
        inner = {
            "embed_tokens": embedding,
            "layers": _module("ModuleList", layers, torch=True),
            "norm": norm,
            "rotary_emb": self._rotary(),
        }
        whole = {"model": _module(f"{name}{'Text' if name == 'Gemma3' else ''}Model", inner), "lm_head": head}
        modules = _module(f"{name}ForCausalLM", whole)
        made = {"modules": modules, "unread": [], "parameters": self._shapes, "configs": [self._config], "config": 0}
        return made

    def _rotary(self) -> dict[str, Any]:
        settings, name = self._of.rope_parameters, f"{self._kind.name}RotaryEmbedding"

        def frequencies(of: dict[str, Any]) -> list[float]:
            found = frequencies_of(of, of["rope_type"], self.head // 2)
            assert found is not None, "its type is known"
            numbers: list[float] = found.tolist()
            return numbers

        if "rope_type" in settings:
            made = _module(name, rope_type=settings["rope_type"], attention_scaling=1.0)
            return made | {"buffers": {"inv_freq": frequencies(settings)}, "config": 0}
        settings = {kind: settings[kind] for kind in {*self._of.layer_types}}
        made = _module(name, rope_type={kind: of["rope_type"] for kind, of in settings.items()})
        made["settings"] |= dict.fromkeys((f"{kind}_attention_scaling" for kind in settings), 1.0)
        return made | {"buffers": {f"{kind}_inv_freq": frequencies(of) for kind, of in settings.items()}, "config": 0}

    def _layer(self, path: str, tensor: str) -> dict[str, Any]:
        kind, hidden = self._kind, self._of.hidden_size
        at = f"{path}mlp.", f"{tensor}ffn_"
        parts = {
            "self_attn": self._attention(f"{path}self_attn.", f"{tensor}attn_"),
            "mlp": self._mixture(*at) if kind.mixed else self._forward(*at, "", self._of.intermediate_size),
        }
        for norm, called in (_GEMMAS_NORMS if kind.gemma else _NORMS).items():
            parts[norm] = self._norm(f"{path}{norm}", f"{tensor}{called}", hidden)
        if kind.name == "Phi3":  # which drop nothing
            parts |= {f"resid_{part}_dropout": _module("Dropout", torch=True) for part in ("attn", "mlp")}
        return _module(f"{kind.name}DecoderLayer", parts)

    def _attention(self, path: str, tensor: str) -> dict[str, Any]:
        of, kind, size = self._of, self._kind, self.head
        hidden, heads, kept = of.hidden_size, of.num_attention_heads, of.num_key_value_heads
        parts: dict[str, Any] = {}
        counts = {"qkv": heads + 2 * kept} if kind.joined else {"q": heads, "k": kept, "v": kept}
        for one, count in counts.items():
            at = f"{path}{one}_proj", f"{tensor}{one}"
            parts[f"{one}_proj"] = self._linear(*at, count * size, hidden, biased=kind.biased)
            if kind.turned and one != "v" and size > 2:
                order = np.arange(count * size).reshape(count, -1, 2).swapaxes(1, 2)
                self.orders[f"{tensor}{one}.weight"] = order.reshape(-1)
            if kind.normed and one != "v":
                parts[f"{one}_norm"] = self._norm(f"{path}{one}_norm", f"{tensor}{one}_norm", size)
        parts["o_proj"] = self._linear(f"{path}o_proj", f"{tensor}output", hidden, heads * size)
        return _module(f"{kind.name}Attention", parts, head_dim=size)

    def _forward(self, path: str, tensor: str, of: str, wide: int) -> dict[str, Any]:
        """Return a feed-forward of a width; `of` is the suffix of its tensors' names."""
        kind, hidden, parts = self._kind, self._of.hidden_size, {}
        if kind.joined:
            parts["gate_up_proj"] = self._linear(f"{path}gate_up_proj", f"{tensor}up{of}", 2 * wide, hidden)
        else:
            for one in ("gate", "up"):
                parts[f"{one}_proj"] = self._linear(f"{path}{one}_proj", f"{tensor}{one}{of}", wide, hidden)
        parts["down_proj"] = self._linear(f"{path}down_proj", f"{tensor}down{of}", hidden, wide)
        parts["activation_fn" if kind.name == "Phi3" else "act_fn"] = self._activation()
        return _module(f"{kind.name}MLP", parts)

    def _mixture(self, path: str, tensor: str) -> dict[str, Any]:
        of, kind = self._of, self._kind
        hidden, count, wide = of.hidden_size, of.num_experts, self._config.get("moe_intermediate_size")
        wide = wide or of.intermediate_size
        gate = self._parameter(f"{path}gate.weight", f"{tensor}gate_inp.weight", count, hidden)
        given = {
            "gate_up_proj": self._stacked(f"{path}experts.gate_up_proj", tensor, ("gate", "up"), count, wide, hidden),
            "down_proj": self._stacked(f"{path}experts.down_proj", tensor, ("down",), count, hidden, wide),
        }
        plain = {"is_transposed": False, "is_concatenated": True}
        picks: dict[str, Any] = {"top_k": of.num_experts_per_tok}
        if kind.name != "Mixtral":  # files do not say whether weights are normalized
            picks["norm_topk_prob"] = kind.name == "Qwen3Moe"
        parts = {
            "gate": _module(f"{kind.name}TopKRouter", parameters={"weight": gate}, **picks),
            "experts": _module(f"{kind.name}Experts", {"act_fn": self._activation()}, parameters=given, **plain),
        }
        if kind.mixed == "shared":
            wide, at = of.shared_expert_intermediate_size, f"{path}shared_expert"
            parts["shared_expert"] = self._forward(f"{at}.", tensor, "_shexp", wide)
            row = self._parameter(f"{at}_gate.weight", f"{tensor}gate_inp_shexp.weight", hidden, change="in one row")
            self._shapes[row][0] = [1, hidden]
            parts["shared_expert_gate"] = _module("Linear", torch=True, parameters={"weight": row, "bias": None})
        return _module(f"{kind.name}SparseMoeBlock", parts)

    def _activation(self) -> dict[str, Any]:
        return _module("GELUTanh" if self._kind.gemma else "SiLUActivation")

    def _linear(self, path: str, tensor: str, outputs: int, inputs: int, *, biased: bool = False) -> dict[str, Any]:
        weight = self._parameter(f"{path}.weight", f"{tensor}.weight", outputs, inputs)
        bias = self._parameter(f"{path}.bias", f"{tensor}.bias", outputs) if biased else None
        return _module("Linear", torch=True, parameters={"weight": weight, "bias": bias})

    def _norm(self, path: str, tensor: str, size: int) -> dict[str, Any]:
        gemma = self._kind.gemma
        weight = self._parameter(f"{path}.weight", f"{tensor}.weight", size, change="less one" if gemma else None)
        epsilon = {"eps" if gemma else "variance_epsilon": self._of.rms_norm_eps}
        return _module(f"{self._kind.name}RMSNorm", parameters={"weight": weight}, **epsilon)

    def _parameter(self, name: str, tensor: str, *shape: int, change: str | None = None) -> int:
        """Add a parameter and return its number."""
        if self._tensors[tensor].shape != shape:
            raise not_understood(tensor, self._tensors[tensor].shape)
        self.places[name] = {"tensors": [tensor], "joined": None} | ({"change": change} if change else {})
        return self._shaped(*shape)

    def _stacked(self, name: str, tensor: str, parts: tuple[str, ...], *shape: int) -> int:
        """Add a parameter of experts that a file has in parts, and return its number."""
        tensors = [f"{tensor}{part}_exps.weight" for part in parts]
        for one in tensors:
            if self._tensors[one].shape != shape:
                raise not_understood(one, self._tensors[one].shape)
        self.places[name] = {"tensors": tensors, "joined": [False, False]}
        count, outputs, inputs = shape
        return self._shaped(count, len(parts) * outputs, inputs)

    def _shaped(self, *shape: int) -> int:
        self._shapes.append([list(shape), "float32"])
        return len(self._shapes) - 1


def _module(
    kind: str,
    modules: dict[str, Any] | None = None,
    *,
    torch: bool = False,
    parameters: Mapping[str, int | None] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Return a module, torch's own or one of transformers."""
    inner = {"buffers": {}, "parameters": dict(parameters or {}), "modules": modules or {}}
    return {"class": kind, "torch": torch, "settings": settings, **inner}
