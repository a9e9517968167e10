"""Check a model's folder before anything is loaded from it: its files, and whether its settings make sense.

A folder may come from a stranger. Errors are one line that names the file, reported before a library stumbles over it
and before the engine is imported: only JSON and the headers of weights are read here.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from detgen.errors import DEMO, EngineError

# Files of a model by their endings; `.py` only if its code is trusted.
SUFFIXES = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt")

# Models that detgen ships, by their names for `--target`; a folder of such a name is given as `./NAME`.
EMBEDDED = {"demo-thinking": DEMO / "thinking"}

_HUB_NAME = re.compile(r"(?!.*(?:--|\.\.))(?!.*\.git$)(?:\w(?:[\w.-]*\w)?/)?\w(?:[\w.-]{0,94}\w)?", re.ASCII)
_LARGEST_TEXT = 256 << 20  # bytes of a file that is not weights; vocabularies have some tens of millions
_LARGEST_HEADER = 100 << 20  # bytes, as in the safetensors library
_LARGEST = 2**31 - 1  # of any count: fits the int32 of kernels
_MOST_LAYERS = 10_000  # if the number of tensors is unknown
_MOST_EXPERTS = 4096
_MOST_LABELS = 1_000_000  # of a classifier; transformers makes names for all of them
_COUNTS = re.compile(
    r"hidden_size|n_embd|d_model|intermediate_size|ffn_dim|n_inner|num_hidden_layers|n_layers?|num_layers|vocab_size"
    r"|num_attention_heads|num_key_value_heads|n_heads?|head_dim|max_position_embeddings|n_positions|n_ctx"
    r"|num_experts|num_local_experts|n_routed_experts|num_experts_per_tok|sliding_window"
)
_LAYERS = re.compile(r"num_hidden_layers|n_layers?|(num_)?((en|de)coder_)?layers")
_LABELS = re.compile(r"num_labels|_num_labels")
_EXPERTS = re.compile(r"num_experts|num_local_experts|n_routed_experts")


def local_place(source: str | Path, name: str) -> Path | None:
    """Return the folder or GGUF file that a model's name stands for; None for a name on the hub.

    Args:
        source: source as the user gave it.
        name: name in messages.

    Raises:
        EngineError: if it is neither a folder, nor a file, nor a name that the hub could have.
    """
    path, given = Path(source), str(source)
    if not given.strip():
        raise EngineError(f"cannot load the model {name!r}: that is not a valid name")
    if isinstance(source, str) and source in EMBEDDED:
        return EMBEDDED[source]
    try:
        kind = path.stat().st_mode
    except ValueError as error:
        raise EngineError(f"cannot load the model {name}: {error}") from None
    except OSError as error:
        if isinstance(source, Path) or given.startswith((".", "/", "~")):
            reason = "there is no such folder" if error.errno in (errno.ENOENT, errno.ENOTDIR) else error.strerror
            raise EngineError(f"cannot load the model {name}: {reason}") from None
        if not _HUB_NAME.fullmatch(given):
            raise EngineError(
                f"cannot load the model {name}: there is no such folder, and it is not a name on the hub"
                " (NAME or OWNER/NAME)"
            ) from None
        return None
    if not stat.S_ISDIR(kind) and not stat.S_ISREG(kind):
        raise EngineError(
            f"cannot load the model {name}: it is neither a folder in the Hugging Face layout nor a GGUF file"
        )
    return path


class Tensor(NamedTuple):
    """A tensor in a safetensors file.

    Attributes:
        name: name of the weight.
        file: name of the file.
        dtype: number format, as safetensors names it.
        shape: shape given in the file.
        at: offset of the first byte.
        size: number of bytes.
    """

    name: str
    file: str
    dtype: str
    shape: Any
    at: int
    size: int


class Stored(NamedTuple):
    """The weights in a folder.

    Attributes:
        size: bytes of the files.
        tensors: tensors in safetensors files; empty for other files.
    """

    size: int
    tensors: list[Tensor]

    @property
    def dtypes(self) -> frozenset[str]:
        """Number formats of the tensors, as safetensors names them; empty if unknown."""
        return frozenset(tensor.dtype for tensor in self.tensors)


def check_folder(folder: Path, name: str, *, trusted: bool) -> Stored:
    """Check that a folder holds a model that transformers can load, without code of its own unless it is trusted.

    Args:
        folder: the folder.
        name: its name in messages.
        trusted: whether code in it may run.

    Raises:
        EngineError: names the file and what is wrong with it.
    """
    try:
        return _check(folder, trusted=trusted)
    except _NoConfig:
        raise EngineError(
            f"{name}: this is an adapter; give its model as --target, and this folder as --adapter"
            if (folder / "adapter_config.json").exists()
            else f"{name}: no config.json in this folder; give a folder in the Hugging Face layout"
        ) from None
    except WrongFileError as error:
        raise EngineError(f"cannot load the model {name}: {error}") from None


class WrongFileError(Exception):
    """A file is wrong; the message begins with its name."""


class _NoConfig(Exception):  # noqa: N818 (not an error of the folder, just no model)
    """The folder has no config.json."""


def model_files(folder: Path, *, trusted: bool) -> list[Path]:
    """Return the files of a folder that can change an output, ordered by name; code only if it is trusted."""
    found = [p for p in folder.iterdir() if p.suffix in SUFFIXES]
    found += folder.glob("additional_chat_templates/*.jinja")
    if trusted:
        found += folder.rglob("*.py")
    return sorted(found)


def _check(folder: Path, *, trusted: bool) -> Stored:
    try:
        files = {path.name: size_of(path) for path in model_files(folder, trusted=trusted)}
    except OSError as error:
        raise WrongFileError(f"{error.filename or folder}: {error.strerror}") from None
    if "config.json" not in files:
        raise _NoConfig
    if "adapter_config.json" in files:
        raise WrongFileError(
            "adapter_config.json: this is an adapter of another model; give that as --target, and this as --adapter"
        )
    for file, length in files.items():
        if length > _LARGEST_TEXT and not file.endswith((".safetensors", ".bin")):
            raise WrongFileError(f"{file}: {length:,} bytes is too large for such a file")
    config = object_of(folder / "config.json")
    for file in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if file in files:
            settings = object_of(folder / file)
            _check_tokens(file, settings)
            _check_code(file, settings, trusted=trusted)
    _check_tokens("config.json", config)
    _check_code("config.json", config, trusted=trusted)
    size, tensors = _weights(folder, files, config)
    _check_counts(config, _MOST_LAYERS if tensors is None else len(tensors))
    _check_quantized(config, tensors or [])
    return Stored(size, tensors or [])


def size_of(path: Path) -> int:
    """Return the size of a readable file in bytes; raise WrongFileError if it cannot be read."""
    try:
        found = path.stat()
    except OSError as error:
        raise WrongFileError(f"{path.name}: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise WrongFileError(f"{path.name}: this is not a regular file")
    if not os.access(path, os.R_OK):
        raise WrongFileError(f"{path.name}: it may not be read")
    return found.st_size


def _parse(file: str, content: bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the value of a JSON text, with objects made by `pairs`."""
    try:
        return json.loads(content, object_pairs_hook=pairs)
    except RecursionError:
        raise WrongFileError(f"{file}: it is nested too deeply") from None
    except UnicodeDecodeError:
        raise WrongFileError(f"{file}: it is not UTF-8") from None
    except ValueError as error:
        raise WrongFileError(f"{file}: it is not JSON: {error}") from None


