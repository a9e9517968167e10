"""bench.json: every sample, and all that is needed to know what it was measured on."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import detgen
from detgen.bench.interface import BenchConfig, ModelSource
from detgen.bench.rows import Results, Row
from detgen.errors import BenchError

FORMAT = 1
_TUPLES = ("same_bytes", "agreement")


def environment(config: BenchConfig, source: ModelSource, versions: dict[str, str]) -> dict[str, Any]:
    """The machine, the versions, the models and the settings of a benchmark."""
    import psutil

    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "detgen": detgen.__version__,
        "device": device_name(source.device),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": source.threads,
        "memory": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "models": {
            "target": source.random_weights or source.target or "embedded:target",
            "draft": source.draft or ("embedded:draft" if source.has_draft else None),
            "random_weights": source.random_weights is not None,
            "dtype": source.dtype,
            "target_quant": source.target_quant,
        },
        "settings": {
            name: getattr(config, name)
            for name in ("full", "requests", "max_tokens", "scale", "rounds", "seed", "acceptances", "fractions")
        },
    }


def device_name(device: str) -> str:
    """The model of the GPU or of the processor."""
    if not device.startswith("cuda"):
        return cpu_name()
    import torch

    return torch.cuda.get_device_name(device)


def cpu_name() -> str:
    """The processor's model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def save(results: Results, path: Path) -> None:
    """Write bench.json."""
    content = {"format": FORMAT, **asdict(results)}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Results:
    """Read a bench.json.

    Raises:
        BenchError: if it is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BenchError(f"{path}: no such file; give the bench.json of a former run") from None
    except (OSError, ValueError) as error:
        raise BenchError(f"{path} cannot be read: {error}; give the bench.json of a former run") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BenchError(f"{path} is no bench.json of this version of detgen; measure anew")
    try:
        rows = [_row(row) for row in content["rows"]]
        return Results(rows=rows, **{f.name: content[f.name] for f in fields(Results) if f.name != "rows"})
    except (KeyError, TypeError) as error:
        raise BenchError(f"{path} is no bench.json of this version of detgen ({error}); measure anew") from None


def _row(values: dict[str, Any]) -> Row:
    pairs = {name: tuple(values[name]) for name in _TUPLES if values[name] is not None}
    lists = {name: [tuple(v) for v in values[name]] for name in ("ttft", "tpot")}
    return Row(**(values | pairs | lists))
