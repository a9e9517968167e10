"""Models that are read while they are packed: the bits of those that transformers loads, and memory for little more."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from helpers.examples import thorough, usual
from helpers.families import DESCRIBED
from helpers.small_models import STORED
from safetensors.torch import load_file, save_file

from detgen.errors import DTypeName, EngineError, QuantName
from detgen.kernels.input_batch import Window
from detgen.machine import CPU
from detgen.models import lazy_weights
from detgen.models.loading import load_model
from detgen.program.arrays import array, same_bits
from detgen.runner import depth
from detgen.runner.block_manager import PAGE
from detgen.runner.preparing import prepare

SIZES = STORED | {"vocab_size": 320}
MIXTURE: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "llama, tied": lambda: hf.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gemma3": lambda: hf.Gemma3TextConfig(**SIZES, head_dim=16),
    "phi3": lambda: hf.Phi3Config(**SIZES),
    "cohere": lambda: hf.CohereConfig(**SIZES),
    "gpt2": lambda: hf.GPT2Config(vocab_size=320, n_embd=64, n_layer=2, n_head=4, n_positions=256),
    "gpt-neox": lambda: hf.GPTNeoXConfig(**{n: SIZES[n] for n in SIZES if n != "num_key_value_heads"}),
    "mixtral": lambda: hf.MixtralConfig(**SIZES, num_local_experts=3),
    "qwen2-moe": lambda: hf.Qwen2MoeConfig(**SIZES, **MIXTURE, shared_expert_intermediate_size=80),
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(**SIZES, **MIXTURE, head_dim=16),
    "gpt-oss": lambda: hf.GptOssConfig(**SIZES, head_dim=16, num_local_experts=5, num_experts_per_tok=2),
    "lfm2": lambda: hf.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
    "falcon-h1": lambda: hf.FalconH1Config(
        **{**SIZES, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 12},
        ssm_multipliers=[0.7, 0.5, 0.4, 0.6, 0.9],
    ),
    "nemotron-h": lambda: hf.NemotronHConfig(
        **{**SIZES, "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 12, "n_groups": 2},
        layers_block_type=["linear_attention", "full_attention", "mlp"],
    ),
    "mamba2": lambda: hf.Mamba2Config(
        vocab_size=320,
        **{"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 2},
        pad_token_id=0,
    ),
    "mamba": lambda: hf.MambaConfig(vocab_size=320, hidden_size=64, num_hidden_layers=2, state_size=12),
    "opt": lambda: hf.OPTConfig(
        vocab_size=320, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64
    ),
    # Numbers beside parameters: corrections of experts, factors of layers; a table of what tokens give to layers.
    **{family: DESCRIBED[family] for family in ("deepseek_v3", "gemma3n_text", "gemma4_text", "gemma4_experts")},
}
# Tied weights, those that are turned, whole in other ways or renamed, experts in each form, numbers beside parameters.
USUAL = (
    *("llama", "llama, tied", "phi3", "gpt2", "gpt-neox", "mixtral", "gpt-oss", "nemotron-h"),
    *("deepseek_v3", "gemma3n_text", "gemma4_experts"),
)
MEASURED = """
import gc
import json
import sys
from pathlib import Path
from detgen.machine import CPU
from detgen.models.loading import load_model
from detgen.runner.preparing import prepare

def kibibytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

def prepared(folder, quant):
    loaded = load_model(Path(folder), folder, "auto", quant)
    return prepare(loaded, None, CPU, batch_size=1, kv_memory=32 << 20)

