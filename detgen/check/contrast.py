"""What happens without the guarantee: the same prompts at several batch sizes, by transformers and by the fast path.

Batches of transformers' `generate` are padded on the left, as its documentation has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from detgen.engine import Engine
from detgen.engine.config import EngineConfig
from detgen.engine.request import Request
from detgen.errors import DEMO
from detgen.passes.loading import load_model, pick_device

SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Contrast:
    """How one way to generate takes to other batch sizes.

    Attributes:
        name: the way.
        changed: prompts whose text is another one than alone, by batch size.
        prompts: how many there are.
        example: (prompt, batch size, text alone, text in the batch) of the first that changed.
    """

    name: str
    changed: dict[int, int]
    prompts: int
    example: tuple[str, int, str, str] | None


def contrast(
    config: EngineConfig, engine: Engine, requests: list[Request], tokens: int, tell: Callable[[str], None]
) -> list[Contrast]:
    """Generate greedily at each batch size without verification.

    Args:
        config: names the model, which transformers loads again.
        engine: for the fast path and for detgen itself.
        requests: the prompts.
        tokens: most tokens a prompt.
        tell: told what is under way.

    Raises:
        EngineError: if the model cannot be loaded.
    """
    prompts = {r.id: engine.encode(r) for r in requests}
    rows = list(prompts.values())
    words = {r.id: engine.tokenizer.decode(prompts[r.id]) for r in requests}
    generate = _transformers(config, engine, tokens)
    ways: list[tuple[str, Callable[[int], list[str]]]] = [
        ("transformers generate", lambda size: generate(rows, size)),
        ("detgen, fast path unverified", lambda size: _detgen(engine, requests, size, tokens, verified=False)),
        ("detgen", lambda size: _detgen(engine, requests, size, tokens, verified=True)),
    ]
    found = []
    for name, way in ways:
        alone: list[str] = []
        changed: dict[int, int] = {}
        example = None
        for size in SIZES:
            tell(f"{name}, batch size {size}")
            texts = way(size)
            alone = alone or texts
            differing = [i for i, (a, b) in enumerate(zip(alone, texts, strict=True)) if a != b]
            changed[size] = len(differing)
            if differing and example is None:
                i = differing[0]
                example = (words[requests[i].id], size, alone[i], texts[i])
        found.append(Contrast(name, changed, len(requests), example))
    return found


def _detgen(engine: Engine, requests: list[Request], size: int, tokens: int, *, verified: bool) -> list[str]:
    some = [r.with_params(max_tokens=tokens, deterministic=verified) for r in requests]
    drafter: Any = "auto" if verified else "none"
    return [c.text for c in engine.with_settings(batch_size=size, drafter=drafter).generate(some)]


def _transformers(config: EngineConfig, engine: Engine, tokens: int) -> Callable[[list[list[int]], int], list[str]]:
    source: Any = config.target or DEMO / "target"
    device = pick_device(config.device)
    loaded = load_model(source, str(config.target or "embedded:target"), device, config.dtype, config.target_quant)
    loaded.model.set_attn_implementation("sdpa")
    padding = min(loaded.eos, default=0)

    @torch.inference_mode()
    def generate(rows: list[list[int]], size: int) -> list[str]:
        texts = []
        for at in range(0, len(rows), size):
            batch = rows[at : at + size]
            width = max(map(len, batch))
            ids = torch.tensor([[padding] * (width - len(r)) + r for r in batch], device=device)
            mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in batch], device=device)
            out = loaded.model.generate(
                input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, pad_token_id=padding
            )
            texts += [engine.tokenizer.decode(o[width:], skip_special_tokens=True) for o in out.tolist()]
        return texts

    return generate


def side_by_side(a: str, b: str, before: int = 40, after: int = 60) -> tuple[str, str]:
    """Where two texts part, with some of what is before and behind; the parting is marked by a bar."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    first, second = (f"{t[max(at - before, 0) : at]}|{t[at : at + after]}" for t in (a, b))
    return first, second
