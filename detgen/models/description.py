"""The description of a loaded transformers model, made by its family's row of traits.

Nothing here computes; loading compares the described model with the model's own forward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from detgen.kernels.c.quantizing import STORAGE, Quantized
from detgen.kernels.decoder import StateShape
from detgen.models.activations import activation_of, bend_of
from detgen.models.altup import altup_of, deviations_of, laurel_of, streams_of
from detgen.models.attentions import attention_of, state_mixer, state_shape_of
from detgen.models.families import FAMILIES, Family, first_of, module_of
from detgen.models.latent import kept_entries
from detgen.models.layer_inputs import beside_of, layer_input_of, layer_inputs_of
from detgen.models.mixtures import MIXTURES, experts_of
from detgen.models.parts import (
    BeforeHead,
    Experts,
    FeedForward,
    Layer,
    LayerInputs,
    Linear,
    Mixer,
    Norm,
    Streams,
    UnknownError,
)
from detgen.models.skeleton import Module, is_torch
from detgen.models.stored import Read, Weight, held, whole
from detgen.models.wrappers import language_model
from detgen.program.arrays import floats
from detgen.program.operands import Activation

if TYPE_CHECKING:
    from torch import nn

_WITHOUT_WEIGHTS = {"Llama4TextL2Norm", "NanoChatRMSNorm"}  # classes of root-mean-square norms
# Others that add 1 to their weights.
_ADDED_TO_ONE = {
    *("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm", "VaultGemmaRMSNorm"),
    *("Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm"),
}
# Wrappers that apply the logit settings of their text part.
_SCALING = {
    *("PaliGemmaForConditionalGeneration", "HyperCLOVAXVisionV2ForConditionalGeneration"),
    *("GraniteDoclingForConditionalGeneration", "Granite4VisionForConditionalGeneration"),
}
# Settings under which a family differs from its row.
_UNUSUAL: dict[str, dict[str, Any]] = {
    "OPTForCausalLM": {"do_layer_norm_before": False},
    "GPT2LMHeadModel": {"add_cross_attention": True},
    "GPTBigCodeForCausalLM": {"multi_query": False, "add_cross_attention": True},
    "BloomForCausalLM": {"slow_but_exact": True},  # without the biases of two of its linear layers
    "FalconForCausalLM": {"alibi": True},  # its biases are rounded to bf16
}


@dataclass(slots=True)
class Description:
    """The parts of a decoder.

    Attributes:
        model: the transformers model.
        family: traits of its family.
        read: returns the weight of a parameter.
        used: ids of the parameters described so far.
        table: the embedding's parameter and weight, once read; the output layer may share them.
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
        return module_of(self.model, self.family.inner)

    @property
    def layers(self) -> Any:
        """The layers, a list of modules."""
        return getattr(self.inner, self.family.layers)

    @property
    def embedding(self) -> Weight:
        """[vocabulary, hidden]."""
        parameter = self._embedded.weight
        weight = self.weight(parameter)
        self.table = parameter, weight
        return weight

    @property
    def embedding_factor(self) -> float:
        """Factor of the embeddings."""
        scale = getattr(self._embedded, "embed_scale", 1.0)  # in the model's number format
        if getattr(self.config, "mup_enabled", False):  # AFMoE's
            scale = self.config.hidden_size**0.5
        return float(scale) * float(getattr(self.inner, "embedding_multiplier", 1.0))

    @property
    def embedding_norm(self) -> Norm | None:
        """Norm of the embeddings; None for none."""
        return self.norm(first_of(self.inner, self.family.embedding_norm))

    @property
    def positions(self) -> tuple[np.ndarray, int] | None:
        """Table of positions, [positions, hidden], and the offset of a position in it."""
        if self.family.positions is None:
            return None
        name, offset = self.family.positions
        return self.array(getattr(self.inner, name).weight), offset

    @property
    def layer_inputs(self) -> LayerInputs | None:
        """Vectors that tokens give to each layer; None if there are none."""
        return layer_inputs_of(self, self._embedded.weight.shape[0])

    @property
    def _embedded(self) -> Any:
        return module_of(self.inner, self.family.embedding)

    @property
    def streams(self) -> Streams | None:
        """The streams of hidden states; None if there is one."""
        return streams_of(self)

    @property
    def final(self) -> Norm | None:
        """The last norm; None where there is neither a norm nor an output layer."""
        return self.norm(getattr(self.inner, self.family.final))

    @property
    def before_head(self) -> BeforeHead | None:
        """The layers between the last norm and the output layer; None if there are none."""
        if not self.family.before_head:
            return None
        found = getattr(self.model, self.family.before_head)
        return BeforeHead(self.linear(found.dense), activation_of(found), self.given_norm(found.norm))

    @property
    def head(self) -> Linear | None:
        """The output layer; None where the model gives hidden states."""
        head = getattr(self.model, self._head_name)
        return None if is_torch(head, "Identity") else self.linear(head)

    @property
    def _head_name(self) -> str:
        return self.family.head if hasattr(self.model, self.family.head) else "lm_head"

    @property
    def head_factor(self) -> float:
        """Factor of the logits."""
        config = self.config
        if not self._scales:
            return 1.0
        if base := getattr(config, "dim_model_base", None):  # MiniCPM's
            return float(base / config.hidden_size)
        factor = getattr(config, self.family.logit_factor, None)
        return float(1 / (getattr(config, "logits_scaling", None) or 1) if factor is None else factor)

    @property
    def softcap(self) -> float:
        """Softcap of the logits; 0 for none."""
        return float((self._scales and getattr(self.config, "final_logit_softcapping", None)) or 0)

    @property
    def _scales(self) -> bool:
        """Whether settings of the text part change the logits; most wrappers leave them unchanged."""
        return language_model(self.model) is None or type(self.model).__name__ in _SCALING

    def release(self, index: int) -> None:
        """Release a layer."""
        if not isinstance(self.model, Module):  # a skeleton holds no weights
            from torch import nn

            self.layers[index] = nn.Identity()

    def release_head(self) -> None:
        """Release the output layer."""
        if not isinstance(self.model, Module):
            from torch import nn

            setattr(self.model, self._head_name, nn.Identity())

    def layer(self, index: int) -> Layer:
        """Describe a layer.

        Raises:
            UnknownError: if it is not what the row says.
        """
        family, config, layer = self.family, self.config, self.layers[index]
        mlp = self._mlp(layer)
        norms = family.norms if self.state_net(index) is None else family.state_norms or family.norms
        one, two, three, four = (self.norm(first_of(layer, names)) for names in norms)
        parallel = family.parallel
        made: FeedForward | Experts | None = None
        if mlp is not None:
            made = experts_of(self, mlp, layer) if hasattr(mlp, "experts") else self.feed_forward(mlp)
        beside, scalar = None, getattr(layer, "layer_scalar", None)
        if type(layer).__name__ in MIXTURES and hasattr(layer, "experts"):
            beside = beside_of(self, layer, experts_of(self, layer, layer))
        return Layer(
            mixers=tuple(self._mixers(index)),
            norms=(one, two, three, four),
            parallel=bool(getattr(config, parallel)) if isinstance(parallel, str) else parallel,
            mlp=made,
            residual=float(getattr(layer, "residual_multiplier", getattr(layer, "residual_scale", 1.0))),
            added_to_normed=bool(getattr(layer, "apply_residual_connection_post_layernorm", False)),
            beside=beside,
            input=layer_input_of(self, layer, index),
            factor=1.0 if scalar is None else scalar.item(),
            laurel=laurel_of(self, layer),
            altup=altup_of(self, layer),
        )

    def source(self, index: int) -> int | None:
        """Return the layer whose keys and values a layer uses: the last of its kind with its own; None for its own."""
        kinds = getattr(self.config, "layer_types", None) or []
        before = (i for i in range(index - 1, -1, -1) if kinds[i] == kinds[index] and not self._shares(i))
        return next(before) if self._shares(index) else None

    def _shares(self, index: int) -> bool:
        return bool(getattr(self.attention(index), "is_kv_shared_layer", False))

    def state_net(self, index: int) -> Any:
        """Return the module of a layer that keeps a state of each sequence; None if there is none."""
        net = getattr(self.layers[index], self.family.state, None)
        return None if state_shape_of(net) is None else net

    def attention(self, index: int) -> Any:
        """Describe the attention of a layer; None if it has none."""
        layer = self.layers[index]
        try:
            found = module_of(layer, self.family.attention)
        except AttributeError:
            return None
        return None if found is self.state_net(index) or found is self._mlp(layer) else found

    def _mlp(self, layer: Any) -> Any:
        """Describe the feed-forward or the mixture of experts of a layer; None if it has neither."""
        family = self.family
        found = first_of(layer, family.mlp) if family.mlp else layer
        return found if hasattr(found, "experts") or hasattr(found, family.gate or family.up) else None

    def _mixers(self, index: int) -> Iterator[Mixer]:
        net, attention, layer = self.state_net(index), self.attention(index), self.layers[index]
        if net is not None:
            yield state_mixer(self, net, layer)
        if attention is not None:
            made = attention_of(self, attention, index)
            yield replace(made, out=made.out._replace(factor=float(getattr(layer, "attn_out_multiplier", 1.0))))

    def feed_forward(self, mlp: Any) -> FeedForward:
        """Describe a feed-forward.

        Raises:
            UnknownError: if it is not what the row says.
        """
        family = self.family
        up = [self.linear(getattr(mlp, name)) for name in (family.gate, family.up) if name]
        down, bend = self.linear(getattr(mlp, family.down)), bend_of(self, mlp)
        activation = Activation.NONE if bend else activation_of(mlp)
        if bend and family.gate:
            raise UnknownError("gates by xIELU")
        if hasattr(mlp, "gate_multiplier"):  # Falcon H1's
            up[0], down = up[0]._replace(factor=mlp.gate_multiplier), down._replace(factor=mlp.down_multiplier)
            if mlp.gate_multiplier != 1 and activation != Activation.SILU:
                raise UnknownError("another activation of gates with a factor")
        return FeedForward(up, bool(family.gate), activation, down, deviations_of(mlp), bend)

    def norm(self, norm: Any, size: int = 0) -> Norm | None:
        """Describe a norm, of that many entries if it has no weights; None for none.

        Raises:
            UnknownError: if it is of another kind.
        """
        if norm is None or is_torch(norm, "Identity"):
            return None
        name = type(norm).__name__
        if is_torch(norm, "LayerNorm"):
            weight, bias = (None if p is None else floats(self.array(p)) for p in (norm.weight, norm.bias))
            plain = np.ones(norm.normalized_shape, np.float32)
            return Norm(plain if weight is None else weight, bias, norm.eps, centred=True)
        if name == "StableLmLayerNormPerHead":
            each = np.stack([floats(self.array(of_head.weight)) for of_head in norm.norms])
            return Norm(each, None, norm.norms[0].eps, centred=True)
        if name == "NemotronLayerNorm1P":
            weight, bias = floats(self.array(norm.weight)), floats(self.array(norm.bias))
            return Norm(1 + weight, bias, norm.eps, centred=True)
        if name in _WITHOUT_WEIGHTS or not getattr(norm, "with_scale", True):
            return Norm(np.ones(size or self.config.hidden_size, np.float32), None, norm.eps, centred=False)
        if name == "OlmoLayerNorm":
            return Norm(np.ones(norm.normalized_shape, np.float32), None, 1e-5, centred=True)
        weight = floats(self.array(norm.weight))
        if name in _ADDED_TO_ONE:
            return Norm(1 + weight, None, norm.eps, centred=False)
        if name.endswith("RMSNorm"):
            epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
            return Norm(weight, None, epsilon, centred=False)
        if name in ("CohereLayerNorm", "Cohere2LayerNorm", "Cohere2MoeLayerNorm"):
            return Norm(weight, None, norm.variance_epsilon, centred=True)
        raise UnknownError(f"norm {name}")

    def given_norm(self, norm: Any) -> Norm:
        """Describe a required norm; errors as for `norm`."""
        found = self.norm(norm)
        if found is None:
            raise UnknownError("a norm that is none")
        return found

    def linear(self, module: Any) -> Linear:
        """Describe a linear layer.

        Raises:
            UnknownError: if it is of another kind.
        """
        transposed = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
        if not is_torch(module, "Linear") and type(module).__name__ != "FalconLinear" and not transposed:
            raise UnknownError(f"linear layer {type(module).__name__}")
        if not module.weight.numel():
            raise UnknownError("a linear layer without inputs or outputs")
        bias = None if module.bias is None else self.array(module.bias)
        weight = self.weight(module.weight)
        if isinstance(weight, Quantized):
            return Linear(weight, bias)
        if weight.dtype.name not in STORAGE:
            raise UnknownError(f"weights in {weight.dtype}")
        return Linear(weight.T if transposed else weight, bias)

    def weight(self, parameter: nn.Parameter) -> Weight:
        """Return the weight of a parameter, and count it as described."""
        self.used.add(id(parameter))
        if self.table is not None and self.table[0] is parameter:
            return self.table[1]
        return self.read(parameter)

    def array(self, parameter: nn.Parameter) -> np.ndarray:
        """Like `weight`, as an array, in float32 if it is kept in few bits."""
        return whole(self.weight(parameter))

    def check(self) -> None:
        """Describe the whole model.

        Raises:
            UnknownError: if any part differs from the row or is left over.
        """
        for name, value in _UNUSUAL.get(_class_of(self.model), {}).items():
            if getattr(self.config, name, None) == value:
                raise UnknownError(name)
        if not len(self.layers):
            raise UnknownError("a decoder without layers")
        described: list[object] = [self.embedding, self.embedding_norm, self.positions, self.final]
        described += [self.before_head, self.head, self.layer_inputs, self.streams]
        described += [self.layer(index) for index in range(len(self.layers))]
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in self.used:
                raise UnknownError(name)


