"""GGUF files of GPT-OSS: the bits of its checkpoints, what the file says of them, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from helpers.gguf_files import bits_of, check_same, loaded, plain_tokenizer, write_vocabulary, written
from helpers.small_models import STORED
from safetensors.torch import load_file, save_file

from detgen.errors import EngineError
from detgen.kernels.c.c_decoder import CDecoder
from detgen.machine import CPU
from detgen.models.gguf.header import read_header
from detgen.models.gguf.models import empty_model, ends, settings
from detgen.models.gguf.places import kept_places, reader_of
from detgen.models.known import known
from detgen.models.stored import whole
from detgen.program.arrays import same_bits
from detgen.program.experts import ExpertLinear
from detgen.program.storage import Storage
from detgen.runner.preparing import prepare

SIZES: dict[str, Any] = {**STORED, "hidden_size": 96, "num_local_experts": 5, "num_experts_per_tok": 3}
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 8.0, "beta_fast": 4.0, "beta_slow": 0.75, "truncate": False}
MODELS: dict[str, Callable[[], Any]] = {
    "yarn": lambda: hf.GptOssConfig(
        **SIZES, head_dim=18, sliding_window=20, rope_parameters=YARN | {"original_max_position_embeddings": 200}
    ),
    "without": lambda: hf.GptOssConfig(
        **SIZES | {"num_hidden_layers": 3, "num_key_value_heads": 1, "intermediate_size": 32, "num_experts_per_tok": 1},
        **{"head_dim": 32, "sliding_window": 11, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
        **{"rms_norm_eps": 1e-3, "tie_word_embeddings": True},
    ),
}


def told(config: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes of a configuration."""
    rope = config.rope_parameters
    yarn = rope["rope_type"] == "yarn"
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": rope["rope_theta"],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.sliding_window": config.sliding_window,
        "expert_feed_forward_length": config.intermediate_size,
        "rope.scaling.type": "yarn" if yarn else None,
        "rope.scaling.factor": rope.get("factor"),
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
        "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
        "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
    }


def tensors_of(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """What llama.cpp's converter makes of the tensors: gates and what they open apart, outputs before inputs."""
    tied = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    names, weights = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, 3), load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        block, _, last = name.rpartition(".mlp.experts.")
        number, suffix = block.rpartition(".")[2], "bias" if last.endswith("bias") else "weight"
        if not block:
            if name != "lm_head.weight" or not tied:
                named = names.get_name(name, try_suffixes=(".weight", ".bias"))
                yield f"{named}.weight" if name.endswith("sinks") else str(named), weight.float().numpy()
            continue
        if last.endswith("_scales"):
            continue
        if last.endswith("_blocks"):
            numbers = in_blocks(weight, weights[name.replace("_blocks", "_scales")])
        else:
            numbers = weight.float().numpy() if suffix == "bias" else weight.float().mT.numpy()
        if last.startswith("down"):
            yield f"blk.{number}.ffn_down_exps.{suffix}", numbers
        else:
            yield f"blk.{number}.ffn_gate_exps.{suffix}", numbers[:, ::2]
            yield f"blk.{number}.ffn_up_exps.{suffix}", numbers[:, 1::2]