prepared(sys.argv[1], "none")
for folder, quant in json.loads(sys.argv[2]):
    before = kibibytes("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    kept = prepared(folder, quant)
    print(kibibytes("VmHWM") - before)
    del kept
    gc.collect()
"""


def bits_of(folder: Path, dtype: DTypeName = "auto", quant: QuantName = "none") -> np.ndarray:
    """Logits of a pass of two windows."""
    loaded = load_model(folder, folder.name, dtype, quant)
    forward = prepare(loaded, None, CPU, batch_size=2, kv_memory=8 << 20).runners[0]
    forward.cache.pages.lay_out(2, 128)
    return array(forward.run([Window(0, 0, list(range(3, 43)), 40), Window(1, 0, [7, 8, 9], 3)])).copy()


def is_lazy(folder: Path) -> bool:
    return bool(load_model(folder, folder.name, "auto", "none").model.device.type == "meta")


def by_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_weights, "empty_model", lambda *_: None)


@pytest.mark.parametrize("family", usual(USUAL, FAMILIES))
def test_the_bits_of_what_transformers_loads(
    family: str, random_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = random_model(FAMILIES[family]())
    every: tuple[QuantName, ...] = ("none", "q8", "q4")
    kinds = usual((every[[*FAMILIES].index(family) % 3],), every)
    assert is_lazy(folder)
    found = [bits_of(folder, quant=quant) for quant in kinds]
    by_transformers(monkeypatch)
    assert not is_lazy(folder)
    assert all(same_bits(a, bits_of(folder, quant=quant)) for a, quant in zip(found, kinds, strict=True))


def change(folder: Path, changed: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Other weights in the same file."""
    tensors = load_file(folder / "model.safetensors")
    changed(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def halved(tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})


def halved_matrices(tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({name: tensor.half() for name, tensor in tensors.items() if tensor.dim() > 1})


# Some forwards round what modules read to the number format of their weights, or keep factors in it.
IN_16_BITS = usual(
    [("llama, tied", halved), ("llama, tied", halved_matrices), ("falcon-h1", halved), ("gemma4_text", halved)],
    [(family, halved) for family in ("nemotron-h", "mamba", "mamba2", "deepseek_v3", "gemma3n_text")],
)


@pytest.mark.parametrize(("family", "changed"), IN_16_BITS)
def test_weights_in_16_bits(
    family: str,
    changed: Callable[[dict[str, torch.Tensor]], Any],
    random_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As they are, or widened where the formats are mixed or `--dtype float32` asks for it."""
    folder = random_model(FAMILIES[family]())
    change(folder, changed)
    wanted: tuple[tuple[DTypeName, QuantName], ...] = (("auto", "none"), ("float32", "none"), ("auto", "q8"))
    found = [bits_of(folder, *how) for how in wanted]
    by_transformers(monkeypatch)
    assert all(same_bits(a, bits_of(folder, *how)) for a, how in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("family", "dtype"),
    usual(
        [("gptj", torch.bfloat16), ("codegen", torch.float16)], [("gptj", torch.float16), ("codegen", torch.bfloat16)]
    ),
)
def test_tables_of_angles_are_not_in_16_bits(
    family: str, dtype: torch.dtype, random_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor made of frequencies in 16 bits: the model's own forward is the one of its weights."""
    folder = random_model(DESCRIBED[family]())
    change(folder, lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()}))
    assert is_lazy(folder)
    kinds: tuple[QuantName, ...] = ("none", "q8", "q4_k")
    found = [bits_of(folder, quant=quant) for quant in kinds]
    by_transformers(monkeypatch)
    assert all(same_bits(a, bits_of(folder, quant=quant)) for a, quant in zip(found, kinds, strict=True))


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_a_weight_that_cannot_be_quantized(name: str, random_model: Callable[..., Path]) -> None:
    folder = random_model(FAMILIES["llama"]())
    change(folder, lambda tensors: tensors[name][3].fill_(torch.inf))
    with pytest.raises(EngineError, match=f"^{name}: a weight is infinite, not a number, or too large for q4_k"):
        bits_of(folder, quant="q4_k")


def test_several_files(random_model: Callable[..., Path]) -> None:
    folder = random_model(FAMILIES["llama"]())
    want = bits_of(folder)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert is_lazy(folder)
    assert same_bits(bits_of(folder), want)


def test_what_transformers_has_to_load(random_model: Callable[..., Path]) -> None:
    """A tied weight that is there twice."""
    folder = random_model(FAMILIES["llama, tied"]())
    change(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert not is_lazy(folder)


def test_experts_that_do_not_fit_together(random_model: Callable[..., Path]) -> None:
    """One is missing, or another size: transformers says so, as of any other weight."""
    gate = "model.layers.1.block_sparse_moe.experts.1.w1.weight"
    for changed in (lambda tensors: tensors.pop(gate), lambda tensors: tensors.update({gate: torch.ones(90, 64)})):
        folder = random_model(FAMILIES["mixtral"]())
        change(folder, changed)
        with pytest.raises(EngineError, match="cannot load the model"):
            is_lazy(folder)


def test_a_place_that_two_tensors_have(random_model: Callable[..., Path]) -> None:
    """Under the old name and the new one, or by numbers that mean the same expert: transformers takes one of them."""
    folder = random_model(FAMILIES["gpt-neox"]())
    change(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(320, 64)}))
    assert not is_lazy(folder)


def test_what_old_files_have_besides(random_model: Callable[..., Path]) -> None:
    """Masks that transformers reads over."""
    folder = random_model(FAMILIES["gpt-neox"]())
    want = bits_of(folder)
    mask = {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 9, 9).bool()}
    change(folder, lambda tensors: tensors.update(mask))
    assert is_lazy(folder)
    assert same_bits(bits_of(folder), want)


def test_ends_come_from_the_generation_settings(random_model: Callable[..., Path]) -> None:
    folder = random_model(FAMILIES["llama"]())
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    loaded = load_model(folder, "x", "auto", "none")
    assert loaded.model.device.type == "meta"
    assert {5, 7} <= loaded.eos


@thorough
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell the peak of memory")
def test_memory(demo_models: Any, tmp_path: Path) -> None:
    """At most 1.2 times what is stored and 24 MiB for passes and libraries, and the pages of made-up keys and values.

    An allocator that keeps what is freed has more, some MiB or tens of them from run to run: here it returns all.
    """
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12}
    sizes |= {"num_key_value_heads": 4, "vocab_size": 4096}
    llama = hf.LlamaConfig(**SIZES | sizes, tie_word_embeddings=True)
    mixtral = hf.MixtralConfig(**SIZES | sizes | {"intermediate_size": 768}, num_local_experts=4)
    known = [stored(config, demo_models.target, tmp_path / config.model_type) for config in (llama, mixtral)]
    measured = [("llama", "none"), ("llama", "q4"), ("mixtral", "none")]
    folders = [(str(tmp_path / name), quant) for name, quant in measured]
    command = [sys.executable, "-c", MEASURED, str(demo_models.draft), json.dumps(folders)]
    environ = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout
    pages = (depth.PAGES + 2) * PAGE * 2 * 4 * 64 * 4 * 6  # keys and values of 4 heads of 64 float32 in 6 layers
    sizes_of = [known[0][0] + 2 * known[0][1], known[0][0] + 0.5625 * known[0][1], known[1][0] + 2 * known[1][1]]
    for which, kibibytes, size in zip(measured, map(int, said.split()[-3:]), sizes_of, strict=True):
        assert kibibytes * 1024 <= 1.2 * (size + pages) + (24 << 20), which


def stored(config: Any, tokenizer: Path, folder: Path) -> tuple[int, int]:
    """A model in bfloat16 in a folder: bytes of its embedding, and how many numbers its matrices have."""
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    for parameter in model.parameters():
        parameter.data.uniform_(-0.02, 0.02)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    return (
        model.get_input_embeddings().weight.numel() * 2,
        sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1),
    )
