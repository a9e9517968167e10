"""One pass of each family on every kind of processor: the same bits, with each way to store weights."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers as hf
from helpers.examples import thorough, usual
from helpers.replaying import EMULATOR, SOURCES, Arm, build_arm, compiled
from helpers.small_models import STORED
from helpers.steps import numbers

from detgen.errors import QuantName
from detgen.kernels.c import c_decoder
from detgen.kernels.c.c_decoder import CDecoder
from detgen.kernels.c.library import BUILDS, Runner, best_build, build
from detgen.kernels.c.panels import panels
from detgen.kernels.c.quantizing import MADE, PAIRED, Form
from detgen.kernels.drawn_weights import IN_FEW_BITS, InFewBits, in_few_bits
from detgen.kernels.input_batch import InputBatch, Window, Windows
from detgen.kernels.logprobs import Scores
from detgen.machine import CPU
from detgen.models.attaching import attach
from detgen.models.bitsandbytes_weights import Quantizing
from detgen.models.program_builder import ProgramBuilder
from detgen.models.stored import held
from detgen.program.arrays import BFLOAT16, FLOAT16, FLOAT32, same_bits, torch_dtype
from detgen.program.operands import Buffer, Into
from detgen.program.program import Program
from detgen.program.rows import Rows
from detgen.program.steps import Linear
from detgen.runner.block_manager import BlockManager
from detgen.runner.kv_cache import KVCache
from detgen.runner.model_runner import ModelRunner

LLAMA = STORED | {"vocab_size": 97}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**LLAMA),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **LLAMA, head_dim=20, sliding_window=9, layer_types=["sliding_attention", "full_attention"]
    ),
    "gemma2": lambda: hf.Gemma2Config(**LLAMA, head_dim=16, sliding_window=9),
    "gemma3n": lambda: hf.Gemma3nTextConfig(
        **{**LLAMA, "num_hidden_layers": 3, "intermediate_size": [90, 96, 75], "head_dim": 20, "sliding_window": 9},
        **{"layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_kv_shared_layers": 1},
        **{"hidden_size_per_layer_input": 14, "vocab_size_per_layer_input": 90, "laurel_rank": 12},
        **{"altup_active_idx": 1, "altup_correct_scale": False, "activation_sparsity_pattern": [0.9, 0.6, 0.0]},
    ),
    "cohere": lambda: hf.CohereConfig(**LLAMA, use_qk_norm=True),
    "opt": lambda: hf.OPTConfig(
        vocab_size=97, hidden_size=64, ffn_dim=90, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64
    ),
    "gpt2": lambda: hf.GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=256),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(**LLAMA, **EXPERTS, shared_expert_intermediate_size=40),
}
NONE = np.zeros((0, 4), np.int64)
WINDOWS = [Window(0, 0, list(range(1, 71)), 3), Window(1, 3, [5], 1), Window(2, 0, [9, 8, 7, 6], 4)]


class Case:
    """A model's passes over a cache of its own.

    Args:
        family: of the model, with random weights.
        dtype: of them.
        quant: how they are quantized: as `panels`' form, or as bitsandbytes does.
    """

    def __init__(self, family: str, dtype: np.dtype[Any], quant: Form | QuantName) -> None:
        torch.manual_seed(3)
        model = hf.AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch_dtype(dtype))  # and not the frequencies
        layout = attach(model, family)
        pages = BlockManager(8)
        kept = BFLOAT16 if quant in PAIRED else FLOAT32
        self.cache = KVCache(layout.cached, pages, kept, CPU)
        if quant in ("none", *PAIRED, *MADE):
            form = cast("Form", quant)
            self.decoder = CDecoder(ProgramBuilder(model, self.cache, layout.traits, form))
        else:
            read = Quantizing(model, held, cast("QuantName", quant))
            self.decoder = CDecoder(ProgramBuilder(model, self.cache, layout.traits, read=read))
        self.forward = ModelRunner(self.decoder, self.cache, layout.group)
        pages.lay_out(3, 128)
        self.kept = [*self.cache.keys, *self.cache.values]

    @property
    def packed(self) -> InputBatch:
        """The windows."""
        return self.forward.pack(Windows.of(WINDOWS))

    def run(self, *, scored: bool) -> list[np.ndarray]:
        """Logits or their scores, keys and values of the windows."""
        for entries in self.kept:
            entries.fill(0)
        results = self.decoder.run(self.packed, scored=scored)
        return [*told(results), *(entries.copy() for entries in self.kept)]


def told(results: np.ndarray | Scores) -> list[np.ndarray]:
    """Results as arrays."""
    return [results] if isinstance(results, np.ndarray) else [x for x in results if x is not None]


@pytest.fixture(scope="module", params=["", "+dotprod"])
def arm(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Arm:
    """Without and with products of whole numbers."""
    return build_arm(tmp_path_factory.mktemp("arm"), request.param)


WAYS: dict[str, tuple[np.dtype[Any], Form | QuantName]] = {  # to store weights
    **{"float32": (FLOAT32, "none"), "bfloat16": (BFLOAT16, "none"), "float16": (FLOAT16, "none")},
    **{form: (BFLOAT16, form) for form in PAIRED},
    **{"q8": (FLOAT32, "q8"), "q4": (BFLOAT16, "q4"), "q4_k": (FLOAT32, "q4_k")},
    **{"nf4": (FLOAT32, "nf4"), "int8": (FLOAT32, "int8")},
}
ALL = [(family, way) for way in WAYS for family in FAMILIES]
# Each way in layers or in experts, each family in floats or in few bits.
USUAL = [(("llama", "qwen2_moe")[i % 2], way) for i, way in enumerate(WAYS)]
USUAL += [
    (family, ("float32", "q4")[i % 2]) for i, family in enumerate(FAMILIES) if family not in ("llama", "qwen2_moe")
]


@pytest.mark.parametrize(("family", "way"), usual(USUAL, ALL))
def test_builds_agree(monkeypatch: pytest.MonkeyPatch, family: str, way: str) -> None:
    found = []
    for name in BUILDS:
        library_found = build(name)
        if library_found is not None:
            monkeypatch.setattr(c_decoder, "best_build", lambda one=library_found: one)
            case = Case(family, *WAYS[way])
            found.append([*case.run(scored=False), *case.run(scored=True)])
    assert len(found) > 1 or build("avx2") is None
    for other in found[1:]:
        assert all(same_bits(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.fixture(scope="module")
def avx_vnni(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The build for AVX-VNNI, with its instruction written as that of AVX-512 on registers of the same width.

    Processors that have the one form mostly lack the other.
    """
    compiler = shutil.which("gcc")
    if build("vnni") is None or compiler is None:
        pytest.skip("this processor has no AVX-512 VNNI, or there is no GCC here")
    folder = tmp_path_factory.mktemp("avxvnni")
    flags = ["-ffp-contract=off", "-fno-math-errno", "-pthread", "-fPIC", f"-I{SOURCES}"]
    flags += ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"]
    for name in ("pass", "attend", "pool"):
        text = folder / f"{name}.s"
        subprocess.run([compiler, *flags, "-O0", "-S", SOURCES / f"{name}.c", "-o", text], check=True)
        text.write_text(text.read_text().replace("{vex} vpdpbusd", "{evex} vpdpbusd"))
    assert "{evex} vpdpbusd" in (folder / "pass.s").read_text()
    subprocess.run([compiler, "-shared", "-pthread", *folder.glob("*.s"), "-lm", "-o", folder / "it.so"], check=True)
    found, known = ctypes.CDLL(str(folder / "it.so")), best_build()
    found.run_pass.argtypes = known.run_pass.argtypes
    return found


