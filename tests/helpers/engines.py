"""What the engine's tests share: engines made once a configuration, and what a run commits, bits and all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from detgen import Completion, Engine, Request
from detgen.engine.sequence import Sequence
from detgen.program.arrays import Array, same_bits, tensor

Key = tuple[str | int, int]


@dataclass
class Observed:
    """One sample: its completion, and the canonical values behind it."""

    completion: Completion
    logits: list[torch.Tensor] = field(default_factory=list)
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    states: list[torch.Tensor] = field(default_factory=list)

    def differs(self, other: Observed) -> str | None:
        """What differs from another run of the same sample, None if nothing does; the cause before its effects."""
        a, b = self.completion, other.completion
        if a.token_ids != b.token_ids:
            return f"token_ids: {a.token_ids} and {b.token_ids}"
        return (self._bits(other) if a.request.params.deterministic else None) or self._data(b)

    def _bits(self, other: Observed) -> str | None:
        done = self.completion
        assert self.keys is not None
        assert self.values is not None
        assert other.keys is not None
        assert other.values is not None
        assert sum(map(len, self.logits)) == len(done.token_ids)
        assert self.keys.shape[1] == done.prompt_tokens + len(done.token_ids) - 1
        if not same_bits(self.keys, other.keys):
            return "bits of the keys"
        if not same_bits(self.values, other.values):
            return "bits of the values"
        if not same_bits(torch.cat(self.logits), torch.cat(other.logits)):
            return "bits of the logits"
        alike = len(self.states) == len(other.states) and all(map(same_bits, self.states, other.states))
        return None if alike else "bits of the states"

    def _data(self, b: Completion) -> str | None:
        a = self.completion
        for name in ("text", "finish_reason", "prompt_tokens", "logprobs", "thoughts", "error"):
            if getattr(a, name) != getattr(b, name):
                return f"{name}: {getattr(a, name)!r} and {getattr(b, name)!r}"
        for name in ("position", "token", "logprob", "margin"):
            mine = [getattr(r, name) for r in a.records if r.token is not None]
            theirs = [getattr(r, name) for r in b.records if r.token is not None]
            if mine != theirs:
                found = [(i, x, y) for i, (x, y) in enumerate(zip(mine, theirs, strict=False)) if x != y]
                return f"{name} in the records, (place, one, other): {found[:3]}"
        return None


class Recording:
    """A trace that keeps everything."""

    chains = False

    def __init__(self) -> None:
        self.logits: dict[Key, list[torch.Tensor]] = {}
        self.entries: dict[Key, tuple[torch.Tensor, torch.Tensor]] = {}
        self.states: dict[Key, list[torch.Tensor]] = {}

    def committed(self, seq: Sequence, first: int, logits: Array) -> None:
        parts = self.logits.setdefault((seq.request.id, seq.sample), [])
        assert first == sum(map(len, parts)), "logits come in order, none twice"
        parts.append(tensor(logits).clone())

    def finished(self, seq: Sequence, keys: np.ndarray, values: np.ndarray) -> None:
        assert (seq.request.id, seq.sample) not in self.entries, "a sequence finishes once"
        self.entries[seq.request.id, seq.sample] = tensor(keys), tensor(values)
        self.states[seq.request.id, seq.sample] = seq.states


def _observe(engine: Engine, requests: Iterable[Request]) -> dict[Key, Observed]:
    trace = Recording()
    found: dict[Key, Observed] = {}
    for batch in engine.stream(requests, trace=trace):
        for c in batch:
            key = c.request.id, c.sample
            assert key not in found, "a completion comes once"
            entries = trace.entries.get(key, (None, None))
            found[key] = Observed(c, trace.logits.get(key, []), *entries, trace.states.get(key, []))
    return found


@pytest.fixture(scope="session")
def observe() -> Callable[[Engine, Iterable[Request]], dict[Key, Observed]]:
    """Runs requests and keeps what was committed, by (request id, sample)."""
    return _observe


@pytest.fixture(scope="session")
def engines() -> Callable[..., Engine]:
    """Engines on the embedded models by settings, made on first use and kept; one at a time may generate.

    The models are prepared twice: with a draft model, and without one for `drafter="none"`, so that the reference that
    others are compared with shares nothing with them.
    """
    prepared: dict[bool, Engine] = {}
    made: dict[tuple[tuple[str, Any], ...], Engine] = {}

    def make(**settings: Any) -> Engine:
        key = tuple(sorted(settings.items()))
        if key not in made:
            plain = settings["drafter"] == "none"
            if plain not in prepared:
                prepared[plain] = Engine(drafter="none" if plain else "auto", kv_memory=64 << 20)
            made[key] = prepared[plain].with_settings(**settings)
        return made[key]

    return make
