"""The adapter against an SGLang that behaves as the real one does where the adapter relies on it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from detgen.bench.interface import Job, ModelSource, Outcome
from detgen.bench.peers import make_peer
from detgen.bench.processes import Child


class Engine:
    """Repeats each prompt's last token; the parts that it streams have all tokens so far, in one growing list."""

    made: Engine

    def __init__(
        self,
        *,
        model_path: str,
        skip_tokenizer_init: bool,
        dtype: str,
        context_length: int,
        max_running_requests: int,
        mem_fraction_static: float,
        disable_radix_cache: bool,
        enable_deterministic_inference: bool,
        random_seed: int,
        base_gpu_id: int,
    ) -> None:
        Engine.made = self
        limit = json.loads((Path(model_path) / "config.json").read_text())["max_position_embeddings"]
        if context_length > limit and os.environ.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN") != "1":
            raise ValueError(f"context_length ({context_length}) is greater than {limit}")
        self.context = context_length
        self.deterministic, self.gpu = enable_deterministic_inference, base_gpu_id
        self.live = self.most = 0
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)

    async def async_generate(self, input_ids: list[int], sampling_params: dict[str, Any], stream: bool) -> Any:
        assert asyncio.get_running_loop() is self.loop, "its sockets belong to another loop"
        assert stream is True
        assert sampling_params["ignore_eos"]
        wanted = min(sampling_params["max_new_tokens"], self.context - 1 - len(input_ids) - 1)
        if len(input_ids) >= self.context - 6:
            wanted = 0

        async def parts() -> AsyncIterator[dict[str, Any]]:
            self.live += 1
            self.most = max(self.most, self.live)
            made: list[int] = []
            while len(made) < wanted:
                await asyncio.sleep(0)
                made += input_ids[-1:] * min(2, wanted - len(made))  # two have come since it was last looked at
                yield {"output_ids": made, "meta_info": {}}
            self.live -= 1

        return parts()

    def shutdown(self) -> None:
        pass


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module: Any = ModuleType("sglang")
    module.Engine = Engine
    monkeypatch.setitem(sys.modules, "sglang", module)
    yield
    asyncio.set_event_loop(None)


def test_it_streams_no_more_than_a_batch(tight: ModelSource, job: Job, run_as_on_a_gpu: Callable[..., Outcome]) -> None:
    outcome = run_as_on_a_gpu("sglang", "deterministic", tight, job)
    Engine.made.loop.close()
    assert outcome.tokens == [[p.tokens[-1]] * p.output for p in job.prompts]
    assert all(0 < first < last for first, last in zip(outcome.first, outcome.last, strict=True))
    assert outcome.passes is None
    assert Engine.made.most == job.batch_size
    assert Engine.made.deterministic


def test_it_runs_on_the_gpu_that_was_asked_for(source: ModelSource) -> None:
    peer = make_peer("sglang")
    for device, index in (("cuda", 0), ("cuda:1", 1)):
        there = replace(source, random_weights=None, device=device)
        peer.load(there, peer.variants(there)[0], (2,))
        Engine.made.loop.close()
        assert Engine.made.gpu == index
        assert not Engine.made.deterministic


_WITH_A_PROCESS = """
import atexit, multiprocessing, time

class Engine:
    def __init__(self, **settings):
        atexit.register(self.shutdown)
        self.process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(30,))
        self.process.start()

    def shutdown(self):
        self.process.kill()
        self.process.join()
"""


def test_its_processes_do_not_keep_its_own_from_ending(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sglang.py").write_text(_WITH_A_PROCESS)
    monkeypatch.syspath_prepend(tmp_path)
    there = replace(source, random_weights=None, device="cuda")
    variant = make_peer("sglang").variants(there)[0]
    child = Child("sglang", dict(variant.environment), tmp_path)
    child.ask("load", "sglang", there, variant, (2,))
    child.close()
    assert child._process.exitcode == 0, "it ended by itself, not by a signal"
