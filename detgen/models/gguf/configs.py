"""Configurations of families whose GGUF files transformers reads incompletely or wrongly: GPT-OSS, Gemma 3n and 4.

It accepts no list with an entry per layer, loses YaRN's numbers and ignores the kinds of layers, so configurations are
made from the file here. Each setting has to be understood: one that is not could change every output.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from detgen.models.gguf.header import Header
from detgen.models.stored import Place, whole

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ELSE = "give the model as a folder in the Hugging Face layout"
FACTORS = "rope_freqs.weight"  # divisors of a rotary embedding's frequencies
SHORT_FACTORS, LONG_FACTORS = (f"rope_factors_{reach}.weight" for reach in ("short", "long"))  # LongRoPE's divisors
# Layers of the models with 27 billion parameters, whose queries are divided by sqrt(hidden size / heads).
LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}

_NEVER = 1e30  # a frequency divided by this or more rotates nothing
_Value = TypeVar("_Value", int, float, str, bool, tuple[Any, ...])


def not_understood(key: str, value: Any) -> ValueError:
    """Return the error for a setting of a file."""
    return ValueError(f"its setting {key} = {value} is not understood here; {ELSE}")


class Said:
    """Settings of a file's architecture; those that have been taken count as understood.

    Attributes:
        layers: number of layers.
    """

    def __init__(self, header: Header) -> None:
        self._prefix = f"{header.architecture}."
        self._left = {
            key.removeprefix(self._prefix): value
            for key, value in header.settings.items()
            if key.startswith(self._prefix)
        }
        self.layers = self.take("block_count", int)

    def take(self, name: str, kind: type[_Value], default: _Value | None = None) -> _Value:
        """Take a setting.

        Raises:
            ValueError: if it is of another type, or is missing and has no default.
        """
        value = self._left.pop(name, default)
        if value is None:
            raise ValueError(f"its setting {self._prefix}{name} is missing; {ELSE}")
        if type(value) is not kind:
            raise self.misunderstood(name, value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Take a setting that was rounded to float32, as the shortest number that rounds to it; errors as `take`."""
        return float(str(np.float32(self.take(name, float, default))))

    def says(self, name: str) -> bool:
        """Return whether a setting is there and has not been taken."""
        return name in self._left

    def leave_out_foreseeing(self) -> None:
        """Do not count layers that predict further tokens, which come last and are not read; errors as `take`."""
        self.layers -= self.take("nextn_predict_layers", int, 0)

    def each(self, name: str, kind: type[_Value]) -> list[_Value]:
        """Take a setting given per layer, or once for all layers; errors as `take`."""
        value = self._left.get(name)
        if not isinstance(value, tuple):
            return [self.take(name, kind)] * self.layers
        del self._left[name]
        if len(value) != self.layers or any(type(one) is not kind for one in value):
            raise self.misunderstood(name, value)
        return list(value)

    def agree(self, name: str, wanted: int | str) -> None:
        """Take a setting, if there is one, that must repeat a known value; errors as `take`."""
        if (value := self._left.pop(name, wanted)) != wanted:
            raise self.misunderstood(name, value)

    def misunderstood(self, name: str, value: Any) -> ValueError:
        """Return the error for a setting."""
        return not_understood(self._prefix + name, value)

    def end(self) -> None:
        """Raise if any setting has not been taken."""
        for name, value in self._left.items():
            raise self.misunderstood(name, value)