@thorough
@pytest.mark.parametrize("kind", IN_FEW_BITS, ids=str)
def test_avx_vnni_agrees(avx_vnni: Any, kind: InFewBits) -> None:
    x, to = Buffer("x", 1280), Buffer("to", 40)
    program = Program(x)
    program.add(Linear(name="step", x=x, to=Into(to), weight=panels([in_few_bits(1, 40, 1280, *kind)])))
    for rows in (1, 2, 3, 7):
        along = np.arange(rows)
        read, of_pass = numbers(2, rows, 1280), Rows(*[along] * 4, *[NONE] * 2)
        found, want = np.zeros((2, rows, 40), np.float32)
        for library, results in ((avx_vnni, found), (best_build(), want)):
            Runner(library, program).run(of_pass, {x: read, to: results})
        assert same_bits(found, want)


@pytest.mark.arm
@pytest.mark.parametrize(("processor", "runs"), [("cortex-a53", False), ("neoverse-n1", True)])
def test_dotprod_is_for_processors_that_have_it(tmp_path: Path, processor: str, runs: bool) -> None:
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"there is no {EMULATOR} here")
    source = tmp_path / "asked.c"
    source.write_text(f'#include "{SOURCES.parent / "built.h"}"\nint main(void) {{ return runs_here(); }}\n')
    program = compiled(tmp_path, [source], [], "+dotprod")
    assert subprocess.run([EMULATOR, "-cpu", processor, program], check=False).returncode == runs


@pytest.mark.arm
@pytest.mark.parametrize(("family", "way"), ALL)
def test_arm_agrees(arm: Arm, family: str, way: str) -> None:
    case = Case(family, *WAYS[way])
    for scored in (False, True):
        want = case.run(scored=scored)
        for entries in case.kept:
            entries.fill(0)
        packed = case.packed
        runner = case.decoder._runner(None, 128, scored)
        out = np.zeros((len(packed.wanted), runner.program.steps[-1].writes.width), np.float32)
        arm.run(runner, packed.rows, {runner.program.steps[-1].writes: out}, case.kept)
        for mine, theirs in zip([*told(Scores.of(out) if scored else out), *case.kept], want, strict=True):
            assert same_bits(mine, theirs)


@pytest.mark.arm
@pytest.mark.parametrize("kind", IN_FEW_BITS, ids=str)
def test_arm_agrees_on_weights_in_few_bits(arm: Arm, kind: InFewBits) -> None:
    x, to, rows = Buffer("x", 1280), Buffer("to", 40), 7
    program, along = Program(x), np.arange(rows)
    program.add(Linear(name="step", x=x, to=Into(to), weight=panels([in_few_bits(1, 40, 1280, *kind)])))
    runner, (found, want) = Runner(best_build(), program), np.zeros((2, rows, 40), np.float32)
    read, of_pass = numbers(2, rows, 1280), Rows(*[along] * 4, *[NONE] * 2)
    arm.run(runner, of_pass, {x: read, to: found}, [])
    runner.run(of_pass, {x: read, to: want})
    assert same_bits(found, want)
