"""Runs that are to survive a crash, each a process: `python -m helpers.crash_scenarios NAME FOLDER`.

Their engine computes nothing. A folder holds the prompts, the output folder `out`, and the cache.
"""

from __future__ import annotations

import io
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import detgen.run.lifecycle
from detgen.engine.config import EngineConfig
from detgen.errors import OutputError, RunError, StoreError
from detgen.run import RunSummary
from helpers.fakes import FakeEngine, go, stopping_at

REFUSED = 2
LINES = "\n".join(
    (
        *(f'{{"prompt": "prompt {n}", "n": {1 + n % 3}}}' for n in range(7)),
        "{broken",
        '{"prompt": "overflow 1", "n": 3}',
        '{"prompt": "too long"}',
        '{"prompt": "overflow 0"}',
        '{"prompt": "last", "logprobs": 1, "task": "\\ud800"}',
    )
)
OTHERS = "\n".join([*LINES.splitlines()[4:2:-1], '{"prompt": "gone"}', *LINES.splitlines()[5:]])


def run_prompts(folder: Path, prompts: str = LINES, **changes: Any) -> RunSummary:
    """Run prompts into a folder."""
    path = folder.with_name(f"{folder.name}-prompts") / "prompts.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text(prompts)
    return go(path, folder / "out", **changes)


def _interrupted(folder: Path) -> None:
    run_prompts(folder, build=stopping_at(4))


def _damaged(folder: Path) -> None:
    """A store of which a page is overwritten."""
    _interrupted(folder)
    store = folder / "out" / "samples.sqlite3"
    data = bytearray(store.read_bytes())
    at = random.Random(4).randrange(1, len(data) // 4096) * 4096
    data[at : at + 4096] = b"\xa5" * 4096
    store.write_bytes(data)


def _filled(folder: Path) -> None:
    """A cache that has a part of the samples."""
    run_prompts(folder, OTHERS, cache=folder / "cache")
    shutil.rmtree(folder / "out")


def _piped(folder: Path, **changes: Any) -> RunSummary:
    sys.stdin = SimpleNamespace(buffer=io.BytesIO(LINES.encode()), isatty=lambda: False)  # type: ignore[assignment]
    return go("-", folder / "out", **changes)


def _meddled(folder: Path) -> RunSummary:
    """Somebody deletes files while the run goes on."""

    def build(config: EngineConfig) -> FakeEngine:
        engine = FakeEngine(config)

        def meddle(step: int) -> None:
            if step == 5:
                for name in ("outputs.jsonl", "samples.sqlite3"):
                    (folder / "out" / name).unlink()

        engine.on_step = meddle
        return engine

    return run_prompts(folder, build=build)


@dataclass(frozen=True)
class Scenario:
    """A folder to begin with, and the run that is to survive.

    Attributes:
        act: the run; it is also what resumes it.
        prepare: what was there before.
        kept: whether a sample that is in the store is never generated again.
        refuses: whether it may end with a line that says to run the same command again.
    """

    act: Callable[[Path], RunSummary]
    prepare: Callable[[Path], object] = lambda folder: None
    kept: bool = True
    refuses: bool = False


SCENARIOS: dict[str, Scenario] = {
    "fresh": Scenario(run_prompts),
    "resumed": Scenario(run_prompts, _interrupted),
    "from a damaged store": Scenario(run_prompts, _damaged, kept=False),
    "overwriting": Scenario(lambda folder: run_prompts(folder, overwrite=True), run_prompts, kept=False),
    "finished before": Scenario(run_prompts, run_prompts),
    "after a run of other prompts": Scenario(run_prompts, lambda folder: run_prompts(folder, OTHERS)),
    "after an interrupted run of other prompts": Scenario(
        run_prompts, lambda folder: run_prompts(folder, OTHERS, build=stopping_at(4))
    ),
    "with a cache": Scenario(lambda folder: run_prompts(folder, cache=folder / "cache")),
    "with a filled cache": Scenario(lambda folder: run_prompts(folder, cache=folder / "cache"), _filled),
    "OpenAI": Scenario(lambda folder: run_prompts(folder, output_format="openai")),
    "piped": Scenario(_piped),
    "meddled with": Scenario(_meddled, kept=False, refuses=True),
}


def act(name: str, folder: Path) -> RunSummary:
    """Run a scenario here."""
    detgen.run.lifecycle.model_stamp = lambda config: None  # type: ignore[assignment, attr-defined]
    return SCENARIOS[name].act(folder)


if __name__ == "__main__":
    try:
        act(sys.argv[1], Path(sys.argv[2]))
    except (OutputError, RunError, StoreError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(REFUSED)
