"""Kill a `detgen run` in the middle and run it again: the real command line, in processes of its own."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from detgen.engine.config import EngineConfig
from detgen.engine.request import Request
from detgen.errors import CheckError
from detgen.outputs import KeptSamples
from detgen.verify.perturb.generation_digests import Observed, line_of
from detgen.verify.perturb.running import Generated, Task
from detgen.verify.perturb.timing import OutOfTime, check_time

DETGEN = (sys.executable, "-m", "detgen")  # command that starts detgen; tests start a broken one

_LOOK_SECONDS = 0.005  # between two looks at the store
_TRIES = 3  # to kill a run before it has all samples


def kill_and_resume(task: Task, config: EngineConfig, until: float | None = None) -> Generated:
    """Run a task, kill it by SIGKILL once its first samples are committed, and run it again to the end.

    A run of few tokens may finish before it is killed; it is then repeated, at most three times.

    Args:
        task: a task whose setting the command line offers.
        config: the models.
        until: when it must be done, in the time of `time.monotonic`; None for no limit.

    Returns:
        The run's output, without digests, and one kill if it was killed before it had all samples.

    Raises:
        CheckError: if a run fails, with its message.
        OutOfTime: if it is not done in time.
    """
    with tempfile.TemporaryDirectory(prefix="detgen-") as name:
        folder = Path(name)
        samples = sum(r.params.n for r in task.queue)
        prompts = "".join(json.dumps(_line(r)) + "\n" for r in task.queue)
        (folder / "prompts.jsonl").write_text(prompts, encoding="utf-8")
        command = [*DETGEN, "run", str(folder / "prompts.jsonl"), *_options(task, config), "-o", str(folder / "out")]
        for _ in range(_TRIES):
            shutil.rmtree(folder / "out", ignore_errors=True)
            if killed := _run(command, until, folder / "out") < samples:
                break
        _run(command, until, None)
        lines = (folder / "out" / "outputs.jsonl").read_text(encoding="utf-8").splitlines()
    found = [line for line in map(line_of, lines) if "error" not in line]
    seen = [Observed(line["prompt_tokens"], tuple(line["token_ids"]), line) for line in found]
    return Generated({(each.line["id"], each.line["sample"]): each for each in seen}, kills=int(killed))


def _run(command: list[str], until: float | None, out: Path | None) -> float:
    """Run a command to its end, or kill it once its folder's store has a sample. Return how many samples that has."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            while out is not None and process.poll() is None:
                if _kept(out):
                    process.kill()
                    process.wait()
                    return _kept(out)
                check_time(until)
                time.sleep(_LOOK_SECONDS)
            _, errors = process.communicate(timeout=None if until is None else max(until - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            raise OutOfTime from None
        finally:
            process.kill()  # must not outlive an interrupted check
    if process.returncode:
        raise CheckError(f"detgen run ended with exit status {process.returncode}: {errors.strip()}")
    return math.inf  # all samples


def _kept(out: Path) -> int:
    """Return how many samples the store of a folder has."""
    with KeptSamples(out) as kept:
        return kept.count()


def _options(task: Task, config: EngineConfig) -> list[str]:
    """Return the command line's options for a task's setting."""
    quant = task.setting.quant
    options = {
        "target": config.target,
        "draft": config.draft,
        "device": config.device,
        "dtype": config.dtype,
        "kv_dtype": config.kv_dtype,
        "adapter": config.adapter,
        "target_quant": config.target_quant if quant == "none" else quant,
        "draft_quant": config.draft_quant,
        "kv_memory": config.kv_memory,
        "prefix_cache": "off" if task.setting.prefix_cache == "off" else "on",
        "drafter": task.setting.drafter,
        **task.engine_settings(config),
    }
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
    return ["--quiet", *["--trust-remote-code"] * config.trust_remote_code, *given]


def _line(request: Request) -> dict[str, Any]:
    """Return the request as a line of a prompts file."""
    line = {
        "id": request.id,
        "prompt": request.prompt,
        "messages": request.messages,
        "prompt_token_ids": request.token_ids,
        "tools": request.tools,
        "tool_choice": None if request.tool_choice == "auto" else request.tool_choice,
        "parallel_tool_calls": None if request.parallel_tool_calls else False,
        "chat_template_kwargs": request.chat_template_kwargs,
        "continue_final_message": request.continue_final_message or None,
        **dict(request.params),
    }
    return {key: value for key, value in line.items() if value is not None and value != ()}
