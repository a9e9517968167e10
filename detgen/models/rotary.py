"""Frequencies of rotary embeddings, computed from a model's settings with the same bits on every machine.

Temperature tuning of attention (Nakanishi, arXiv 2501.19399): queries grow with the logarithm of their position.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from detgen.kernels.c.angles import power, powers
from detgen.program.arrays import array, floats
from detgen.program.fdlibm import logarithm

_FASTEST = 2.0**17  # largest frequency; those of known models are at most 1
_CLOSE = 4e-7  # relative to a frequency: transformers' own powers may be off in the last place


class Rotary(NamedTuple):
    """How heads are rotated.

    Attributes:
        frequencies: float32 [n], for 2 n entries of a head.
        amplitude: amplitude of the cosines and sines.
    """

    frequencies: np.ndarray
    amplitude: float


def rotary_of(module: Any, kind: str | None = None) -> Rotary | None:
    """Describe a transformers rotary embedding; None if it does not do what its settings say.

    Args:
        module: the embedding.
        kind: kind of the layer, where each kind has its own settings.

    Raises:
        ValueError: if its angles cannot be computed.
    """
    settings: dict[str, Any] = getattr(module.config, "rope_parameters", None) or {}
    prefix, type_ = "", module.rope_type
    if isinstance(type_, dict):
        if kind is None or kind not in type_:
            return None
        settings, prefix, type_ = settings.get(kind) or {}, f"{kind}_", type_[kind]
    own = floats(array(getattr(module, f"{prefix}inv_freq")))
    amplitude = float(getattr(module, f"{prefix}attention_scaling", 1.0))
    if not (np.abs(own) < _FASTEST).all() or not math.isfinite(amplitude):
        raise ValueError(
            "its rotary embedding has frequencies that are not finite, or too large; see its rope settings"
        )
    if type(module).__name__ == "PhimoeRotaryEmbedding" and type_ != "default":
        amplitude = float(settings["short_mscale"])
    if type_ == "ntk_alpha" and settings.get("rope_type") == "dynamic":  # Hunyuan's, which has one length after all
        size, type_ = 2 * len(own), "default"
        base = power(settings["alpha"], size / (size - 2)) * settings["rope_theta"]
        settings = {"rope_theta": base, "rope_type": type_}
    if "rope_theta" not in settings or settings.get("rope_type") != type_:
        return None
    with np.errstate(all="ignore"):  # overflows here also occur in transformers, or it is another embedding
        found = frequencies_of(settings, type_, len(own))
    if found is None or not np.allclose(found, own, rtol=_CLOSE, atol=0):
        return None
    if type(module).__name__ == "NanoChatRotaryEmbedding":  # which turns the other way
        found = -found
    return Rotary(found, amplitude)


def plain_rotary(base: float, n: int) -> Rotary:
    """Return the unmodified embedding with a number of frequencies of a base."""
    found = frequencies_of({"rope_theta": base}, "default", n)
    assert found is not None, "it is the default"
    return Rotary(found, 1.0)


def frequencies_of(settings: dict[str, Any], type_: str, n: int) -> np.ndarray | None:
    """Return a number of frequencies by the settings of a type; None if the type is unknown."""
    base = float(settings["rope_theta"])
    one = np.float32(1)
    exponents = np.arange(0, 2 * n, 2, dtype=np.float32) / np.float32(2 * n)
    longer = powers(base, tuple(exponents.tolist()))
    found = one / longer
    if type_ == "linear":
        found = found / np.float32(settings["factor"])
    elif type_ == "llama3":
        found = _llama3(found, settings)
    elif type_ == "yarn":
        found = _yarn(longer, base, settings)
    elif type_ == "longrope":  # within the original context, where passes stay
        found = one / (np.array(settings["short_factor"], dtype=np.float32) * longer)
    elif type_ == "proportional":  # the fastest of all entries; the others are not rotated
        turned = int(settings.get("partial_rotary_factor", 1.0) * n)
        found = np.where(np.arange(n) < turned, found / np.float32(settings.get("factor", 1.0)), np.float32(0))
    elif type_ not in ("default", "dynamic"):
        return None
    if "frequency_factors" in settings:  # of a GGUF file
        found = found / np.asarray(settings["frequency_factors"], dtype=np.float32)
    return found


def _llama3(found: np.ndarray, settings: dict[str, Any]) -> np.ndarray:
    """Return Llama 3.1's frequencies: long waves are stretched by a factor, medium ones in part."""
    factor, context = np.float32(settings["factor"]), settings["original_max_position_embeddings"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    waves = (1 / found) * np.float32(2 * math.pi)  # torch divides numbers by tensors so
    share = ((1 / waves) * np.float32(context) - np.float32(low)) / np.float32(high - low)
    between = (1 - share) * found / factor + share * found
    short: np.ndarray = np.where(waves < context / high, found, between)
    return np.where(waves > context / low, found / factor, short)


def _yarn(longer: np.ndarray, base: float, settings: dict[str, Any]) -> np.ndarray:
    """Return YaRN's (Peng et al., arXiv 2309.00071): a ramp from original frequencies to those divided by a factor.

    Args:
        longer: what the original frequencies are the reciprocals of.
        base: of these powers.
        settings: of the embedding.
    """
    n, context = len(longer), settings.get("original_max_position_embeddings")
    if context is None:
        return 1 / longer

    def dimension(rotations: float) -> float:
        return 2 * n * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(settings.get("beta_fast") or 32), dimension(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * n - 1)
    ramp = (np.arange(n, dtype=np.float32) - np.float32(low)) / np.float32((high - low) or 0.001)
    kept = 1 - np.clip(ramp, 0, 1)
    ramped: np.ndarray = (1 / (np.float32(settings["factor"]) * longer)) * (1 - kept) + (1 / longer) * kept
    return ramped


class Tuning(NamedTuple):
    """Queries are multiplied by 1 + by * log(1 + floor((position + offset) / every)).

    Attributes:
        every: number of positions per step.
        by: factor of the logarithm.
        offset: added to positions.
    """

    every: float
    by: float
    offset: int

    def factors(self, positions: int) -> np.ndarray:
        """Return the factors of the first positions, float32 [positions], each rounded once."""
        steps = np.floor((np.arange(positions, dtype=np.float64) + self.offset) / self.every)
        found: np.ndarray = (1 + self.by * logarithm(1 + steps)).astype(np.float32)
        return found


def tuning_of(attention: Any, config: Any) -> Tuning | None:
    """Return the tuning of a transformers module in a model with that configuration; None for none."""
    if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:  # Llama 4's
        return Tuning(float(attention.floor_scale), float(attention.attn_scale), 1)
    if type(attention).__name__ in ("Ministral3Attention", "Mistral4Attention"):
        settings = config.rope_parameters
        return Tuning(float(settings["original_max_position_embeddings"]), float(settings["llama_4_scaling_beta"]), 0)
    return None
