"""The models of a benchmark: facts about the target before it is loaded, and both models in the forms that peers take.

Peers load them in their own processes: with detgen's loader, or as a folder on the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from detgen.bench.config import BenchConfig
from detgen.bench.peer_interface import ModelSource
from detgen.bench.random_weights import config_of, random_model
from detgen.engine.config import EngineConfig
from detgen.engine.request import Request
from detgen.errors import DEMO, BenchError
from detgen.interruption import interrupted_later
from detgen.machine import usable_cores
from detgen.models.folders import check_folder, local_place
from detgen.models.hub import fetched
from detgen.progress import Observer


@dataclass(frozen=True, slots=True)
class Target:
    """Facts about the target before it is loaded.

    Attributes:
        engine: settings of the benchmark, with device, dtype and threads decided.
        vocabulary: number of entries of its logits.
        context: most positions of a sequence.
        weights: parameters that a pass reads, without an untied embedding, of which it reads one row per token. None
            for a mixture, since each token uses only some of its experts.
        native: as in `ModelSource`.
        as_stored: as in `ModelSource`.
        encode: returns the token ids of a request as `detgen run` does, chats with the model's template; with random
            weights, by the embedded tokenizer. Raises RequestError for a request that cannot run.
    """

    engine: EngineConfig
    vocabulary: int
    context: int
    weights: float | None
    native: bool
    as_stored: bool
    encode: Callable[[Request], list[int]]


def resolve(config: BenchConfig, observer: Observer) -> Target:
    """Examine a benchmark's target.

    Raises:
        BenchError: if there is no such configuration, or the model thinks while it reads.
        EngineError: if there is no such model or device, or the model cannot be loaded.
    """
    with interrupted_later():
        import torch
        from transformers import AutoModelForCausalLM

        from detgen.engine.encoding import prompt_tokens
        from detgen.engine.rendering import chat_renderer
        from detgen.engine.tokenizing import Tokenize
        from detgen.models.explained import explained
        from detgen.models.families import FAMILIES
        from detgen.models.loaded import DTYPES, rule_of
        from detgen.models.loading import pick_device
        from detgen.models.settings import context_of, load_settings
        from detgen.program.operands import name_of
        from detgen.thinking.configuration import ThinkingStatesConfig

    engine = config.engine
    if rule_of(engine.dtype) is not None:
        raise BenchError(f"no other program computes in {engine.dtype}: compare them with --dtype bfloat16")
    device = pick_device(engine.device)
    place: Any = engine.target or DEMO / "target"
    name = str(config.random_weights or engine.target or "embedded:target")
    trusted = engine.trust_remote_code
    if config.random_weights is not None:
        _, tokenizer = load_settings(DEMO / "target", "embedded:target", trusted=False)
    else:
        place = local_place(place, name) or fetched(name, observer, trusted=trusted)
        if place.is_file():
            raise BenchError(f"{name} is a file, and most peers take folders; give one in the Hugging Face layout")
        check_folder(place, name, trusted=trusted)
        found, tokenizer = load_settings(place, name, trusted=trusted)
        if isinstance(found, ThinkingStatesConfig):
            raise BenchError(
                f"{name} thinks while it reads, which no other program does: there is nothing to compare it with;"
                " choose another --target, and see the closing figures of detgen run"
            )
    with explained(name):
        if config.random_weights is not None:
            found = config_of(config.random_weights, "target")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(found, trust_remote_code=trusted)
    text = found.get_text_config()
    dtype = engine.dtype
    if dtype == "auto":
        asked = "float32" if device.type == "cpu" else name_of(getattr(found, "dtype", None))
        dtype = next((known for known in DTYPES if known == asked), "bfloat16")
    # The peculiarities of a model of a known family are found when it is loaded.
    native = type(model).__name__ in FAMILIES and device.type == "cpu" and not hasattr(found, "quantization_config")
    render, tokenize = chat_renderer(tokenizer), Tokenize(tokenizer, name)
    size = len(tokenizer) if config.random_weights is not None else int(text.vocab_size)
    tied = getattr(text, "tie_word_embeddings", False)
    embedding = 0 if tied else model.get_input_embeddings().weight.numel()
    mixture = any(".experts." in parameter for parameter, _ in model.named_parameters())
    return Target(
        engine=replace(engine, device=str(device), dtype=dtype, threads=engine.threads or usable_cores()),
        vocabulary=int(text.vocab_size),
        context=context_of(text),
        weights=None if mixture else float(sum(p.numel() for p in model.parameters()) - embedding),
        native=native,
        as_stored=device.type == "cpu" and engine.dtype == "auto",
        encode=lambda request: prompt_tokens(request, tokenizer, name, size, render, tokenize),
    )


class TokenIds:
    """Stands in for a tokenizer without any text: every sequence of ids has the text ""."""

    all_special_ids: tuple[int, ...] = ()
    eos_token_id = None

    def get_vocab(self) -> dict[str, int]:
        """Return no names of tokens."""
        return {}

    def decode(self, ids: list[int], **_: Any) -> str:
        """Return no text."""
        return ""


def loaded(source: ModelSource, role: str, weights: str | None = None, *, as_stored: bool = False) -> Any:
    """Load a `LoadedModel` without end-of-sequence tokens, its context cut to what the workloads need.

    Its weights are in the CPU's memory, from where detgen takes them to the device.

    Args:
        source: the models.
        role: target or draft.
        weights: their quantization, as in `Contender.weights`; None for that of the settings.
        as_stored: as in `ModelSource`.
    """
    quant: dict[str, Any] = {} if weights is None else {f"{role}_quant": weights}
    return _loaded(replace(source, engine=replace(source.engine, **quant)), role, as_stored)


def own_forward(source: ModelSource, role: str) -> Any:
    """Load the model for transformers: weights on the benchmark's device, in the benchmark's number format."""
    from detgen.models.loaded import DTYPES
    from detgen.program.arrays import torch_dtype

    model = loaded(source, role).whole()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch_dtype(DTYPES[source.engine.dtype]))
    return model.to(source.engine.device)


def _loaded(source: ModelSource, role: str, as_stored: bool) -> Any:
    import torch

    from detgen.models.loaded import DTYPES, FORMS, LoadedModel
    from detgen.models.loading import load_model
    from detgen.program.arrays import torch_dtype

    engine = source.engine
    quant = engine.target_quant if role == "target" else engine.draft_quant
    dtype, trusted = "auto" if as_stored else engine.dtype, engine.trust_remote_code
    if source.random_weights is not None:
        wanted = None if as_stored else torch_dtype(DTYPES[engine.dtype])
        model = random_model(source.random_weights, role, wanted, engine.device, source.seed).cpu()
        torch.cuda.empty_cache()  # free memory there counts when detgen takes memory for keys and values
        name, form = f"random:{source.random_weights}:{role}", FORMS.get(quant, "none")
        return LoadedModel(name, model, TokenIds(), "", source.positions, frozenset(), form, dtype=dtype)
    given = _given(source, role)
    place, name = given or DEMO / role, given or f"embedded:{role}"
    found = load_model(place, name, dtype, quant, trusted=trusted)
    return replace(found, eos=frozenset(), context=min(source.positions, found.context))


def folder(source: ModelSource, role: str) -> Path:
    """Return the model as a folder in the Hugging Face layout; random weights are written on first use."""
    if source.random_weights is not None:
        path = source.scratch / f"random-{role}"
        if not (path / "config.json").is_file():
            loaded(source, role).model.save_pretrained(path)
        return path
    given = _given(source, role)
    if given is None:
        return DEMO / role
    if Path(given).is_dir():
        return Path(given)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(given, local_files_only=True))


def _given(source: ModelSource, role: str) -> str | None:
    """Return the model that was asked for; None for the embedded one."""
    model = source.engine.target if role == "target" else source.engine.draft
    return None if model is None else str(model)
