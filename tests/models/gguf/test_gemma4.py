"""GGUF files of Gemma 4: the bits of its folders, of layers of several sizes, and what is refused."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers as hf
from helpers.examples import usual
from helpers.gguf_files import bits_of, check_same, loaded, plain_tokenizer, write_vocabulary, written
from helpers.small_models import STORED
from safetensors.torch import load_file

from detgen.errors import EngineError
from detgen.models.gguf.header import read_header
from detgen.models.gguf.models import ends, settings
from detgen.models.known import known
from detgen.models.loading import load_model
from detgen.program.arrays import same_bits

WINDOW, FULL = "sliding_attention", "full_attention"
SIZES: dict[str, Any] = {**STORED, "sliding_window": 20, "head_dim": 20, "global_head_dim": 26}
MODELS: dict[str, Callable[[], Any]] = {
    # Layers that see the keys of others, are wider, and read more of each token.
    "sharing": lambda: hf.Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 5, "layer_types": [WINDOW, FULL, WINDOW, WINDOW, FULL]},
        **{"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0},
        **{"hidden_size_per_layer_input": 14, "vocab_size_per_layer_input": 4096},
    ),
    # Experts beside feed-forwards; values that are keys; heads by kinds of layers.
    "experts": lambda: hf.Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 4, "layer_types": [WINDOW, FULL, WINDOW, FULL], "hidden_size": 96},
        **{"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
        **{"enable_moe_block": True, "num_experts": 5, "top_k_experts": 3, "moe_intermediate_size": 64},
        rope_parameters={
            WINDOW: {"rope_type": "default", "rope_theta": 500.0},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.6, "rope_theta": 3e4},
        },
    ),
    # Heads of one size, an output layer of its own, nothing shared.
    "plain": lambda: hf.Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 2, "layer_types": [WINDOW, FULL], "head_dim": 32, "global_head_dim": 32},
        **{"hidden_size_per_layer_input": 0, "tie_word_embeddings": False, "rms_norm_eps": 1e-3},
    ),
}


def told(folder: Path) -> dict[str, Any]:
    """What llama.cpp's converter writes of a folder's configuration."""
    config, weights = hf.AutoConfig.from_pretrained(folder), load_file(folder / "model.safetensors")
    windows, rope = [kind == WINDOW for kind in config.layer_types], config.rope_parameters
    own, width = config.num_hidden_layers - config.num_kv_shared_layers, config.intermediate_size
    of = "model.layers.{}.self_attn.{}.weight"
    window, full = (len(weights[of.format(windows.index(kind), "q_norm")]) for kind in (True, False))
    kept = {w: len(weights[of.format(windows.index(w), "k_proj")]) // (window if w else full) for w in windows}
    heads = [kept[w] for w in windows]
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": [width * (1 + (i >= own)) for i in range(len(heads))]
        if config.use_double_wide_mlp
        else width,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": heads if len(set(heads)) > 1 else heads[0],
        "rope.freq_base": rope[FULL]["rope_theta"],
        "rope.freq_base_swa": rope[WINDOW]["rope_theta"],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "expert_count": config.num_experts,
        "expert_used_count": config.top_k_experts,
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": window,
        "attention.value_length_swa": window,
        "final_logit_softcapping": config.final_logit_softcapping,
        "attention.sliding_window": config.sliding_window,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "attention.sliding_window_pattern": windows,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": window,
    }


def tensors_of(folder: Path, full: int, share: float, *, apart: bool = False) -> Iterator[tuple[str, np.ndarray]]:
    """What llama.cpp's converter makes of the tensors, and of the share of a full head of entries that rotates.

    Gates may stand apart from what they open, which some files have.
    """
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, 5)
    for name, tensor in load_file(folder / "model.safetensors").items():
        numbers, block = tensor.float().numpy(), f"blk.{name.removeprefix('model.layers.').partition('.')[0]}"
        if name.endswith("router.scale"):
            yield f"{block}.ffn_gate_inp.scale", numbers
        elif name.endswith("per_expert_scale"):
            yield f"{block}.ffn_down_exps.scale", numbers
        elif apart and name.endswith("gate_up_proj"):
            half = numbers.shape[1] // 2
            yield f"{block}.ffn_gate_exps.weight", numbers[:, :half]
            yield f"{block}.ffn_up_exps.weight", numbers[:, half:]
        else:
            whole = name if name.endswith(".weight") else f"{name}.weight"
            yield str(names.get_name(whole, try_suffixes=(".weight",))), numbers
    turned = int(full * share / 2)
    yield "rope_freqs.weight", np.array([1.0] * turned + [1e30] * (full // 2 - turned), np.float32)


def made(
    folder: Path, path: Path, others: Mapping[str, Any] | None = None, more: Mapping[str, Any] | None = None, **how: Any
) -> Path:
    """A GGUF file of a folder, with other settings and more tensors, or fewer, for None; see `written`."""
    config = hf.AutoConfig.from_pretrained(folder)
    said, share = told(folder), config.rope_parameters[FULL]["partial_rotary_factor"]
    apart = how.pop("apart", False)
    tensors = {**dict(tensors_of(folder, said["attention.key_length"], share, apart=apart)), **(more or {})}
    there = [(name, numbers) for name, numbers in tensors.items() if numbers is not None]
    return written(path, "gemma4", said | dict(others or {}), there, partial(write_vocabulary, folder), **how)


@pytest.fixture(scope="module")
def folders(random_model: Callable[..., Path]) -> Callable[[str], Path]:
    return cache(lambda name: plain_tokenizer(random_model(MODELS[name]())))


@pytest.mark.parametrize("name", MODELS)
def test_float32_gives_the_bits_of_the_folder(name: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    check_same(made(folders(name), tmp_path / "model.gguf"), folders(name))


def test_a_second_start_gives_the_bits_of_the_first(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept of a model has the factors of its layers, which are no parameters, but numbers of the file."""
    factor = {"blk.0.layer_output_scale.weight": np.array([0.75], np.float32)}
    plain, path = (made(folders("sharing"), tmp_path / f"{i}.gguf", more=[{}, factor][i]) for i in range(2))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = load_model(path, path.name, "auto", "none", role="target")
    wanted = bits_of(first)
    second = load_model(path, path.name, "auto", "none", role="target")
    assert (first.own, second.own is not None) == (None, True)
    assert same_bits(bits_of(second), wanted)
    assert not same_bits(bits_of(loaded(plain)), wanted)


