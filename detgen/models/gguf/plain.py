"""Plain decoders in GGUF files - of Llama's, Qwen2's and Qwen3's kind - as transformers makes them, without it.

A first start would ask transformers for seconds, mostly to import it. Each setting and each tensor of a file has to be
understood here; where one is not, transformers is asked. Tests ask it for these, too: modules, tokenizer, places of
weights and bits are the same (`tests/models/gguf/test_plain.py`).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from detgen.kernels.attention import AttentionTraits
from detgen.models.gguf.configs import FACTORS, Said, not_understood
from detgen.models.gguf.header import Header
from detgen.models.gguf.tokenizer import tokenizer_facts
from detgen.models.own_forward import Layout, OwnForward
from detgen.models.rotary import frequencies_of
from detgen.models.stored import Place, whole
from detgen.program.arrays import floats

# What transformers calls the classes of an architecture.
_CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_SIZES = {
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
}
_HEADS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_LARGEST = 1e30  # base of a rotary embedding, or factor


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
    kind = header.architecture
    if kind not in _CLASSES or header.settings.get("general.name") == "mistral":
        return None  # a file of that name is of another family to transformers
    try:
        config = _config(header, path)
        made = _Modules(header, config)
        skeleton = made.skeleton()
        tokenizer = tokenizer_facts(header, path, adds_named=kind != "llama")
    except Exception:  # of whatever the tokenizers library raises
        return None
    heads, kept, size = config["num_attention_heads"], config["num_key_value_heads"], made.head
    layers = range(config["num_hidden_layers"])
    layout = Layout([(kept, size, size) for _ in layers], [AttentionTraits(size**-0.5) for _ in layers], heads // kept)
    return Plain(skeleton, made.places, made.orders, tokenizer, OwnForward(layout))


def _config(header: Header, path: Path) -> dict[str, Any]:
    """The settings of a file, by what transformers calls them.

    Raises:
        ValueError: if one is missing, or not understood.
    """
    of, kind, rows = Said(header), header.architecture, len(header.settings["tokenizer.ggml.tokens"])
    of.agree("vocab_size", rows)
    sizes = {name: of.take(said, int) for name, said in _SIZES.items()} | {"num_hidden_layers": of.layers}
    heads, kept, hidden, *_ = sizes.values()
    if min(sizes.values()) < 1 or heads % kept or hidden % heads:
        raise not_understood("sizes", sizes)
    said = [of.take(name, int, 0) for name in _HEADS]
    head = next((size for size in said if size), hidden // heads)
    # Files of Qwen2 have no heads of another size, and those of Qwen3 no usual one.
    known = {"qwen2": head == hidden // heads, "qwen3": any(said[:2])}.get(kind, True)
    if not known or head % 2 or not {*said} <= {0, head}:
        raise not_understood("sizes of heads", said)
    rotary: dict[str, Any] = {"rope_theta": of.take("rope.freq_base", float), "rope_type": "default"}
    if (scaling := of.take("rope.scaling.type", str, "none")) == "linear":
        rotary |= {"rope_type": scaling, "factor": of.take("rope.scaling.factor", float)}
    elif scaling != "none":
        raise of.misunderstood("rope.scaling.type", scaling)
    epsilon = of.take("attention.layer_norm_rms_epsilon", float)
    if not 0 < epsilon < 1 < rotary["rope_theta"] < _LARGEST or not 1 <= rotary.get("factor", 1) < _LARGEST:
        raise not_understood("numbers", rotary)
    of.end()
    if (entry := header.tensors.get(FACTORS)) is not None:
        factors = floats(whole(Place(path, entry.kind, entry.shape, entry.at, FACTORS).read()))
        if factors.shape != (head // 2,) or not ((factors > 0) & (factors < _LARGEST)).all():
            raise not_understood(FACTORS, factors.shape)
        rotary["frequency_factors"] = factors.tolist()
    full = ["full_attention"] * of.layers
    kinds: dict[str, Any] = {} if kind == "llama" else {"layer_types": full}
    return {
        **sizes,
        **(kinds if kind == "qwen2" else {**kinds, "head_dim": head}),
        "model_type": kind,
        "vocab_size": rows,
        "rms_norm_eps": epsilon,
        "rope_parameters": rotary,
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


class _Modules:
    """Makes the modules of a model, and notes where the weights lie.

    Args:
        header: of the file.
        config: its settings.

    Attributes:
        places: see `Plain`.
        orders: likewise.
        head: the size of heads.
    """

    def __init__(self, header: Header, config: dict[str, Any]) -> None:
        self.places: dict[str, Any] = {}
        self.orders: dict[str, np.ndarray] = {}
        self.head: int = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        self._tensors, self._config, self._of = header.tensors, config, SimpleNamespace(**config)
        self._class = _CLASSES[header.architecture]
        self._shapes: list[list[Any]] = []

    def skeleton(self) -> dict[str, Any]:
        """The whole.

        Raises:
            ValueError: if a tensor is missing, has another shape, or belongs nowhere.
        """
        of, rotary = self._of, self._of.rope_parameters
        table = self._parameter("model.embed_tokens.weight", "token_embd.weight", of.vocab_size, of.hidden_size)
        layers = {str(i): self._layer(f"model.layers.{i}.", f"blk.{i}.") for i in range(of.num_hidden_layers)}
        norm = self._norm("model.norm", "output_norm", of.hidden_size)
        head = _module("Linear", torch=True, parameters={"weight": table, "bias": None})
        if not of.tie_word_embeddings:
            head = self._linear("lm_head", "output", of.vocab_size, of.hidden_size)
        read = {place["tensors"][0] for place in self.places.values()}
        if left := self._tensors.keys() - read - {FACTORS}:
            raise not_understood("tensors", left)
        frequencies = frequencies_of(rotary, rotary["rope_type"], self.head // 2)
        assert frequencies is not None, "its type is known"
        turning = _module(f"{self._class}RotaryEmbedding", rope_type=rotary["rope_type"], attention_scaling=1.0)
        inner = {
            "embed_tokens": _module("Embedding", torch=True, parameters={"weight": table}),
            "layers": _module("ModuleList", layers, torch=True),
            "norm": norm,
            "rotary_emb": turning | {"buffers": {"inv_freq": frequencies.tolist()}, "config": 0},
        }
        whole = {"model": _module(f"{self._class}Model", inner), "lm_head": head}
        modules = _module(f"{self._class}ForCausalLM", whole)
        made = {"modules": modules, "unread": [], "parameters": self._shapes, "configs": [self._config], "config": 0}
        return made

    def _layer(self, path: str, tensor: str) -> dict[str, Any]:
        of, name, size = self._of, self._class, self.head
        hidden, heads, kept = of.hidden_size, of.num_attention_heads, of.num_key_value_heads
        attention, forward = {}, {}
        for one, count in (("q", heads), ("k", kept), ("v", kept)):
            at = f"{path}self_attn.{one}_proj", f"{tensor}attn_{one}"
            attention[f"{one}_proj"] = self._linear(*at, count * size, hidden, biased=name == "Qwen2")
            if name == "Llama" and one != "v" and size > 2:  # whose files have side by side what is rotated together
                order = np.arange(count * size).reshape(count, -1, 2).swapaxes(1, 2)
                self.orders[f"{tensor}attn_{one}.weight"] = order.reshape(-1)
            if name == "Qwen3" and one != "v":
                at = f"{path}self_attn.{one}_norm", f"{tensor}attn_{one}_norm"
                attention[f"{one}_norm"] = self._norm(*at, size)
        attention["o_proj"] = self._linear(f"{path}self_attn.o_proj", f"{tensor}attn_output", hidden, heads * size)
        wide = of.intermediate_size
        for one, sizes in (("gate", (wide, hidden)), ("up", (wide, hidden)), ("down", (hidden, wide))):
            forward[f"{one}_proj"] = self._linear(f"{path}mlp.{one}_proj", f"{tensor}ffn_{one}", *sizes)
        parts = {
            "self_attn": _module(f"{name}Attention", attention, head_dim=size),
            "mlp": _module(f"{name}MLP", {**forward, "act_fn": _module("SiLUActivation")}),
            "input_layernorm": self._norm(f"{path}input_layernorm", f"{tensor}attn_norm", hidden),
            "post_attention_layernorm": self._norm(f"{path}post_attention_layernorm", f"{tensor}ffn_norm", hidden),
        }
        return _module(f"{name}DecoderLayer", parts)

    def _linear(self, path: str, tensor: str, outputs: int, inputs: int, *, biased: bool = False) -> dict[str, Any]:
        weight = self._parameter(f"{path}.weight", f"{tensor}.weight", outputs, inputs)
        bias = self._parameter(f"{path}.bias", f"{tensor}.bias", outputs) if biased else None
        return _module("Linear", torch=True, parameters={"weight": weight, "bias": bias})

    def _norm(self, path: str, tensor: str, size: int) -> dict[str, Any]:
        weight = self._parameter(f"{path}.weight", f"{tensor}.weight", size)
        name, epsilon = f"{self._class}RMSNorm", self._of.rms_norm_eps
        return _module(name, parameters={"weight": weight}, variance_epsilon=epsilon)

    def _parameter(self, name: str, tensor: str, *shape: int) -> int:
        """A parameter, by its number."""
        if self._tensors[tensor].shape != shape:
            raise not_understood(tensor, self._tensors[tensor].shape)
        self.places[name] = {"tensors": [tensor], "joined": None}
        self._shapes.append([list(shape), "float32"])
        return len(self._shapes) - 1


def _module(
    kind: str,
    modules: dict[str, Any] | None = None,
    *,
    torch: bool = False,
    parameters: dict[str, int | None] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """A module, torch's own or one of transformers."""
    inner = {"buffers": {}, "parameters": parameters or {}, "modules": modules or {}}
    return {"class": kind, "torch": torch, "settings": settings, **inner}