def _common(of: Said, header: Header) -> dict[str, Any]:
    """Return the settings that GPT-OSS and Gemmas have."""
    vocabulary = rows_of(header, "token_embd.weight")
    of.agree("vocab_size", vocabulary)
    return {
        "vocab_size": vocabulary,
        "num_hidden_layers": of.layers,
        "hidden_size": of.take("embedding_length", int),
        "num_attention_heads": of.take("attention.head_count", int),
        "max_position_embeddings": of.take("context_length", int),
        "rms_norm_eps": of.take("attention.layer_norm_rms_epsilon", float),
        "sliding_window": of.take("attention.sliding_window", int),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def rows_of(header: Header, tensor: str) -> int:
    """Return the number of rows of a tensor.

    Raises:
        ValueError: if it is missing.
    """
    if tensor not in header.tensors:
        raise ValueError(f"weights are missing: {tensor}")
    return header.tensors[tensor].shape[0]


def numbers_of(header: Header, path: Path, tensor: str) -> np.ndarray:
    """Return the numbers of a small tensor; errors as `rows_of`."""
    rows_of(header, tensor)
    entry = header.tensors[tensor]
    return whole(Place(path, entry.kind, entry.shape, entry.at, tensor).read())


def gpt_oss(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of GPT-OSS, whose experts' clamps and kinds of layers are always the same."""
    from transformers import GptOssConfig

    common = _common(of, header)
    size = of.take("attention.key_length", int, common["hidden_size"] // common["num_attention_heads"])
    inner = of.take("expert_feed_forward_length", int)
    for name, wanted in (
        ("attention.value_length", size),
        ("rope.dimension_count", size),
        ("feed_forward_length", inner),
    ):
        of.agree(name, wanted)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": of.take("rope.freq_base", float)}
    kind = of.take("rope.scaling.type", str, "none")
    if kind == "yarn":
        rope |= {
            "rope_type": kind,
            "factor": of.take("rope.scaling.factor", float),
            "original_max_position_embeddings": of.take("rope.scaling.original_context_length", int),
            "beta_fast": of.take("rope.scaling.yarn_beta_fast", float, 32.0),
            "beta_slow": of.take("rope.scaling.yarn_beta_slow", float, 1.0),
            "truncate": False,  # files cannot say so, but all checkpoints do
        }
    elif kind != "none":
        raise of.misunderstood("rope.scaling.type", kind)
    return GptOssConfig(
        **common,
        head_dim=size,
        num_key_value_heads=of.take("attention.head_count_kv", int),
        intermediate_size=inner,
        num_local_experts=of.take("expert_count", int),
        num_experts_per_tok=of.take("expert_used_count", int),
        rope_parameters=rope,
    )


def gemma3n(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of the text part of Gemma 3n."""
    from transformers import Gemma3nTextConfig

    common = _common(of, header)
    size = of.take("attention.key_length", int)
    of.agree("attention.value_length", size)
    windows = of.each("attention.sliding_window_pattern", bool)
    scales = of.each("activation_sparsity_scale", float)
    shares = [round(NormalDist().cdf(scale), 4) for scale in scales]  # of gates that are closed
    known = [NormalDist().inv_cdf(share) if 0 < share < 1 else -math.inf for share in shares]
    if not all(math.isclose(*pair, rel_tol=1e-5) for pair in zip(scales, known, strict=True)):
        raise of.misunderstood("activation_sparsity_scale", tuple(scales))
    return Gemma3nTextConfig(
        **common,
        head_dim=size,
        num_key_value_heads=of.take("attention.head_count_kv", int),
        intermediate_size=of.each("feed_forward_length", int),
        layer_types=["sliding_attention" if window else "full_attention" for window in windows],
        num_kv_shared_layers=of.take("attention.shared_kv_layers", int, 0),
        activation_sparsity_pattern=shares,
        altup_active_idx=of.take("altup.active_idx", int),
        altup_num_inputs=of.take("altup.num_inputs", int),
        altup_correct_scale="blk.0.altup_correct_scale.weight" in header.tensors,
        laurel_rank=rows_of(header, "blk.0.laurel_l.weight"),
        hidden_size_per_layer_input=of.take("embedding_length_per_layer_input", int),
        vocab_size_per_layer_input=rows_of(header, "per_layer_token_embd.weight"),
        final_logit_softcapping=of.take("final_logit_softcapping", float),
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": of.take("rope.freq_base_swa", float, 1e4)},
            "full_attention": {"rope_type": "default", "rope_theta": of.take("rope.freq_base", float)},
        },
    )


def gemma4(of: Said, header: Header, path: Path) -> PreTrainedConfig:
    """Return the configuration of the text part of Gemma 4."""
    from transformers import Gemma4TextConfig

    windows = of.each("attention.sliding_window_pattern", bool)
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    heads, own = of.each("attention.head_count_kv", int), of.layers - of.take("attention.shared_kv_layers", int, 0)
    values = (f"blk.{i}.attn_v.weight" for i, window in enumerate(windows[:own]) if not window)
    keys_are_values = not any(name in header.tensors for name in values)
    of_full, of_windows = heads[-1], heads[windows.index(True)] if any(windows) else heads[-1]
    by_kind = [of_windows if window else of_full for window in windows]
    if heads != by_kind or (of_full != of_windows and not keys_are_values):
        raise of.misunderstood("attention.head_count_kv", tuple(heads))
    sizes = {window: of.take(f"attention.key_length{'_swa' * window}", int) for window in (False, True)}
    for window, size in sizes.items():
        for name in ("attention.value_length", "rope.dimension_count"):
            of.agree(f"{name}{'_swa' * window}", size)
    widths = of.each("feed_forward_length", int)
    doubled = own < of.layers and widths[-1] == 2 * widths[0]
    if widths != [widths[0] * (1 + (doubled and i >= own)) for i in range(of.layers)]:
        raise of.misunderstood("feed_forward_length", tuple(widths))
    experts, by_token = of.take("expert_count", int, 0), of.take("embedding_length_per_layer_input", int, 0)
    more: dict[str, Any] = {}
    if experts:
        more |= {"num_experts": experts, "top_k_experts": of.take("expert_used_count", int)}
        more |= {"enable_moe_block": True, "moe_intermediate_size": of.take("expert_feed_forward_length", int)}
    if by_token:
        more |= {"vocab_size_per_layer_input": rows_of(header, "per_layer_token_embd.weight")}
    config = Gemma4TextConfig(
        **_common(of, header),
        **more,
        layer_types=list(kinds),
        head_dim=sizes[True],
        global_head_dim=sizes[False],
        num_key_value_heads=of_windows,
        num_global_key_value_heads=of_full,
        attention_k_eq_v=keys_are_values,
        num_kv_shared_layers=of.layers - own,
        intermediate_size=widths[0],
        use_double_wide_mlp=doubled,
        hidden_size_per_layer_input=by_token,
        final_logit_softcapping=of.take("final_logit_softcapping", float, 0.0) or None,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": of.take("rope.freq_base_swa", float, 1e4)},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": of.take("rope.freq_base", float),
                "partial_rotary_factor": _share(header, path, sizes[False] // 2),
            },
        },
    )
    if config.layer_types != kinds:  # the configuration gives the last layer full attention
        raise of.misunderstood("attention.sliding_window_pattern", tuple(windows))
    return config


def _share(header: Header, path: Path, frequencies: int) -> float:
    """Return the share of frequencies that rotate: a file has the factor 1 for these, and a huge one for the others.

    Raises:
        ValueError: if it has other factors, or none.
    """
    factors = numbers_of(header, path, FACTORS)
    count = int((factors == 1).sum())
    if factors.shape != (frequencies,) or (factors[:count] != 1).any() or (factors[count:] < _NEVER).any():
        raise ValueError(f"its {FACTORS} divides frequencies in a way that is not understood here; {ELSE}")
    return min((count + 0.5) / frequencies, 1.0)  # rounding down gives the same number again