def test_gates_of_experts_may_stand_apart(folders: Callable[[str], Path], tmp_path: Path) -> None:
    one, two = (made(folders("experts"), tmp_path / f"{apart}.gguf", apart=apart) for apart in (False, True))
    assert same_bits(bits_of(loaded(one)), bits_of(loaded(two)))


def test_keys_that_no_one_reads_are_left_out(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Checkpoints have them in layers that see those of others; in a layer with its own, nothing may be left over."""
    numbers, path = np.ones((40, 64), np.float32), tmp_path / "model.gguf"
    unread = {
        "blk.3.attn_k.weight": numbers,
        "blk.3.attn_v.weight": numbers,
        "blk.3.attn_k_norm.weight": numbers[0, :20],
    }
    found = bits_of(loaded(made(folders("sharing"), path, more=unread)))
    assert same_bits(found, bits_of(loaded(folders("sharing"))))
    with pytest.raises(EngineError, match=r"weights are missing: model\.layers\.0\.self_attn\.v_proj"):
        loaded(made(folders("sharing"), path, more={"blk.0.attn_v.weight": None}))


KINDS = ("Q8_0", "Q4_0"), ("Q5_1", "BF16", "F16")


@pytest.mark.parametrize(
    ("name", "kinds"),
    usual([("sharing", KINDS[0]), ("experts", KINDS[1])], [("sharing", KINDS[1]), ("experts", KINDS[0])]),
)
def test_stored_weights_stand_for_their_numbers(
    name: str, kinds: tuple[str, ...], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    def kind_of(name: str) -> str:
        return kinds[zlib.crc32(name.encode()) % len(kinds)]

    paths = [
        made(folders(name), tmp_path / f"{widened}.gguf", kind_of=kind_of, widened=widened) for widened in (False, True)
    ]
    file, same = map(loaded, paths)
    assert same_bits(bits_of(file), bits_of(same))


PATTERN = "attention.sliding_window_pattern"
FACTORS = np.ones(13, np.float32)


@pytest.mark.parametrize(
    ("others", "more", "said"),
    [
        (
            {PATTERN: [True, False, True, False, True]},
            {},
            rf"{PATTERN} = \(True, False, True, False, True\) is not under",
        ),
        ({PATTERN: [True, False]}, {}, rf"{PATTERN} = \(True, False\) is not understood"),
        ({PATTERN: None}, {}, rf"{PATTERN} is missing"),
        ({"feed_forward_length": [96, 96, 96, 192, 192]}, {}, r"feed_forward_length = \(96, 96, 96, 192, 192\) is not"),
        ({"attention.head_count_kv": [2, 2, 1, 2, 2]}, {}, r"head_count_kv = \(2, 2, 1, 2, 2\) is not understood"),
        ({"attention.value_length": 20}, {}, r"value_length = 20 is not understood"),
        ({"rope.dimension_count_swa": 10}, {}, r"rope\.dimension_count_swa = 10 is not understood"),
        ({"attention.scale": 0.5}, {}, r"attention\.scale = 0\.5 is not understood"),
        ({"rope.scaling.type": "linear"}, {}, r"rope\.scaling\.type = linear is not understood"),
        ({"attention.shared_kv_layers": 4, "feed_forward_length": 96}, {}, "layer types producing a cache"),
        ({}, {"rope_freqs.weight": None}, r"weights are missing: rope_freqs\.weight"),
        ({}, {"rope_freqs.weight": 2 * FACTORS}, r"rope_freqs\.weight divides frequencies in a way that is not"),
        ({}, {"rope_freqs.weight": FACTORS[1:]}, r"rope_freqs\.weight divides frequencies in a way that is not"),
        ({}, {"blk.0.layer_output_scale.weight": FACTORS[:2]}, r"blk\.0\.layer_output_scale\.weight has another shape"),
        ({}, {"blk.0.ffn_gate_inp.scale": FACTORS}, r"describe no such weights as blk\.0\.ffn_gate_inp\.scale"),
    ],
)
def test_what_is_refused(
    others: dict[str, Any], more: dict[str, Any], said: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    path = made(folders("sharing"), tmp_path / "model.gguf", others, more)
    with pytest.raises(EngineError, match=f"^cannot load the model model.gguf: .*{said}"):
        loaded(path)


@pytest.mark.parametrize("count", usual([0, 7, 13], [1, 12]))
def test_any_share_of_frequencies(count: int, folders: Callable[[str], Path], tmp_path: Path) -> None:
    """As many rotate as have a factor of 1."""
    factors = np.where(np.arange(13) < count, 1, 1e30).astype(np.float32)
    model = loaded(made(folders("sharing"), tmp_path / "model.gguf", more={"rope_freqs.weight": factors})).model
    assert (model.model.rotary_emb.full_attention_inv_freq > 0).sum() == count


def test_the_tokenizer(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Texts become the tokens of the checkpoint's own; turns, and what waits for a tool, end a sequence."""
    named = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<turn|>", "<|tool_response>"]
    pieces = ["\u2581", "d", "e", "f", "de", "def", "\u2581def", "\n", "\n\n", "\u2581\u2581"]
    tokens = [*named, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [("d", "e"), ("de", "f"), ("\u2581", "def"), ("\n", "\n"), ("\u2581", "\u2581")]
    own = hf.GemmaTokenizer({token: i for i, token in enumerate(tokens)}, merges)
    own.add_special_tokens({"additional_special_tokens": named[5:]})

    def write(writer: Any) -> None:
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list([*tokens, *(f"<unused{i}>" for i in range(len(tokens), 4096))])
        writer.add_token_scores([0.0] * 4096)
        writer.add_token_types([*([3] * 6), 4, *([6] * 256), *([1] * (4096 - 263))])
        writer.add_token_merges([" ".join(merge) for merge in merges])
        for i, kind in enumerate(("pad", "eos", "bos", "unk")):
            getattr(writer, f"add_{kind}_token_id")(i)
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(True)

    tensors = tensors_of(folders("plain"), 32, 0.25)
    path = written(tmp_path / "model.gguf", "gemma4", told(folders("plain")), tensors, write)
    header = read_header(path, "x")
    _, tokenizer = settings(path, header)
    for text in ("def  def\n\n", " def<turn|>\ndef", "x\u00e9", "\n \n<|tool_response> d"):
        ids = own(text, add_special_tokens=False).input_ids
        assert tokenizer(text).input_ids == ids
        assert tokenizer.decode(ids) == own.decode(ids)
    assert ends(header, tokenizer) == {1, 5, 6}


def test_keys_of_a_token_are_counted(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """By the sizes of each layer; those that see the keys of others keep none."""
    found = [known("x", made(folders(name), tmp_path / f"{name}.gguf")).kv for name in ("sharing", "experts")]
    assert found == [2 * 4 * (2 * 20 + 2 * 26), 2 * 4 * 2 * (2 * 20 + 1 * 26)]
