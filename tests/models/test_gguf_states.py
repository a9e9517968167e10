"""GGUF files of families with states: the bits of their folders, and what is refused."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import transformers as hf
from helpers.examples import examples, usual
from helpers.families import NETS
from helpers.gguf_files import bits_of, check_same, loaded, plain_tokenizer, write_vocabulary, written
from helpers.small_models import STORED
from hypothesis import given
from hypothesis import strategies as st

from detgen.errors import EngineError
from detgen.kernels.bits import same_bits
from detgen.kernels.c.quantizing import Quantized
from detgen.kernels.drawn_weights import IN_FEW_BITS, InFewBits, in_few_bits
from detgen.models.gguf_changes import logarithms
from detgen.models.loading import load_model
from detgen.models.step_parts import negative_powers
from detgen.models.stored import damaged, whole

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


def told_of_heads(config: Any) -> dict[str, Any]:
    """What all models with attentions have."""
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }


def told_of_nets(config: Any) -> dict[str, Any]:
    rope, dense = config.rope_parameters, not hasattr(config, "num_experts")
    yarn = rope["rope_type"] == "yarn"
    return told_of_heads(config) | {
        "feed_forward_length": config.intermediate_size if dense else None,
        "expert_count": None if dense else config.num_experts,
        "expert_used_count": None if dense else config.num_experts_per_tok,
        "expert_feed_forward_length": None if dense else config.moe_intermediate_size,
        "expert_shared_feed_forward_length": None if dense else config.shared_expert_intermediate_size,
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
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
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


FAMILIES = {
    "qwen35": Family("qwen35", told_of_nets, tiled_changed),
    "qwen35moe": Family("qwen35moe", told_of_nets, tiled_changed),
    "qwen3next": Family("qwen3next", told_of_nets, nets_changed),
}
SIZES = NETS | STORED | {"num_hidden_layers": 4}
MIXTURE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
EXPERTS = MIXTURE | {"shared_expert_intermediate_size": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 64}
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
            found = names.get_name(changed, try_suffixes=(".weight", ".bias"))
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


USUAL = ["qwen35", "qwen3next"]


@pytest.mark.parametrize("name", usual(USUAL, MODELS))
def test_float32_gives_the_bits_of_the_folder(name: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    check_same(made(name, folders(name), tmp_path / "model.gguf"), folders(name))


@pytest.mark.parametrize("name", usual(USUAL, MODELS))
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


@pytest.mark.parametrize(("name", "kinds"), usual([("qwen35", KINDS[0])], [(n, k) for n in MODELS for k in KINDS]))
def test_stored_weights_stand_for_their_numbers(
    name: str, kinds: tuple[str, ...], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    def kind_of(tensor: str) -> str:
        return kinds[zlib.crc32(tensor.encode()) % len(kinds)]

    folder = folders(name)
    paths = (made(name, folder, tmp_path / f"{i}.gguf", kind_of=kind_of, widened=bool(i)) for i in range(2))
    file, same = map(loaded, paths)
    assert same_bits(bits_of(file), bits_of(same))


def test_layers_that_draft_are_not_read(folders: Callable[[str], Path], tmp_path: Path) -> None:
    others = {"block_count": 5, "nextn_predict_layers": 1, "attention.recurrent_layers": [True, False] * 2 + [False]}
    more = {"blk.4.nextn.eh_proj.weight": np.ones((64, 128), np.float32), "blk.4.attn_norm.weight": np.ones(64, "f4")}
    path = made("qwen35", folders("qwen35"), tmp_path / "model.gguf", others, more)
    check_same(path, folders("qwen35"))


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
    path = made(name, folders(name), tmp_path / "model.gguf", others, more)
    with pytest.raises(EngineError, match=f"^cannot load the model model.gguf: .*{said}"):
        loaded(path)


def test_a_rate_that_is_none_is_damage(folders: Callable[[str], Path], tmp_path: Path) -> None:
    more = {"blk.0.ssm_a": np.array([-1, -2, 0.5, -1, -1, -1], np.float32)}
    model = loaded(made("qwen35", folders("qwen35"), tmp_path / "model.gguf", more=more))
    assert damaged(model.model, model.read) == "blk.0.ssm_a"


@given(rates=st.lists(st.floats(-(2.0**60), -(2.0**-60), width=32), min_size=1))
@examples(400)
def test_logarithms_of_rates(rates: list[float]) -> None:
    """Their exponentials are those of what a folder had."""
    wanted = negative_powers(np.log(-np.array(rates, np.float32)))
    assert same_bits(negative_powers(logarithms(wanted)), wanted)


@pytest.mark.parametrize("kind", IN_FEW_BITS, ids=str)
def test_columns_in_few_bits(kind: InFewBits) -> None:
    """They stay so where groups stay together, and stand for the same numbers."""
    weight = in_few_bits(1, 5, 512, *kind)
    for each in (128, 16):
        order = np.arange(512).reshape(2, -1, each).swapaxes(0, 1).ravel()
        found = weight.columns(order)
        assert isinstance(found, Quantized) == (each % weight.scales.group == 0)
        assert same_bits(whole(found), weight.weight()[:, order])