def object_of(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise WrongFileError if it holds none."""
    settings = _parse(path.name, path.read_bytes())
    if not isinstance(settings, dict):
        raise WrongFileError(f"{path.name}: it must hold an object, not {shown(settings)}")
    return settings


def shown(value: object) -> str:
    """Return a value as JSON, shortened if long."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _nested(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each setting, including those of nested objects."""
    for key, value in settings.items():
        yield key, value
        if isinstance(value, dict):
            yield from _nested(value)


def _check_tokens(file: str, settings: dict[str, Any]) -> None:
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        value = settings.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(i) is int for i in ids):
            raise WrongFileError(f"{file}: {key} must be a token id or a list of them, got {shown(value)}")
        if wrong := [i for i in ids if abs(i) > _LARGEST]:
            raise WrongFileError(f"{file}: {key} must be at most {_LARGEST:,}, got {shown(wrong[0])}")
    longest = settings.get("model_max_length")
    if longest is not None and type(longest) not in (int, float):
        raise WrongFileError(f"{file}: model_max_length must be a number, got {shown(longest)}")


def _check_code(file: str, settings: dict[str, Any], *, trusted: bool) -> None:
    """Raise if code comes from elsewhere: transformers would fetch it, and no digest would cover it."""
    for key, value in _nested(settings):
        names = str(value)
        if key == "auto_map" and trusted and "--" in names:
            raise WrongFileError(f"{file}: auto_map names code of another repository; copy the code into this folder")
        if key.lstrip("_").startswith("attn_implementation") and "/" in names:
            raise WrongFileError(f"{file}: {key} names code on the hub, which detgen does not run; remove it")


