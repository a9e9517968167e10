"""What rows see is asked of transformers: masks are recognized or refused; windows and chunks are the model's own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from helpers import windowed
from helpers.small_models import SIZES, made
from transformers import masking_utils as own

from detgen import EngineError
from detgen.kernels.input_batch import Window
from detgen.models.attaching import attach
from detgen.models.masks import Mask, Seen, UnknownMaskError
from detgen.program.arrays import same_bits

CPU = torch.device("cpu")
CONFIG = hf.LlamaConfig(**SIZES, rope_theta=1e4)
EXPERTS = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
CHUNKS = own.chunked_causal_mask_function(100, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("function", "seen"),
    [
        (own.causal_mask_function, Seen()),
        (own.sliding_window_causal_mask_function(1), Seen(window=1)),
        (own.sliding_window_causal_mask_function(24), Seen(window=24)),
        (own.sliding_window_causal_mask_function(97), Seen(window=97)),
        (own.sliding_window_causal_mask_function(10_000), Seen()),  # beyond all numbers of the configuration
        (CHUNKS, Seen(chunk=100)),
    ],
)
def test_recognized(function: Any, seen: Seen) -> None:
    assert Mask(function, CPU).seen(4, CONFIG) == seen


@pytest.mark.parametrize(
    "function",
    [
        own.bidirectional_mask_function,
        own.and_masks(CHUNKS, own.sliding_window_overlay(24)),
        own.or_masks(own.sliding_window_causal_mask_function(24), lambda b, h, q, k: (k < 4) & (k <= q)),
        own.or_masks(own.causal_mask_function, lambda b, h, q, k: k == 512),
        lambda b, h, q, k: (k <= q) & ((h == 0) | (k > q - 24)),
        lambda b, h, q, k: (k <= q) & ((q < 500) | (k > q - 24)),
        lambda b, h, q, k: k <= q if q > 3 else k < 0,
        own.padding_mask_function(torch.ones(1, 4)),
    ],
)
def test_others_are_refused(function: Any) -> None:
    with pytest.raises(UnknownMaskError, match="mask"):
        Mask(function, CPU).seen(4, CONFIG)


def test_a_model_may_only_hand_it_on() -> None:
    mask: Any = Mask(own.causal_mask_function, CPU)
    for use in (lambda: mask.shape, lambda: mask[:, :2], lambda: torch.ones(2) + mask, lambda: torch.where(mask, 1, 0)):
        with pytest.raises(UnknownMaskError, match="it computes with the mask"):
            use()


@pytest.mark.parametrize(
    ("config", "window", "chunk"),
    [
        (hf.LlamaConfig(**SIZES), [None, None], [None, None]),
        (
            hf.Qwen2MoeConfig(**EXPERTS, use_sliding_window=True, sliding_window=24, max_window_layers=1),
            [24, None],
            None,
        ),
        (hf.OlmoeConfig(**EXPERTS, sliding_window=24), None, None),  # transformers ignores it
        (hf.PhimoeConfig(**SIZES, sliding_window=24), [24, 24], None),
        (
            hf.Llama4TextConfig(**SIZES, attention_chunk_size=24, moe_layers=[], no_rope_layers=[1, 0]),
            None,
            [24, None],
        ),
    ],
)
def test_of_each_layer(config: Any, window: Any, chunk: Any) -> None:
    """Not what the configuration says, nor what an attention function is handed over, but what the masks hide."""
    traits = attach(made(config), "it").traits
    assert [t.window for t in traits] == (window or [None, None])
    assert [t.chunk for t in traits] == (chunk or [None, None])


def compare(kind: str, window: int) -> str:
    """What differs between a model's own logits and those of packed passes, at prompts of 24 to 640 tokens; "" if none.

    A refusal that names the model, or the operator that mixes its rows, is fine, too.
    """
    made = windowed.model(kind, window)
    words = [random.Random(1).randrange(3, windowed.VOCABULARY) for _ in range(640)]
    lengths = (24, window + 1, 2 * window + 1, 640)
    wanted = [windowed.own(made, words[:n]) for n in lengths]
    try:
        passes = windowed.prepared(made)
    except EngineError as e:
        named = "not supported: " in str(e) and type(made).__name__.split("For")[0] in str(e)
        return "" if named or "not row-invariant by its own forward: aten." in str(e) else str(e)
    for n, want in zip(lengths, wanted, strict=True):
        off = abs(windowed.packed(passes, words[:n]) - want).max(-1) / abs(want).max()
        if not off.max() <= 2e-5:
            return f"{n} tokens differ by {float(off.max())}, from {np.flatnonzero(off > 2e-5)[0]} on"
    return ""


@pytest.mark.parametrize(("kind", "window"), [("llama4_text", 100), ("qwen2_moe", 24), ("phimoe", 24), ("doge", 24)])
def test_logits_are_the_models_own(kind: str, window: int) -> None:
    assert kind in windowed.families()
    assert not compare(kind, window)


@pytest.mark.parametrize("kind", ["llama4_text", "qwen2_moe"])
def test_a_row_is_the_same_alone_and_among_others(kind: str) -> None:
    """Bit for bit, on both sides of the bounds of chunks and windows of 24."""
    passes = windowed.prepared(windowed.model(kind, 24))
    forward = passes.runners[0]
    forward.cache.pages.lay_out(2, 128)
    words = [random.Random(2).randrange(3, windowed.VOCABULARY) for _ in range(80)]
    alone = np.concatenate([forward.run([Window(0, at, [word], 1)]) for at, word in enumerate(words)])
    for first in (1, 24, 47, 60):
        pieces = [(0, first), (first, 80)]
        found = [forward.run([Window(0, 0, words[::-1], 1), Window(1, a, words[a:b], b - a)]) for a, b in pieces]
        assert same_bits(np.concatenate([logits[1:] for logits in found]), alone)


@pytest.mark.slow
@pytest.mark.parametrize("window", [24, 100])
def test_all_families(window: int) -> None:
    """Every family of transformers whose file makes masks with windows or chunks: as its own forward, or refused."""
    kinds = windowed.families()
    assert len(kinds) > 40
    found = {kind: compare(kind, window) for kind in kinds}
    assert not {kind: what for kind, what in found.items() if what}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_state_beside_the_cache_is_refused(dtype: torch.dtype) -> None:
    """Falcon-H1's in its own forward, where rounding to 16 bits would hide how small it is."""
    settings = {**SIZES, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
    model = hf.AutoModelForCausalLM.from_config(hf.FalconH1Config(**settings, mamba_n_groups=1, head_dim=16))
    with pytest.raises(EngineError, match=r"FalconH1ForCausalLM.*not supported.*a state of what it has read"):
        attach(model.to(dtype).eval(), "it")


def test_a_state_that_shows_in_keys_alone_is_refused() -> None:
    with pytest.raises(EngineError, match=r"ZayaForCausalLM.*not supported.*a state of what it has read"):
        windowed.prepared(windowed.model("zaya", 24))
