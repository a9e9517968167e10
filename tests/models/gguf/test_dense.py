"""GGUF files of families whose layers are alike: what files of some have, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf
from helpers.examples import usual
from helpers.families import LATENT
from helpers.gguf_alike import MODELS, made
from helpers.gguf_dense import LATENT_KEYS, ROUTED, SIZES
from helpers.gguf_files import bits_of, check_refused, check_same, loaded, plain_tokenizer, write_vocabulary, written
from helpers.gguf_models import Model, check_kept, check_stored, tensors_of, told
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
    check_refused(made(name, folders(name), tmp_path / "model.gguf", others, more), said)
