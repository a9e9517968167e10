"""bitsandbytes' formats: the bits of the weights that they hold, what runs make of them, and what is refused."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from helpers.commands import invoke
from helpers.examples import usual
from helpers.small_models import STORED
from helpers.thinking_models import random_model as thinking_model
from safetensors.torch import load_file, save_file

from detgen import Engine, EngineError
from detgen.errors import QuantName
from detgen.kernels.input_batch import Window
from detgen.machine import CPU
from detgen.models import bitsandbytes_weights
from detgen.models.bitsandbytes_weights import CODES
from detgen.models.loading import load_model
from detgen.program.arrays import BFLOAT16, same_bits
from detgen.program.steps import Linear
from detgen.program.storage import Storage
from detgen.runner.preparing import prepare

LACKING = importlib.util.find_spec("bitsandbytes") is None
pytestmark = pytest.mark.skipif(LACKING, reason="bitsandbytes is not installed")
# Blocks of 64 go on from row to row; of 72 inputs not even groups of 32 are whole.
SIZES = STORED | {"hidden_size": 96, "intermediate_size": 72, "vocab_size": 320}
LLAMA = hf.LlamaConfig(**SIZES)
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LLAMA,
    "llama, tied": lambda: hf.LlamaConfig(**{**SIZES, "hidden_size": 128}, tie_word_embeddings=True),
    "phi3": lambda: hf.Phi3Config(**SIZES),
    "gpt2": lambda: hf.GPT2Config(vocab_size=320, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=0),
    "qwen2-moe": lambda: hf.Qwen2MoeConfig(
        **SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ),
    "gemma, own forward": lambda: hf.GemmaConfig(**SIZES, head_dim=32, hidden_act="quick_gelu"),
    "dynamic": lambda: hf.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
}
KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4, nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "fp4, nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}


def bnb() -> Any:
    """The library, which takes a second to import: whoever only collects these tests need not."""
    return importlib.import_module("bitsandbytes")


def quantized(folder: Path, to: Path, **options: Any) -> Path:
    """A model as transformers and bitsandbytes save it."""
    config = hf.BitsAndBytesConfig(**options)
    model = hf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": "cpu"})
    model.save_pretrained(to)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, to / name)
    return to


def widened(folder: Path, to: Path) -> Path:
    """The same model in float32, its weights dequantized by bitsandbytes."""
    stored = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    turned = config["model_type"] == "gpt2"
    made, said = {}, [name for name in stored if ".weight." in name or name.endswith(("SCB", "weight_format"))]
    for name in stored.keys() - set(said):
        weight, state = stored[name], {n.removeprefix(f"{name}."): stored[n] for n in said if n.startswith(f"{name}.")}
        if weight.dtype == torch.int8:
            largest = stored[f"{name.removesuffix('weight')}SCB"]
            weight = weight.float() * (largest / 127)[:, None]
            near = bnb().functional.int8_vectorwise_dequant(stored[name], largest)
            assert ((weight - near).abs() <= 2**-22 * near.abs()).all()
        elif state:
            found = bnb().functional.QuantState.from_dict(state, "cpu")
            shape, entries = found.shape, math.prod(found.shape)
            # Its kernel for CPUs takes scales of other blocks where rows are no multiple of a block; rows of one are.
            found.shape = torch.Size((-(-entries // 64), 64))
            weight = torch.cat([weight, weight.new_zeros(-(-entries // 64) * 32 - len(weight), 1)])
            weight = bnb().functional.dequantize_4bit(weight, found).flatten()[:entries].view(shape)
        made[name] = weight.t().contiguous() if turned and weight is not stored[name] else weight
    del config["quantization_config"]
    to.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(folder / name, to / name)
    (to / "config.json").write_text(json.dumps(config))
    save_file(made, to / "model.safetensors", metadata={"format": "pt"})
    return to


def bits_of(folder: Path, quant: QuantName = "none", dtype: Any = "auto", *, exact: bool = True) -> list[np.ndarray]:
    """Logits of a pass of two windows, and the entries of the cache; exact: of inputs that are not rounded."""
    loaded = load_model(folder, folder.name, dtype, quant)
    forward = prepare(loaded, None, CPU, batch_size=2, kv_memory=8 << 20).runners[0]
    forward.cache.pages.lay_out(2, 128)
    with forward.decoder.exactly() if exact else nullcontext():
        logits = forward.run([Window(0, 0, list(range(3, 43)), 40), Window(1, 0, [7, 8, 9], 3)])
    at = np.array([*range(40), *range(128, 131)])
    return [logits.copy(), *(x for i in range(len(forward.cache.keys)) for x in forward.cache.read(i, at))]


def agree(found: list[np.ndarray], want: list[np.ndarray]) -> bool:
    return all(same_bits(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_every_format(random_model: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    """A checkpoint gives the bits of the float32 model with the weights that bitsandbytes dequantizes."""
    folder = quantized(random_model(LLAMA), tmp_path / "few", **KINDS[kind])
    assert agree(bits_of(folder), bits_of(widened(folder, tmp_path / "wide")))


@pytest.mark.parametrize(
    ("family", "kind"),
    usual(zip(FAMILIES, itertools.cycle(("nf4", "int8"))), itertools.product(FAMILIES, ("nf4", "int8"))),
)
def test_families(random_model: Callable[..., Path], tmp_path: Path, family: str, kind: QuantName) -> None:
    """Of every family, a checkpoint and what is quantized here give the bits of the float32 model."""
    plain = random_model(FAMILIES[family]())
    folder = quantized(plain, tmp_path / "few", **KINDS[kind])
    want = bits_of(widened(folder, tmp_path / "wide"))
    assert agree(bits_of(folder), want)
    assert agree(bits_of(plain, kind), want)
    assert agree(bits_of(plain, kind, exact=False), bits_of(folder, exact=False))


def test_experts_one_by_one(random_model: Callable[..., Path], tmp_path: Path) -> None:
    """As transformers had them quantized before version 5; they are widened."""
    plain = random_model(hf.MixtralConfig(**{**SIZES, "intermediate_size": 64}, num_local_experts=3))
    few = Path(shutil.copytree(plain, tmp_path / "few"))
    tensors = load_file(few / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        assert name.endswith((".w1.weight", ".w2.weight", ".w3.weight"))
        tensors[name], state = bnb().functional.quantize_4bit(tensors[name], quant_type="nf4")
        tensors |= {f"{name}.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
    save_file(tensors, few / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((few / "config.json").read_text()) | {"quantization_config": {"load_in_4bit": True}}
    (few / "config.json").write_text(json.dumps(config))
    found = bits_of(few)
    assert agree(found, bits_of(widened(few, tmp_path / "wide")))
    assert not same_bits(found[0], bits_of(plain)[0])


def storages(folder: Path, quant: QuantName = "none") -> dict[str, Storage]:
    engine = Engine(target=folder, target_quant=quant, kv_memory=8 << 20)
    steps = engine._prepared.runners[0].decoder.program().steps  # type: ignore[union-attr]
    return {step.name.split(".")[-1]: step.weight.storage for step in steps if isinstance(step, Linear)}


def test_how_weights_are_kept(random_model: Callable[..., Path], tmp_path: Path) -> None:
    """In few bits, those alone that bitsandbytes quantizes, where rows have whole groups; without bitsandbytes."""
    plain = random_model(LLAMA)
    for kind, few in (("nf4", Storage.CODE), ("int8", Storage.BYTE)):
        want = {"qkv_proj": few, "o_proj": few, "up_proj": few, "down_proj": Storage.FLOAT, "lm_head": Storage.FLOAT}
        assert storages(plain, kind) == want  # type: ignore[arg-type]
        folder = quantized(plain, tmp_path / kind, **KINDS[kind], llm_int8_skip_modules=["o_proj"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "bitsandbytes", None)
            with pytest.raises(EngineError, match="pip install bitsandbytes"):
                load_model(plain, "plain", "auto", kind)  # type: ignore[arg-type]
            assert storages(folder) == {**want, "o_proj": Storage.FLOAT, "lm_head": few}


def test_codes_are_those_of_bitsandbytes() -> None:
    for kind, codes in CODES.items():
        assert same_bits(codes, bnb().functional.get_4bit_type(kind, device="cpu"))


def test_other_weights_in_16_bits(random_model: Callable[..., Path], tmp_path: Path) -> None:
    """They stay as they are; `--dtype` says how they are kept and not how sums are made."""
    folder = quantized(random_model(LLAMA), tmp_path / "few", **KINDS["nf4"])
    path = folder / "model.safetensors"
    tensors, plain = load_file(path), ("embed_tokens.weight", "lm_head.weight", "norm.weight")
    tensors |= {name: t.bfloat16() for name, t in tensors.items() if name.endswith(plain)}
    save_file(tensors, path, metadata={"format": "pt"})
    want = bits_of(widened(folder, tmp_path / "wide"), dtype="float32")
    loaded = load_model(folder, "few", "bfloat16", "none")
    assert loaded.read(loaded.model.lm_head.weight).dtype == BFLOAT16  # type: ignore[union-attr]
    for dtype in ("auto", "bfloat16", "float32"):
        assert agree(bits_of(folder, dtype=dtype), want)


def test_thinking_models(demo_models: Any, tmp_path: Path) -> None:
    """All of their linear layers but the output layers; batches change nothing."""
    folder = tmp_path / "thinking"
    thinking_model("sometimes").save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_models.target / name, folder / name)
    found = {}
    for quant in ("none", "nf4"):
        engine = Engine(target=folder, target_quant=quant, kv_memory=8 << 20, drafter="none")
        one, three = (
            engine.with_settings(batch_size=n).generate(["def f(a):\n", "import os\n", "x"], max_tokens=12, seed=1)
            for n in (1, 3)
        )
        assert [(c.token_ids, c.thoughts) for c in one] == [(c.token_ids, c.thoughts) for c in three]
        found[quant] = [r.logprob for c in one for r in c.records]
    assert found["nf4"] != found["none"]


@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_runs(demo_models: Any, tmp_path: Path, quant: str) -> None:
    """By the command line, with a draft model: the same bytes in any batch, on any machine."""
    outputs, prompts = [], tmp_path / "prompts.txt"
    prompts.write_text("def f(\nimport os\nclass A:\n")
    for batch, drafter in (("1", "none"), ("3", "model")):
        out = tmp_path / batch
        done = invoke(
            *("run", str(prompts), "-o", str(out), "--max-tokens", "12"),
            *("--target", str(demo_models.target), "--draft", str(demo_models.draft), "--drafter", drafter),
            *("--target-quant", quant, "--draft-quant", quant, "--batch-size", batch, "--kv-memory", "64MiB"),
        )
        assert done.exit_code == 0, done.output
        outputs.append((out / "outputs.jsonl").read_bytes())
    assert outputs[0] == outputs[1]
    profile = json.loads((out / "manifest.json").read_text())["profile"]
    assert (profile["arithmetic"], profile["target"]["quant"]) == ("detgen-2", quant)
    assert profile["versions"] == {"bitsandbytes": bnb().__version__}, "whose quantizer decides the weights"


def test_whose_quantizer_the_profile_names(stored: Path, random_model: Callable[..., Path]) -> None:
    """bitsandbytes where it quantizes, by whatever forward the model runs; of a checkpoint it decides nothing more."""
    own_forward = random_model(FAMILIES["gemma, own forward"]())
    few, own = (Engine(target=t, target_quant="nf4", kv_memory=8 << 20) for t in (random_model(LLAMA), own_forward))
    assert few.profile()["versions"] == {"bitsandbytes": bnb().__version__}
    assert own.profile()["versions"] == {"bitsandbytes": bnb().__version__, "transformers": hf.__version__}
    assert "versions" not in Engine(target=stored, kv_memory=8 << 20).profile()


NAME = "model.layers.1.mlp.up_proj.weight"
STATE = f"{NAME}.quant_state.bitsandbytes__nf4"
Tensors = dict[str, torch.Tensor]


def said(**change: Any) -> Callable[[Tensors], None]:
    """Other settings of a tensor."""

    def damage(tensors: Tensors) -> None:
        state = json.loads(bytes(tensors[STATE].numpy())) | change
        tensors[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return damage


def text(content: bytes) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({STATE: torch.tensor(list(content), dtype=torch.uint8)})


def put(name: str, tensor: torch.Tensor | None) -> Callable[[Tensors], None]:
    """Another tensor; None takes it away."""

    def damage(tensors: Tensors) -> None:
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor

    return damage


DAMAGES: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "no JSON": (text(b"{"), f"{STATE}: it is not JSON"),
    "deep": (text(b"[" * 9999), f"{STATE}: it is not JSON"),
    "a list": (text(b"[1]"), f"{STATE}: it is not an object"),
    "long": (text(b" " * 20000), f"{STATE}: it must be a text of at most"),
    "another kind": (said(quant_type="fp4"), f"{STATE}: quant_type must be nf4 or fp4, as in its name, and is 'fp4'"),
    "no shape": (said(shape=None), f"{STATE}: shape must be two whole numbers"),
    "a shape of texts": (said(shape=["a", 96]), f"{STATE}: shape must be two"),
    "a huge shape": (said(shape=[2**40, 96]), f"{STATE}: shape must be two"),
    "a large shape": (said(shape=[2**30, 96]), f"{NAME}: .1073741824, 96. weights take 51,539,607,552 bytes"),
    "another shape": (said(shape=[96, 72]), rf"do not fit config.json: {NAME} is \(96, 72\), not \(72, 96\)"),
    "a block of 0": (said(blocksize=0), f"{STATE}: blocksize must be one of"),
    "a block of True": (said(blocksize=True), f"{STATE}: blocksize must be one of"),
    "a longer block": (said(blocksize=128), f"{NAME}.absmax: it must be 54 numbers in F32, and is 432 bytes in F32"),
    "scales missing": (put(f"{NAME}.absmax", None), f"{STATE}: {NAME}.absmax, which belongs to it, is missing"),
    "scales of bytes": (put(f"{NAME}.absmax", torch.zeros(108, dtype=torch.uint8)), "108 numbers in F32, and is 108"),
    "weights missing": (put(NAME, None), f"{STATE}: {NAME}, which belongs to it, is missing"),
    "weights cut": (put(NAME, torch.zeros(99, 1, dtype=torch.uint8)), f"{NAME}: .72, 96. weights take 3,456 bytes"),
    "other codes": (put(f"{NAME}.quant_map", torch.zeros(16)), "has other codes than nf4"),
    "nothing said": (put(STATE, None), f"{NAME}: nothing says what its numbers mean"),
    "one more": (put("model.layers.1.mlp.more.weight", torch.zeros(3)), "no such weights as model.layers.1.mlp.more"),
    "one less": (put("model.norm.weight", None), "weights are missing: model.norm.weight"),
}
OFFSET = {"nested_blocksize": 256, "nested_offset": "x"}


def nested(**change: Any) -> Callable[[Tensors], None]:
    """Scales that are said to be quantized, with such settings."""

    def damage(tensors: Tensors) -> None:
        tensors[f"{NAME}.nested_absmax"] = torch.zeros(1)
        said(**change)(tensors)

    return damage


DAMAGES |= {
    "nested, a text": (nested(**OFFSET), f"{STATE}: nested_offset must be a finite number, and is 'x'"),
    "nested, infinite": (nested(**OFFSET | {"nested_offset": math.inf}), "must be a finite number, and is inf"),
    "nested, no block": (nested(), f"{STATE}: nested_blocksize must be one of"),
}


@pytest.fixture(scope="module")
def stored(random_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized(random_model(LLAMA), tmp_path_factory.mktemp("few"), **KINDS["nf4"])


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(stored: Path, tmp_path: Path, damage: str) -> None:
    """One line that names the file and the tensor, and no allocation of what a file only says."""
    folder = Path(shutil.copytree(stored, tmp_path / "damaged"))
    path = folder / "model.safetensors"
    tensors, (change, message) = load_file(path), DAMAGES[damage]
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(EngineError, match=message.replace("[", r"\[")) as error:
        load_model(folder, "damaged", "auto", "none")
    assert str(error.value).startswith("cannot load the model damaged: ")
    assert "\n" not in str(error.value)


def test_damaged_int8(random_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = quantized(random_model(LLAMA), tmp_path / "few", **KINDS["int8"])
    path = folder / "model.safetensors"
    good, module = load_file(path), NAME.removesuffix(".weight")
    for name, tensor, message in (
        (f"{module}.SCB", torch.zeros(5), "SCB: it must be 72 numbers in F32, and is 20 bytes in F32"),
        (NAME, torch.zeros(72, 96), rf"{NAME}: it must be a matrix of int8, and is \[72, 96\] in F32"),
        (NAME, torch.zeros(72, 95, dtype=torch.int8), rf"do not fit config.json: {NAME} is \(72, 95\)"),
        (f"{module}.weight_format", torch.tensor(2, dtype=torch.uint8), "weight_format: the weight is not stored row"),
        (f"{module}.SCB", None, f"{NAME}: nothing says what its numbers mean"),
    ):
        tensors = dict(good)
        put(name, tensor)(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(EngineError, match=message):
            load_model(folder, "damaged", "auto", "none")


def test_what_is_refused(stored: Path) -> None:
    """Quantizing what is quantized."""
    for quant in ("nf4", "q8"):
        with pytest.raises(EngineError, match=f"quantized by bitsandbytes.*cannot be quantized to {quant}; leave out"):
            load_model(stored, "stored", "auto", quant)  # type: ignore[arg-type]


def test_older_configurations() -> None:
    """Some say the number of bits and not the method."""
    for said, want in (({"load_in_4bit": True}, True), ({"quant_method": "gptq", "bits": 4}, False), (None, False)):
        config = hf.LlamaConfig(**SIZES, quantization_config=said) if said else hf.LlamaConfig(**SIZES)
        assert bitsandbytes_weights.is_quantized(config) == want
