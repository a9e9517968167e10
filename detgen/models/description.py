"""What a loaded transformers model consists of, as far as its family's row of traits tells.

Nothing here computes; loading compares what the description gives with the model's own forward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from detgen.kernels.c.quantizing import STORAGE, Quantized
from detgen.kernels.decoder import StateShape
from detgen.models.activations import activation_of
from detgen.models.families import FAMILIES, Family
from detgen.models.latent import latent_of
from detgen.models.mixtures import MIXTURES, routing_of
from detgen.models.parts import (
    Attention,
    Experts,
    FeedForward,
    Latent,
    Layer,
    Linear,
    Mixer,
    Norm,
    UnknownError,
    some_rows,
)
from detgen.models.rotary import Rotary, plain_rotary, rotary_of
from detgen.models.state_nets import state_mixer, state_shape_of
from detgen.models.stored import Read, Weight, held, turned, whole
from detgen.models.tuning import tuning_of
from detgen.models.wrappers import language_model
from detgen.program.operands import Activation

# Classes of root-mean-square norms whose weights are added to 1.
_ADDED_TO_ONE = {
    *("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm", "VaultGemmaRMSNorm"),
    *("Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm"),
}
# Settings under which a family is not what its row says.
_UNUSUAL: dict[str, dict[str, Any]] = {
    "OPTForCausalLM": {"do_layer_norm_before": False},
    "GPT2LMHeadModel": {"add_cross_attention": True},
    "GPTBigCodeForCausalLM": {"multi_query": False, "add_cross_attention": True},
    "StableLmForCausalLM": {"qk_layernorm": True},
    "PhiForCausalLM": {"qk_layernorm": True},
    "Exaone4ForCausalLM": {"sliding_window": None},
    "ExaoneMoeForCausalLM": {"sliding_window": None},
    "BloomForCausalLM": {"apply_residual_connection_post_layernorm": True},
    "FalconForCausalLM": {"alibi": True},  # whose biases are rounded to bf16
}


@dataclass(slots=True)
class Description:
    """What a decoder consists of.

    Attributes:
        model: the transformers model.
        family: its family's traits.
        read: gives the weight of a parameter.
        used: ids of the parameters that have been described.
        table: the embedding's parameter and weight, once it was read; the output layer may have the same.
    """

    model: Any
    family: Family
    read: Read = held
    used: set[int] = field(default_factory=set)
    table: tuple[nn.Parameter, Weight] | None = None

    @property
    def config(self) -> Any:
        """The configuration of the text part."""
        return self.model.config.get_text_config()

    @property
    def inner(self) -> Any:
        """The decoder without its output layer."""
        return _module(self.model, self.family.inner)

    @property
    def layers(self) -> Any:
        """The layers, a list of modules."""
        return getattr(self.inner, self.family.layers)

    @property
    def embedding(self) -> Weight:
        """[vocabulary, hidden]."""
        parameter = getattr(self.inner, self.family.embedding).weight
        weight = self._weight(parameter)
        self.table = parameter, weight
        return weight

    @property
    def embedding_factor(self) -> float:
        """What embeddings are multiplied by."""
        scale = getattr(getattr(self.inner, self.family.embedding), "scalar_embed_scale", 1.0)
        return float(scale * getattr(self.inner, "embedding_multiplier", 1.0))

    @property
    def embedding_norm(self) -> Norm | None:
        """Of the embeddings; None for none."""
        return self._norm(_first(self.inner, self.family.embedding_norm))

    @property
    def positions(self) -> tuple[torch.Tensor, int] | None:
        """The table of positions, [positions, hidden], and what is added to a position to find it there."""
        if self.family.positions is None:
            return None
        name, offset = self.family.positions
        return self._tensor(getattr(self.inner, name).weight), offset

    @property
    def final(self) -> Norm | None:
        """The last norm; None where there is none, nor an output layer."""
        return self._norm(getattr(self.inner, self.family.final))

    @property
    def head(self) -> Linear | None:
        """The output layer; None where the model gives hidden states."""
        head = getattr(self.model, self._head_name)
        return None if type(head) is nn.Identity else self._linear(head)

    @property
    def _head_name(self) -> str:
        return self.family.head if hasattr(self.model, self.family.head) else "lm_head"

    @property
    def head_factor(self) -> float:
        """What logits are multiplied by."""
        config = self.config
        if base := getattr(config, "dim_model_base", None):  # MiniCPM's
            return float(base / config.hidden_size)
        factor = getattr(config, self.family.logit_factor, None)
        return float(factor or 1 / (getattr(config, "logits_scaling", None) or 1))

    @property
    def softcap(self) -> float:
        """That of the logits; 0 for none."""
        return float(getattr(self.config, "final_logit_softcapping", None) or 0)

    def release(self, index: int) -> None:
        """Let a layer go."""
        self.layers[index] = nn.Identity()

    def release_head(self) -> None:
        """Let the output layer go."""
        setattr(self.model, self._head_name, nn.Identity())

    def layer(self, index: int) -> Layer:
        """A layer.

        Raises:
            UnknownError: if it is not what the row says.
        """
        family, config, layer = self.family, self.config, self.layers[index]
        mlp = self._mlp(layer)
        one, two, three, four = (self._norm(_first(layer, names)) for names in family.norms)
        parallel = family.parallel
        made: FeedForward | Experts | None = None
        if mlp is not None:
            made = self._experts(mlp, layer) if hasattr(mlp, "experts") else self._feed_forward(mlp)
        return Layer(
            mixers=tuple(self._mixers(index)),
            norms=(one, two, three, four),
            parallel=bool(getattr(config, parallel)) if isinstance(parallel, str) else parallel,
            mlp=made,
            residual=float(getattr(layer, "residual_multiplier", getattr(layer, "residual_scale", 1.0))),
        )

    def state_net(self, index: int) -> Any:
        """The module of a layer that keeps a state of each sequence; None if there is none."""
        net = getattr(self.layers[index], self.family.state, None)
        return None if state_shape_of(net) is None else net

    def attention(self, index: int) -> Any:
        """The attention of a layer; None if it has none."""
        layer = self.layers[index]
        found = getattr(layer, self.family.attention, None)
        return None if found is self.state_net(index) or found is self._mlp(layer) else found

    def _mlp(self, layer: Any) -> Any:
        """The feed-forward of a layer, or the mixture of experts; None if it has neither."""
        family = self.family
        found = _first(layer, family.mlp) if family.mlp else layer
        return found if hasattr(found, "experts") or hasattr(found, family.gate or family.up) else None

    def _mixers(self, index: int) -> Iterator[Mixer]:
        net, attention, layer = self.state_net(index), self.attention(index), self.layers[index]
        if net is not None:
            yield state_mixer(net, layer, self.config, self._linear, self._tensor)
        if attention is not None:
            made = self._attention(attention, index)
            yield replace(made, out=made.out._replace(factor=float(getattr(layer, "attn_out_multiplier", 1.0))))

    def _attention(self, attention: Any, index: int) -> Attention:
        family, config = self.family, self.config
        out, rotary = self._linear(getattr(attention, family.out)), self._rotary(attention, index)
        qkv: list[Linear] | Latent
        gate = None
        if family.latent:
            size, values = int(attention.qk_head_dim), int(attention.v_head_dim)
            heads = kv_heads = int(attention.num_heads)
            qkv = latent_of(attention, self._linear, self._norm)
            if rotary is None or 2 * len(rotary.frequencies) != attention.qk_rope_head_dim:
                raise UnknownError("another share of heads is rotated")
        else:
            size = values = int(getattr(attention, "head_dim", None) or attention.head_size)
            heads = out.weight.shape[1] // size
            kv_heads = getattr(attention, "num_kv_heads", None) or getattr(config, "num_key_value_heads", None) or heads
            qkv = [self._linear(getattr(attention, name)) for name in family.qkv]
            if hasattr(attention, "key_multiplier"):  # Falcon H1's
                qkv = _multiplied(qkv, float(self.layers[index].attention_in_multiplier), attention.key_multiplier)
            if family.gated:
                each = torch.arange(2 * heads * size).view(heads, 2, size)  # a head's query, and its gate
                qkv[0], gate = (some_rows(qkv[0], each[:, part].flatten()) for part in range(2))
            if family.by_head:  # queries, a key and a value of each
                each = torch.arange(qkv[0].weight.shape[0]).view(kv_heads, -1, size)
                qkv = [some_rows(qkv[0], torch.cat([part.flatten() for part in each.tensor_split([-2, -1], 1)]))]
            if family.parts:  # queries, values and keys of some heads
                each = torch.arange(qkv[0].weight.shape[0]).view(family.parts, 3, -1)
                qkv = [some_rows(qkv[0], each[:, [0, 2, 1]].transpose(0, 1).flatten())]
            if getattr(attention, "clip_qkv", None) or getattr(config, "clip_qkv", None):
                raise UnknownError("queries, keys and values that are clipped")
            if sum(one.weight.shape[0] for one in qkv) != (heads + 2 * kv_heads) * size:
                raise UnknownError("queries, keys and values of other sizes")
        interleaved = family.interleaved
        q, k = (self._norm(getattr(attention, name, None), size) for name in family.head_norms)
        return Attention(
            heads=heads,
            kv_heads=kv_heads,
            size=size,
            values=values,
            qkv=qkv,
            gate=gate,
            out=out,
            head_norms=(q, k),
            rotary=rotary,
            rotated_first=family.rotated_first,
            tuning=tuning_of(attention, config),
            interleaved=bool(getattr(config, interleaved)) if isinstance(interleaved, str) else interleaved,
            query_scale=float(attention.scaling) if family.scaled_queries else None,
            sinks=self._tensor(attention.sinks).float() if hasattr(attention, "sinks") else None,
        )

    def _feed_forward(self, mlp: Any) -> FeedForward:
        family = self.family
        up = [self._linear(getattr(mlp, name)) for name in (family.gate, family.up) if name]
        down, activation = self._linear(getattr(mlp, family.down)), activation_of(mlp)
        if hasattr(mlp, "gate_multiplier"):  # Falcon H1's
            up[0], down = up[0]._replace(factor=mlp.gate_multiplier), down._replace(factor=mlp.down_multiplier)
            if mlp.gate_multiplier != 1 and activation != Activation.SILU:
                raise UnknownError("another activation of gates with a factor")
        return FeedForward(up, bool(family.gate), activation, down)

    def _experts(self, mlp: Any, layer: Any) -> Experts:
        mixture = MIXTURES.get(type(mlp).__name__)
        if mixture is None:
            raise UnknownError(type(mlp).__name__)
        experts, router, biases = mlp.experts, getattr(mlp, mixture.router), None
        if type(getattr(mlp, "fc1_latent_proj", None)) is nn.Linear:
            raise UnknownError("experts that read short vectors")
        if hasattr(experts, "gate_up_proj_bias"):
            biases = self._tensor(experts.gate_up_proj_bias), self._tensor(experts.down_proj_bias)
        shared = None
        beside = next((of for of in (mlp, layer) if getattr(of, mixture.shared, None) is not None), None)
        if beside is not None:
            gate = getattr(beside, f"{mixture.shared}_gate", None)
            shared = self._feed_forward(getattr(beside, mixture.shared)), None if gate is None else self._linear(gate)
        linear = getattr(router, mixture.logits) if mixture.logits else router
        bias, gated = getattr(linear, "bias", None), hasattr(experts, "gate_up_proj")
        return Experts(
            router=Linear(self._tensor(linear.weight), None if bias is None else self._tensor(bias)),
            up=self._of_experts(experts, experts.gate_up_proj if gated else experts.up_proj),
            down=self._of_experts(experts, experts.down_proj),
            biases=biases,
            gated=gated,
            interleaved=not getattr(experts, "is_concatenated", True),
            activation=Activation.SILU if mixture.clamped else activation_of(experts),
            limited=(float(experts.limit), float(experts.alpha), 1.0) if mixture.clamped else (0.0, 1.0, 0.0),
            picks=int(router.top_k),
            routing=routing_of(mlp, router, mixture, self._tensor),
            weighs_inputs=mixture.weighs_inputs,
            shared=shared,
        )

    def _of_experts(self, experts: Any, parameter: nn.Parameter) -> Weight:
        """[experts, outputs, inputs]; weights in few bits always are."""
        weight = self._weight(parameter)
        if isinstance(weight, torch.Tensor) and turned(experts):
            return weight.transpose(1, 2)
        return weight

    def _rotary(self, attention: Any, index: int) -> Rotary | None:
        if getattr(attention, "rotary_dim", None):  # GPT-J's
            return plain_rotary(10000.0, attention.rotary_dim // 2)
        rotary = _first(self.inner, "rotary_emb pos_emb")
        if rotary is None or not getattr(attention, self.family.rotates, True):
            return None
        kinds = getattr(self.config, "layer_types", None)
        found = rotary_of(rotary, getattr(attention, "layer_type", None) or (kinds[index] if kinds else None))
        if found is None:
            raise UnknownError("a rotary embedding of another kind")
        return found

    def _norm(self, norm: Any, size: int = 0) -> Norm | None:
        """A norm; of that many entries if it has no weights."""
        if norm is None or type(norm) is nn.Identity:
            return None
        name = type(norm).__name__
        if type(norm) is nn.LayerNorm:
            weight, bias = (None if p is None else self._tensor(p).float() for p in (norm.weight, norm.bias))
            return Norm(weight, bias, norm.eps, centred=True)
        if name == "NemotronLayerNorm1P":
            return Norm(1 + self._tensor(norm.weight).float(), self._tensor(norm.bias).float(), norm.eps, centred=True)
        if name == "Llama4TextL2Norm":
            return Norm(torch.ones(size), None, norm.eps, centred=False)
        if name == "OlmoLayerNorm":
            return Norm(torch.ones(*norm.normalized_shape), None, 1e-5, centred=True)
        weight = self._tensor(norm.weight).float()
        if name in _ADDED_TO_ONE:
            return Norm(1 + weight, None, norm.eps, centred=False)
        if name.endswith("RMSNorm"):
            epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
            return Norm(weight, None, epsilon, centred=False)
        if name in ("CohereLayerNorm", "Cohere2LayerNorm"):
            return Norm(weight, None, norm.variance_epsilon, centred=True)
        raise UnknownError(f"norm {name}")

    def _linear(self, module: Any) -> Linear:
        transposed = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
        if type(module) is not nn.Linear and type(module).__name__ != "FalconLinear" and not transposed:
            raise UnknownError(f"linear layer {type(module).__name__}")
        bias = None if module.bias is None else self._tensor(module.bias)
        weight = self._weight(module.weight)
        if isinstance(weight, Quantized):
            return Linear(weight, bias)
        if weight.dtype not in STORAGE:
            raise UnknownError(f"weights in {weight.dtype}")
        return Linear(weight.t() if transposed else weight, bias)

    def _weight(self, parameter: nn.Parameter) -> Weight:
        self.used.add(id(parameter))
        if self.table is not None and self.table[0] is parameter:
            return self.table[1]
        return self.read(parameter)

    def _tensor(self, parameter: nn.Parameter) -> torch.Tensor:
        return whole(self._weight(parameter))

    def check(self) -> None:
        """Describe all of the model.

        Raises:
            UnknownError: if anything of it is not what the row says, or is left over.
        """
        for name, value in _UNUSUAL.get(_class_of(self.model), {}).items():
            if getattr(self.config, name, None) == value:
                raise UnknownError(name)
        described: list[object] = [self.embedding, self.embedding_norm, self.positions, self.final, self.head]
        described += [self.layer(index) for index in range(len(self.layers))]
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in self.used:
                raise UnknownError(name)


def describe(model: Any) -> Description | None:
    """The description of a model; None if its family is not known, or it is not what the family's row says.

    Its parameters may be on torch's `meta` device; then `read` has to be set before it is asked for weights.
    """
    family = _family(model)
    if family is None:
        return None
    found = Description(model, family)
    try:
        found.check()
    except (UnknownError, AttributeError, StopIteration):
        return None
    return found


def _family(model: Any) -> Family | None:
    """The row of a model; of a wrapper, that of the language model in it."""
    found, path = FAMILIES.get(_class_of(model)), language_model(model)
    return found if found is None or path is None else found._replace(inner=path)


def _class_of(model: Any) -> str:
    """The class of a model; of a wrapper, that of a decoder with the language model in it."""
    path = language_model(model)
    name = type(model if path is None else _module(model, path)).__name__
    return name if path is None or name in FAMILIES else re.sub("(Text)?Model$", "ForCausalLM", name)


def _module(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _first(layer: Any, names: str | None) -> Any:
    """The first of the modules of these names that a layer has; None if it has none."""
    return next((found for name in (names or "").split() if (found := getattr(layer, name, None)) is not None), None)


def has_description(model: Any) -> bool:
    """Whether programs can be built of a model, whose parameters may be on `meta`."""
    return describe(model) is not None


def _multiplied(qkv: list[Linear], read: float, keys: float) -> list[Linear]:
    """Queries, keys and values whose inputs are multiplied by a factor, and keys by another one."""
    if read != 1 and any(one.bias is not None for one in qkv):
        raise UnknownError("a bias of what reads multiplied rows")
    return [one._replace(factor=read * of) for one, of in zip(qkv, (1.0, float(keys), 1.0), strict=True)]


class States(NamedTuple):
    """What keeps states in a model, as programs know it.

    Attributes:
        shapes: the modules that do, and what they keep.
        alone: layers without an attention and without such a module.
    """

    shapes: dict[Any, StateShape]
    alone: frozenset[int]


def states_of(model: Any) -> States:
    """The modules of a model that keep states of sequences."""
    found = describe(model)
    if found is None:
        return States({}, frozenset())
    layers = range(len(found.layers))
    nets = [found.state_net(i) for i in layers]
    shapes = {net: shape for net in nets if (shape := state_shape_of(net)) is not None}
    return States(shapes, frozenset(i for i in layers if nets[i] is None and found.attention(i) is None))
