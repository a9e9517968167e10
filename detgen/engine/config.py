"""What an engine is built from: models, device, drafter, limits. Plain data, checked on construction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from detgen.drafters.registry import DRAFTERS, WITHDRAWN
from detgen.engine.showing import brief
from detgen.errors import DTypeName, EngineError, QuantName

if TYPE_CHECKING:
    from detgen.drafters.protocol import Drafter
    from detgen.models.loading import LoadedModel

# The most of each count. Far more threads than a process can start kill it without a message.
_MOST = {
    "threads": 1024,
    "batch_size": 1_000_000,
    "draft_tokens": 1_000_000,
    "prefill_chunk": 1_000_000_000,
    "kv_memory": 2**50,
}


@dataclass(frozen=True, slots=True, repr=False)
class EngineConfig:
    """How to build an engine. Only `target`, `dtype`, `target_quant` and the device can change an output.

    Attributes:
        target: folder, GGUF file or hub name of the target model, demo-thinking (the embedded one that thinks while it
            reads), or a loaded model (it is changed in place); None is the embedded one.
        draft: the draft model, likewise; None is the embedded one if the target is None, too, else none.
        drafter: name of the drafter; auto chooses during the run. Or a function that makes a custom drafter, given
            the engine's own by name: `model` (if there is a draft model), `ngram`, `auto` and `none`.
        draft_tokens: draft tokens per round of `model` and `ngram`; None adapts.
        batch_size: most requests at a time.
        device: auto, cpu, cuda or cuda:N.
        dtype: number format in which weights are kept; auto is the checkpoint's own. On CUDA models compute in it, too;
            on a CPU they compute in float32.
        target_quant: quantization of the target's linear layers: q8 or q4 by detgen, nf4 or int8 by bitsandbytes, or
            none.
        draft_quant: quantization of the draft model, likewise.
        threads: CPU threads; None leaves torch's choice.
        kv_memory: bytes for the KV caches; None takes a share of the free memory.
        prefill_chunk: most prompt tokens of a request per round; None fills the pass.
        prefix_cache: share KV entries of prompts that begin alike, also with finished requests.
        speculative_prefill: chunks that a pass reads ahead in a prompt, for models that think while they read; auto
            adapts, off reads chunk by chunk.
        trust_remote_code: run Python code that comes with a model.
    """

    target: str | Path | LoadedModel | None = None
    draft: str | Path | LoadedModel | None = None
    drafter: str | Callable[[Mapping[str, Drafter]], Drafter] = "auto"
    draft_tokens: int | None = None
    batch_size: int = 16
    device: str = "auto"
    dtype: DTypeName = "auto"
    target_quant: QuantName = "none"
    draft_quant: QuantName = "none"
    threads: int | None = None
    kv_memory: int | None = None
    prefill_chunk: int | None = None
    prefix_cache: bool = True
    speculative_prefill: int | Literal["auto", "off"] = "auto"
    trust_remote_code: bool = False

    def __repr__(self) -> str:
        return brief(self)

    def __post_init__(self) -> None:
        """Check names and ranges.

        Raises:
            EngineError: if one is out of range; names the option, its range and its value.
        """
        if isinstance(self.drafter, str) and self.drafter in WITHDRAWN:
            raise EngineError(f"drafter {WITHDRAWN[self.drafter]}")
        for name, allowed in (
            ("drafter", tuple(DRAFTERS)),
            ("dtype", get_args(DTypeName)),
            ("target_quant", get_args(QuantName)),
            ("draft_quant", get_args(QuantName)),
        ):
            value = getattr(self, name)
            if value not in allowed and not (name == "drafter" and callable(value)):
                raise EngineError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is None and name != "batch_size":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise EngineError(f"{name} must be a whole number of at least 1, got {value!r}")
            if value > most:
                raise EngineError(f"{name} must be at most {most}, got {value}")
        if not isinstance(self.prefix_cache, bool):  # "off" would be taken for true
            raise EngineError(f"prefix_cache must be True or False, got {self.prefix_cache!r}")
        ahead = self.speculative_prefill
        if ahead not in ("auto", "off") and (type(ahead) is not int or not 1 <= ahead <= _MOST["prefill_chunk"]):
            raise EngineError(
                f"speculative_prefill must be auto, off or a whole number of at least 1 (chunks), got {ahead!r}"
            )