def in_blocks(blocks: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """Numbers in pairs, [experts, outputs, groups, 16], and their scales as llama.cpp's blocks, a row's in one."""
    pairs = blocks.numpy()
    codes = np.stack([pairs & 15, pairs >> 4], -1).reshape(*pairs.shape[:-1], 32)
    packed = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([scales.numpy()[..., None], packed], -1).reshape(*pairs.shape[:2], -1)


def made(folder: Path, path: Path, others: Mapping[str, Any] | None = None, **how: Any) -> Path:
    """A GGUF file of a folder, with other settings; see `written`."""
    said = told(hf.AutoConfig.from_pretrained(folder)) | dict(others or {})
    return written(path, "gpt-oss", said, tensors_of(folder), partial(write_vocabulary, folder), **how)


@pytest.fixture(scope="module")
def folders(random_model: Callable[..., Path]) -> Callable[[str], Path]:
    return cache(lambda name: plain_tokenizer(random_model(MODELS[name]())))


@pytest.mark.parametrize("name", MODELS)
def test_float32_gives_the_bits_of_the_folder(name: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    check_same(made(folders(name), tmp_path / "model.gguf"), folders(name))


def test_a_checkpoint_in_mxfp4_is_the_same_model(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Whose gates and what they open take turns there, and numbers of a block stand in pairs."""
    folder, g = Path(shutil.copytree(folders("yarn"), tmp_path / "model")), torch.Generator().manual_seed(3)
    weights = {name: weight.bfloat16() for name, weight in load_file(folder / "model.safetensors").items()}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        draw = partial(torch.randint, dtype=torch.uint8, generator=g)
        weights[f"{name}_blocks"] = draw(0, 256, (experts, outputs, inputs // 32, 16))
        weights[f"{name}_scales"] = draw(121, 126, (experts, outputs, inputs // 32))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(said))
    path = made(folder, tmp_path / "model.gguf")
    for exactly in (True, False):
        found, want = (bits_of(loaded(place), exactly=exactly) for place in (path, folder))
        assert same_bits(found, want)


@pytest.mark.parametrize(
    ("kinds", "storage"),
    [
        ({"exps": "MXFP4", "attn": "Q8_0", "token": "Q8_0"}, Storage.MICRO),
        ({"gate_exps": "MXFP4", "exps": "Q8_0", "": "BF16"}, Storage.FLOAT),
    ],
)
def test_stored_weights_stand_for_their_numbers(
    kinds: dict[str, str], storage: Storage, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """They stay as they are stored, unless gates have another type than what they open."""

    def kind_of(name: str) -> str:
        return next((kind for part, kind in kinds.items() if part in name), "F32")

    path, wide = (
        made(folders("yarn"), tmp_path / f"{widened}.gguf", kind_of=kind_of, widened=widened)
        for widened in (False, True)
    )
    assert same_bits(bits_of(loaded(path)), bits_of(loaded(wide)))
    decoder = prepare(loaded(path), None, CPU, batch_size=1, kv_memory=8 << 20).runners[0].decoder
    assert isinstance(decoder, CDecoder)
    found = next(step.weight.storage for step in decoder.program().steps if isinstance(step, ExpertLinear))
    assert found == storage


def test_what_is_kept_of_a_file_finds_the_same_weights(folders: Callable[[str], Path], tmp_path: Path) -> None:
    path = made(
        folders("yarn"), tmp_path / "model.gguf", kind_of=lambda name: "MXFP4" if "gate_exps" in name else "F32"
    )
    header = read_header(path, "x")
    model, reader = empty_model(settings(path, header)[0], header, path)
    kept = kept_places(reader)
    assert kept is not None
    again = reader_of(model, json.loads(json.dumps(kept[0])), kept[1], header, path, None)
    for parameter in model.parameters():
        assert same_bits(whole(again(parameter)), whole(reader(parameter)))


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"rope.scaling.type": "longrope"}, r"rope\.scaling\.type = longrope is not understood"),
        ({"rope.scaling.yarn_ext_factor": 0.5}, r"rope\.scaling\.yarn_ext_factor = 0\.5 is not understood"),
        ({"rope.scaling.factor": None}, r"rope\.scaling\.factor is missing"),
        ({"rope.dimension_count": 16}, r"rope\.dimension_count = 16 is not understood"),
        ({"attention.value_length": 16}, r"attention\.value_length = 16 is not understood"),
        ({"attention.sliding_window_pattern": [True, True]}, r"sliding_window_pattern = \(True, True\) is not"),
        ({"attention.head_count": "4"}, r"attention\.head_count = 4 is not understood"),
        ({"attention.head_count": 2}, r"do not fit its settings: blk\.0\.attn_\w+\.\w+ has another shape"),
        ({"expert_count": 4}, r"do not fit its settings: blk\.0\.ffn_\w+\.\w+ has another shape"),
        ({"feed_forward_length": 64}, r"feed_forward_length = 64 is not understood"),
    ],
)
def test_what_is_refused(others: dict[str, Any], said: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    path = made(folders("yarn"), tmp_path / "model.gguf", others)
    with pytest.raises(EngineError, match=f"^cannot load the model model.gguf: .*{said}"):
        loaded(path)


def test_calls_of_tools_end_a_sequence(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """As in the settings of the checkpoints; a file names one token."""
    header = read_header(made(folders("yarn"), tmp_path / "model.gguf"), "x")
    tokens = {"<|return|>": 7, "<|call|>": 8, "<|endoftext|>": 9, "<|end|>": 10}
    tokenizer = SimpleNamespace(eos_token_id=7, get_vocab=lambda: tokens)
    assert ends(header, tokenizer) == {7, 8, 9}


def test_keys_of_a_token_are_counted(folders: Callable[[str], Path], tmp_path: Path) -> None:
    assert known("x", made(folders("without"), tmp_path / "model.gguf")).kv == 3 * 2 * 4 * 32
