"""Families whose GGUF files are read as stated here, by llama.cpp's names of architectures.

For other families, transformers interprets a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from detgen.models.gguf import dense as dense
from detgen.models.gguf import longrope as longrope
from detgen.models.gguf import mambas as mambas
from detgen.models.gguf import mixtures as mixtures
from detgen.models.gguf import nets as nets
from detgen.models.gguf import older as older
from detgen.models.gguf import routed as routed
from detgen.models.gguf import scans as scans
from detgen.models.gguf import texts as texts
from detgen.models.gguf.changes import Change
from detgen.models.gguf.configs import Said, gemma3n, gemma4, gpt_oss
from detgen.models.gguf.header import Header

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class GgufFamily(NamedTuple):
    """How files of a family are read.

    Attributes:
        make: makes the configuration.
        like: family as which transformers changes tensors: "llama" has interleaved rows of queries and keys; "" for
            none.
        names: parameter of a layer, and its part or None, by names of tensors that the tables lack or have differently.
        changes: returns the changes of tensors for a configuration, by names as in `names`; a parameter with parts has
            its own name there.
        tokenized: whether transformers makes even a byte-level tokenizer; it makes all others.
        tables: architecture whose tables of tensor names apply, if the gguf package has none for this one.
    """

    make: Callable[[Said, Header, Path], PreTrainedConfig]
    like: str = ""
    names: Mapping[str, tuple[str, int | None]] = MappingProxyType({})
    changes: Callable[[Any], Mapping[str, Change]] = lambda _: {}
    tokenized: bool = False
    tables: str = ""


GGUF_FAMILIES = {
    "gpt-oss": GgufFamily(gpt_oss, tokenized=True),
    "gemma3n": GgufFamily(gemma3n, tokenized=True),
    "gemma4": GgufFamily(gemma4, tokenized=True),
    "falcon": GgufFamily(older.falcon, changes=older.by_heads),
    "bloom": GgufFamily(older.bloom, changes=older.by_heads),
    "mpt": GgufFamily(older.mpt),
    "gptneox": GgufFamily(older.gptneox, changes=older.by_heads),
    "starcoder": GgufFamily(older.starcoder),
    "exaone": GgufFamily(older.exaone, tables="llama"),
    "phi2": GgufFamily(longrope.phi2),
    "phi3": GgufFamily(longrope.phi3),
    "phimoe": GgufFamily(longrope.phimoe),
    "minicpm": GgufFamily(longrope.minicpm, "llama"),
    "minicpm3": GgufFamily(longrope.minicpm3),
    "gemma": GgufFamily(dense.gemma, "gemma2", tokenized=True),
    "granite": GgufFamily(dense.granite, "llama"),
    "smollm3": GgufFamily(dense.smollm3, "llama"),
    "olmo": GgufFamily(dense.olmo, "llama"),
    "olmo2": GgufFamily(dense.olmo2),
    "chatglm": GgufFamily(dense.glm),
    "glm4": GgufFamily(dense.glm4),
    "mistral3": GgufFamily(dense.mistral3, "llama"),
    "ernie4_5": GgufFamily(dense.ernie),
    "command-r": GgufFamily(dense.cohere),
    "jais2": GgufFamily(dense.jais2),
    "qwen2vl": GgufFamily(texts.qwen2vl),
    "qwen3vl": GgufFamily(texts.qwen3vl),
    "cohere2": GgufFamily(dense.cohere2),
    "exaone4": GgufFamily(dense.exaone4),
    "seed_oss": GgufFamily(dense.seed_oss),
    "arcee": GgufFamily(dense.arcee, "llama"),
    "hunyuan-dense": GgufFamily(dense.hunyuan),
    "granitemoe": GgufFamily(mixtures.granitemoe, "llama", mixtures.GRANITE_NAMES),
    "glm4moe": GgufFamily(routed.glm4moe, names=routed.CORRECTED),
    "deepseek2": GgufFamily(routed.deepseek2, names=routed.CORRECTED | routed.LATENT),
    "mistral4": GgufFamily(routed.mistral4, names=routed.LATENT),
    "dots1": GgufFamily(routed.dots1, names=routed.CORRECTED),
    "hunyuan-moe": GgufFamily(mixtures.hunyuan_moe),
    "llama4": GgufFamily(mixtures.llama4),
    "olmoe": GgufFamily(mixtures.olmoe),
    "qwen3vlmoe": GgufFamily(texts.qwen3vlmoe),
    "ernie4_5-moe": GgufFamily(mixtures.ernie_moe, names=mixtures.ERNIE_NAMES, changes=mixtures.corrections),
    "minimax-m2": GgufFamily(mixtures.minimax_m2, names=mixtures.MINIMAX_NAMES),
    "afmoe": GgufFamily(routed.afmoe, names=routed.AFMOE_NAMES),
    "exaone-moe": GgufFamily(routed.exaone_moe, names=routed.CORRECTED),
    "hy_v3": GgufFamily(routed.hy_v3, names=routed.HY_NAMES, tables="dots1"),
    "mellum": GgufFamily(mixtures.mellum, tables="qwen3moe"),
    "cohere2moe": GgufFamily(routed.cohere2_moe, tables="deepseek2"),
    "qwen35": GgufFamily(nets.qwen35, names=nets.DELTA_NAMES, changes=nets.tiled_nets),
    "qwen35moe": GgufFamily(nets.qwen35moe, names=nets.DELTA_NAMES, changes=nets.tiled_nets),
    "qwen3next": GgufFamily(nets.qwen3next, names=nets.DELTA_NAMES | nets.JOINED_NAMES, changes=nets.nets),
    "lfm2moe": GgufFamily(nets.lfm2moe, names=nets.CONVOLUTION_NAMES, changes=nets.convolutions),
    "granitehybrid": GgufFamily(mambas.granitehybrid, "llama", mambas.GRANITE_NAMES, mambas.mixers),
    "falcon-h1": GgufFamily(mambas.falcon_h1, names=mambas.FALCON_NAMES, changes=mambas.mixers),
    "nemotron_h": GgufFamily(mambas.nemotron_h, "llama", mambas.NEMOTRON_NAMES, mambas.mixers),
    "nemotron_h_moe": GgufFamily(mambas.nemotron_h, "llama", mambas.NEMOTRON_NAMES, mambas.mixers),
    "mamba2": GgufFamily(mambas.mamba2, names=mambas.MAMBA_2_NAMES, changes=mambas.mixers),
    "mamba": GgufFamily(scans.mamba, changes=scans.scans),
    "jamba": GgufFamily(scans.jamba, changes=scans.scans),
}


def config_of(header: Header, path: Path) -> PreTrainedConfig | None:
    """Return the configuration of a file; None if transformers has to make it.

    Raises:
        ValueError: if a setting is missing or not understood; the message names it.
    """
    family = GGUF_FAMILIES.get(header.architecture)
    if family is None:
        return None
    settings = Said(header)
    config = family.make(settings, header, path)
    settings.end()
    return config