def describe(model: Any) -> Description | None:
    """Describe a model; return None if its family is unknown, or it differs from the family's row.

    Its parameters may be on torch's `meta` device; set `read` then before asking for weights.
    """
    found = _described(model)
    return found if isinstance(found, Description) else None


def unknown_in(model: Any) -> str | None:
    """Return why a model of a known family cannot be described; None if it can, or the family is unknown."""
    found = _described(model)
    return found if isinstance(found, str) else None


def _described(model: Any) -> Description | str | None:
    """Return a model's description, or what its family's row does not cover; None if there is no row."""
    family = _family(model)
    if family is None:
        return None
    found = Description(model, family)
    try:
        found.check()
    except (UnknownError, AttributeError, StopIteration) as error:
        return str(error) if isinstance(error, UnknownError) and str(error) else "one of its modules"
    return found


def _family(model: Any) -> Family | None:
    """Return the row of a model, or of the language model inside a wrapper."""
    found, path = FAMILIES.get(_class_of(model)), language_model(model)
    return found if found is None or path is None else found._replace(inner=path)


def _class_of(model: Any) -> str:
    """Return the class of a model; for a wrapper, of a decoder with the language model inside."""
    path = language_model(model)
    name = type(model if path is None else module_of(model, path)).__name__
    return name if path is None or name in FAMILIES else re.sub("(Text)?Model$", "ForCausalLM", name)


def has_description(model: Any) -> bool:
    """Return whether programs can be built from a model; its parameters may be on `meta`."""
    return describe(model) is not None


class States(NamedTuple):
    """What layers of a model keep of sequences, as programs know it.

    Attributes:
        shapes: modules that keep states, and what they keep.
        alone: layers with neither attention nor such a module.
        sharing: layers that see the keys and values of an earlier one and keep none themselves.
        latent: entries of the key that layers of latent attention keep for all heads, with the value in it.
    """

    shapes: dict[Any, StateShape]
    alone: frozenset[int]
    sharing: frozenset[int]
    latent: dict[int, int]


def states_of(model: Any) -> States:
    """Return what layers of a model keep of sequences, other than the keys and values that their heads read."""
    found = describe(model)
    if found is None:
        return States({}, frozenset(), frozenset(), {})
    layers = range(len(found.layers))
    nets = [found.state_net(i) for i in layers]
    shapes = {net: shape for net in nets if (shape := state_shape_of(net)) is not None}
    alone = frozenset(i for i in layers if nets[i] is None and found.attention(i) is None)
    latent = {i: kept_entries(found.attention(i)) for i in layers if found.family.latent}
    return States(shapes, alone, frozenset(i for i in layers if found.source(i) is not None), latent)
