"""The adapter against a vLLM that behaves as the real one does where the adapter relies on it."""

from __future__ import annotations

import enum
import json
import os
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from detgen.bench.interface import Job, ModelSource, Outcome
from detgen.bench.peers import make_peer

OutputKind = enum.Enum("OutputKind", "CUMULATIVE DELTA FINAL_ONLY")
Context = enum.Enum("Context", "LLM_CLASS ENGINE_CONTEXT")


@dataclass
class Arguments:
    model: str
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    device_ids: list[int] | None = None
    enable_prefix_caching: bool | None = None
    gpu_memory_utilization: float = 0.92
    max_num_seqs: int | None = None
    disable_log_stats: bool = False


@dataclass
class Sampling:
    temperature: float = 1.0
    ignore_eos: bool = False
    max_tokens: int = 16
    detokenize: bool = True
    output_kind: OutputKind = OutputKind.CUMULATIVE


@dataclass
class Running:
    name: str
    prompt: list[int]
    params: Sampling
    begun: int = 0
    made: list[int] = field(default_factory=list)


class Engine:
    """Continues each prompt by its last token plus one, and so on; a step gives the tokens of the pass before."""

    made: Engine

    def __init__(self, arguments: Arguments, context: Context) -> None:
        Engine.made = self
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        limit = json.loads((Path(arguments.model) / "config.json").read_text())["max_position_embeddings"]
        if arguments.max_model_len > limit:
            raise ValueError(f"User-specified max_model_len ({arguments.max_model_len}) is greater than {limit}")
        self.arguments, self.context = arguments, context
        self.live: dict[str, Running] = {}
        self.ahead: deque[list[Running]] = deque()
        self.most = self.passes = 0

    @classmethod
    def from_engine_args(cls, engine_args: Arguments, usage_context: Context = Context.ENGINE_CONTEXT) -> Engine:
        return cls(engine_args, usage_context)

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: Sampling) -> str:
        assert request_id not in self.live
        self.live[request_id] = Running(request_id, prompt["prompt_token_ids"], params)
        self.most = max(self.most, len(self.live))
        return f"{request_id}-0123abcd"  # the one it uses within

    def step(self) -> list[Any]:
        if self.live:
            batch = [r for r in self.live.values() if r.begun < r.params.max_tokens]
            for running in batch:
                running.begun += 1
            self.passes += bool(batch)
            self.ahead.append(batch)
            if len(self.ahead) < 2:
                return []
        return [self._output(running) for running in self.ahead.popleft()]

    def _output(self, running: Running) -> Any:
        running.made.append(running.prompt[-1] + len(running.made) + 1)
        finished = (
            len(running.made) == running.params.max_tokens
            or len(running.prompt) + len(running.made) >= self.arguments.max_model_len
        )
        if finished:
            del self.live[running.name]
        # The list of all tokens is its own, and goes on growing.
        ids = running.made if running.params.output_kind is OutputKind.CUMULATIVE else running.made[-1:]
        return SimpleNamespace(request_id=running.name, outputs=[SimpleNamespace(token_ids=ids)], finished=finished)


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.sampling_params", "vllm.usage.usage_lib")}
    contents = {
        "vllm": {"EngineArgs": Arguments, "LLMEngine": Engine, "SamplingParams": Sampling},
        "vllm.sampling_params": {"RequestOutputKind": OutputKind},
        "vllm.usage.usage_lib": {"UsageContext": Context},
    }
    for name, module in modules.items():
        vars(module).update(contents[name])
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "vllm.usage", ModuleType("vllm.usage"))


def test_it_keeps_no_more_than_a_batch_under_way(
    tight: ModelSource, job: Job, run_as_on_a_gpu: Callable[..., Outcome]
) -> None:
    outcome = run_as_on_a_gpu("vllm", "plain", tight, job)
    assert outcome.tokens == [[p.tokens[-1] + i + 1 for i in range(p.output)] for p in job.prompts]
    assert all(0 < first < last for first, last in zip(outcome.first, outcome.last, strict=True))
    assert Engine.made.most == job.batch_size
    assert outcome.passes == Engine.made.passes, "steps that only fill or drain what it runs ahead are no passes"
    assert (tight.scratch / "random-target" / "model.safetensors").is_file()


def test_it_is_set_up_as_for_offline_use(tight: ModelSource, job: Job, run_as_on_a_gpu: Callable[..., Outcome]) -> None:
    run_as_on_a_gpu("vllm", "batch-invariant", tight, job)
    assert Engine.made.context is Context.LLM_CLASS
    assert Engine.made.arguments.max_num_seqs == 4
    assert Engine.made.arguments.disable_log_stats
    assert Engine.made.arguments.device_ids is None
    assert os.environ["VLLM_BATCH_INVARIANT"] == os.environ["VLLM_NO_USAGE_STATS"] == "1"


def test_it_runs_on_the_gpu_that_was_asked_for(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    peer = make_peer("vllm")
    second = replace(source, random_weights=None, device="cuda:1")
    peer.load(second, peer.variants(second)[0], (2,))
    assert Engine.made.arguments.device_ids == [1]
