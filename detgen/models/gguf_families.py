"""Families whose GGUF files are read by what is stated here, by llama.cpp's names of architectures.

Of the others, transformers says what a file means.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from detgen.models.gguf_configs import Said, gemma4, gpt_oss
from detgen.models.gguf_header import Header

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class GgufFamily(NamedTuple):
    """How files of a family are read.

    Attributes:
        make: makes the configuration.
        like: the family by whose ways transformers changes tensors: "llama" has rows of queries and keys in turns;
            "" for none.
    """

    make: Callable[[Said, Header, Path], PreTrainedConfig]
    like: str = ""


GGUF_FAMILIES = {
    "gpt-oss": GgufFamily(gpt_oss),
    "gemma4": GgufFamily(gemma4),
}


def config_of(header: Header, path: Path) -> PreTrainedConfig | None:
    """The configuration of a file; None if that is for transformers.

    Raises:
        ValueError: names what is missing or not understood.
    """
    family = GGUF_FAMILIES.get(header.architecture)
    if family is None:
        return None
    settings = Said(header)
    config = family.make(settings, header, path)
    settings.end()
    return config
