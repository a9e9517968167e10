"""Models made ready for packed passes: loaded, rewritten, given caches, probed. What takes long, done once.

Several engines may stand on the same prepared models, one generating at a time.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from transformers import PreTrainedModel

from detgen.drafters.model import READ_ROWS
from detgen.engine.config import EngineConfig
from detgen.errors import DEMO, EngineError, QuantName
from detgen.passes.adapter import PlainDecoder, attach, attend_current
from detgen.passes.forward import Forward
from detgen.passes.kv_cache import KVCache
from detgen.passes.lean_decoder import lean_decoder
from detgen.passes.loading import LoadedModel, check_vocabularies, load_model, pick_device
from detgen.passes.packing import FREE_SHAPES, Shapes
from detgen.passes.probing import ProbeReport, probe, reference_logits
from detgen.passes.rewriting import align_activations, fuse_norms, prepack_experts, prepack_linears

_LEAST_POSITIONS = 3 * 128  # what the probe needs


@dataclass(frozen=True, slots=True)
class Prepared:
    """What an engine is built on.

    Attributes:
        device: where the models are.
        target: the model whose output is wanted.
        draft: the draft model, if there is one.
        passes: of the target, and of the draft model if there is one.
        shapes: what canonical passes are held to.
        probe: what the probe found.
    """

    device: torch.device
    target: LoadedModel
    draft: LoadedModel | None
    passes: tuple[Forward, ...]
    shapes: Shapes
    probe: ProbeReport


def prepare(config: EngineConfig) -> Prepared:
    """Load the models of a configuration, rewrite them for packed passes, allocate their caches, probe the target.

    Raises:
        EngineError: as the constructor of `Engine`.
    """
    device = pick_device(config.device)
    target, draft = _load(config, device)
    models = [target] + ([draft] if draft else [])
    reference = reference_logits(target.model, target.vocabulary)
    layouts = [attach(loaded.model, loaded.name) for loaded in models]
    parts = list(zip(models, layouts, strict=True))
    held = sum(KVCache.position_bytes(layout.cached, m.dtype) for m, layout in parts)
    positions = _positions(config, device, target.context, held)
    passes = tuple(
        Forward(
            lean_decoder(m.model, attend_current, layout.traits) or _plain_decoder(m.model),
            KVCache(layout.cached, positions, m.dtype, device),
            layout.group,
        )
        for m, layout in parts
    )
    shapes, report = probe(passes[0], reference, layouts[0].traits)
    if shapes is None:
        if not config.allow_nondeterministic:
            raise EngineError(
                f"{target.name} is not row-invariant on this device: in passes of any size a row's bits depend on the "
                "others. Its outputs would depend on the batch; --allow-nondeterministic runs it without the guarantee"
            )
        shapes = replace(FREE_SHAPES, rows=(1, READ_ROWS))
    if draft:
        passes[1].learn_cost(config.batch_size)
    return Prepared(device, target, draft, passes, shapes, report)


def _plain_decoder(model: PreTrainedModel) -> PlainDecoder:
    """The model's own forward, on operators that give a row the same bits beside any neighbours."""
    prepack_linears(model)
    fuse_norms(model)
    align_activations(model)
    prepack_experts(model)
    return PlainDecoder(model)


def _load(config: EngineConfig, device: torch.device) -> tuple[LoadedModel, LoadedModel | None]:
    _quiet()

    def load(source: str | Path | LoadedModel | None, role: str, quant: QuantName) -> LoadedModel:
        if isinstance(source, LoadedModel):
            return source
        return load_model(source or DEMO / role, str(source or f"embedded:{role}"), device, config.dtype, quant)

    target = load(config.target, "target", config.target_quant)
    available = config.draft is not None or config.target is None
    if config.drafter == "model" and not available:
        raise EngineError("--drafter model needs a draft model: give one with --draft, or use --drafter ngram")
    if not available or config.drafter in ("self", "ngram", "none"):
        return target, None
    draft = load(config.draft, "draft", config.draft_quant)
    check_vocabularies(target, draft)
    return target, draft


def _positions(config: EngineConfig, device: torch.device, context: int, position_bytes: int) -> int:
    """Size of the KV buffer in positions: what a whole batch of the longest sequences takes, or what fits.

    Raises:
        EngineError: if not even a short sequence fits the budget.
    """
    budget = config.kv_memory
    if budget is None:
        if device.type == "cuda":
            budget = int(torch.cuda.mem_get_info(device)[0] * 0.8)
        else:
            budget = int(psutil.virtual_memory().available * 0.4)
    held = budget // position_bytes
    if config.kv_memory is not None and held < _LEAST_POSITIONS:
        raise EngineError(
            f"--kv-memory {budget} bytes holds {held} positions of {position_bytes} bytes; "
            f"give at least {_LEAST_POSITIONS * position_bytes} bytes"
        )
    context = -(-context // 512) * 512
    return max(min(held, config.batch_size * context), _LEAST_POSITIONS)


def _quiet() -> None:
    """Keep transformers' loading bars and advice off the screen; errors are raised and shown by detgen."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="MatMul8bitLt")
