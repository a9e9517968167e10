"""GGUF files as llama.cpp's converter makes them, for tests: of a folder, its tokenizer in it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import AutoModelForCausalLM
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from detgen.bench.peers.gguf_file import write_gguf
from detgen.errors import EngineError
from detgen.kernels.input_batch import Window
from detgen.machine import CPU
from detgen.models.loaded import LoadedModel
from detgen.models.loading import load_model
from detgen.models.stored import turned
from detgen.program.arrays import array, same_bits
from detgen.runner.preparing import prepare

CONTROL, NORMAL = 3, 1


def plain_tokenizer(folder: Path) -> Path:
    """The folder, its tokenizer splitting texts as GPT-2's does, which GGUF files can say."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    path.write_text(json.dumps(content), encoding="utf-8")
    return folder


def write_vocabulary(folder: Path, writer: Any, *, pre: str = "gpt-2") -> None:
    """Write the byte-level tokenizer of a folder, how that is said to split texts, and its chat template."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    ids = content["model"]["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
    special = {token["id"] for token in content["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    writer.add_token_types([CONTROL if i in special else NORMAL for i in sorted(ids.values())])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_eos_token_id(0)
    template = folder / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text(encoding="utf-8"))


def drawn(config: Any, path: Path, folder: Path, settings: dict[str, Any]) -> Path:
    """A GGUF file of random tensors, in float32, that have the names by which transformers looks for them.

    Args:
        config: of a family whose architecture has the name of its type.
        path: of the file.
        folder: of a model with a byte-level tokenizer.
        settings: others of the file, or instead of those of the configuration.
    """
    kind = config.model_type.removesuffix("_text")
    model = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(kind, TensorProcessor)(config=config.to_dict())
    names = GGUF_CONFIG_MAPPING[kind]
    told = {key: getattr(config, name) for key, name in names.items() if name and hasattr(config, name)}
    if "rope.freq_base" in names:
        told["rope.freq_base"] = config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"]
    writer, g = gguf.GGUFWriter(path, kind), np.random.default_rng(0)
    _write_settings(writer, kind, told | settings)
    write_vocabulary(folder, writer)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for tensor, name in sorted(get_gguf_hf_weights_map(model, processor).items()):
        if name not in shapes:
            continue
        rows, *rest = shapes[name]
        if turned(model.get_submodule(name.rpartition(".")[0])) and rest:
            rows, rest = rest[0], [rows]
        noise = g.standard_normal([rows, *(n for n in rest if n > 1 or "conv" not in tensor)]).astype(np.float32)
        writer.add_tensor(tensor, 0.1 * noise + (not rest and not tensor.endswith("bias")))
    return _finished(writer, path)


def _write_settings(writer: Any, architecture: str, settings: Mapping[str, Any]) -> None:
    of = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    of[bool] = writer.add_bool
    for key, value in settings.items():
        of[type(value)](f"{architecture}.{key}", value)


def _finished(writer: Any, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def written(
    path: Path,
    architecture: str,
    settings: Mapping[str, Any],
    tensors: Iterable[tuple[str, np.ndarray]],
    write_tokenizer: Callable[[Any], None],
    kind_of: Callable[[str], str] = lambda _: "F32",
    *,
    widened: bool = False,
) -> Path:
    """A GGUF file.

    Args:
        path: of the file.
        architecture: llama.cpp's name of the family.
        settings: of the architecture; those that are None are left out.
        tensors: by their names, in float32; bytes are blocks in MXFP4.
        write_tokenizer: writes the tokenizer.
        kind_of: type of a matrix, by its name, as far as its rows are whole blocks of 32.
        widened: whether it gets, in float32, what those of that type stand for.
    """
    writer = gguf.GGUFWriter(path, architecture)
    _write_settings(writer, architecture, {key: value for key, value in settings.items() if value is not None})
    write_tokenizer(writer)
    for name, numbers in tensors:
        if numbers.dtype == np.uint8:
            writer.add_tensor(name, numbers, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
            continue
        fits = numbers.ndim > 1 and name.endswith("weight") and numbers.shape[-1] % 32 == 0
        kind = gguf.GGMLQuantizationType[kind_of(name) if fits else "F32"]
        stored = gguf.quants.quantize(np.ascontiguousarray(numbers), kind)
        if widened:
            stored, kind = gguf.dequantize(stored, kind).astype(np.float32), gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, stored, raw_dtype=kind)
    return _finished(writer, path)


def made(
    folder: Path, path: Path, kind_of: Callable[[str], str] = lambda _: "F32", more: Callable[[Any], None] | None = None
) -> Path:
    """A GGUF file of a folder.

    Args:
        folder: of the model, with a byte-level tokenizer.
        path: of the file.
        kind_of: type of a matrix, by its name.
        more: writes further settings.
    """

    def vocabulary(writer: Any) -> None:
        write_vocabulary(folder, writer)
        if more is not None:
            more(writer)

    write_gguf(AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), path, kind_of, vocabulary)
    return path


def plain_model(folder: Path, path: Path) -> Path:
    """A copy of a model's folder, with a tokenizer that a GGUF file can hold."""
    shutil.copytree(folder, path)
    return plain_tokenizer(path)


def loaded(path: Path) -> LoadedModel:
    """A model, its weights as they are stored."""
    return load_model(path, path.name, "auto", "none")


def bits_of(loaded: LoadedModel, *, exactly: bool = True) -> np.ndarray:
    """Logits of a pass of two windows; of quantized layers, inputs are rounded only if that is asked for."""
    forward = prepare(loaded, None, CPU, batch_size=2, kv_memory=8 << 20).runners[0]
    forward.cache.pages.lay_out(2, 128)
    windows = [Window(0, 0, list(range(3, 43)), 40), Window(1, 0, [7, 8, 9], 3)]
    with forward.decoder.exactly() if exactly else nullcontext():
        return array(forward.run(windows)).copy()


def check_same(path: Path, folder: Path) -> None:
    """A file in float32 is the model of a folder, to the bit."""
    file, own = loaded(path), loaded(folder)
    assert (file.context, file.vocabulary) == (own.context, own.vocabulary)
    assert same_bits(bits_of(file), bits_of(own))


def check_refused(path: Path, said: str) -> None:
    """A file cannot be loaded, and the message says why, by a pattern."""
    with pytest.raises(EngineError, match=f"(?s)^cannot load the model {re.escape(path.name)}: .*{said}"):
        loaded(path)
