"""GGUF files of families with states: the bits of their folders, and what is refused."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import transformers as hf
from helpers.examples import usual
from helpers.families import CONVOLVED, MULTIPLIED, NEMOTRON_H, NETS, SCANNED, SPACES
from helpers.gguf_files import bits_of, check_refused, check_same, loaded, plain_tokenizer, write_vocabulary, written
from helpers.small_models import STORED

from detgen.kernels.c.quantizing import Quantized
from detgen.kernels.drawn_weights import IN_FEW_BITS, InFewBits, in_few_bits
from detgen.models.known import known
from detgen.models.loading import load_model
from detgen.models.rates import logarithms, negative_powers
from detgen.models.stored import damaged, whole
from detgen.program.arrays import same_bits

Numbers = np.ndarray
Written = Iterator[tuple[str, Numbers]]


class Family(NamedTuple):
    """How llama.cpp's converter writes a family.

    Attributes:
        architecture: what it calls it.
        told: the settings of a configuration.
        changed: makes tensors of parameters, which have their names, but for what is given other ones.
    """

    architecture: str
    told: Callable[[Any], dict[str, Any]]
    changed: Callable[[str, Numbers, Any], Written]


NAMED = {  # settings, and what configurations call them, one way or another
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps norm_eps layer_norm_epsilon",
    "expert_count": "num_experts num_local_experts n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size"
    ),
    "ssm.conv_kernel": "linear_conv_kernel_dim mamba_d_conv conv_kernel",
    "ssm.state_size": "linear_key_head_dim mamba_d_state ssm_state_size state_size",
    "ssm.group_count": "linear_num_key_heads mamba_n_groups n_groups",
    "ssm.time_step_rank": (
        "linear_num_value_heads mamba_n_heads mamba_num_heads num_heads mamba_dt_rank time_step_rank"
    ),
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "shortconv.l_cache": "conv_L_cache",
    "leading_dense_block_count": "num_dense_layers",
}


def told_of(config: Any, *parts: str) -> dict[str, Any]:
    """Settings of those names, and those whose names begin so."""
    found = {}
    for key, names in NAMED.items():
        if key.startswith(parts):
            found[key] = next((getattr(config, name) for name in names.split() if hasattr(config, name)), None)
    return found


SIZES_OF_ALL = "block_count", "embedding_length", "attention.layer_norm"
OF_ATTENTIONS = *SIZES_OF_ALL, "context_length", "feed_forward_length", "attention.head_count"


def told_of_kinds(config: Any, *parts: str) -> dict[str, Any]:
    """Those of hybrids, whose layers without attention have no keys."""
    kept = [config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types]
    return told_of(config, *OF_ATTENTIONS, "expert", *parts) | {"attention.head_count_kv": kept}


def told_of_convolutions(config: Any) -> dict[str, Any]:
    more = {"expert_gating_func": 2, "rope.freq_base": config.rope_parameters["rope_theta"], "vocab_size": 4096}
    return told_of_kinds(config, "shortconv", "leading_dense") | more


def told_of_granite(config: Any) -> dict[str, Any]:
    return told_of_kinds(config, "ssm", "attention", "embedding", "residual", "logit") | {
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "rope.scaling.finetuned": config.position_embedding_type == "rope",
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
    }


def told_of_nemotron(config: Any) -> dict[str, Any]:
    dense = "mlp" in config.layer_types
    width = config.intermediate_size if dense else config.moe_intermediate_size
    return told_of_kinds(config, "ssm") | {
        "feed_forward_length": [width * (kind in ("mlp", "moe")) for kind in config.layer_types],
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "rope.scaling.finetuned": False,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
    }


def told_of_falcon(config: Any) -> dict[str, Any]:
    return told_of(config, *OF_ATTENTIONS, "ssm") | {
        "ssm.inner_size": config.mamba_d_ssm,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
    }


def told_of_mamba(config: Any) -> dict[str, Any]:
    return told_of(config, *SIZES_OF_ALL, "ssm") | {
        "ssm.inner_size": config.expand * config.hidden_size,
        "ssm.dt_b_c_rms": None if config.model_type == "mamba2" else config.model_type == "falcon_mamba",
        **{"context_length": 1 << 20, "feed_forward_length": 0, "attention.head_count": 0},
    }


def told_of_jamba(config: Any) -> dict[str, Any]:
    more = {"ssm.inner_size": config.mamba_expand * config.hidden_size, "expert_feed_forward_length": None}
    return told_of_kinds(config, "ssm") | more


def told_of_nets(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    yarn = rope["rope_type"] == "yarn"
    return told_of(config, *OF_ATTENTIONS, "expert", "ssm") | {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "full_attention_interval": 4,
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [11, 11, 10, 0] if config.model_type.startswith("qwen3_5") else None,
        "rope.scaling.type": "yarn" if yarn else None,
        "rope.scaling.factor": rope.get("factor"),
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
    }


def simply(name: str, numbers: Numbers) -> Written:
    """Rates instead of their logarithms, no inner size of a convolution, experts apart."""
    if name.endswith("A_log"):
        yield name, negative_powers(numbers)
    elif name.endswith("dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), numbers
    elif name.endswith(("conv1d.weight", "conv.weight")):
        yield name, numbers[:, 0]
    elif name.endswith("experts.gate_up_proj"):
        yield from zip((name.replace("gate_up", part) for part in ("gate", "up")), np.split(numbers, 2, 1), strict=True)
    else:
        yield name, numbers


def nets_changed(name: str, numbers: Numbers, config: Any) -> Written:
    """Qwen3-Next: norms have one more; queries, keys, values and gates of all key heads follow each other."""
    keys, size, values = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim
    if name.endswith("in_proj_qkvz.weight"):
        share = config.linear_num_value_heads // keys * values
        of_heads = numbers.reshape(keys, 2 * (size + share), -1)
        parts = np.split(of_heads, [size, 2 * size, 2 * size + share], 1)
        *qkv, gate = (part.reshape(-1, numbers.shape[1]) for part in parts)
        yield name.replace("in_proj_qkvz", "in_proj_qkv"), np.concatenate(qkv)
        yield name.replace("in_proj_qkvz", "in_proj_z"), gate
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        yield name, 1 + numbers
    else:
        yield from simply(name, numbers)


def tiled_changed(name: str, numbers: Numbers, config: Any) -> Written:
    """Qwen3.5: the first value head of each key head comes first, then the second ones."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    before = 2 * keys * config.linear_key_head_dim if name.endswith(("in_proj_qkv.weight", "conv1d.weight")) else 0

    def tiled(x: Numbers) -> Numbers:
        return x.reshape(keys, values // keys, len(x) // values, -1).swapaxes(0, 1).reshape(x.shape)

    if "linear_attn." in name and not name.endswith(("norm.weight", "out_proj.weight")):
        numbers = np.concatenate([numbers[:before], tiled(numbers[before:])])
    elif name.endswith("linear_attn.out_proj.weight"):
        numbers = np.ascontiguousarray(tiled(np.ascontiguousarray(numbers.T)).T)
    yield from nets_changed(name, numbers, config)


def convolutions_changed(name: str, numbers: Numbers, _: Any) -> Written:
    yield from simply(name.replace("expert_bias", "expert_bias.bias"), numbers)


def in_pairs(numbers: Numbers, heads: int) -> Numbers:
    """Rows of queries, or of keys: those that are rotated together come together."""
    return np.ascontiguousarray(numbers.reshape(heads, 2, -1, numbers.shape[1]).swapaxes(1, 2)).reshape(numbers.shape)


def mixers_changed(name: str, numbers: Numbers, config: Any) -> Written:
    """Mamba-2: heads, and groups, have a dimension of their own; what hybrids have besides."""
    groups = getattr(config, "n_groups", getattr(config, "mamba_n_groups", None))
    name = name.replace("model.layers", "backbone.layers") if ".mixer." in name else name
    if name.endswith(("A_log", ".D")):
        yield from simply(name, numbers[:, None])
    elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        yield name, numbers.reshape(groups, -1)
    elif name.endswith(("q_proj.weight", "k_proj.weight")) and config.model_type != "falcon_h1":
        heads = config.num_attention_heads if name.endswith("q_proj.weight") else config.num_key_value_heads
        yield name, in_pairs(numbers, heads)
    elif name.endswith("shared_mlp.input_linear.weight"):
        of_all = "_shexp" if config.num_local_experts else ""
        for part, half in zip(("gate", "up"), np.split(numbers, 2), strict=True):
            yield f"blk.{name.split('.')[2]}.ffn_{part}{of_all}.weight", half
    elif name.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
        yield f"blk.{name.split('.')[2]}.ffn_down.weight", numbers
    else:
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = name.replace("block_sparse_moe.router", "block_sparse_moe.router.layer")
        of_experts = name.replace("backbone", "model").replace(".mixer.experts", ".mlp.experts")
        of_experts = of_experts.replace("block_sparse_moe.experts", "mlp.experts")
        yield from simply(of_experts if "experts." in name and "shared" not in name else name, numbers)


def scans_changed(name: str, numbers: Numbers, _: Any) -> Written:
    yield from simply(name.replace("feed_forward.experts", "mlp.experts"), numbers)


FAMILIES = {
    "lfm2moe": Family("lfm2moe", told_of_convolutions, convolutions_changed),
    "granitehybrid": Family("granitehybrid", told_of_granite, mixers_changed),
    "falcon-h1": Family("falcon-h1", told_of_falcon, mixers_changed),
    "nemotron_h": Family("nemotron_h", told_of_nemotron, mixers_changed),
    "nemotron_h_moe": Family("nemotron_h_moe", told_of_nemotron, mixers_changed),
    "mamba2": Family("mamba2", told_of_mamba, mixers_changed),
    "mamba": Family("mamba", told_of_mamba, scans_changed),
    "jamba": Family("jamba", told_of_jamba, scans_changed),
    "qwen35": Family("qwen35", told_of_nets, tiled_changed),
    "qwen35moe": Family("qwen35moe", told_of_nets, tiled_changed),
    "qwen3next": Family("qwen3next", told_of_nets, nets_changed),
}
SIZES = NETS | STORED | {"num_hidden_layers": 4}
MIXTURE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
EXPERTS = MIXTURE | {"shared_expert_intermediate_size": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 64}
HYBRID = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
NEMOTRON = NEMOTRON_H | STORED | {"head_dim": 18, "time_step_min": 1e-3}
NEMOTRON = {name: value for name, value in NEMOTRON.items() if name != "num_hidden_layers"}
SCAN = SCANNED | {name: STORED[name] for name in ("vocab_size", "pad_token_id", "eos_token_id")}
MAMBA_2 = {**SCAN, "hidden_size": 64, "num_heads": 8, "head_dim": 16, "n_groups": 2}
WIDE = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 64}
MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "qwen35": ("qwen35", lambda: hf.Qwen3_5TextConfig(**SIZES | WIDE, tie_word_embeddings=True)),
    "qwen35 yarn": (
        "qwen35",
        lambda: hf.Qwen3_5TextConfig(
            **SIZES | {"rms_norm_eps": 1e-3, "linear_num_value_heads": 2},
            rope_parameters=YARN | {"partial_rotary_factor": 0.6, "mrope_section": [3, 1, 1]},
        ),
    ),
    "qwen35moe": (
        "qwen35moe",
        lambda: hf.Qwen3_5MoeTextConfig(**{k: SIZES[k] for k in SIZES.keys() - {"intermediate_size"}}, **EXPERTS),
    ),
    "qwen3next": ("qwen3next", lambda: hf.Qwen3NextConfig(**SIZES, **EXPERTS, norm_topk_prob=True)),
    "lfm2moe": (
        "lfm2moe",
        lambda: hf.Lfm2MoeConfig(
            **CONVOLVED | STORED | {"conv_bias": False, "num_hidden_layers": 3} | MIXTURE, num_dense_layers=1
        ),
    ),
    "granitehybrid": (
        "granitehybrid",
        lambda: hf.GraniteMoeHybridConfig(
            **SPACES | STORED | MULTIPLIED | HYBRID,
            **{"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
        ),
    ),
    "granitehybrid without experts": (
        "granitehybrid",
        lambda: hf.GraniteMoeHybridConfig(
            **SPACES | STORED | MULTIPLIED | HYBRID | {"mamba_conv_bias": False},
            **{"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96},
            **{"position_embedding_type": "rope", "tie_word_embeddings": True},
        ),
    ),
    "falcon-h1": (
        "falcon-h1",
        lambda: hf.FalconH1Config(
            **SPACES | STORED | {"num_hidden_layers": 2},
            **{"mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "head_dim": 20},
        ),
    ),
    "falcon-h1 with biases": (
        "falcon-h1",
        lambda: hf.FalconH1Config(
            **SPACES | STORED | {"num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_d_head": 8, "head_dim": 16},
            **{"projectors_bias": True, "mlp_bias": True, "attention_bias": True, "mamba_proj_bias": True},
        ),
    ),
    "nemotron_h": (
        "nemotron_h",
        lambda: hf.NemotronHConfig(
            **NEMOTRON | {"mlp_bias": True, "attention_bias": False},
            layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
        ),
    ),
    "nemotron_h_moe": (
        "nemotron_h_moe",
        lambda: hf.NemotronHConfig(
            **NEMOTRON | {"n_group": 3, "topk_group": 2, "norm_topk_prob": False},
            layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
        ),
    ),
    "mamba2": ("mamba2", lambda: hf.Mamba2Config(**MAMBA_2, use_bias=True, tie_word_embeddings=False)),
    "mamba": ("mamba", lambda: hf.MambaConfig(**SCAN, use_bias=True, use_conv_bias=False)),
    "falcon mamba": ("mamba", lambda: hf.FalconMambaConfig(**SCAN, tie_word_embeddings=False)),
    "jamba": (
        "jamba",
        lambda: hf.JambaConfig(
            **STORED | MIXTURE | {"num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1},
            **{"expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 12, "mamba_d_conv": 3},
            mamba_dt_rank=10,
        ),
    ),
}


def tensors_of(folder: Path, family: Family, config: Any) -> Written:
    """What llama.cpp's converter makes of the tensors."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[family.architecture], config.num_hidden_layers)
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for changed, numbers in family.changed(name, parameter.numpy(), config):
            named = changed.startswith("blk.")
            found = changed if named else names.get_name(changed, try_suffixes=(".weight", ".bias"))
            assert found is not None, changed
            yield found + ".weight" * found.endswith("exps"), numbers


def made(
    name: str, folder: Path, path: Path, others: Mapping[str, Any] | None = None, more: Any = None, **how: Any
) -> Path:
    """A GGUF file of a model, with other settings, and with other tensors, or fewer, for None; see `written`."""
    family, config = FAMILIES[MODELS[name][0]], hf.AutoConfig.from_pretrained(folder)
    tensors = {**dict(tensors_of(folder, family, config)), **(more or {})}
    there = [(tensor, numbers) for tensor, numbers in tensors.items() if numbers is not None]
    said = family.told(config) | dict(others or {})
    return written(path, family.architecture, said, there, partial(write_vocabulary, folder), **how)


@pytest.fixture(scope="module")
def folders(random_model: Callable[..., Path]) -> Callable[[str], Path]:
    return cache(lambda name: plain_tokenizer(random_model(MODELS[name][1]())))


USUAL = ["qwen35", "qwen3next", "lfm2moe", "granitehybrid", "nemotron_h_moe", "jamba"]


@pytest.mark.parametrize("name", usual(USUAL, MODELS))
def test_float32_gives_the_bits_of_the_folder(name: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    check_same(made(name, folders(name), tmp_path / "model.gguf"), folders(name))


@pytest.mark.parametrize("name", usual(["qwen35", "qwen3next", "nemotron_h_moe"], MODELS))
def test_a_second_start_gives_the_bits_of_the_first(
    name: str, folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(name, folders(name), tmp_path / "model.gguf", kind_of=lambda tensor: KINDS[0][len(tensor) % 2])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = load_model(path, path.name, "auto", "none", role="target")
    wanted = bits_of(first)
    second = load_model(path, path.name, "auto", "none", role="target")
    assert (first.own, second.own is not None) == (None, True)
    assert same_bits(bits_of(second), wanted)


KINDS = ("Q8_0", "Q4_1"), ("Q5_0", "BF16", "F16")


@pytest.mark.parametrize(
    ("name", "kinds"),
    usual([("qwen35", KINDS[0]), ("granitehybrid", KINDS[1])], product(MODELS, KINDS)),
)
def test_stored_weights_stand_for_their_numbers(
    name: str, kinds: tuple[str, ...], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    def kind_of(tensor: str) -> str:
        return kinds[zlib.crc32(tensor.encode()) % len(kinds)]

    folder = folders(name)
    paths = (made(name, folder, tmp_path / f"{i}.gguf", kind_of=kind_of, widened=bool(i)) for i in range(2))
    file, same = map(loaded, paths)
    assert same_bits(bits_of(file), bits_of(same))


def test_a_single_row_may_be_a_list(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Which llama-quantize makes of it."""
    folder, name = folders("qwen3next"), MODELS["qwen3next"][0]
    tensors = dict(tensors_of(folder, FAMILIES[name], hf.AutoConfig.from_pretrained(folder)))
    more = {tensor: numbers[0] for tensor, numbers in tensors.items() if "gate_inp_shexp" in tensor}
    check_same(made("qwen3next", folder, tmp_path / "model.gguf", more=more), folder)


@pytest.mark.parametrize(
    ("name", "lists"),
    [
        ("qwen35", {"attention.recurrent_layers": [True, False] * 2 + [False]}),
        ("nemotron_h_moe", {"attention.head_count_kv": [0, 0, 2, 0, 2], "feed_forward_length": [0, 64, 0, 64, 64]}),
    ],
)
def test_layers_that_draft_are_not_read(
    name: str, lists: dict[str, Any], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    others = {"block_count": 5, "nextn_predict_layers": 1, **lists}
    more = {"blk.4.nextn.eh_proj.weight": np.ones((64, 128), "f4"), "blk.4.attn_norm.weight": np.ones(64, "f4")}
    check_same(made(name, folders(name), tmp_path / "model.gguf", others, more), folders(name))


@pytest.mark.parametrize(
    ("name", "others", "more", "said"),
    [
        ("qwen35", {"rope.scaling.type": "longrope"}, {}, r"rope\.scaling\.type = longrope is not understood"),
        ("qwen35", {"attention.scale": 0.5}, {}, r"attention\.scale = 0\.5 is not understood"),
        ("qwen35", {"ssm.inner_size": 200}, {}, r"ssm\.inner_size = 200 is not understood"),
        ("qwen35", {"ssm.group_count": 4}, {}, r"ssm\.group_count = 4 is not understood"),
        ("qwen35", {"ssm.group_count": 3}, {}, r"do not fit its settings: blk\.0\.\w+\.weight"),
        ("qwen35", {"ssm.conv_kernel": 4}, {}, r"do not fit its settings: blk\.0\.ssm_conv1d\.weight"),
        ("qwen35", {"attention.recurrent_layers": None}, {}, "describe no such weights as blk"),
        ("qwen35", {"attention.recurrent_layers": [True]}, {}, r"recurrent_layers = \(True,\) is not understood"),
        ("qwen35", {"attention.head_count_kv": [2, 0, 2, 0]}, {}, r"head_count_kv = \(2, 0, 2, 0\) is not understood"),
        ("qwen35", {}, {"blk.0.ssm_a": None}, r"weights are missing: model\.layers\.0\.linear_attn\.A_log"),
        ("qwen35", {}, {"blk.4.attn_norm.weight": np.ones(64, "f4")}, r"no such weights as blk\.4\.attn_norm\.weight"),
        ("qwen3next", {}, {"blk.0.attn_gate.weight": None}, r"weights are missing: .*in_proj_qkvz"),
        ("qwen3next", {"expert_gating_func": 2}, {}, r"expert_gating_func = 2 is not understood"),
        ("lfm2moe", {"expert_gating_func": 1}, {}, r"expert_gating_func = 1 is not understood"),
        ("lfm2moe", {"expert_weights_scale": 2.5}, {}, r"expert_weights_scale = 2\.5 is not understood"),
        ("lfm2moe", {"rope.dimension_count": 8}, {}, r"rope\.dimension_count = 8 is not understood"),
        ("lfm2moe", {"attention.head_count_kv": [0, 2, 1]}, {}, r"head_count_kv = \(0, 2, 1\) is not understood"),
        ("lfm2moe", {}, {"blk.1.exp_probs_b.bias": None}, r"weights are missing: .*\.1\.feed_forward\.expert_bias"),
        ("granitehybrid", {"attention.scale": None}, {}, r"attention\.scale is missing"),
        ("granitehybrid", {"ssm.inner_size": 136}, {}, r"ssm\.inner_size = 136 is not understood"),
        ("granitehybrid", {"ssm.group_count": 3}, {}, r"ssm\.group_count = 3 is not understood"),
        ("granitehybrid", {"attention.head_count_kv": 2}, {}, r"describe no such weights as blk\.0\.ssm"),
        ("granitehybrid", {}, {"blk.0.ffn_up_shexp.weight": None}, r"weights are missing: .*shared_mlp\.input_linear"),
        (
            "granitehybrid",
            {},
            {"blk.0.ffn_up.weight": np.ones((32, 64), "f4")},
            r"no such weights as blk\.0\.ffn_up\w*",
        ),
        ("granitehybrid", {}, {"rope_freqs.weight": np.ones(8, "f4")}, r"no such weights as rope_freqs\.weight"),
        ("nemotron_h_moe", {"rope.scaling.finetuned": True}, {}, r"rope\.scaling\.finetuned = True is not understood"),
        ("nemotron_h_moe", {"moe_latent_size": 8}, {}, r"moe_latent_size = 8 is not understood"),
        ("nemotron_h_moe", {"attention.layer_norm_epsilon": 0.5}, {}, r"layer_norm_rms_epsilon = \[.*\] is not under"),
        ("nemotron_h_moe", {"feed_forward_length": [0, 64, 64, 64]}, {}, r"head_count_kv = .* is not understood"),
        ("jamba", {"attention.head_count_kv": [0, 2, 2, 0]}, {}, r"block_count = 4 is not understood"),
        ("mamba", {"attention.head_count": 4}, {}, r"attention\.head_count = 4 is not understood"),
        ("falcon-h1", {}, {"output.weight": None}, r"weights are missing: output\.weight"),
        ("qwen3next", {"ssm.state_size": 13}, {}, r"do not fit its settings: blk\.0\.\w+\.weight"),
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
    check_refused(made(name, folders(name), tmp_path / "model.gguf", others, more), said)


def test_a_rate_that_is_none_is_damage(folders: Callable[[str], Path], tmp_path: Path) -> None:
    more = {"blk.0.ssm_a": np.array([-1, -2, 0.5, -1, -1, -1], np.float32)}
    model = loaded(made("qwen35", folders("qwen35"), tmp_path / "model.gguf", more=more))
    assert damaged(model.model, model.read) == "blk.0.ssm_a"


def test_logarithms_of_rates() -> None:
    """Their exponentials are the rates, which a rounded logarithm alone does not give."""
    drawn = np.random.default_rng(3).uniform(-3, 3, 100_000).astype(np.float32)
    rates = negative_powers(np.concatenate([drawn, 20 * drawn]))
    assert same_bits(negative_powers(logarithms(rates)), rates)
    assert not same_bits(negative_powers(np.log(-rates.astype(np.float64)).astype(np.float32)), rates)


@pytest.mark.parametrize(
    ("name", "kept"), [("qwen35", 2 * 2 * 18), ("nemotron_h_moe", 2 * 18), ("mamba2", 0), ("falcon-h1", 2 * 2 * 20)]
)
def test_keys_of_a_token_are_counted(name: str, kept: int, folders: Callable[[str], Path], tmp_path: Path) -> None:
    """In layers that have some."""
    assert known("x", made(name, folders(name), tmp_path / "model.gguf")).kv == 2 * 4 * kept


@pytest.mark.parametrize("kind", IN_FEW_BITS, ids=str)
def test_columns_in_few_bits(kind: InFewBits) -> None:
    """They stay so where groups stay together, and stand for the same numbers."""
    weight = in_few_bits(1, 5, 512, *kind)
    for each in (128, 16):
        order = np.arange(512).reshape(2, -1, each).swapaxes(0, 1).ravel()
        found = weight.columns(order)
        assert isinstance(found, Quantized) == (each % weight.scales.group == 0)
        assert same_bits(whole(found), weight.weight()[:, order])
