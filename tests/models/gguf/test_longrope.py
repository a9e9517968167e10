"""GGUF files of families that LongRoPE may stretch: the bits of their folders, their spaces, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf
from helpers.examples import usual
from helpers.families import LATENT
from helpers.gguf_files import check_same, loaded, plain_tokenizer, written
from helpers.gguf_models import Model, check_kept, check_stored, made_of, tensors_of, told
from helpers.small_models import STORED

from detgen.errors import EngineError
from detgen.models.gguf.header import read_header
from detgen.models.gguf.models import settings

SIZES: dict[str, Any] = {**STORED, "num_hidden_layers": 3}
SHORT, LONG = [1.1] * 4 + [1.5] * 4, [4.0] * 8
STRETCHED: dict[str, Any] = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128},
    **{"short_factor": SHORT, "long_factor": LONG},
}
PART: dict[str, Any] = STRETCHED | {"short_factor": SHORT[1:7], "long_factor": LONG[:6], "partial_rotary_factor": 0.75}
AMPLITUDES = {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}
USUAL = math.sqrt(1 + math.log(2) / math.log(128))
WHOLE = STRETCHED | {"original_max_position_embeddings": 256}
SCALED = {"embedding_multiplier": 12.0, "residual_multiplier": 0.8, "attention_multiplier": 0.25, "logits_scaling": 4.0}
LEFT: dict[str, Any] = {"vocab_size": None}
PHI = LEFT | {"rope.dimension_count": 16, "attention.sliding_window": 0}
LATENT_SAID = LEFT | {
    "attention.key_length": LATENT["qk_nope_head_dim"] + LATENT["qk_rope_head_dim"],
    "attention.value_length": None,
    "rope.dimension_count": LATENT["qk_rope_head_dim"],
    "rope.freq_base": None,
}


def factors(short: list[float], long: list[float]) -> dict[str, np.ndarray]:
    both = {"short": short, "long": long}
    return {f"rope_factors_{reach}.weight": np.array(numbers, np.float32) for reach, numbers in both.items()}


MODELS = {
    "phi2": Model(
        "phi2",
        lambda: hf.PhiConfig(
            **{**SIZES, "intermediate_size": 4 * SIZES["hidden_size"]},
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4},
        ),
        LEFT | {"rope.dimension_count": 6, "rope.freq_base": None},
    ),
    "phi3": Model(
        "phi3",
        lambda: hf.Phi3Config(**SIZES, sliding_window=40),
        PHI | {"attention.sliding_window": 40, "rope.scaling.original_context_length": 4096},
    ),
    "phi3_long": Model(
        "phi3",
        lambda: hf.Phi3Config(**SIZES, original_max_position_embeddings=128, rope_parameters=dict(STRETCHED)),
        PHI | {"rope.scaling.attn_factor": USUAL},
        more=factors(SHORT, LONG),
    ),
    "phi4_mini": Model(
        "phi3",
        lambda: hf.Phi3Config(
            **{**SIZES, "tie_word_embeddings": True, "original_max_position_embeddings": 128},
            rope_parameters={**PART, "attention_factor": 1.3},
        ),
        PHI | {"rope.dimension_count": 12, "rope.scaling.attn_factor": 1.3},
        more=factors(PART["short_factor"], PART["long_factor"]),
    ),
    "phimoe": Model(
        "phimoe",
        lambda: hf.PhimoeConfig(
            **{**SIZES, "num_local_experts": 6, "attention_bias": True, "lm_head_bias": True, "sliding_window": 40},
            rope_parameters=STRETCHED | AMPLITUDES,
        ),
        PHI | {"attention.sliding_window": 40, "rope.scaling.attn_factor": USUAL},
        more=factors(SHORT, LONG),
    ),
    "phimoe_plain": Model("phimoe", lambda: hf.PhimoeConfig(**SIZES, num_local_experts=6), PHI),
    "minicpm": Model("minicpm", lambda: hf.GraniteConfig(**SIZES, **SCALED), {"attention.scale": None}, in_turns=True),
    "minicpm_old": Model(
        "minicpm",
        lambda: hf.GraniteConfig(
            **{**SIZES, **SCALED, "residual_multiplier": 1.4 / math.sqrt(3), "logits_scaling": 64 / 256},
            rope_parameters=WHOLE,
        ),
        dict.fromkeys(
            [f"{part}_scale" for part in ("embedding", "residual", "logit")]
            + ["attention.scale", "rope.scaling.original_context_length"]
        ),
        in_turns=True,
        more=factors(SHORT, LONG),
    ),
    "minicpm3": Model("minicpm3", lambda: hf.MiniCPM3Config(**{**SIZES, **LATENT, "v_head_dim": 16}), LATENT_SAID),
    "minicpm3_long": Model(
        "minicpm3",
        lambda: hf.MiniCPM3Config(
            **{**SIZES, **LATENT, "v_head_dim": 16},
            rope_parameters=WHOLE | {"short_factor": SHORT[:5], "long_factor": LONG[:5]},
        ),
        LATENT_SAID | {"rope.scaling.original_context_length": None, "rope.scaling.type": "longrope"},
        more=factors(SHORT[:5], LONG[:5]),
    ),
}
SOME = ("phi2", "phi3_long", "phi4_mini", "phimoe", "minicpm", "minicpm3_long")


@pytest.fixture(scope="module")
def folders(random_model: Callable[..., Path]) -> Callable[[str], Path]:
    return cache(lambda name: plain_tokenizer(random_model(MODELS[name].config())))


@pytest.mark.parametrize("name", usual(SOME, MODELS))
def test_float32_gives_the_bits_of_the_folder(name: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    check_same(made_of(MODELS[name], folders(name), tmp_path / "model.gguf"), folders(name))


@pytest.mark.parametrize("name", usual(["phi3_long", "phimoe"], MODELS))
def test_the_second_start_gives_the_same(
    name: str, folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check_kept(made_of(MODELS[name], folders(name), tmp_path / "model.gguf"))


@pytest.mark.parametrize("name", usual(["phi4_mini"], MODELS))
def test_stored_weights_stand_for_their_numbers(name: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    check_stored(MODELS[name], folders(name), tmp_path, ("Q8_0", "Q5_1", "BF16"))


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
    path = made_of(MODELS[name], folders(name), tmp_path / "model.gguf", others, more)
    with pytest.raises(EngineError, match=f"(?s)^cannot load the model model.gguf: .*{said}"):
        loaded(path)
