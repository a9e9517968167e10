"""Generates under a setting: in this process, in one of its own, or stopped there and resumed here."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import psutil

from detgen.check.axes import Setting
from detgen.check.comparing import Key, Observed, Watching
from detgen.drafters.known_text import AdversaryDrafter, Known, OracleDrafter
from detgen.drafters.protocol import Drafter
from detgen.engine import Engine
from detgen.engine.config import EngineConfig
from detgen.engine.request import Completion, Request, SamplingParams
from detgen.engine.sequence import Sequence
from detgen.engine.stats import EngineStats
from detgen.errors import QuantName
from detgen.run import RunConfig, run


@dataclass(frozen=True, slots=True)
class Task:
    """A generation, as plain data.

    Attributes:
        setting: how.
        queue: what, in order.
        known: samples of the reference, for the drafters that need them.
        seed: of the adversary.
    """

    setting: Setting
    queue: list[Request]
    known: list[Known]
    seed: int


class Subject:
    """The engine under test, by quantization of the target.

    Args:
        config: how to build it.
        engine: one that is there already, with the quantization of `config`.
    """

    def __init__(self, config: EngineConfig, engine: Engine | None = None) -> None:
        self._config = config
        self._engines: dict[str, Engine] = {"none": engine} if engine is not None else {}

    def engine(self, quant: str = "none") -> Engine:
        """The engine with this quantization of the target; "none" is the one that was asked for.

        Raises:
            EngineError: as building an engine does.
        """
        if quant not in self._engines:
            if psutil.virtual_memory().available < 2 * psutil.Process().memory_info().rss:
                self._engines.clear()  # no room for one more
            asked = self._config if quant == "none" else replace(self._config, target_quant=cast("QuantName", quant))
            self._engines[quant] = Engine(asked)
        return self._engines[quant]

    def configured(self, task: Task) -> Engine:
        """The engine as the task's setting wants it."""
        setting, engine = task.setting, self.engine(task.setting.quant)
        return engine.with_settings(
            drafter=_drafter(task, engine.vocabulary),
            draft_tokens=setting.draft_tokens,
            verify_window=setting.verify_window or 8,
            batch_size=max(len(task.queue), 1) if setting.batch == "all" else setting.batch,
            threads=setting.threads or self._config.threads or _all_cores(),
            prefill_chunk=setting.chunk,
            prefix_reuse=setting.reuse,
        )

    def generate(self, task: Task) -> dict[Key, Observed]:
        """Generate in this process.

        Raises:
            EngineError: as building an engine does.
        """
        engine, trace = self.configured(task), Watching()
        found = {}
        for finished in engine.stream(task.queue, trace=trace):
            for done in finished:
                if done.error is None:
                    found[done.request.id, done.sample] = trace.observed(done)
        return found

    def start_run(self, task: Task, folder: Path, die: Callable[[], None]) -> None:
        """Begin a run of the task's prompts in a folder and end it, by `die`, when half of them are done."""
        _run(_Recorded(self.configured(task), after=len(task.queue) // 2, die=die), task, folder)

    def finish_run(self, task: Task, folder: Path) -> dict[Key, Observed]:
        """Resume the run in the folder; samples from its journal come without digests.

        Raises:
            RunError: if the folder's run is not this one.
        """
        engine = _Recorded(self.configured(task))
        _run(engine, task, folder)
        found: dict[Key, Observed] = {}
        with (folder / "out" / "outputs.jsonl").open(encoding="utf-8") as lines:
            for line in map(json.loads, lines):
                if "error" not in line:
                    key = line["id"], line["sample"]
                    done = line["text"], line["finish_reason"]
                    plain = Observed(line["prompt_tokens"], tuple(line["token_ids"]), *done)
                    seen = engine.found.get(key)
                    if seen is not None:  # the file counts, the digests are those of the engine
                        plain = replace(plain, logits=seen.logits, keys=seen.keys, values=seen.values)
                    found[key] = plain
        return found


def _all_cores() -> int:
    return os.cpu_count() or 1


def _drafter(task: Task, vocabulary: int) -> Any:
    name = task.setting.drafter
    if name not in ("oracle", "adversary"):
        return name

    def make(named: Mapping[str, Drafter]) -> Drafter:
        oracle = OracleDrafter(task.known)
        return oracle if name == "oracle" else AdversaryDrafter(oracle, vocabulary, task.seed)

    return make


def known(requests: Iterable[Request], reference: Mapping[Key, Observed], engine: Engine) -> list[Known]:
    """The reference's samples, for drafters that look ahead."""
    found = []
    for request in requests:
        prompt = engine.encode(request)
        for sample in range(request.params.n):
            seen = reference.get((request.id, sample))
            if seen is not None:
                choice = Sequence(request, sample, list(prompt), len(prompt), 0).choice()
                found.append(Known(choice, (*prompt, *seen.tokens)))
    return found


class _Recorded:
    """An engine for a run: watched, and able to die on the way."""

    def __init__(self, engine: Engine, after: int | None = None, die: Callable[[], None] | None = None) -> None:
        self._engine = engine
        self._after, self._die = after, die
        self.found: dict[Key, Observed] = {}
        self.profile, self.draft_profile = engine.profile, engine.draft_profile
        self.probe_report = engine.probe_report

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    def stream(self, requests: Iterable[Request]) -> Iterator[list[Completion]]:
        trace = Watching()
        for finished in self._engine.stream(requests, trace=trace):
            self.found |= {(d.request.id, d.sample): trace.observed(d) for d in finished if d.error is None}
            yield finished
            if self._after is not None and self._die is not None and len(self.found) >= max(self._after, 1):
                self._die()


class _Silent:
    """Is told how a run goes, and keeps it."""

    def message(self, text: str) -> None:
        pass

    def progress(self, progress: object) -> None:
        pass


def _run(engine: _Recorded, task: Task, folder: Path) -> None:
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        prompts.write_text("".join(json.dumps(_record(r)) + "\n" for r in task.queue), encoding="utf-8")
    config = RunConfig(str(prompts), folder / "out", SamplingParams(), EngineConfig())
    run(config, _Silent(), build_engine=lambda _: engine)


def _record(request: Request) -> dict[str, Any]:
    """The request as a line of a prompts file."""
    record = {"id": request.id, "prompt": request.prompt, "messages": request.messages, **asdict(request.params)}
    return {key: value for key, value in record.items() if value is not None}


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for a run that is stopped and resumed."""
    return tempfile.TemporaryDirectory(prefix="detgen-")
