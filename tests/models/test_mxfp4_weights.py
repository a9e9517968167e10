"""Experts in MXFP4: the weights that transformers makes of them, the bits of runs, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from helpers.families import LLAMA
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from detgen import EngineError
from detgen.kernels.input_batch import Window
from detgen.machine import CPU
from detgen.models.loading import load_model
from detgen.program.arrays import array
from detgen.program.experts import ExpertLinear
from detgen.program.storage import Storage
from detgen.runner.preparing import prepare

SIZES = LLAMA | {"num_hidden_layers": 2, "hidden_size": 96, "num_local_experts": 5, "num_experts_per_tok": 3}
SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


@pytest.fixture(scope="module")
def folders(random_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model as the checkpoints of GPT-OSS are stored, and the same in float32 by transformers."""
    plain = random_model(hf.GptOssConfig(**SIZES, head_dim=18, sliding_window=20))
    folder, g = tmp_path_factory.mktemp("mxfp4"), torch.Generator().manual_seed(3)
    made, same = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            made[name], same[name] = weight.bfloat16(), weight.bfloat16().float()
            continue
        experts, inputs, outputs = weight.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=g)
        scales = torch.randint(121, 126, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=g)
        made[f"{name}_blocks"], made[f"{name}_scales"] = blocks, scales
        same[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(same, plain / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(plain, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    said = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"quantization_config": SETTINGS}))
    return folder, plain


def test_it_computes_what_transformers_makes_of_the_weights(folders: tuple[Path, Path]) -> None:
    """As they are stored, of inputs that become whole numbers, and exactly."""
    folder, plain = folders
    loaded = load_model(folder, "x", "auto", "none")
    assert loaded.packed_bytes == (folder / "model.safetensors").stat().st_size - _header(folder)
    runner = prepare(loaded, None, CPU, batch_size=1, kv_memory=8 << 20).runners[0]
    runner.cache.pages.lay_out(1, 64)
    layers = [step.weight for step in runner.decoder.program().steps if isinstance(step, ExpertLinear)]
    assert [weight.storage for weight in layers] == [Storage.MICRO] * 4
    ids = list(range(3, 63))
    model = hf.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        want = array(model(input_ids=torch.tensor([ids])).logits[0])
    with runner.decoder.exactly():
        exact = runner.run([Window(0, 0, ids, 60)]).copy()
    assert abs(exact - want).max() < 1e-5 * abs(want).max()
    rounded = runner.run([Window(0, 0, ids, 60)])
    assert 1e-4 < np.linalg.norm(rounded - want) / np.linalg.norm(want) < 0.05


def _header(folder: Path) -> int:
    return 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")


def _changed(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


EXPERTS = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x.pop(f"{EXPERTS}.down_proj_scales"), "down_proj_blocks: .*down_proj_scales, .* is missing"),
        (lambda x: x.pop(f"{EXPERTS}.down_proj_blocks"), "down_proj_scales: nothing says what its numbers mean"),
        (lambda x: x[f"{EXPERTS}.down_proj_scales"].fill_(255), "down_proj_scales is damaged: a scale is infinite"),
        (
            lambda x: x.update({f"{EXPERTS}.down_proj_blocks": x[f"{EXPERTS}.down_proj_blocks"][..., :8].contiguous()}),
            r"down_proj_blocks has the shape \[5, 96, 3, 8\], and its scales \[5, 96, 3\]",
        ),
        (
            lambda x: x.update({f"{EXPERTS}.down_proj_scales": x[f"{EXPERTS}.down_proj_scales"].float()}),
            "down_proj_scales: it must be bytes",
        ),
        (
            lambda x: x.update({n: x[n][1:].contiguous() for n in x if n.startswith(f"{EXPERTS}.down_proj_")}),
            "do not fit config.json: .*down_proj(_bias)? is .4",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(
    folders: tuple[Path, Path], tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], said: str
) -> None:
    folder = _changed(folders[0], tmp_path / "changed", change)
    with pytest.raises(EngineError, match=f"model.safetensors.*{said}|{said}"):
        prepare(load_model(folder, "x", "auto", "none"), None, CPU, batch_size=1, kv_memory=8 << 20)


def test_it_is_not_quantized_once_more(folders: tuple[Path, Path]) -> None:
    with pytest.raises(EngineError, match="its weights are in MXFP4, and cannot be quantized to q8"):
        load_model(folders[0], "x", "auto", "q8")
