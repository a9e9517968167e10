"""GGUF files of families whose layers are alike: the bits of their folders, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf
from helpers.examples import usual
from helpers.families import LATENT, MULTIPLIED
from helpers.gguf_files import bits_of, check_same, loaded, plain_tokenizer, write_vocabulary, written
from helpers.gguf_models import Model, check_kept, check_stored, made_of, tensors_of, told
from helpers.small_models import STORED
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from detgen.engine import Engine
from detgen.errors import EngineError
from detgen.models.byte_letters import byte_letters
from detgen.models.gguf.families import config_of
from detgen.models.gguf.header import read_header
from detgen.models.gguf.models import settings
from detgen.models.gguf.tokenizer import own_tokenizer
from detgen.models.known import known
from detgen.models.loading import load_model
from detgen.program.arrays import same_bits
from detgen.program.steps import HeadLinear
from detgen.program.storage import Storage

MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
SIZES: dict[str, Any] = {**STORED, "num_hidden_layers": 3}
FOUR: dict[str, Any] = {**SIZES, "num_hidden_layers": 4}
YARN: dict[str, Any] = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32},
    **{"beta_fast": 16.0, "beta_slow": 0.5},
}
SCALED = {"mscale": 0.707, "mscale_all_dim": 0.707}
ROUTED: dict[str, Any] = {
    **{**SIZES, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "routed_scaling_factor": 2.4, "n_group": 3, "topk_group": 2},
}


def latent(keys: int, multiplier: float | None = None) -> dict[str, Any]:
    """Settings of DeepSeek's heads, of which a file makes one; and YaRN's multiplier."""
    kept, turned = LATENT["kv_lora_rank"], LATENT["qk_rope_head_dim"]
    return {
        **{"attention.head_count_kv": 1, "attention.key_length": kept + turned, "attention.value_length": kept},
        **{"attention.key_length_mla": keys, "attention.value_length_mla": LATENT["v_head_dim"]},
        **{"rope.dimension_count": turned, "rope.scaling.yarn_log_multiplier": multiplier},
    }


LATENT_KEYS = LATENT["qk_nope_head_dim"] + LATENT["qk_rope_head_dim"]
PATTERN = {"attention.sliding_window_pattern": [kind == MIXED[0] for kind in MIXED]}
MODELS = {
    "granite": Model("granite", lambda: hf.GraniteConfig(**SIZES, **MULTIPLIED, attention_bias=True), in_turns=True),
    "granitemoe": Model(
        "granitemoe",
        lambda: hf.GraniteMoeConfig(**SIZES, **MULTIPLIED, num_local_experts=6, num_experts_per_tok=3),
        in_turns=True,
    ),
    "granitemoeshared": Model(
        "granitemoe",
        lambda: hf.GraniteMoeSharedConfig(
            **{**SIZES, **MULTIPLIED, "tie_word_embeddings": True, "shared_intermediate_size": 64},
            **{"num_local_experts": 6, "num_experts_per_tok": 3},
        ),
        in_turns=True,
    ),
    "smollm3": Model(
        "smollm3",
        lambda: hf.SmolLM3Config(**FOUR, mlp_bias=True, rope_parameters=YARN),
        {"rope.scaling.type": "yarn", "attention.sliding_window": None},
        in_turns=True,
    ),
    "olmo": Model("olmo", lambda: hf.OlmoConfig(**SIZES), {"attention.layer_norm_epsilon": 1e-5}, in_turns=True),
    "olmo_clamped": Model(
        "olmo",
        lambda: hf.OlmoConfig(**SIZES, clip_qkv=0.75),
        {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 0.75},
        in_turns=True,
    ),
    "olmo2": Model("olmo2", lambda: hf.Olmo2Config(**SIZES)),
    "olmo3": Model(
        "olmo2",
        lambda: hf.Olmo3Config(
            **{**SIZES, "sliding_window": 20, "layer_types": MIXED},
            rope_parameters={
                "full_attention": {**YARN, "attention_factor": 1.1},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        ),
        {**PATTERN, "rope.scaling.type": "yarn", "rope.scaling.yarn_attn_factor": 1.1, "rope.freq_base_swa": 500.0},
    ),
    "gemma3n": Model(
        "gemma3n",
        lambda: hf.Gemma3nTextConfig(
            **FOUR
            | {"head_dim": 18, "sliding_window": 20, "num_kv_shared_layers": 1, "laurel_rank": 12}
            | {"layer_types": [*MIXED, "full_attention"], "intermediate_size": [96, 64, 96, 96]},
            **{"hidden_size_per_layer_input": 14, "vocab_size_per_layer_input": 4096, "altup_num_inputs": 3},
            **{"altup_active_idx": 1, "activation_sparsity_pattern": [0.95, 0.6, 0.0, 0.0]},
            final_logit_softcapping=30.0,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        ),
        {
            **{"attention.sliding_window_pattern": [True, False, True, False], "rope.freq_base_swa": 500.0},
            **{"activation_sparsity_scale": [1.6448536, 0.25334710, -math.inf, -math.inf]},
            **{"altup.active_idx": 1, "altup.num_inputs": 3, "attention.shared_kv_layers": 1},
            **{"embedding_length_per_layer_input": 14, "final_logit_softcapping": 30.0},
        },
    ),
    "glm4": Model(
        "glm4",
        lambda: hf.Glm4Config(
            **{**SIZES, "head_dim": 20, "attention_bias": True},
            rope_parameters={"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.7},
        ),
        {"rope.dimension_count": 14},
    ),
    "glm4moe": Model(
        "glm4moe",
        lambda: hf.Glm4MoeConfig(**ROUTED, head_dim=20, use_qk_norm=True),
        {"rope.dimension_count": 10, "nextn_predict_layers": 1, "block_count": 4, "expert_gating_func": 2},
    ),
    "deepseek_v2": Model(
        "deepseek2",
        lambda: hf.DeepseekV2Config(
            **{**ROUTED, **LATENT, "topk_method": "group_limited_greedy"},
            rope_parameters=YARN | SCALED,
        ),
        {**latent(LATENT_KEYS, 0.0707), "rope.scaling.type": "yarn", "expert_gating_func": 1},
    ),
    "deepseek_v3": Model(
        "deepseek2",
        lambda: hf.DeepseekV3Config(**{**ROUTED, **LATENT, "q_lora_rank": None, "attention_bias": True}),
        {**latent(LATENT_KEYS), "expert_gating_func": 2},
    ),
    "ministral3": Model(
        "mistral3",
        lambda: hf.Ministral3Config(
            **{**SIZES, "head_dim": 18},
            rope_parameters=YARN | {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        {"rope.scaling.type": "yarn", "rope.scaling.yarn_log_multiplier": 1.0},
        in_turns=True,
    ),
    "mistral_small": Model(
        "mistral3", lambda: hf.MistralConfig(**SIZES, head_dim=18, sliding_window=None), in_turns=True
    ),
    "cohere2": Model("cohere2", lambda: hf.Cohere2Config(**FOUR, sliding_window=20, logit_scale=0.3)),
    "exaone4": Model(
        "exaone4", lambda: hf.Exaone4Config(**SIZES, head_dim=18, sliding_window=20, layer_types=MIXED), PATTERN
    ),
    "exaone4_full": Model(
        "exaone4",
        lambda: hf.Exaone4Config(
            **SIZES, head_dim=18, sliding_window=None, layer_types=["full_attention"] * 3, tie_word_embeddings=True
        ),
    ),
    "seed_oss": Model("seed_oss", lambda: hf.SeedOssConfig(**SIZES, head_dim=18, attention_out_bias=True)),
    "ernie4_5": Model("ernie4_5", lambda: hf.Ernie4_5Config(**SIZES, head_dim=18, use_bias=True)),
    "ernie4_5_moe": Model(
        "ernie4_5-moe",
        lambda: hf.Ernie4_5_MoeConfig(
            **{**FOUR, "moe_num_experts": 6, "moe_k": 3, "moe_num_shared_experts": 2, "moe_intermediate_size": 32},
            **{"moe_layer_start_index": 1, "moe_layer_interval": 2},
        ),
        {"expert_shared_feed_forward_length": 48},
    ),
    "command-r": Model(
        "command-r",
        lambda: hf.CohereConfig(**SIZES, logit_scale=0.3, use_qk_norm=True),
        {"rope.scaling.type": "none"},
    ),
    "jais2": Model("jais2", lambda: hf.Jais2Config(**SIZES, head_dim=18), {"rope.dimension_count": 18}),
    "glm": Model(
        "chatglm", lambda: hf.GlmConfig(**SIZES, head_dim=20), {"rope.dimension_count": 10, "vocab_size": None}
    ),
    "qwen2vl": Model("qwen2vl", lambda: hf.Qwen2Config(**SIZES), {"rope.dimension_sections": [2, 3, 3, 0]}),
    "qwen3vl": Model(
        "qwen3vl",
        lambda: hf.Qwen3Config(**SIZES, head_dim=18),
        {"rope.dimension_sections": [3, 3, 3, 0], "n_deepstack_layers": 3},
    ),
    "qwen3vlmoe": Model(
        "qwen3vlmoe",
        lambda: hf.Qwen3MoeConfig(
            **{**SIZES, "head_dim": 18, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
            norm_topk_prob=True,
        ),
        {"rope.dimension_sections": [3, 3, 3, 0], "n_deepstack_layers": 3, "expert_weights_norm": None},
    ),
    "solar_open": Model(
        "glm4moe",
        lambda: hf.SolarOpenConfig(**ROUTED | {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}, head_dim=18),
        {"rope.dimension_count": 18, "expert_gating_func": 2},
    ),
    "mistral4": Model(
        "mistral4",
        lambda: hf.Mistral4Config(
            **{**ROUTED, **LATENT},
            rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        ),
        {**latent(LATENT_KEYS, 0.1), "rope.scaling.type": "yarn", "attention.temperature_scale": None},
        fused=True,
    ),
    "minimax_m2": Model(
        "minimax-m2",
        lambda: hf.MiniMaxM2Config(
            **{**SIZES, "head_dim": 20, "num_local_experts": 6, "num_experts_per_tok": 3},
            rope_parameters={"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5},
        ),
        {"rope.dimension_count": 10, "expert_feed_forward_length": 96, "expert_gating_func": 2},
    ),
    "afmoe": Model(
        "afmoe",
        lambda: hf.AfmoeConfig(
            **{**FOUR, "head_dim": 18, "num_experts": 6, "num_shared_experts": 2, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 32, "num_dense_layers": 1, "sliding_window": 20, "route_scale": 2.4},
            mup_enabled=True,
        ),
        {"rope.dimension_count": 18, "expert_weights_norm": True},
    ),
    "exaone_moe": Model(
        "exaone-moe",
        lambda: hf.ExaoneMoeConfig(
            **{**ROUTED, "head_dim": 18, "num_experts": 6, "num_shared_experts": 2, "norm_topk_prob": True},
            **{"sliding_window": 20, "layer_types": MIXED},
        ),
        {
            **{**PATTERN, "expert_gating_func": 2, "expert_shared_feed_forward_length": 64},
            **{"nextn_predict_layers": 0, "rope.scaling.type": "none", "expert_shared_count": 2},
        },
    ),
    "hy_v3": Model(
        "hy_v3",
        lambda: hf.HYV3Config(
            **{**FOUR, "head_dim": 18, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
            **{"num_shared_experts": 2, "router_scaling_factor": 2.5},
        ),
        {
            **{"expert_shared_feed_forward_length": 64, "expert_weights_norm": True, "expert_gating_func": 2},
            **{"expert_shared_count": None, "nextn_predict_layers": 1, "block_count": 5},
        },
        tables="dots1",
    ),
    "mellum": Model(
        "mellum",
        lambda: hf.MellumConfig(
            **{**SIZES, "head_dim": 18, "num_local_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
            **{"sliding_window": 20, "layer_types": MIXED},
            rope_parameters={
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        ),
        {**PATTERN, "rope.scaling.type": "yarn", "rope.freq_base_swa": 500.0, "expert_weights_norm": None},
        tables="qwen3moe",
    ),
    "cohere2_moe": Model(
        "cohere2moe",
        lambda: hf.Cohere2MoeConfig(
            **{**SIZES, "head_dim": 18, "sliding_window": 20, "layer_types": MIXED, "logit_scale": 0.3},
            **{"num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 2, "norm_topk_prob": False},
            **{"expert_selection_fn": "sigmoid", "prefix_dense_intermediate_size": 72},
            mlp_layer_types=["dense", "sparse", "sparse"],
        ),
        {
            **{**PATTERN, "expert_gating_func": 2, "feed_forward_length": 72, "expert_feed_forward_length": 96},
            **{"expert_shared_feed_forward_length": 192, "leading_dense_block_count": 1, "rope.scaling.type": "none"},
        },
        tables="deepseek2",
    ),
    "arcee": Model("arcee", lambda: hf.ArceeConfig(**SIZES, head_dim=18, mlp_bias=True), in_turns=True),
    "dots1": Model(
        "dots1",
        lambda: hf.Dots1Config(**ROUTED, head_dim=18, norm_topk_prob=True),
        {"attention.sliding_window": None},
    ),
    "hunyuan": Model(
        "hunyuan-dense",
        lambda: hf.HunYuanDenseV1Config(
            **{**SIZES, "head_dim": 18},
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
        ),
        {"rope.freq_base": 1e4 * 50 ** (18 / 16), "rope.scaling.type": "none"},
    ),
    "hunyuan_moe": Model(
        "hunyuan-moe",
        lambda: hf.HunYuanMoEV1Config(**SIZES, head_dim=18, num_experts=6, moe_topk=3),
        {"expert_feed_forward_length": 96, "expert_shared_feed_forward_length": 96, "expert_shared_count": 1},
    ),
    "llama4": Model(
        "llama4",
        lambda: hf.Llama4TextConfig(
            **{**FOUR, "head_dim": 18, "intermediate_size_mlp": 64, "num_local_experts": 6, "num_experts_per_tok": 2},
            interleave_moe_layer_step=2,
        ),
        {"feed_forward_length": 64, "expert_feed_forward_length": SIZES["intermediate_size"]},
    ),
    "olmoe": Model(
        "olmoe", lambda: hf.OlmoeConfig(**SIZES, num_experts=6, num_experts_per_tok=3), {"expert_weights_norm": None}
    ),
}
SOME = ("gemma3n", "granitemoeshared", "olmo3", "glm4moe", "deepseek_v2", "hunyuan", "llama4")


def made(name: str, *args: Any, **how: Any) -> Path:
    """A GGUF file of a folder of a family; see `made_of`."""
    return made_of(MODELS[name], *args, **how)


@pytest.fixture(scope="module")
def folders(random_model: Callable[..., Path]) -> Callable[[str], Path]:
    return cache(lambda name: plain_tokenizer(random_model(MODELS[name].config())))


@pytest.mark.parametrize("name", usual(SOME, MODELS))
def test_float32_gives_the_bits_of_the_folder(name: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    check_same(made(name, folders(name), tmp_path / "model.gguf"), folders(name))


@pytest.mark.parametrize("name", usual(["granite", "glm4moe"], MODELS))
def test_the_second_start_gives_the_same(
    name: str, folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept has where parts of a weight lie, orders of rows, and corrections of scores."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check_kept(made(name, folders(name), tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("name", "kinds"),
    usual(
        [("granitemoeshared", ("Q8_0", "Q4_0")), ("deepseek_v3", ("Q8_0",))],
        [(name, ("Q5_1", "BF16", "Q8_0")) for name in MODELS],
    ),
)
def test_stored_weights_stand_for_their_numbers(
    name: str, kinds: tuple[str, ...], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    check_stored(MODELS[name], folders(name), tmp_path, kinds)


def test_heads_of_deepseek_stay_in_few_bits(random_model: Callable[..., Path], tmp_path: Path) -> None:
    """A file has weights of keys as queries take them, so that both stay as they are stored."""
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": None}
    turned = LATENT["qk_rope_head_dim"]
    said = {
        **{"attention.head_count_kv": 1, "attention.key_length": 64 + turned, "attention.value_length": 64},
        **{"attention.key_length_mla": 32 + turned, "attention.value_length_mla": 32},
        **{"rope.dimension_count": turned, "expert_gating_func": 2},
    }
    model = Model("deepseek2", lambda: hf.DeepseekV3Config(**ROUTED | LATENT | sizes, attention_bias=True), said)
    check_stored(model, plain_tokenizer(random_model(model.config())), tmp_path, ("Q8_0",))
    decoder: Any = Engine(target=tmp_path / "False.gguf", drafter="none", kv_memory=8 << 20).canonical.decoder
    of_heads = [step.weight.storage for step in decoder.program().steps if isinstance(step, HeadLinear)]
    assert of_heads == [Storage.BYTE] * 2 * SIZES["num_hidden_layers"]


def in_one(name: str, folder: Path) -> dict[str, np.ndarray | None]:
    """Queries, keys and values in one tensor, as llama.cpp's converter writes them if asked to, and older ones did."""
    tensors, more = dict(tensors_of(folder, MODELS[name])), dict[str, np.ndarray | None]()
    for i in range(MODELS[name].config().num_hidden_layers):
        for kind in ("weight", "bias"):
            parts = [f"blk.{i}.attn_{one}.{kind}" for one in "qkv"]
            if parts[0] in tensors:
                more[f"blk.{i}.attn_qkv.{kind}"] = np.concatenate([tensors[part] for part in parts])
                more |= dict.fromkeys(parts)
    return more