def _check_counts(config: dict[str, Any], most_layers: int) -> None:
    if not isinstance(config.get("model_type"), str):
        raise WrongFileError(f"config.json: model_type must be a text, got {shown(config.get('model_type'))}")
    for key, value in _nested(config):
        if _LABELS.fullmatch(key) and type(value) is int and value > _MOST_LABELS:
            raise WrongFileError(f"config.json: {key} must be at most {_MOST_LABELS:,}, got {value:,}")
        if _LAYERS.fullmatch(key) and type(value) is int and value > most_layers:
            raise WrongFileError(f"config.json: {key} is {value:,}, and the weights have only {most_layers:,} tensors")
        if key == "query_pre_attn_scalar" and value is not None and not (type(value) in (int, float) and value > 0):
            raise WrongFileError(f"config.json: {key} must be a number above 0, got {shown(value)}")
        if value is None or not _COUNTS.fullmatch(key) or isinstance(value, list | dict):
            continue
        if key == "sliding_window" and value == 0 and config.get("use_sliding_window") is False:
            continue  # transformers writes this for models that could have one
        if value == 0 and "expert" in key and config["model_type"] == "granitemoehybrid":
            continue  # there are no experts then
        if type(value) is not int or not 1 <= value <= _LARGEST:
            raise WrongFileError(
                f"config.json: {key} must be a whole number from 1 to {_LARGEST:,}, got {shown(value)}"
            )
        if _EXPERTS.fullmatch(key) and value > _MOST_EXPERTS:
            raise WrongFileError(f"config.json: {key} must be at most {_MOST_EXPERTS:,}, got {value:,}")


def _check_quantized(config: dict[str, Any], tensors: list[Tensor]) -> None:
    """Raise if weights are said to be in few bits but are not."""
    settings = config.get("quantization_config")
    said = isinstance(settings, dict) and settings.get("quant_method") == "bitsandbytes"
    if said and tensors and not any(tensor.dtype in ("U8", "I8") for tensor in tensors):
        raise WrongFileError(
            "config.json: quantization_config says that bitsandbytes has quantized the weights, and it has not;"
            " remove it, or quantize them with --target-quant nf4 or int8"
        )


def _weights(folder: Path, files: dict[str, int], config: dict[str, Any]) -> tuple[int, list[Tensor] | None]:
    """Return the weights that transformers will load: their bytes, and each tensor if in safetensors files."""
    explicit = config.get("transformers_weights")
    if explicit is not None:
        if explicit not in files:
            raise WrongFileError(f"config.json: transformers_weights names {shown(explicit)}, which is not here")
        names = [str(explicit)]
    elif "model.safetensors" in files:
        names = ["model.safetensors"]
    elif "model.safetensors.index.json" in files:
        names = _shards(folder / "model.safetensors.index.json", files)
    elif "pytorch_model.bin" in files:
        names = ["pytorch_model.bin"]
    elif "pytorch_model.bin.index.json" in files:
        names = _shards(folder / "pytorch_model.bin.index.json", files)
    else:
        raise WrongFileError("there are no weights in the folder, such as model.safetensors")
    stored = sum(files[name] for name in names)
    if not all(name.endswith(".safetensors") for name in names):
        return stored, None
    tensors: dict[str, Tensor] = {}
    for name in names:
        for tensor in tensors_of(folder / name, files[name]):
            if other := tensors.get(tensor.name):
                raise WrongFileError(f"{name}: it has {shown(tensor.name)}, which {other.file} has, too")
            tensors[tensor.name] = tensor
    return stored, list(tensors.values())


def _shards(index: Path, files: dict[str, int]) -> list[str]:
    placed = object_of(index).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(v, str) for v in placed.values()):
        raise WrongFileError(f"{index.name}: weight_map must say for each weight in which file it is")
    names = sorted(set(placed.values()))
    for name in names:
        if name not in files:
            raise WrongFileError(f"{index.name}: it names {shown(name)}, which is not in the folder")
    return names


def tensors_of(path: Path, length: int) -> list[Tensor]:
    """Return the tensors of a safetensors file, whose header must match its length."""
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        if length < 8 or header > min(length - 8, _LARGEST_HEADER):
            raise WrongFileError(f"{path.name}: it is cut short, or not a safetensors file")
        found = _parse(path.name, file.read(header), partial(_once, path.name))
    if not isinstance(found, dict):
        raise WrongFileError(f"{path.name}: its header is not an object")
    found.pop("__metadata__", None)
    first = 8 + header
    tensors = []
    for name, tensor in found.items():
        place = tensor.get("data_offsets") if isinstance(tensor, dict) else None
        if not isinstance(place, list) or len(place) != 2 or not all(type(i) is int and i >= 0 for i in place):
            raise WrongFileError(f"{path.name}: its header does not say where each tensor is")
        begin, end = place
        tensors.append(
            Tensor(name, path.name, str(tensor.get("dtype")), tensor.get("shape"), first + begin, end - begin)
        )
    at = first
    for tensor in sorted(tensors, key=lambda tensor: (tensor.at, tensor.size)):
        if tensor.at != at or tensor.size < 0:
            raise WrongFileError(f"{path.name}: its tensors overlap or leave a gap, at {shown(tensor.name)}")
        at += tensor.size
    if at != length:
        kind = "cut short" if at > length else "longer than its tensors"
        raise WrongFileError(
            f"{path.name}: it is {kind}: {at - first:,} bytes of tensors, {length - first:,} in the file"
        )
    return tensors


def _once(file: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object whose keys are unique: readers differ in which duplicate they take."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise WrongFileError(f"{file}: its header has {shown(key)} twice")
        made[key] = value
    return made
