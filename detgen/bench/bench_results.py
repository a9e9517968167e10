"""The results of a benchmark, kept in bench.json: rows, and a description of the machine and the models."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from detgen import __version__
from detgen.bench.config import BenchConfig
from detgen.bench.peer_interface import ModelSource
from detgen.errors import BenchError
from detgen.machine import cpu_name

_FORMAT = 1
_SETTINGS = ("full", "requests", "max_tokens", "scale", "rounds", "seed", "acceptances", "fractions")


@dataclass(slots=True)
class Row:
    """One contender in one cell, measured.

    Lists have one entry per measured round. Ratios compare runs of the same round.

    Attributes:
        workload: name of the workload.
        batch_size: most requests at a time.
        peer: name of the peer.
        label: label of the contender.
        precision: precision of weights and arithmetic.
        weights: see `Outcome`.
        fewer_bits: see `Contender`.
        reference: label of the row whose tokens its verified requests must have.
        synthetic: whether the drafts were made to be accepted at a stated rate.
        fraction: share of requests that are verified.
        requests: number of requests.
        prompt_tokens: tokens of all prompts together.
        output_tokens: output tokens of all requests together.
        error: why there are no measurements; the lists are empty then.
        wrong: what is wrong with its outputs; None if nothing was found.
        seconds: seconds of a run.
        cpu_seconds: processor time of the peer's processes in a run.
        others: seconds of processor time that other processes took in a run, and that were available; see `Others`.
            Empty if the system does not tell.
        ttft: p50 and p99 of the time to first token, in seconds.
        tpot: p50 and p99 of the time per output token after the first, in seconds.
        over_none: speed over that of detgen without drafts in the same round.
        over_transformers: speed over the fastest transformers row of the same round.
        passes: passes of the target model in a run.
        counts: see `Outcome`; of the last run.
        same_bytes: prompts with the same tokens at two batch sizes, number of prompts, and the other batch size.
        agreement: prompts whose tokens equal the reference's, and number of prompts.
        memory: peak bytes of the peer's process.
        gpu_memory: peak bytes on the GPU.
        bandwidth_share: bytes of weights read, relative to what a copy moves in the same time.
        arithmetic_share: useful arithmetic, relative to what a matrix product does in the same time.
    """

    workload: str
    batch_size: int
    peer: str
    label: str
    precision: str
    synthetic: bool
    fraction: float | None
    requests: int
    prompt_tokens: int
    output_tokens: int
    error: str | None = None
    wrong: str | None = None
    weights: str | None = None
    fewer_bits: bool = False
    reference: str = "detgen none"
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    others: list[tuple[float, float]] = field(default_factory=list)
    ttft: list[tuple[float, float]] = field(default_factory=list)
    tpot: list[tuple[float, float]] = field(default_factory=list)
    over_none: list[float] = field(default_factory=list)
    over_transformers: list[float] = field(default_factory=list)
    passes: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    same_bytes: tuple[int, int, int] | None = None
    agreement: tuple[int, int] | None = None
    memory: int | None = None
    gpu_memory: int | None = None
    bandwidth_share: float | None = None
    arithmetic_share: float | None = None

    @property
    def key(self) -> tuple[str, int, str]:
        """What identifies the row in all runs of the same benchmark."""
        return self.workload, self.batch_size, self.label

    @property
    def speeds(self) -> list[float]:
        """Output tokens per second in each round."""
        return [self.output_tokens / s for s in self.seconds]

    @property
    def verdict(self) -> str:
        """`yes`, or how many prompts differ between two batch sizes."""
        if self.same_bytes is None:
            return "-"
        same, of, other = self.same_bytes
        return f"yes (with {other})" if same == of else f"no: {of - same} of {of} (with {other})"


@dataclass(slots=True)
class Results:
    """The results of a whole benchmark.

    Attributes:
        environment: see `describe`.
        roofline: bytes per second of a copy, operations per second of a matrix product.
        workloads: origin of each workload by name.
        rows: rows in the order in which they were measured.
        notes: what was left out or disturbed, and why.
        complete: whether the benchmark was completed; False if it was stopped or is still running.
    """

    environment: dict[str, Any]
    roofline: dict[str, float]
    workloads: dict[str, str]
    rows: list[Row]
    notes: list[str]
    complete: bool = True


def describe(config: BenchConfig, source: ModelSource, packages: dict[str, str]) -> dict[str, Any]:
    """Return the machine, the versions of the peers' packages, the models and the settings of a benchmark."""
    import psutil

    engine = source.engine
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "detgen": __version__,
        "device": _device_name(source),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": engine.threads,
        "memory": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": dict(sorted(packages.items())),
        "models": {
            "target": str(source.random_weights or engine.target or "embedded:target"),
            "draft": str(engine.draft or "embedded:draft") if source.has_draft else None,
            "random_weights": source.random_weights is not None,
            "dtype": engine.dtype,
            "target_quant": engine.target_quant,
        },
        "settings": {name: getattr(config, name) for name in _SETTINGS},
    }


def _device_name(source: ModelSource) -> str:
    """Return the model of the GPU or the processor."""
    if not source.on_gpu:
        return cpu_name()
    import torch

    return torch.cuda.get_device_name(source.engine.device)


class Stopped(KeyboardInterrupt):
    """A benchmark was interrupted after something was measured.

    Attributes:
        results: what was measured, as in bench.json.
    """

    def __init__(self, results: Results) -> None:
        super().__init__()
        self.results = results


def save(results: Results, path: Path) -> None:
    """Write bench.json atomically: if this process is killed, the former file or this one is there, complete.

    Raises:
        BenchError: if it cannot be written.
    """
    made = path.with_name(f".{path.name}.new")
    try:
        made.write_text(json.dumps({"format": _FORMAT, **asdict(results)}, indent=1) + "\n", encoding="utf-8")
        os.replace(made, path)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from None


def load(path: Path) -> Results:
    """Read a bench.json.

    Raises:
        BenchError: if it is not one.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BenchError(f"{path}: no such file; give the bench.json of an earlier run") from None
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot read {path}: {error}; give the bench.json of an earlier run") from None
    try:
        if content["format"] != _FORMAT:
            raise KeyError("format")
        rows = [_row(row) for row in content["rows"]]
        known = content.keys() & {f.name for f in fields(Results)} - {"rows"}  # older files have no `complete`
        return Results(rows=rows, **{name: content[name] for name in known})
    except (KeyError, TypeError) as error:
        raise BenchError(f"{path} is not a bench.json of this version of detgen ({error}); measure again") from None


def _row(values: dict[str, Any]) -> Row:
    tuples = {name: tuple(values[name]) for name in ("same_bytes", "agreement") if values[name] is not None}
    # Older files have no `others`, and columns that no longer exist.
    pairs = {name: [tuple(pair) for pair in values.get(name, ())] for name in ("ttft", "tpot", "others")}
    known = values.keys() & {f.name for f in fields(Row)}
    return Row(**({name: values[name] for name in known} | tuples | pairs))
