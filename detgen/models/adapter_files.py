"""Check the folder of an adapter (low-rank factors, LoRA, of linear layers, as PEFT saves them) before the engine is
imported.

A folder may come from a stranger. Errors, also of adapters that cannot be merged, are one line that names the file and
the setting or tensor. Factors are read by `detgen/models/merging.py`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from detgen.errors import EngineError
from detgen.models.digest import digests
from detgen.models.folders import Tensor, WrongFileError, object_of, shown, size_of, tensors_of
from detgen.progress import Observer

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_MERGED = "; merge it by PEFT (merge_and_unload), save the result, and give that as --target"
# Settings that change how a layer computes, and what they ask for.
_REFUSED = {
    "use_dora": "DoRA, which gives each output a magnitude of its own",
    "use_qalora": "QALoRA, whose factors read means of groups",
    "use_bdlora": "factors in blocks (BD-LoRA)",
    "lora_bias": "factors with biases",
    "alora_invocation_tokens": "an adapter that only some tokens activate (aLoRA)",
    "arrow_config": "several adapters that tokens are routed to",
    "layer_replication": "layers that are there several times",
    "megatron_config": "layers of Megatron",
    "target_parameters": "factors of parameters that are not linear layers, such as experts",
    "trainable_token_indices": "tokens with embeddings of their own",
}
# Settings that say how the factors were trained or found, or what tensors and modules say better.
_TOLD = {
    *("auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "exclude_modules"),
    *("fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform"),
    *("loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_type"),
    *("peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"),
    *("alpha_pattern", "lora_alpha", "r", "rank_pattern", "use_rslora"),
}
# How factors may begin; the other ways also change the weights that they are added to.
_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_PREFIX = "base_model.model."
_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
_LARGEST = 1 << 20  # bytes of the settings
_LONGEST, _MOST = 200, 4  # characters of a pattern of names, and repetitions in it, so that matching is fast


class Factors(NamedTuple):
    """What is added to a linear layer's weight, [outputs, inputs]: scale * (up @ down).

    Attributes:
        up: [outputs, rank], `lora_B`.
        down: [rank, inputs], `lora_A`.
        scale: factor of the product.
    """

    up: Tensor
    down: Tensor
    scale: float


class Adapter(NamedTuple):
    """An adapter.

    Attributes:
        folder: folder of the adapter.
        name: its name in messages.
        factors: factors by module name.
        replaced: weights that replace the model's own (`modules_to_save`), by parameter name.
    """

    folder: Path
    name: str
    factors: Mapping[str, Factors]
    replaced: Mapping[str, Tensor]

    def digest(self, observer: Observer) -> str:
        """Return SHA-256 over the digests of its files."""
        files = [self.folder / file for file in (CONFIG, WEIGHTS)]
        return hashlib.sha256("".join(digests(files, observer)).encode()).hexdigest()


def check_adapter(folder: str | Path, place: Path | None) -> Adapter:
    """Check that a folder holds an adapter that can be merged.

    Args:
        folder: folder as the user gave it.
        place: folder or file of the model; None if it is not there yet.

    Raises:
        EngineError: names the file and what is wrong with it.
    """
    name, path = str(folder), Path(folder)
    if place is not None and place.is_file():
        raise EngineError(
            f"cannot merge the adapter {name}: the weights of a GGUF file ({place.name}) stay as they are stored;"
            " give the folder of the model that it was made of as --target, with --target-quant for few bits"
        )
    if not path.is_dir():
        what = "this is not a folder" if path.exists() else "there is no such folder"
        raise EngineError(
            f"cannot use the adapter {name}: {what}; give --adapter one with {CONFIG} and {WEIGHTS}, as PEFT saves it"
        )
    try:
        return _check(path, name)
    except WrongFileError as error:
        raise EngineError(f"cannot use the adapter {name}: {error}") from None


def _check(folder: Path, name: str) -> Adapter:
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).exists():
            old = (folder / "adapter_model.bin").exists() and file == WEIGHTS
            raise WrongFileError(
                "adapter_model.bin: this is a pickle, which could run code; save the adapter as safetensors"
                if old
                else f"{file} is not in this folder; give one as PEFT saves it"
            )
    if size_of(folder / CONFIG) > _LARGEST:
        raise WrongFileError(f"{CONFIG}: it is too large for such a file")
    config = object_of(folder / CONFIG)
    _check_settings(config)
    parts: dict[str, dict[str, Tensor]] = {}
    replaced: dict[str, Tensor] = {}
    for tensor in tensors_of(folder / WEIGHTS, size_of(folder / WEIGHTS)):
        _check_tensor(tensor)
        own = tensor.name.removeprefix(_PREFIX)
        if match := _FACTOR.fullmatch(own):
            parts.setdefault(match["module"], {})[match["part"]] = tensor
        elif "lora_" in own:
            what = "of an embedding" if "lora_embedding_" in own else "which is not a factor of a linear layer"
            raise WrongFileError(f"{WEIGHTS}: {tensor.name}, {what}, cannot be merged here{_MERGED}")
        else:  # of a layer that has factors, too, it may be the weight that they are added to
            replaced[own.replace(".base_layer.", ".")] = tensor
    if not parts:
        raise WrongFileError(f"{WEIGHTS}: no tensor is a factor (.lora_A.weight, .lora_B.weight)")
    factors = {module: _factors(module, of, config) for module, of in parts.items()}
    return Adapter(folder, name, factors, replaced)


def _check_settings(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise WrongFileError(f"{CONFIG}: peft_type is {shown(kind)}, and only LORA can be merged here{_MERGED}")
    if (bias := config.get("bias") or "none") != "none":
        raise WrongFileError(
            f"{CONFIG}: bias is {shown(bias)}: biases that were trained cannot be merged here{_MERGED}"
        )
    if (init := config.get("init_lora_weights")) not in _BEGINNINGS:
        raise WrongFileError(
            f"{CONFIG}: init_lora_weights is {shown(init)}, which changes the model's own weights, too; save the"
            " adapter by PEFT as a plain one (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    for key, value in config.items():
        if value and key in _REFUSED:
            raise WrongFileError(f"{CONFIG}: {key} is set: {_REFUSED[key]}, cannot be merged here{_MERGED}")
        if value and key not in _TOLD:
            raise WrongFileError(f"{CONFIG}: {key} is set, and nothing is known of it here{_MERGED}")
    _number("r", config.get("r"), whole=True)
    _number("lora_alpha", config.get("lora_alpha"))
    for key, whole in (("rank_pattern", True), ("alpha_pattern", False)):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict):
            raise WrongFileError(f"{CONFIG}: {key} must be an object, got {shown(patterns)}")
        for pattern, value in patterns.items():
            _check_pattern(key, pattern)
            _number(f"{key}: {pattern}", value, whole=whole)


def _number(key: str, value: Any, *, whole: bool = False) -> None:
    if whole and (type(value) is not int or not 1 <= value < 2**31):
        raise WrongFileError(f"{CONFIG}: {key} must be a whole number of at least 1, got {shown(value)}")
    if type(value) not in (int, float) or not abs(value) < 1e30:
        raise WrongFileError(f"{CONFIG}: {key} must be a finite number, got {shown(value)}")


def _check_pattern(key: str, pattern: str) -> None:
    repeated = len(re.findall(r"[*+?{]", pattern))
    try:
        re.compile(pattern)
    except re.error as error:
        raise WrongFileError(f"{CONFIG}: {key}: {shown(pattern)} is not a regular expression: {error}") from None
    if len(pattern) > _LONGEST or repeated > _MOST or re.search(r"\)[*+?{]", pattern):
        raise WrongFileError(
            f"{CONFIG}: {key}: {shown(pattern)} could take forever; write it with at most {_MOST} repetitions,"
            " none of a group"
        )


def _check_tensor(tensor: Tensor) -> None:
    shape, size = tensor.shape, _SIZES.get(tensor.dtype, 0)
    whole = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
    if not whole or math.prod(shape) * size != tensor.size:
        raise WrongFileError(
            f"{WEIGHTS}: {tensor.name} must be of F32, F16 or BF16, and is {shape!r:.40} {tensor.dtype}"
        )


def _factors(module: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> Factors:
    """Return the factors of a module, reading settings as PEFT does (`peft.utils.other.get_pattern_key`)."""
    for part in "AB":
        if part not in parts:
            raise WrongFileError(f"{WEIGHTS}: {module}.lora_{part}.weight is missing")
    listed = config.get("target_modules")
    if isinstance(listed, list) and not any(f".{module}".endswith(f".{one}") for one in listed):
        raise WrongFileError(f"{WEIGHTS}: {module} has factors, and target_modules in {CONFIG} does not name it")
    up, down = parts["B"], parts["A"]
    rank = int(_of("rank_pattern", module, config, "r"))
    for tensor, axis in ((down, 0), (up, 1)):
        if len(tensor.shape) != 2 or tensor.shape[axis] != rank:
            raise WrongFileError(f"{WEIGHTS}: {tensor.name} is {tensor.shape}, and its rank in {CONFIG} is {rank}")
    alpha = float(_of("alpha_pattern", module, config, "lora_alpha"))
    return Factors(up, down, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _of(patterns: str, module: str, config: Mapping[str, Any], key: str) -> Any:
    """Return a module's setting: that of the first pattern that matches its name or the end of it."""
    for pattern, value in (config.get(patterns) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return config[key]