@pytest.mark.parametrize("name", usual(["granite"], ["granite", "ernie4_5", "glm", "qwen3vl", "olmo2"]))
def test_queries_keys_and_values_may_be_one_tensor(
    name: str, folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = folders(name)
    path = made(name, folder, tmp_path / "model.gguf", more=in_one(name, folder))
    check_same(path, folder)
    check_kept(path)
    paths = [tmp_path / f"{kind}.gguf" for kind in ("joined", "apart")]
    for path, more in zip(paths, (in_one(name, folder), {}), strict=True):
        made(name, folder, path, more=more, kind_of=lambda _: "Q8_0")
    joined, apart = map(loaded, paths)
    assert same_bits(bits_of(joined), bits_of(apart))


def test_older_files_of_deepseek_have_all_heads(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """With keys and values in one weight, and sizes of theirs."""
    folder, heads = folders("deepseek_v3"), SIZES["num_attention_heads"]
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    more: dict[str, np.ndarray | None] = {}
    for i in range(SIZES["num_hidden_layers"]):
        more |= {f"blk.{i}.attn_k_b.weight": None, f"blk.{i}.attn_v_b.weight": None}
        more[f"blk.{i}.attn_kv_b.weight"] = state[f"model.layers.{i}.self_attn.kv_b_proj.weight"].numpy()
    others = {
        **{"attention.head_count_kv": heads, "attention.key_length": LATENT_KEYS},
        **{"attention.value_length": LATENT["v_head_dim"], "expert_gating_func": None},
        **{"attention.key_length_mla": None, "attention.value_length_mla": None},
    }
    check_same(made("deepseek_v3", folder, tmp_path / "model.gguf", others, more), folder)


@pytest.mark.parametrize(("experts", "groups"), [(160, (8, 3)), (256, (8, 4)), (64, (1, 1))])
def test_older_files_of_deepseek_say_no_groups(experts: int, groups: tuple[int, int], tmp_path: Path) -> None:
    model = MODELS["deepseek_v2"]
    said = told(model) | {"expert_group_count": None, "expert_group_used_count": None}
    said |= {"expert_count": experts, "block_count": 1}  # of as many layers as there are tensors, at most
    table = [("token_embd.weight", np.zeros((SIZES["vocab_size"], SIZES["hidden_size"]), np.float32))]
    path = written(tmp_path / "model.gguf", model.kind, said, table, lambda _: None)
    config: Any = config_of(read_header(path, "x"), path)
    assert (config.n_group, config.topk_group) == groups


def test_layers_that_foresee_tokens_are_left_out(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Where a file says that it has some; else its tensors are too many."""
    more = {"blk.3.attn_norm.weight": np.ones(64, np.float32), "blk.3.nextn.eh_proj.weight": np.ones((64, 128), "f4")}
    check_same(made("glm4moe", folders("glm4moe"), tmp_path / "model.gguf", more=more), folders("glm4moe"))
    others = {"nextn_predict_layers": None, "block_count": 3}
    path = made("glm4moe", folders("glm4moe"), tmp_path / "other.gguf", others, more)
    with pytest.raises(EngineError, match=r"describe no such weights as blk\.3\.attn_norm"):
        loaded(path)


def test_norms_of_gemma_are_more_by_one(
    random_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In files; of what is kept of one, too."""
    folder = plain_tokenizer(random_model(hf.GemmaConfig(**SIZES, head_dim=18)))
    state = load_file(folder / "model.safetensors")
    norms = {name: (1024 * tensor).round() / 1024 for name, tensor in state.items() if tensor.ndim == 1}
    save_file(state | norms, folder / "model.safetensors", metadata={"format": "pt"})
    model = Model("gemma", lambda: hf.GemmaConfig(**SIZES, head_dim=18))
    tensors = [(name, numbers + (numbers.ndim == 1)) for name, numbers in tensors_of(folder, model)]
    path = written(tmp_path / "model.gguf", "gemma", told(model), tensors, partial(write_vocabulary, folder))
    check_same(path, folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second = (kept_bits(path) for _ in range(2))
    assert (first[0], second[0]) == (False, True)
    assert same_bits(first[1], second[1])


def kept_bits(path: Path) -> tuple[bool, np.ndarray]:
    """Whether a model is made of what is kept of it, and its logits."""
    model = load_model(path, path.name, "auto", "none", role="target")
    return model.own is not None, bits_of(model)


PIECES = {
    "gpt-2": ["Ab", " don", "'t", " 1234", " \u4e2d\u6587\u304b", "\n\n ", " X", "_", "y", " !!", "\n"],
    "refact": ["Ab", " don", "'t", " ", *"1234", " \u4e2d\u6587\u304b", "\n\n ", " X", "_", "y", " !!", "\n"],
    "glm4": ["Ab", " don", "'t", " ", "123", "4", " \u4e2d\u6587\u304b", "\n\n", " ", " X", "_y", " !!\n"],
    "qwen2": ["Ab", " don", "'t", " ", *"1234", " \u4e2d\u6587\u304b", "\n\n", " ", " X", "_y", " !!\n"],
    "tekken": ["Ab", " don", "'t", " ", *"1234", " \u4e2d\u6587\u304b", "\n\n", " ", " X", "_y", " !!\n"],
    "llama4": ["Ab", " don't", " ", "123", "4", " \u4e2d\u6587\u304b", "\n\n", " ", " X", "_y", " !!\n"],
    "seed-coder": ["Ab", " don", "'t", " ", *"1234", " \u4e2d\u6587\u304b", "\n\n", " ", " X", "_y", " !!", "\n"],
    "deepseek-llm": [
        *("Ab", " don", "'", "t", " ", *"1234", " ", "\u4e2d\u6587\u304b"),
        *("\n", "\n", " ", " X", "_", "y", " !!", "\n"),
    ],
    "deepseek-v3": [
        *("Ab", " don", "'t", " ", "123", "4", " ", "\u4e2d\u6587\u304b"),
        *("\n\n", " ", " X", "_y", " !!\n"),
    ],
}


@pytest.mark.parametrize("pre", PIECES)
def test_how_texts_are_split(pre: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    path = made("olmo2", folders("olmo2"), tmp_path / "model.gguf", pre=pre)
    tokenizer = own_tokenizer(read_header(path, "x"), path).backend_tokenizer
    letters = byte_letters()
    found = tokenizer.pre_tokenizer.pre_tokenize_str("Ab don't 1234 \u4e2d\u6587\u304b\n\n  X_y !!\n")
    pieces = [bytes(letters.index(letter) for letter in piece).decode() for piece, _ in found]
    assert pieces == PIECES[pre]


def test_tokens_that_stand_for_themselves(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Stay whole in texts, in whatever letters: those of DeepSeek's chats are written in such."""
    user, tag = "<\uff5cUser\uff5c>", "<a b>"

    def write(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("deepseek-v3")
        tokens = [*byte_letters(), user, tag, "ab"]
        writer.add_token_list([*tokens, *(f"[PAD{i}]" for i in range(len(tokens), 4096))])
        writer.add_token_types([*([1] * 256), 3, 4, 1, *([5] * (4096 - 259))])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(256)
        writer.add_add_bos_token(True)

    model = MODELS["olmo2"]
    path = written(tmp_path / "model.gguf", "olmo2", told(model), tensors_of(folders("olmo2"), model), write)
    tokenizer = own_tokenizer(read_header(path, "x"), path)
    assert tokenizer(f"!{user}{tag}!").input_ids == [256, 33, 256, 257, 33]
    assert tokenizer.decode([33, 256, 257]) == f"!{user}{tag}"
    assert tokenizer.decode([33, 256, 257], skip_special_tokens=True) == f"!{tag}"


@pytest.mark.parametrize("pre", ["viking", "default"])
def test_unknown_splits_are_refused(pre: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    path = made("olmo2", folders("olmo2"), tmp_path / "model.gguf", pre=pre)
    with pytest.raises(EngineError, match=rf"tokenizer\.ggml\.pre = {pre} is not understood"):
        loaded(path)


def test_texts_of_gemma_3n(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Become the tokens of its own tokenizer, which puts no space before them, as Llama's does."""
    named = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>"]
    pieces = ["\u2581", "d", "e", "f", "de", "def", "\u2581def", "\n", "\n\n", "\u2581\u2581"]
    tokens = [*named, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [("d", "e"), ("de", "f"), ("\u2581", "def"), ("\n", "\n"), ("\u2581", "\u2581")]
    own = hf.GemmaTokenizer({token: i for i, token in enumerate(tokens)}, merges)
    own.add_special_tokens({"additional_special_tokens": named[5:]})

    def write(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([*tokens, *(f"<unused{i}>" for i in range(len(tokens), 4096))])
        writer.add_token_scores([0.0] * 4096)
        writer.add_token_types([*([3] * 6), *([6] * 256), *([1] * (4096 - 262))])
        for i, kind in enumerate(("pad", "eos", "bos", "unk")):
            getattr(writer, f"add_{kind}_token_id")(i)

    model = MODELS["gemma3n"]
    path = written(tmp_path / "model.gguf", "gemma3n", told(model), tensors_of(folders("gemma3n"), model), write)
    _, tokenizer = settings(path, read_header(path, "x"))
    for text in ("def  def\n\n", " def<start_of_turn>\ndef", "x\u00e9"):
        ids = own(text, add_special_tokens=False).input_ids
        assert tokenizer(text).input_ids == [2, *ids]


def test_letters_and_marks_of_command_r(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Become single letters, as transformers' own tokenizer of the family has it."""
    path = made("cohere2", folders("cohere2"), tmp_path / "model.gguf", pre="command-r")
    tokenizer = own_tokenizer(read_header(path, "x"), path)
    assert tokenizer("e\u0301 12").input_ids == tokenizer("\u00e9 12").input_ids
    theirs = hf.CohereTokenizer().backend_tokenizer
    for text in ("Ab don't 1234  x\n", "12a 3"):
        own, other = (one.pre_tokenizer.pre_tokenize_str(text) for one in (tokenizer.backend_tokenizer, theirs))
        assert own == other


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3n", "glm4moe"])
def test_keys_of_a_token_are_counted(name: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Of latent attention, layers that see the keys of others, and layers that are left out, as of the folder."""
    path = made(name, folders(name), tmp_path / "model.gguf")
    assert known("x", path).kv == known("x", folders(name)).kv


NORM = np.ones(64, np.float32)


@pytest.mark.parametrize(
    ("name", "others", "more", "said"),
    [
        ("granite", {"attention.scale": None}, {}, r"attention\.scale is missing"),
        ("granite", {"attention.sliding_window": 8}, {}, r"sliding_window = 8 is not understood"),
        ("granite", {"attention.key_length": 24}, {}, r"key_length = 24 is not understood"),
        ("granite", {"rope.dimension_count": 8}, {}, r"rope\.dimension_count = 8 is not understood"),
        ("granite", {"rope.scaling.type": "longrope"}, {}, r"rope\.scaling\.type = longrope is not understood"),
        ("granite", {"rope.scaling.finetuned": False}, {}, r"rope\.scaling\.finetuned = False is not understood"),
        ("granite", {"expert_shared_feed_forward_length": 8}, {}, r"expert_shared_feed_forward_length = 8 is not"),
        ("granite", {}, {"blk.0.attn_qkv.weight": np.ones((129, 64), "f4")}, r"129 rows of queries, keys and values"),
        (
            "granite",
            {},
            {"blk.0.attn_qkv.weight": np.ones((128, 64), "f4")},
            r"no such weights as blk\.0\.attn_q",
        ),
        ("granite", {}, {"blk.0.ffn_norm.weight": None}, r"weights are missing: model\.layers\.0\.post_attention"),
        ("granite", {}, {"blk.0.attn_k_norm.weight": NORM}, r"describe no such weights as blk\.0\.attn_k_norm"),
        ("granitemoeshared", {}, {"blk.0.ffn_up_shexp.weight": None}, r"weights are missing: .*0\.shared_mlp\.input"),
        ("granitemoeshared", {}, {"blk.0.ffn_up_shexp.weight": np.ones((9, 64), "f4")}, r"gate_shexp.* another shape"),
        ("olmo", {"attention.layer_norm_epsilon": 1e-6}, {}, r"layer_norm_epsilon = 1e-06 is not understood"),
        ("olmo3", {"attention.sliding_window_pattern": [True]}, {}, r"sliding_window_pattern = \(True,\) is not"),
        ("olmo3", {"rope.scaling.yarn_ext_factor": 0.5}, {}, r"yarn_ext_factor = 0\.5 is not understood"),
        ("gemma3n", {"activation_sparsity_scale": [1.6, 0.2, 0.1, -9.0]}, {}, r"activation_sparsity_scale = .* is not"),
        ("gemma3n", {}, {"altup_proj.weight": np.ones((1, 64, 64), "f4")}, r"weights are missing: model\.altup_proj"),
        ("gemma3n", {}, {"altup_proj.weight": np.ones((3, 64, 64), "f4")}, r"no such weights as altup_proj\.weight/2"),
        (
            "exaone4",
            {"block_count": 64, "attention.sliding_window": None},
            {f"blk.{i}.attn_norm.weight": np.ones(64, np.float32) for i in range(64)},
            r"attention\.sliding_window is missing",
        ),
        ("glm4", {"rope.dimension_count": 22}, {}, r"rope\.dimension_count = 22 is not understood"),
        ("glm4moe", {"expert_gating_func": 1}, {}, r"expert_gating_func = 1 is not understood"),
        ("glm4moe", {}, {"blk.1.exp_probs_b.bias": None}, r"weights are missing: .*layers\.1\.mlp\.gate\.e_score_corr"),
        ("deepseek_v2", {"expert_gating_func": 2}, {}, r"expert_gating_func = 2 is not understood"),
        ("deepseek_v2", {"expert_weights_norm": True}, {}, r"expert_weights_norm = True is not understood"),
        ("deepseek_v2", {"attention.key_length": 40}, {}, r"attention\.key_length = 40 is not understood"),
        ("deepseek_v2", {"attention.head_count_kv": 2}, {}, r"head_count_kv = 2 is not understood"),
        ("deepseek_v2", {}, {"blk.0.attn_v_b.weight": None}, r"weights are missing: .*layers\.0\.self_attn\.kv_b_proj"),
        ("deepseek_v2", {}, {"blk.0.attn_v_b.weight": np.ones((4, 9, 36), "f4")}, r"attn_k_b.* has another shape"),
        ("ministral3", {"rope.scaling.type": "none"}, {}, r"is not understood"),
        ("ministral3", {"rope.scaling.yarn_log_multiplier": 0.5}, {}, r"yarn_log_multiplier = 0\.5 is not understood"),
        ("hunyuan", {"rope.scaling.factor": 2.0}, {}, r"rope\.scaling\.factor = 2\.0 is not understood"),
        ("hunyuan_moe", {"expert_shared_count": 2}, {}, r"expert_shared_count = 2 is not understood"),
        ("llama4", {"attention.sliding_window": 0}, {}, r"sliding_window = 0 is not understood"),
    ],
)
def test_what_is_refused(
    name: str,
    others: dict[str, Any],
    more: dict[str, Any],
    said: str,
    folders: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    path = made(name, folders(name), tmp_path / "model.gguf", others, more)
    with pytest.raises(EngineError, match=f"^cannot load the model model.gguf: .*{said}"):
        loaded(path)
