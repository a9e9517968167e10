"""GGUF files: the bits of the weights that they hold, what runs make of them, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import struct
import zlib
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from helpers.commands import invoke
from helpers.examples import usual
from helpers.gguf_files import bits_of, loaded, made, plain_model, plain_tokenizer
from helpers.small_models import STORED
from safetensors.torch import load_file, save_file
from transformers import modeling_gguf_pytorch_utils as by_package
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from detgen.bench.peers import gguf_file
from detgen.engine.config import EngineConfig
from detgen.engine.pieces import pieces_of
from detgen.errors import EngineError
from detgen.kernels.c.c_decoder import CDecoder
from detgen.kernels.c.quantizing import Quantized
from detgen.machine import CPU
from detgen.models.folders import model_files
from detgen.models.gguf.header import Header, check_gguf, read_header
from detgen.models.gguf.kinds import NAMED
from detgen.models.gguf.models import ends
from detgen.models.gguf.quickly import QuickReader, quick_gguf
from detgen.models.loading import load_model, load_tokenizer
from detgen.models.stored import Place, whole
from detgen.params import SamplingParams
from detgen.program.arrays import floats, same_bits
from detgen.program.experts import ExpertLinear
from detgen.progress import Progress, Unobserved
from detgen.run import RunConfig, run, work
from detgen.runner.preparing import prepare

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**STORED),
    "llama, tied": lambda: hf.LlamaConfig(**STORED, tie_word_embeddings=True),
    "qwen2": lambda: hf.Qwen2Config(**STORED),
    "qwen3": lambda: hf.Qwen3Config(**STORED, head_dim=32),
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
MIXTURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral": (hf.MixtralConfig, {"intermediate_size": 256, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "qwen2_moe": (hf.Qwen2MoeConfig, EXPERTS | {"shared_expert_intermediate_size": 96}),
    "qwen3_moe": (hf.Qwen3MoeConfig, EXPERTS | {"norm_topk_prob": True, "head_dim": 32}),
}
UNITS: dict[str, tuple[int, ...]] = {  # where in a block the units are, or scales and minima, in float16
    **{"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,)},
    **{"Q6_K": (208,), "MXFP4": ()},
}
NO_NUMBER = 255  # among the scales of MXFP4
LINES = (
    {"prompt": "def add(a, b):\n", "max_tokens": 12},
    {"messages": [{"role": "user", "content": "Name three rivers."}], "temperature": 0.9, "logprobs": 2},
)


@pytest.fixture(scope="module")
def folder(demo_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded draft model, with a tokenizer that a GGUF file can hold."""
    return plain_model(demo_models.draft, tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    return made(folder, folder.with_name("model.gguf"))


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a few lines with a model, into a folder of the given name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))

    def go(model: Path, output: str, *options: str) -> Any:
        return invoke("run", "prompts.jsonl", "--target", str(model), "-o", output, *options)

    return go


def test_the_tokenizer_is_loaded_alone(folder: Path, file: Path) -> None:
    """The pieces of a text are its bytes, whether the tokenizer comes from a file or from a folder."""
    text = "def f(x):\n        return '\u00e9\u20ac'"
    for place in (folder, file):
        tokenizer = load_tokenizer(place, place.name)
        pieces = pieces_of(place)
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        assert b"".join(pieces.of(token).data for token in tokens) == text.encode()
        assert pieces.of(0).text == tokenizer.eos_token
    with pytest.raises(EngineError, match="cannot load the model no: there is no such folder"):
        load_tokenizer(Path("no"), "no")


def blocks_of(kind: str, count: int, seed: int = 1) -> np.ndarray:
    """Blocks of random numbers; scales and units are finite."""
    random = np.random.default_rng(seed)
    if NAMED[kind].storage is None:
        numbers = random.standard_normal((count, 1)).astype(np.float32)
        return gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind]).view(np.uint8).reshape(count, -1)
    blocks = random.integers(0, 256, (count, NAMED[kind].size), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] %= NO_NUMBER
    for at in UNITS.get(kind, (0,)):
        blocks[:, at : at + 2] = random.standard_normal((count, 1)).astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", NAMED)
