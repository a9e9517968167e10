"""What runs on the device during a decode pass: launches a layer, the time that it is busy, the longest kernels.

A trace slows the host down, so that the share of the time is that of a pass without one.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

from gpu.notebook import Asked, Notebook
from gpu.passes import Built, build, decode
from gpu.timing import host_seconds

_BATCHES = (1, 32, 128)
_TOP = 12
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of a trace's events
_ON_HOST = {"cpu_op"}


def measure(book: Notebook, asked: Asked) -> None:
    """A trace of one pass at each batch size."""
    batches = (1, 2) if asked.tiny else _BATCHES
    built = build(asked, batches[-1])
    for rows in batches:
        with book.part(f"batch {rows}"):
            _trace(book, asked, built, rows)


def _trace(book: Notebook, asked: Asked, built: Built, rows: int) -> None:
    windows = decode(built, rows)

    def run() -> object:
        return built.forward.run(windows)

    alone = host_seconds(run, 3)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if not asked.tiny:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    for _ in range(2):  # the first one sets up the profiler
        with torch.profiler.profile(activities=kinds) as profile:
            run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    wanted = _ON_HOST if asked.tiny else _ON_DEVICE
    found = summary([e for e in events if e.get("ph") == "X" and e.get("cat") in wanted])
    found |= {"seconds": alone, "synchronizations": sum("Synchronize" in str(e.get("name")) for e in events)}
    launches, busy = found["launches"], found["busy"]
    line = f"batch {rows}: {launches} launches, {launches / built.layers:.1f} a layer; the device is busy "
    line += f"for {1e3 * busy:.2f} ms, {busy / alone:.0%} of the {1e3 * alone:.2f} ms of a pass"
    book.note(f"batch {rows}", found, line)
    for name, count, seconds in found["top"][:6]:
        book.say(f"    {1e3 * seconds:7.3f} ms in {count:4} launches: {name[:90]}")


def summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Launches, seconds from the first to the end of the last, seconds in which any ran, the longest by name."""
    assert events, "the trace has no event of the device"
    seconds: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    busy, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: float(e["ts"])):
        start, taken = float(event["ts"]), float(event.get("dur", 0))
        busy += max(start + taken - max(start, until), 0.0)
        until = max(until, start + taken)
        seconds[event["name"]] += taken / 1e6
        counts[event["name"]] += 1
    top = sorted(seconds, key=lambda name: -seconds[name])[:_TOP]
    span = until - min(float(e["ts"]) for e in events)
    return {
        "launches": len(events),
        "busy": busy / 1e6,
        "span": max(span, 1e-3) / 1e6,
        "top": [[name, counts[name], seconds[name]] for name in top],
    }
