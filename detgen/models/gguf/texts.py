"""Configurations of the text models of families with images, from GGUF files, which have no image encoders.

See `detgen/models/gguf/dense.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from detgen.models.gguf.configs import Said
from detgen.models.gguf.dense import usual
from detgen.models.gguf.header import Header

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _take_images(of: Said) -> None:
    """Accept the settings of images: for text, positions are single numbers."""
    of.take("rope.dimension_sections", tuple)
    of.take("n_deepstack_layers", int, 0)  # layers that also receive images


def qwen2vl(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of the text model of Qwen2-VL and Qwen2.5-VL."""
    from transformers import Qwen2Config

    _take_images(of)
    return Qwen2Config(**usual(of, header, sized=False))


def qwen3vl(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of the text model of Qwen3-VL."""
    from transformers import Qwen3Config

    _take_images(of)
    return Qwen3Config(**usual(of, header))


def qwen3vlmoe(of: Said, header: Header, _: Path) -> PreTrainedConfig:
    """Return the configuration of the text model of Qwen3-VL with experts."""
    from transformers import Qwen3MoeConfig

    _take_images(of)
    return Qwen3MoeConfig(
        **usual(of, header),
        num_experts=of.take("expert_count", int),
        num_experts_per_tok=of.take("expert_used_count", int),
        moe_intermediate_size=of.take("expert_feed_forward_length", int),
        norm_topk_prob=True,
    )