def test_each_type_of_tensor(tmp_path: Path, kind: str) -> None:
    """What is read, widened, has the bits that the gguf package gives, but for the sign of zeros."""
    data = blocks_of(kind, 3 * 512 // NAMED[kind].entries)
    path = tmp_path / "weights"
    path.write_bytes(b"before" + data.tobytes() + b"behind")
    want = gguf.dequantize(data, gguf.GGMLQuantizationType[kind]).reshape(3, 512)
    for order in (None, np.array([2, 0, 1])):
        found = Place(path, kind, (3, 512), 6, order=order).read()
        assert same_bits(floats(whole(found)) + 0.0, want[slice(None) if order is None else order] + 0.0)
        assert isinstance(found, Quantized) == (NAMED[kind].storage is not None)


@pytest.mark.parametrize("kind", [name for name, kind in NAMED.items() if kind.storage is not None and name != "MXFP4"])
@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_a_scale_that_is_not_finite(tmp_path: Path, kind: str, number: float) -> None:
    for at in UNITS.get(kind, (0,)):
        data = blocks_of(kind, 512 // NAMED[kind].entries)
        data[-1, at : at + 2] = np.array([number], np.float16).view(np.uint8)
        (tmp_path / "weights").write_bytes(data.tobytes())
        with pytest.raises(EngineError, match=r"^weights: the tensor output is damaged: a scale is infinite"):
            Place(tmp_path / "weights", kind, (1, 512), 0, "output").read()


def test_a_scale_of_mxfp4_that_is_no_number(tmp_path: Path) -> None:
    data = blocks_of("MXFP4", 16)
    data[-1, 0] = NO_NUMBER
    (tmp_path / "weights").write_bytes(data.tobytes())
    with pytest.raises(EngineError, match=r"^weights: the tensor output is damaged: a scale is infinite"):
        Place(tmp_path / "weights", "MXFP4", (1, 512), 0, "output").read()


@pytest.mark.parametrize(("number", "place"), [(np.inf, "blk.0.attn_q.weight"), (np.nan, "blk.1.ffn_norm.weight")])
def test_a_weight_that_is_not_finite(file: Path, tmp_path: Path, number: float, place: str) -> None:
    """Of weights that are stored as they are, a model's first pass says that some are wrong."""
    content, at = bytearray(file.read_bytes()), read_header(file, "x").tensors[place].at
    content[at + 40 : at + 44] = np.float32(number).tobytes()
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(EngineError, match=f"cannot load the model bad: its tensor {place} has an entry that is inf"):
        prepare(load_model(tmp_path / "bad.gguf", "bad", "auto", "none"), None, CPU, batch_size=1, kv_memory=8 << 20)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_gives_the_bits_of_the_folder(family: str, random_model: Callable[..., Path], tmp_path: Path) -> None:
    """Rows in llama.cpp's order, heads of another size, biases, a tied output layer."""
    model = plain_tokenizer(random_model(FAMILIES[family]()))
    file = loaded(made(model, tmp_path / "model.gguf"))
    folder = loaded(model)
    assert file.tokenizer.get_vocab() == folder.tokenizer.get_vocab()
    assert (file.context, file.eos, file.vocabulary) == (folder.context, folder.eos, folder.vocabulary)
    assert same_bits(bits_of(file), bits_of(folder))


quantized = gguf.quants.quantize


def stand_in(numbers: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Rows as blocks of any type; where the gguf package makes none, random ones that depend on the row."""
    with suppress(NotImplementedError):
        return quantized(numbers, kind)
    rows = []
    for row in numbers.reshape(-1, numbers.shape[-1]):
        blocks = blocks_of(kind.name, len(row) // NAMED[kind.name].entries, zlib.crc32(row.tobytes()))
        for at in UNITS.get(kind.name, (0,)):
            units = blocks[:, at : at + 2].copy().view(np.float16)
            blocks[:, at : at + 2] = (units * 2e-4).astype(np.float16).view(np.uint8)
        rows.append(blocks.reshape(-1))
    return np.stack(rows).reshape(*numbers.shape[:-1], -1)


@pytest.mark.parametrize(
    "kinds",
    usual(
        [
            *(("Q8_0", "Q4_0", "F32", "F16", "BF16"), ("Q5_1", "Q4_1", "Q5_0")),
            *(("Q4_K", "Q5_K", "Q6_K"), ("Q2_K", "Q3_K", "IQ4_XS", "IQ4_NL")),
        ],
        [("Q8_0",), ("Q4_0",), ("F16",), ("BF16",)],
    ),
    ids=" ".join,
)
def test_stored_weights_give_the_bits_of_what_they_stand_for(
    kinds: tuple[str, ...], random_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a folder in float32 with the weights that the gguf package makes of the file's."""
    monkeypatch.setattr(gguf.quants, "quantize", stand_in)
    sizes = {"hidden_size": 256, "intermediate_size": 512} if kinds[0].endswith("K") else {}
    model = plain_tokenizer(random_model(hf.LlamaConfig(**STORED | sizes)))
    given: dict[str, str] = {}

    def kind_of(name: str) -> str:
        return given.setdefault(name, kinds[len(given) % len(kinds)])

    path = made(model, tmp_path / "model.gguf", kind_of)
    tensors = load_file(model / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, weight in tensors.items():
        kind = given.get(str(names.get_name(name, try_suffixes=(".weight",))), "F32")
        type_ = gguf.GGMLQuantizationType[kind]
        tensors[name] = torch.from_numpy(gguf.dequantize(gguf.quants.quantize(weight.numpy(), type_), type_).copy())
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert same_bits(bits_of(loaded(path)), bits_of(loaded(model)))


def mixture(family: str, **sizes: int) -> Any:
    """Its configuration."""
    made, given = MIXTURES[family]
    return made(**STORED | given | sizes)


@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_in_float32(family: str, random_model: Callable[..., Path], tmp_path: Path) -> None:
    model = plain_tokenizer(random_model(mixture(family)))
    found, want = (loaded(made(model, tmp_path / "model.gguf")), loaded(model))
    assert type(found.model) is type(want.model)
    assert same_bits(bits_of(found), bits_of(want))


def test_a_gate_of_one_row_may_be_a_matrix(
    random_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llama.cpp's converter writes it; llama-quantize makes it a list."""
    parts = gguf_file._parts
    monkeypatch.setattr(
        gguf_file, "_parts", lambda name, x: [(name, x)] if name.endswith("expert_gate.weight") else parts(name, x)
    )
    model = plain_tokenizer(random_model(mixture("qwen2_moe")))
    assert same_bits(bits_of(loaded(made(model, tmp_path / "model.gguf"))), bits_of(loaded(model)))


@pytest.mark.parametrize(
    ("family", "kinds"),
    usual(
        [("mixtral", ("Q4_K", "Q4_K", "Q6_K")), ("qwen3_moe", ("Q4_0", "Q5_1", "IQ4_XS"))],
        [*((family, ("Q4_K", "Q4_K", "Q6_K")) for family in MIXTURES), ("mixtral", ("Q8_0", "Q8_0", "Q5_0"))],
    ),
)
def test_experts_stay_as_they_are_stored(
    family: str,
    kinds: tuple[str, str, str],
    random_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In their own bits, and with those of a folder of what they stand for; gates and what they open have one kind."""
    monkeypatch.setattr(gguf.quants, "quantize", stand_in)
    model = plain_tokenizer(random_model(mixture(family, hidden_size=256)))
    by_part = dict(zip(("gate", "up", "down"), kinds, strict=True))

    def kind_of(name: str) -> str:
        return next((kind for part, kind in by_part.items() if f"ffn_{part}_exps" in name), "F32")

    def stands_for(weight: torch.Tensor, part: str) -> torch.Tensor:
        kind = gguf.GGMLQuantizationType[by_part[part]]
        rows = weight.detach().flatten(0, 1).numpy()
        return torch.from_numpy(gguf.dequantize(gguf.quants.quantize(rows, kind), kind).copy()).view(weight.shape)

    path = made(model, tmp_path / "model.gguf", kind_of)
    other = hf.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, parameter in other.named_parameters():
        if name.endswith("gate_up_proj"):
            halves = zip(parameter.chunk(2, 1), ("gate", "up"), strict=True)
            parameter.data = torch.cat([stands_for(*half) for half in halves], 1)
        elif name.endswith("experts.down_proj"):
            parameter.data = stands_for(parameter, "down")
    wide = Path(shutil.copytree(model, tmp_path / "wide"))
    other.save_pretrained(wide)
    assert same_bits(bits_of(loaded(path)), bits_of(loaded(wide)))
    decoder = prepare(loaded(path), None, CPU, batch_size=1, kv_memory=8 << 20).runners[0].decoder
    assert isinstance(decoder, CDecoder)
    up, down = [step.weight.storage for step in decoder.program().steps if isinstance(step, ExpertLinear)][:2]
    assert (up.whole, down) == (kinds[0] == kinds[1], NAMED[kinds[2]].storage)


def test_experts_that_do_not_fit(
    random_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another shape than the settings say, of a layer that there is not, or gates that nothing stands beside."""
    model = plain_tokenizer(random_model(mixture("qwen3_moe")))
    path = made(model, tmp_path / "model.gguf", more=lambda writer: writer.add_expert_feed_forward_length(128))
    with pytest.raises(EngineError, match=r"fit its settings: blk\.0\.ffn_\w+_exps\.weight has another shape"):
        loaded(path)
    content = made(model, path).read_bytes()
    path.write_bytes(content.replace(b"blk.1.ffn_up_exps", b"blk.7.ffn_up_exps"))
    with pytest.raises(EngineError, match=r"no such weights as blk\.7\.ffn_up_exps\.weight"):
        loaded(path)
    parts = gguf_file._parts
    monkeypatch.setattr(gguf_file, "_parts", lambda *given: [x for x in parts(*given) if "experts.up" not in x[0]])
    with pytest.raises(EngineError, match=r"weights are missing: model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        loaded(made(model, path))


def test_kept_in_another_number_format(folder: Path, tmp_path: Path) -> None:
    """Where that is asked for, plain numbers are rounded to it: other bits, about the same logits."""
    finer = Path(shutil.copytree(folder, tmp_path / "finer"))
    weights = {name: 1.001 * weight.float() for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(weights, finer / "model.safetensors", metadata={"format": "pt"})
    file = made(finer, tmp_path / "model.gguf", lambda _: "F32")
    stored, rounded = bits_of(loaded(file)), bits_of(load_model(file, "file", "bfloat16", "none"))
    assert not same_bits(stored, rounded)
    np.testing.assert_allclose(rounded, stored, rtol=0.05, atol=0.05)


def test_a_stretched_rotary_embedding(file: Path, folder: Path, tmp_path: Path) -> None:
    """The factors of Llama 3.1's frequencies are a tensor of the file; the folder has what they are made from."""
    stretched = Path(shutil.copytree(folder, tmp_path / "model"))
    content = json.loads((stretched / "config.json").read_text())
    content["rope_parameters"] |= {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 64,
    }
    (stretched / "config.json").write_text(json.dumps(content))
    settings = load_model(stretched, "stretched", "auto", "none").model.model.rotary_emb
    plain = load_model(folder, "plain", "auto", "none").model.model.rotary_emb
    factors = (plain.inv_freq / settings.inv_freq).numpy()
    assert factors.max() > 7
    path = made(folder, tmp_path / "model.gguf", more=lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    found, want = bits_of(loaded(path)), bits_of(loaded(stretched))
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)
    assert not np.allclose(found, bits_of(loaded(file)), rtol=1e-3, atol=1e-3)


def test_a_run_writes_what_it_writes_with_the_folder(
    folder: Path, file: Path, go: Callable[..., Any], tmp_path: Path
) -> None:
    """Byte for byte, texts and chats; it is known again, is audited, and drafts for others."""
    assert go(folder, "ours").exit_code == 0
    done = go(file, "out", "--draft", str(file), "--drafter", "model")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "out/outputs.jsonl").read_bytes() == (tmp_path / "ours/outputs.jsonl").read_bytes()
    assert "text" in (tmp_path / "out/outputs.jsonl").read_text()
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    with file.open("rb") as content:
        assert manifest["profile"]["target"]["digest"] == hashlib.file_digest(content, "sha256").hexdigest()
    again = go(file, "out", "--draft", str(file), "--drafter", "model")
    assert "already" in again.stderr + again.stdout
    audited = invoke("audit", "out")
    assert (audited.exit_code, "nothing differs" in audited.stdout) == (0, True), audited.output
    other = go(folder, "out")
    assert (other.exit_code, "digest" in other.stderr) == (2, True), other.output


def test_an_interrupted_run_is_resumed(
    file: Path, go: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopping(Unobserved):
        def progress(self, progress: Progress) -> None:
            if progress.done and not stopped:
                stopped.append(True)
                os.kill(os.getpid(), signal.SIGINT)

    stopped: list[bool] = []
    engine = EngineConfig(target=str(file), drafter="none", batch_size=1, kv_memory=8 << 20)
    assert go(file, "whole").exit_code == 0
    monkeypatch.setattr(work, "_REPORT_SECONDS", 0.0)  # else both may be done before the first report
    config = RunConfig("prompts.jsonl", tmp_path / "out", SamplingParams(), engine)
    assert run(config, Stopping()).status == "interrupted"
    finished = run(config, Unobserved())
    assert (finished.status, finished.resumed > 0) == ("finished", True)
    assert (tmp_path / "out/outputs.jsonl").read_bytes() == (tmp_path / "whole/outputs.jsonl").read_bytes()


def test_quantizing_it_again_is_refused(file: Path, go: Callable[..., Any]) -> None:
    for quant in ("q8", "nf4"):
        refused = go(file, "out", "--target-quant", quant)
        assert (refused.exit_code, "stay as they are stored" in refused.stderr) == (2, True), refused.output


def damaged(content: bytes, what: str) -> bytes:
    """A file in which something is wrong."""
    name = b"blk.0.attn_q.weight"
    at = content.index(name) + len(name)  # behind it: its dimensions, its sizes, its type and its place
    if what == "type":
        return content[: at + 20] + struct.pack("<I", 16) + content[at + 24 :]
    if what == "unknown type":
        return content[: at + 20] + struct.pack("<I", 999) + content[at + 24 :]
    if what == "sizes":
        return content[: at + 4] + struct.pack("<Q", 2**40) + content[at + 12 :]
    if what == "name":
        return content.replace(name, b"blk.0.attn_x.weight")
    if what == "another name":
        return content.replace(b"blk.0.attn_q.weight", b"blk.9.attn_q.weight")
    if what == "version":
        return content[:4] + struct.pack("<I", 1) + content[8:]
    if what == "architecture":
        key = b"general.architecture" + struct.pack("<IQ", 8, 5)
        return content.replace(key + b"llama", key + b"lama2").replace(b"llama.block_count", b"lama2.block_count")
    if what == "layers":
        key = b"llama.block_count"
        at = content.index(key) + len(key) + 4
        return content[:at] + struct.pack("<I", 2**31) + content[at + 4 :]
    if what.startswith("token of"):  # many more bytes than there are
        at = content.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 4 + 12  # its first one's length
        return content[:at] + struct.pack("<Q", 2 ** int(what.split("^")[1])) + content[at + 8 :]
    return {"end": content[:-1000], "header": content[:3000], "magic": b"GGML" + content[4:], "nothing": b""}[what]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("end", "cut short"),
        ("header", "cut short"),
        ("token of 2^40", "cut short"),
        ("token of 2^63", "cut short"),
        ("magic", "not a GGUF file"),
        ("nothing", "not a GGUF file"),
        ("version", "GGUF 1"),
        ("type", "type IQ2_XXS"),
        ("unknown type", "type 999"),
        ("sizes", "sizes that make no sense"),
        ("name", "describe no such weights as blk.0.attn_x.weight"),
        ("another name", "describe no such weights as blk.9.attn_q.weight"),
        ("architecture", "lama2"),
        ("layers", "block_count"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(file: Path, tmp_path: Path, what: str, said: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(damaged(file.read_bytes(), what))
    with pytest.raises(EngineError) as refusal:
        load_model(path, "bad", "auto", "none")
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("architecture", "text"),
    [("phi3", "<|end|>"), ("phimoe", "<|end|>"), ("minicpm3", "<|im_end|>"), ("glm4moe", "<|observation|>")],
)
def test_ends_that_files_do_not_say(architecture: str, text: str) -> None:
    """Those of a family's checkpoints; others' texts are no ends."""
    tokenizer = SimpleNamespace(eos_token_id=1, get_vocab=lambda: {text: 2, "<|eot_id|>": 3})
    assert ends(Header(architecture, {}, {}, {}), tokenizer) == {1, 2}


def test_settings_that_are_not_understood(folder: Path, tmp_path: Path) -> None:
    """A file whose frequencies are stretched as nothing here is told would give other outputs than llama.cpp's."""

    def stretched(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)

    path = made(folder, tmp_path / "model.gguf", more=stretched)
    with pytest.raises(EngineError, match=r"llama\.rope\.scaling\.type = yarn is not understood"):
        loaded(path)
    path = made(folder, tmp_path / "model.gguf", more=lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(EngineError, match="one of several parts"):
        loaded(path)


def test_nothing_beside_the_file_has_a_say(folder: Path, file: Path, tmp_path: Path) -> None:
    """A tokenizer in the same folder is another model's."""
    path = Path(shutil.copy(file, tmp_path / "model.gguf"))
    for other in ("config.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / other).write_text("{}")
    (tmp_path / "tokenizer.json").write_text("nonsense")
    (tmp_path / "chat_template.jinja").write_text("nonsense")
    found, want = loaded(path), loaded(file)
    assert found.tokenizer.chat_template == want.tokenizer.chat_template != "nonsense"
    assert found.digest == want.digest
    ids = [one.tokenizer("def f(").input_ids for one in (found, want, loaded(folder))]
    assert ids[0] == ids[1] == ids[2]


def test_the_header_is_read_without_the_weights(file: Path) -> None:
    header = read_header(file, "x")
    assert header == check_gguf(file, "x", "none")
    assert header.architecture == "llama"
    assert header.settings["tokenizer.ggml.tokens"] == range(4096)
    assert header.tensors["blk.0.attn_norm.weight"].kind == "F32"
    ends = [entry.at + entry.size for entry in header.tensors.values()]
    assert 0 <= file.stat().st_size - max(ends) < 32


def test_each_thing_is_read_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of names, for all modules of a model; the header, whose lists are no arrays of numpy, for settings.

    And what the header says is worked out once, for them and for the tokenizer.
    """
    made, read, parts, said = [], [], [], []

    def saying(*arguments: Any, **named: Any) -> Any:
        said.append(arguments)
        return load_gguf_checkpoint(*arguments, **named)

    class Names(gguf.TensorNameMap):
        def __init__(self, *arguments: Any) -> None:
            made.append(arguments)
            super().__init__(*arguments)

    class Reader(QuickReader):
        def _build_fields(self, *arguments: Any) -> int:
            read.append(self)
            return super()._build_fields(*arguments)

        def _get(self, *arguments: Any, **named: Any) -> Any:
            parts.append(arguments)
            return super()._get(*arguments, **named)

    monkeypatch.setattr("gguf.tensor_mapping.TensorNameMap", Names)
    monkeypatch.setattr("detgen.models.gguf.quickly.QuickReader", Reader)
    monkeypatch.setattr(by_package, "load_gguf_checkpoint", saying)
    former = gguf.GGUFReader, gguf.get_tensor_name_map, saying
    loaded(file)
    assert (len(made), len(read), len(said)) == (1, 1, 1)
    assert len(parts) < 1000  # there are 4,096 tokens, and more merges
    assert (gguf.GGUFReader, gguf.get_tensor_name_map, by_package.load_gguf_checkpoint) == former


def test_strings_are_read_from_plain_arrays(file: Path) -> None:
    """A mapped file makes a view of each, by code in Python."""
    reader = pytest.importorskip("transformers.integrations.gguf.reader")
    former = reader._mapped
    with quick_gguf():
        assert type(reader._mapped(file)) is np.ndarray
    assert reader._mapped is former


def test_quickly_is_as_slowly(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings, tokenizer and weights are those that transformers makes of what the gguf package reads."""

    def more(writer: Any) -> None:
        writer.add_token_scores([0.1 * i for i in range(4096)])
        writer.add_array("general.tags", ["\u00e9", ""])
        writer.add_array("general.numbers", [1, 2])
        writer.add_array("general.nothing", [])

    path = made(folder, tmp_path / "model.gguf", more=more)
    quick, checkpoint = loaded(path), load_gguf_checkpoint(str(path))
    with quick_gguf():
        for _ in range(2):
            found = by_package.load_gguf_checkpoint(str(path))
            assert found == checkpoint
            found["config"].clear()  # as a caller may
    monkeypatch.setattr("detgen.models.gguf.quickly.quick_gguf", nullcontext)
    slow = loaded(path)
    assert quick.model.config.to_diff_dict() == slow.model.config.to_diff_dict()
    assert quick.tokenizer.backend_tokenizer.to_str() == slow.tokenizer.backend_tokenizer.to_str()
    assert quick.tokenizer.init_kwargs.keys() == slow.tokenizer.init_kwargs.keys()
    assert same_bits(bits_of(quick), bits_of(slow))


@pytest.mark.parametrize("native", [True, False])
def test_a_long_load_says_how_far_it_is(
    file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    """In megabytes of what is read, of a file as of a folder; a short one says nothing."""

    class Watching(Unobserved):
        def progress(self, progress: Progress) -> None:
            seen.append(progress)

    monkeypatch.setattr("detgen.models.loading.has_description", lambda _: native)
    for place in (file, folder):
        seen: list[Progress] = []
        load_model(place, "x", "auto", "none", observer=Watching())
        assert not seen
        with monkeypatch.context() as patched:
            patched.setattr("detgen.models.digest._SOON", 0.0)
            load_model(place, "x", "auto", "none", observer=Watching())
        size = sum(path.stat().st_size for path in (model_files(place, trusted=False) if place is folder else [place]))
        assert {progress.total for progress in seen} == {round(size / 1e6)}
        done = [progress.done for progress in seen]
        assert (done[0] < done[-1] == seen[-1].total, seen[-1].unit, seen[-1].left) == (True, "MB", 0.0)
