"""Describes what mixes the rows of a layer: its attention, by its family's traits, or a module that keeps states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.kernels.decoder import StateShape
from detgen.models.delta_nets import delta_net, delta_shape
from detgen.models.families import first_of
from detgen.models.latent import kept_entries, latent_of
from detgen.models.mambas import mamba, mamba_shape, selective_mamba, selective_shape
from detgen.models.parts import Attention, Latent, Linear, Mixer, UnknownError, some_rows
from detgen.models.rotary import Rotary, plain_rotary, rotary_of, tuning_of
from detgen.models.short_convolutions import convolution_shape, short_convolution
from detgen.program.arrays import floats

if TYPE_CHECKING:
    from detgen.models.description import Description


# Attention classes that rotate in all layers if a model has no windows.
_ALL_WITHOUT_WINDOWS = ("Exaone4Attention", "ExaoneMoeAttention")
# Modules that keep states, by the ends of their class names: functions for the shape of states and the description.
_NETS: dict[str, tuple[Callable[[Any], StateShape], Callable[[Description, Any], Mixer]]] = {
    "GatedDeltaNet": (delta_shape, delta_net),
    "ShortConv": (convolution_shape, short_convolution),
    "MambaMixer": (selective_shape, selective_mamba),
    **dict.fromkeys(("MambaLayer", "BambaMixer", "FalconH1Mixer", "Mamba2Mixer"), (mamba_shape, mamba)),
}


def attention_of(of: Description, attention: Any, index: int) -> Attention:
    """Describe the attention of a layer.

    Raises:
        UnknownError: if it does not match the family's traits.
    """
    family, config = of.family, of.config
    out, rotary = of.linear(getattr(attention, family.out)), _rotary(of, attention, index)
    qkv: list[Linear] | Latent
    gate, source = None, of.source(index)
    if family.latent:
        values, heads, kv_heads = int(attention.kv_lora_rank), int(attention.num_heads), 1
        size, qkv = kept_entries(attention), latent_of(of, attention)
        if rotary is None or 2 * len(rotary.frequencies) != attention.qk_rope_head_dim:
            raise UnknownError("another share of heads is rotated")
    else:
        size = values = int(getattr(attention, "head_dim", None) or attention.head_size)
        heads = out.weight.shape[1] // size
        modules = [getattr(attention, name, None) for name in family.qkv]
        if source is not None:
            modules = modules[:1]
        elif modules[-1] is None:  # values are keys, before both are normed
            modules[-1] = modules[-2]
        qkv = [of.linear(module) for module in modules]
        if source is None:  # a file may have settings of other families, which its own does not read
            queries = (2 if family.gated else 1) * heads
            kv_heads = (sum(one.weight.shape[0] for one in qkv) // size - queries) // 2
        else:
            kv_heads = heads // int(attention.num_key_value_groups)
        if hasattr(attention, "key_multiplier"):  # Falcon H1's
            qkv = _multiplied(qkv, float(of.layers[index].attention_in_multiplier), attention.key_multiplier)
        if family.gated:
            each = np.arange(2 * heads * size).reshape(heads, 2, size)  # a head's query, and its gate
            qkv[0], gate = (some_rows(qkv[0], each[:, part].ravel()) for part in range(2))
        if family.own_gate and (own := getattr(attention, family.own_gate)) is not None:
            gate = of.linear(own)
            if len(out.weight[0]) % gate.weight.shape[0]:
                raise UnknownError("gates that do not divide the results")
        if family.by_head:  # each key head has its queries, a key and a value
            each = np.arange(qkv[0].weight.shape[0]).reshape(kv_heads, -1, size)
            qkv = [some_rows(qkv[0], np.concatenate([part.ravel() for part in np.split(each, [-2, -1], 1)]))]
        if family.parts:  # each part has queries, values and keys of some heads
            each = np.arange(qkv[0].weight.shape[0]).reshape(family.parts, 3, -1)
            qkv = [some_rows(qkv[0], each[:, [0, 2, 1]].swapaxes(0, 1).ravel())]
        if sum(one.weight.shape[0] for one in qkv) != (heads + (0 if source is not None else 2 * kv_heads)) * size:
            raise UnknownError("queries, keys and values of other sizes")
        if rotary is not None and 2 * len(rotary.frequencies) > size:
            raise UnknownError("a rotation of more than a head has")
    interleaved = family.interleaved
    q, k, v = (of.norm(getattr(attention, name, None), size) for name in (*family.head_norms, "v_norm"))
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        values=values,
        qkv=qkv,
        gate=gate,
        out=out,
        head_norms=(q, k, v),
        rotary=rotary,
        rotated_first=family.rotated_first,
        tuning=tuning_of(attention, config),
        interleaved=bool(getattr(config, interleaved)) if isinstance(interleaved, str) else interleaved,
        query_scale=float(attention.scaling) if family.scaled_queries else None,
        sinks=floats(of.array(attention.sinks)) if hasattr(attention, "sinks") else None,
        source=source,
        bound=float(getattr(attention, "clip_qkv", None) or getattr(config, "clip_qkv", None) or 0.0),
    )


def _rotary(of: Description, attention: Any, index: int) -> Rotary | None:
    if getattr(attention, "rotary_dim", None):  # GPT-J's
        return plain_rotary(10000.0, attention.rotary_dim // 2)
    rotary = first_of(of.inner, "rotary_emb pos_emb")
    if rotary is None or not _rotates(of, attention):
        return None
    kinds = getattr(of.config, "layer_types", None)
    found = rotary_of(rotary, getattr(attention, "layer_type", None) or (kinds[index] if kinds else None))
    if found is None:
        raise UnknownError("a rotary embedding of another kind")
    return found if len(found.frequencies) else None


def _rotates(of: Description, attention: Any) -> bool:
    if type(attention).__name__ in _ALL_WITHOUT_WINDOWS and attention.sliding_window is None:
        return True
    return any(getattr(attention, name, True) for name in of.family.rotates.split())


def _multiplied(qkv: list[Linear], read: float, keys: float) -> list[Linear]:
    """Return queries, keys and values with inputs multiplied by `read`, and keys also by `keys`."""
    if read != 1 and any(one.bias is not None for one in qkv):
        raise UnknownError("a bias of what reads multiplied rows")
    return [one._replace(factor=read * of) for one, of in zip(qkv, (1.0, float(keys), 1.0), strict=True)]


def state_shape_of(net: Any) -> StateShape | None:
    """Return the shape of a module's states; None if the module is unknown."""
    kind = _kind(net)
    return _NETS[kind][0](net) if kind else None


def state_mixer(of: Description, net: Any, layer: Any) -> Mixer:
    """Describe a module that keeps states, within its layer.

    Raises:
        UnknownError: if it is of another kind.
    """
    found = _NETS[_kind(net)][1](of, net)
    return replace(found, out=found.out._replace(factor=float(getattr(layer, "ssm_out_multiplier", 1.0))))


def _kind(net: Any) -> str:
    return next((kind for kind in _NETS if type(net).__name__.endswith(kind)), "")
