"""GGUF files of families that LongRoPE may stretch: their spaces, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gguf_alike import MODELS, made
from helpers.gguf_files import check_refused, written
from helpers.gguf_longrope import LONG, SHORT, factors
from helpers.gguf_models import tensors_of, told

from detgen.models.gguf.header import read_header
from detgen.models.gguf.models import settings

PIECES = ["\u2581", "d", "e", "f", "de", "def", "\u2581def", "\n", "\u2581\u2581"]


@pytest.mark.parametrize(
    ("name", "prefixed", "pieces"),
    [
        ("phimoe", None, ["\u2581", "\u2581def", "\u2581def"]),
        ("minicpm3", True, ["\u2581", "\u2581def", "\u2581def"]),
        ("minicpm3", False, ["\u2581def", "\u2581def"]),
    ],
)
def test_spaces_before_texts(
    name: str, prefixed: bool | None, pieces: list[str], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """One is put there, also before another one, unless a file says otherwise."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]

    def write(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([*tokens, *(f"[PAD{i}]" for i in range(len(tokens), 4096))])
        writer.add_token_scores([-float(i) for i in range(4096)])
        writer.add_token_types([2, 3, 3, *([6] * 256), *([1] * len(PIECES)), *([5] * (4096 - len(tokens)))])
        for i, kind in enumerate(("unk", "bos", "eos")):
            getattr(writer, f"add_{kind}_token_id")(i)
        writer.add_add_bos_token(False)
        if prefixed is not None:
            writer.add_add_space_prefix(prefixed)

    model = MODELS[name]
    there = [*tensors_of(folders(name), model), *model.more.items()]
    path = written(tmp_path / "model.gguf", model.kind, told(model), there, write)
    _, tokenizer = settings(path, read_header(path, "x"))
    ids = tokenizer(" def def").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode(ids) == " def def"


@pytest.mark.parametrize(
    ("name", "others", "more", "said"),
    [
        ("phi2", {"rope.dimension_count": 17}, {}, r"rope\.dimension_count = 17 is not understood"),
        ("phi3", {"rope.scaling.attn_factor": 1.1}, {}, r"attn_factor = .* is not understood"),
        ("phi3_long", {"rope.scaling.type": "linear"}, {}, r"rope\.scaling\.type = linear is not understood"),
        ("phi3_long", {}, {"rope_factors_short.weight": None}, r"weights are missing: rope_factors_short\.weight"),
        ("phi3_long", {}, {"rope_factors_long.weight": None}, r"attn_factor = .* is not understood"),
        ("phi3_long", {}, {"rope_factors_long.weight": np.ones(9, "f4")}, r"9 of long_factor for 8 frequencies"),
        ("phimoe", {"rope.scaling.attn_factor": 1.3}, {}, r"attn_factor = 1\.3 is not understood"),
        ("minicpm3", {"attention.head_count_kv": 2}, {}, r"head_count_kv = 2 is not understood"),
        ("minicpm3", {}, factors(SHORT, LONG), r"8 of short_factor for 5 frequencies"),
        ("minicpm", {"rope.scaling.type": "longrope"}, {}, r"rope\.scaling\.type = longrope is not understood"),
    ],
)
def test_what_is_refused(
    name: str, others: dict[str, Any], more: dict[str, Any], said: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    check_refused(made(name, folders(name), tmp_path / "model.gguf", others, more), said)
