"""An engine that computes nothing, runs with it, and what they write. Child processes import it, too."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from detgen.engine.config import EngineConfig
from detgen.engine.request import Chunk, Completion, Request, TokenLogprobs, TokenRecord
from detgen.engine.stats import EngineStats
from detgen.outputs import KeptSamples
from detgen.outputs.identity import sound
from detgen.params import SamplingParams
from detgen.program.operands import ARITHMETIC
from detgen.progress import Observer, Progress
from detgen.run import RunConfig, RunSummary, run
from helpers.records import count_records

NAMES = ("outputs.jsonl", "acceptance.jsonl", "samples.sqlite3", "manifest.json")


class FakeEngine:
    """Tokens computed from the prompt, requests finished in an order of their own."""

    def __init__(
        self, config: EngineConfig, observer: Observer | None = None, *, device: str = "cpu", pause: float = 0.0
    ) -> None:
        self.stats = EngineStats()
        self.pulled = 0
        self.streams = 0
        self.on_step: Callable[[int], None] = lambda step: None
        self._config = config
        self._pause = pause
        self._device = device

    @property
    def thinks(self) -> bool:
        return False

    @property
    def dated(self) -> bool:
        return self._device == "dated"

    def chunks(self, request: Request, tokens: Sequence[int], thoughts: Mapping[int, str]) -> list[Chunk]:
        return []

    def profile(self) -> dict[str, Any]:
        target = {"name": "fake", "digest": "t", "quant": "none"}
        versions = {"torch": "1", "transformers": "1"}
        return {
            "target": target,
            "dtype": "float32",
            "kv_dtype": "float32",
            "arithmetic": ARITHMETIC,
            "device": self._device,
            "capability": "fake",
            "versions": versions,
        }

    def draft_profile(self) -> dict[str, Any] | None:
        draft = self._config.draft
        return None if draft is None else {"name": "draft", "digest": str(draft), "quant": "none"}

    def stream(self, requests: Iterable[Request]) -> Iterator[list[Completion]]:
        self.streams += 1
        source = iter(requests)
        order = random.Random(self._config.batch_size)
        live: list[Completion] = []
        ended = False
        while not ended or live:
            while not ended and len(live) < self._config.batch_size:
                request = next(source, None)
                if request is None:
                    ended = True
                    break
                self.pulled += 1
                live += complete(request)
            if live:
                self.stats.target_passes += 1
                self.on_step(self.stats.target_passes)
                if self._pause:
                    time.sleep(self._pause)
                order.shuffle(live)
                finished = [live.pop() for _ in range(order.randint(0, min(3, len(live))))]
                self.stats.tokens += sum(len(each.token_ids) for each in finished)
                yield finished


def complete(request: Request) -> list[Completion]:
    if request.prompt == "too long":
        return [Completion(request, error="7 tokens, the model has room for 4")]
    prompt = request.prompt or ""
    failing = [int(word) for word in prompt.split()[1:]] if prompt.startswith("overflow") else []  # "overflow 0 2"
    completions: list[Completion] = []
    for sample in request.wanted:
        if sample in failing:
            completions.append(Completion(request, sample, finish_reason="error", error="the logits are not finite"))
            continue
        alone = request.params.with_(n=1)
        key = f"{request.prompt}{request.messages}{alone}{sample}".encode()
        tokens = tuple(hashlib.sha256(key).digest()[: request.params.max_tokens])
        records = [
            TokenRecord(
                p, p // 2, token, "ngram", token if p % 2 else 0, "accepted" if p % 2 else "corrected", -0.1, 0.3
            )
            for p, token in enumerate(tokens)
        ]
        records.append(TokenRecord(len(tokens), (len(tokens) - 1) // 2, None, "ngram", 3, "rolled_back", None, None))
        drafts = count_records(records)
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = tuple(TokenLogprobs(-0.1, ((token, -0.1),)) for token in tokens)
        text = "".join(map(chr, tokens))
        completions.append(Completion(request, sample, text, tokens, "length", 4, logprobs, tuple(records), drafts))
    return completions


class Watcher:
    def __init__(self) -> None:
        self.messages: list[str] = []
        self.stages: list[str] = []
        self.reports: list[Progress] = []

    def message(self, text: str) -> None:
        self.messages.append(text)

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def progress(self, progress: Progress) -> None:
        self.reports.append(progress)


def config(prompts: Path | str, output: Path | None, *, batch_size: int = 4, **changes: Any) -> RunConfig:
    fields: dict[str, Any] = {"params": SamplingParams(max_tokens=3), **changes}
    return RunConfig(str(prompts), output, engine=EngineConfig(batch_size=batch_size), **fields)


def go(
    prompts: Path | str, output: Path | None, watcher: Watcher | None = None, *, build: Any = FakeEngine, **changes: Any
) -> RunSummary:
    return run(config(prompts, output, **changes), watcher or Watcher(), build_engine=build)


def no_engine(config: EngineConfig) -> FakeEngine:
    raise AssertionError("no model should be loaded")


def stopping_at(step: int) -> Callable[[EngineConfig], FakeEngine]:
    """An engine that is interrupted in a step."""

    def build(config: EngineConfig) -> FakeEngine:
        engine = FakeEngine(config)
        engine.on_step = lambda now: os.kill(os.getpid(), signal.SIGINT) if now == step else None
        return engine

    return build


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().decode().split("\n")[:-1]]


def content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in NAMES[:2]}


def kept_in(folder: Path) -> int:
    """Samples in the store of a folder."""
    with KeptSamples(folder) as kept:
        return kept.count()


def keys_in(folder: Path) -> set[bytes]:
    """The keys of the samples in the store of a folder that are whole; none is there twice."""
    keys: list[bytes] = []
    with KeptSamples(folder) as kept, suppress(sqlite3.Error):
        if (store := kept._store) is not None:
            rows = store.db.execute("SELECT key, value FROM entries JOIN packed USING (id)")
            keys = [key for key, value in rows if sound(key, value) is not None]
    assert len(keys) == len(set(keys))
    return set(keys)


def manifest_of(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return manifest
