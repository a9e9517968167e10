"""Starts a process for each stage, ends it at its limit, and keeps what it wrote. Imports no library."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu.notebook import write
from gpu.stages import STAGES, Stage

_HERE = Path(__file__).resolve().parents[1]
_ROOT = _HERE.parent
_LEAST = 5.0  # least seconds of a stage
_LAST = 15  # lines of a failed stage's log to keep
_LOOK = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
_LOOKS = 0.05  # seconds between checks of a running stage
_KNOWS_NOTHING: dict[str, Any] = {"found": {}, "lines": [], "failed": []}


class SuiteError(Exception):
    """The suite cannot run; the message is a sentence."""


def environment(*, tiny: bool) -> dict[str, str]:
    """Return the environment of stages: this checkout's packages, no network, and no device if `tiny`."""
    paths = [str(_HERE), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    found |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return found | ({"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"} if tiny else {})


def device_name() -> str:
    """Return the name of the CUDA device.

    Raises:
        SuiteError: if there is none, or no torch.
    """
    look = subprocess.run(
        [sys.executable, "-c", _LOOK], env=environment(tiny=False), capture_output=True, text=True, check=False
    )
    if look.returncode:
        why = (look.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SuiteError(f"torch cannot be asked for a CUDA device ({why}); run this by the Python that has torch")
    if not (name := look.stdout.strip()):
        raise SuiteError("torch finds no CUDA device here; --tiny tries all stages on the CPU")
    return name


class Suite:
    """Runs stages, and keeps their results in a folder.

    Args:
        folder: folder for `gpu_suite.json`, which is written after each stage, and its summary; results of an earlier
            run stay for stages that do not run again.
        device: name of the device.
        model: as `Asked.model`; None for each stage's own.
        tiny: as `Asked.tiny`.

    Raises:
        SuiteError: if a file of that name in the folder cannot be read.
    """

    def __init__(self, folder: Path, device: str, model: str | None, *, tiny: bool) -> None:
        self._folder, self._device, self._model, self._tiny = folder, device, model, tiny
        self._path = folder / "gpu_suite.json"
        self._interrupted = False
        self._results: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            try:
                self._results = dict(json.loads(self._path.read_text(encoding="utf-8"))["stages"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise SuiteError(
                    f"{self._path} is no result of this program ({error}); delete it, or give another -o"
                ) from None
        folder.mkdir(parents=True, exist_ok=True)

    def interrupt(self, *_: object) -> None:
        """End the running stage, and keep what it found; a signal handler."""
        self._interrupted = True  # raises nothing, since results may just be being written

    def run(self, stages: Sequence[Stage], minutes: float) -> bool:
        """Run stages one after the other and print their results; return whether all that could run are done.

        Args:
            stages: stages to run.
            minutes: time for all together; each has its share of it, and what earlier stages left.

        Raises:
            KeyboardInterrupt: after `interrupt`; what the stage had found is kept.
        """
        started, share = time.monotonic(), 60 * minutes / sum(stage.seconds for stage in stages)
        until, well = started, True
        for stage in stages:
            until += share * stage.seconds
            if missing := [name for name in stage.packages if importlib.util.find_spec(name) is None]:
                result = _KNOWS_NOTHING | {"status": f"skipped: {', '.join(missing)} not installed", "seconds": 0.0}
            else:
                result = self._run(stage, max(until - time.monotonic(), _LEAST))
                well = well and result["status"] == "done"
            self._keep(stage.name, result)
            print(*told(stage, result), sep="\n", flush=True)
            if self._interrupted:
                raise KeyboardInterrupt
        if any(stage.name.startswith("generations") for stage in stages):
            for line in ratios(self._results):
                print(line, flush=True)
        return well

    def _run(self, stage: Stage, limit: float) -> dict[str, Any]:
        """Run a stage in a process of its own, which is ended at the limit with everything that it started."""
        part, log = (self._folder / f"{stage.name}.{kind}" for kind in ("part.json", "log"))
        part.unlink(missing_ok=True)
        started = time.monotonic()
        model = self._model or stage.model
        command = [sys.executable, "-m", "gpu", stage.name, model, str(part), *(["tiny"] if self._tiny else [])]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                env=environment(tiny=self._tiny),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                process_group=0,
            )
            while process.poll() is None and not self._interrupted and time.monotonic() < started + limit:
                time.sleep(_LOOKS)
            if process.poll() is not None:
                status = "done" if process.returncode == 0 else f"failed: exit status {process.returncode}"
            else:
                status = "interrupted" if self._interrupted else f"stopped at its limit of {limit:.0f} s"
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        result = dict(_KNOWS_NOTHING)
        with suppress(OSError, ValueError):  # the stage wrote nothing
            result |= json.loads(part.read_text(encoding="utf-8"))
        result |= {"status": status, "seconds": round(time.monotonic() - started, 1)}
        result |= {"limit": round(limit, 1), "device": self._device, "model": model, "tiny": self._tiny}
        result |= {"measured": datetime.now(UTC).isoformat(timespec="seconds"), "commit": _commit()}
        if status != "done":
            result["log"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST:]
        for path in (part, part.with_suffix(".new"), log):
            path.unlink(missing_ok=True)
        return result

    def _keep(self, name: str, result: dict[str, Any]) -> None:
        self._results[name] = result
        known = {stage.name: stage for stage in STAGES}
        there = {name: self._results[name] for name in known if name in self._results}
        write(self._path, json.dumps({"format": 1, "stages": there}, indent=1) + "\n")
        lines = [line for name, each in there.items() for line in told(known[name], each)]
        write(self._path.with_suffix(".txt"), "\n".join([*lines, *ratios(there)]) + "\n")


def told(stage: Stage, result: dict[str, Any]) -> Iterator[str]:
    """Yield the results of a stage as lines."""
    yield f"== {stage.name} ({stage.title}): {result['status']}, {result['seconds']:.1f} s"
    yield from (f"  {line}" for line in result["lines"])
    yield from (f"  FAILED {line}" for line in result["failed"])
    yield from (f"  | {line}" for line in result.get("log", ()))


def ratios(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield speeds relative to the peer's, and those of mixed lengths relative to equal ones."""
    own, peer = (results.get(name, _KNOWS_NOTHING)["found"] for name in ("generations", "generations-peer"))
    speeds = {
        name: found["tokens_per_second"]
        for name, found in (own | peer).items()
        if isinstance(found, dict) and "tokens_per_second" in found
    }
    others = {name.rpartition(", ")[2]: speed for name, speed in speeds.items() if name in peer}
    for name, speed in speeds.items():
        who, _, workload = name.rpartition(", ")
        if name in own and workload in others:
            yield f"{name}: {speed / others[workload]:.2f} times generate_batch"
        if workload == "mixed" and f"{who}, equal" in speeds:
            yield f"{who}: mixed lengths at {speed / speeds[f'{who}, equal']:.2f} of the speed of equal ones"


def _commit() -> str | None:
    """Return the commit of this checkout; None if git does not know it."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    return None
