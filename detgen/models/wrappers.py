"""Multimodal models, of which only the text part runs: their encoders of images and sound, the towers, are not read.

Such a model is a wrapper with a language model inside. It runs by the wrapper's own class, so that positions, masks and
names of weights are transformers' own; without an image the towers have no effect. Gemma 3n and 4 run by the class of
their text part: transformers cannot make the wrapper of the one without timm, and the wrappers of the other look at an
embedding, which has no numbers before it is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_PATH = "model.language_model"
_PATHS = (_PATH, "model.text_model")  # the latter for Idefics and SmolVLM
# Classes of text parts, which read multimodal checkpoints as well.
_TEXT_PARTS = (
    *("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    *("Gemma3nForCausalLM", "Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"),
)
_BY_TEXT_PART = ("gemma3n", "gemma4", "gemma4_unified")  # kinds of models that run by the class of their text part
_BESIDE = re.compile(  # in these, and in Llama 3.2's
    r"(model\.)?(vision_tower|vision_embedder|audio_tower|embed_vision|embed_audio|vision_model|multi_modal_projector)\."
)


def auto_class(config: Any) -> Any:
    """Return the transformers class that makes a configuration's model: a multimodal one only if no other does."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

    classes = AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM
    return next((of for of in classes if type(config) in of._model_mapping), AutoModelForCausalLM)


def settings_of_text(config: Any) -> Any:
    """Return the configuration of the text part if that is loaded by itself, otherwise the given one."""
    if config.model_type not in _BY_TEXT_PART:
        return config
    text = config.get_text_config()
    for name in ("quantization_config", "eos_token_id", "tie_word_embeddings"):  # these settings are outside of it
        if getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    return text


def language_model(model: nn.Module) -> str | None:
    """Return the path of the language model in a wrapper; None if the model is not a wrapper."""
    for path in _PATHS:
        found = getattr(getattr(model, "model", None), path.partition(".")[2], None)
        if hasattr(found, "named_parameters"):
            return path
    return None


def is_read_here_alone(model: PreTrainedModel) -> bool:
    """Return whether a model is a wrapper that transformers does not load as a decoder."""
    return language_model(model) is not None and "CausalLM" not in auto_class(model.config).__name__


def without_towers(model: PreTrainedModel) -> set[str]:
    """Remove everything but the language model, in place; return the names of the removed tensors."""
    path = language_model(model)
    if type(model).__name__ == "MllamaForCausalLM":
        _without_crossing(model)
    if path is None:
        return set()
    import torch
    from torch import nn

    before = set(model.state_dict())
    for name, module in list(model.model.named_children()):
        if f"model.{name}" != path and next(module.parameters(), None) is not None:
            tower: Any = nn.Module()
            tower.device = torch.device("cpu")  # Qwen2-Audio moves its ids to this device
            setattr(model.model, name, tower)
    for name, _ in list(model.model.named_parameters(recurse=False)):  # of images
        setattr(model.model, name, None)
    return before - set(model.state_dict())


def _without_crossing(model: Any) -> None:
    """Remove the layers of Llama 3.2 that do nothing without an image, and allow files to have them."""
    crossing = [i for i in model.config.cross_attention_layers if i < len(model.model.layers)]
    for i in crossing:
        if next(model.model.layers[i].parameters(), None) is not None:
            from torch import nn

            model.model.layers[i] = nn.Identity()
    numbers = "|".join(map(str, crossing))
    model._keys_to_ignore_on_load_unexpected = [rf"^model\.layers\.({numbers})\."]


def renaming(model: PreTrainedModel) -> Callable[[str], str]:
    """Return how transformers renames the tensors of files; names of a model that was never multimodal stay.

    Call it before the towers are removed.
    """
    if type(model).__name__ in _TEXT_PARTS:
        return lambda name: name.replace(f"{_PATH}.", "model.", 1)
    if type(model).__name__ == "MllamaForCausalLM":
        return lambda name: re.sub(r"^(model\.)?language_model\.(model\.|(?!lm_head))", "model.", name).removeprefix(
            "language_model."
        )
    if language_model(model) is None:
        return lambda name: name
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    changes = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
    known = model.state_dict()
    return lambda name: rename_source_key(name, changes, [], model.base_model_prefix, known)[0]


def is_made(model: PreTrainedModel, name: str) -> bool:
    """Return whether transformers makes the parameter of that name from several tensors in files."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    makers = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightConverter)]
    return any(re.search(pattern, name) for one in makers for pattern in one.target_patterns)


def of_text(names: Collection[str], left_out: set[str]) -> set[str]:
    """Return the names that are not tensors of towers."""
    towers = {name.rpartition(".")[0] for name in left_out}
    of_towers = {name for name in names if name.rpartition(".")[0] in towers or _BESIDE.match(name)}
    return set(names) - of_towers - left_out
