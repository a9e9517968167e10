"""What the tests of real workers share: prompts, a run of a single process, and processes by name."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from detgen.engine.config import EngineConfig
from detgen.params import SamplingParams
from detgen.run import RunConfig, run
from helpers.fakes import Watcher, content

ENGINE = EngineConfig(batch_size=4, kv_memory=64 << 20)
PARAMS = SamplingParams(max_tokens=24)
WORKER = "ray::Serving"
RAY = (WORKER, "raylet", "gcs_server")


def write_prompts(path: Path, count: int) -> Path:
    """Prompts with one sample and with several, drawn and greedy, some that begin alike or have a form.

    And lines that cannot run.
    """
    starts = ("def add(a, b):\n", "import os\n\n", "class Tree:\n", "for i in range(", "# Sort a list\n" * 9, "x = [")
    lines: list[dict[str, Any]] = [{"prompt": f"{starts[n % 6]}{n}", "n": 1 + n % 3, "id": n} for n in range(count)]
    for line in lines[::4]:
        line |= {"temperature": 0.9, "top_p": 0.9, "seed": 3, "logprobs": 2}
    for line in lines[::7]:
        line["guided_regex"] = r'\{"[a-z]{1,9}": [0-9]+\}'
    texts = [json.dumps(line) for line in lines]
    texts[1:1] = [
        '{"prompt": 1}',
        "{broken",
        '{"prompt": ""}',
        json.dumps({"prompt": "x", "max_tokens": 2, "stop": "("}),
    ]
    path.write_text("\n".join(texts) + "\n")
    return path


def one_process(prompts: Path, out: Path) -> dict[str, bytes]:
    run(RunConfig(str(prompts), out, PARAMS, ENGINE), Watcher())
    return content(out)


def family(pid: int) -> list[psutil.Process]:
    """All that a process started."""
    return psutil.Process(pid).children(recursive=True)


def alive(processes: list[psutil.Process], *names: str) -> list[int]:
    """Those that run, and whose command has one of the names; any name if there is none."""
    found: list[int] = []
    for each in processes:
        try:
            command = " ".join(each.cmdline())
        except psutil.Error:  # it has ended, or is a zombie
            continue
        if command and (not names or any(name in command for name in names)):
            found.append(each.pid)
    return found


def workers(processes: list[psutil.Process]) -> list[int]:
    """The workers that run; a copy of one, in which it reads forms, is a part of it."""
    found = set(alive(processes, WORKER))
    copies: set[int] = set()
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            copies |= {child.pid for child in each.children()} if each.pid in found else set()
    return sorted(found - copies)


def wait_for(done: Callable[[], Any], seconds: float = 120) -> None:
    """Wait until something is so, or fail; a busy machine takes long to start workers."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)
