"""The grid: the workloads, batch sizes and contenders to measure."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from detgen.bench.config import BenchConfig
from detgen.bench.model_source import Target
from detgen.bench.peer_interface import Contender, Job, ModelSource, Workload
from detgen.bench.peers import APART, NAMES, peer_class, versions
from detgen.bench.peers.detgen_engine import SYNTHETIC
from detgen.bench.processes import start_worker
from detgen.bench.random_weights import settings_of
from detgen.bench.workloads import SYNTHETIC as SYNTHETIC_WORKLOADS
from detgen.bench.workloads import WHOLE, check_name, make_workload, split_name
from detgen.errors import BenchError
from detgen.worker import WorkerError

_LEAST_SCALE = 1e-4
_QUICK_BATCHES, _FULL_BATCHES = (16, 1), (1, 4, 16, 32)
_FULL_FRACTIONS = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
Peers = dict[str, list[Contender]]
MIXED = ("none", "auto")  # drafters for partly verified batches


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload at one batch size, and the contenders that take turns in it."""

    workload: Workload
    batch_size: int
    contenders: tuple[Contender, ...]

    def job(self, contender: Contender, batch_size: int | None = None) -> Job:
        """Return the job of a contender, at the cell's batch size or another one."""
        prompts = self.workload.prompts
        share = 1.0 if contender.fraction is None else contender.fraction
        verified = tuple(is_verified(i, share) for i in range(len(prompts)))
        return Job(prompts, batch_size or self.batch_size, verified, self.workload.temperature)


def is_verified(index: int, fraction: float) -> bool:
    """Return whether the request of this index is verified: the first one is, and others spread evenly."""
    return ceil((index + 1) * fraction - 1e-9) > ceil(index * fraction - 1e-9)


def batch_sizes(config: BenchConfig) -> tuple[int, ...]:
    """Return the batch sizes asked for, or those of the grid."""
    return config.batch_sizes or (_FULL_BATCHES if config.full else _QUICK_BATCHES)


def requests_at(config: BenchConfig, batch_size: int) -> int:
    """Return a cell's number of requests: two batches, enough to compare outputs, enough for the smallest share."""
    if config.requests is not None:
        return config.requests
    return max(2 * batch_size, 16 if config.full else 8, ceil(100 / min(_fractions(config))))


def _fractions(config: BenchConfig) -> tuple[float, ...]:
    """Return the percentages of verified requests asked for, or those of the grid."""
    return config.fractions or (_FULL_FRACTIONS if config.full else (100.0,))


def fitted_workloads(config: BenchConfig, target: Target) -> list[Workload]:
    """Return the workloads asked for, or those of the grid, with the requests of the largest cell.

    Raises:
        BenchError: if there is no such workload, or its sequences are longer than the model's context.
    """
    names = config.workloads or (("sample", *SYNTHETIC_WORKLOADS) if config.full else ("sample",))
    requests = max(requests_at(config, size) for size in batch_sizes(config))
    workloads = []
    for name in names:
        plain, _ = split_name(name)
        scale = config.scale or (1.0 if target.engine.device.startswith("cuda") or plain in WHOLE else 1 / 16)
        while True:
            workload = make_workload(name, requests, scale, config, target)
            # A default scale shrinks until sequences fit the model's context.
            gives_way = config.scale is None and plain in SYNTHETIC_WORKLOADS and scale > _LEAST_SCALE
            if workload.longest <= target.context or not gives_way:
                break
            scale /= 2
        if workload.longest > target.context:
            raise BenchError(
                f"workload {name} has sequences of {workload.longest} tokens, the model's context is "
                f"{target.context}; use a smaller --scale or fewer --max-tokens"
            )
        workloads.append(workload)
    return workloads


def make_cells(config: BenchConfig, workloads: list[Workload], peers: Peers) -> list[Cell]:
    """Return a cell for each workload at each batch size that a contender can run.

    Raises:
        BenchError: if there is none.
    """
    cells = []
    for workload in workloads:
        for size in batch_sizes(config):
            contenders = contenders_at(config, peers, size)
            if workload.temperature:
                contenders = tuple(c for c in contenders if c.peer == "detgen")
            if contenders:
                prompts = workload.prompts[: requests_at(config, size)]
                cells.append(Cell(replace(workload, prompts=prompts), size, contenders))
    if not cells:
        raise BenchError("nothing is left to measure: no peer that was asked for runs these batch sizes")
    return cells


def find_peers(config: BenchConfig, source: ModelSource) -> tuple[Peers, list[str], dict[str, str]]:
    """Return the contenders of each peer that runs these models, notes on the others, and versions of packages."""
    found: Peers = {}
    packages: dict[str, str] = {}
    notes = []
    for name in config.peers or NAMES:
        peer = peer_class(name)
        try:
            there = installed(name, pythons(config).get(name), config.output / "logs")
        except (BenchError, WorkerError) as error:
            notes.append(f"{name} skipped: {str(error).removeprefix('BenchError: ')}")
            continue
        if contenders := peer.contenders(source):
            found[name] = contenders
            packages |= there
        else:
            notes.append(f"{name} skipped: it does not run these models on {source.engine.device}")
    return found, notes, packages


def installed(name: str, python: str | None, logs: Path) -> dict[str, str]:
    """Return the versions of what a peer needs, in the environment in which it runs.

    Raises:
        BenchError: if something is not installed in detgen's environment.
        WorkerError: if something is not installed in the peer's own environment, or that does not run.
    """
    if python is None:
        return versions(peer_class(name))
    with start_worker(f"{name}-versions", 1, logs, python=python) as worker:
        found: dict[str, str] = worker.call(versions, peer_class(name))
    return found


def pythons(config: BenchConfig) -> dict[str, str]:
    """Return the Python of each peer that has its own environment.

    Raises:
        BenchError: if an entry is not NAME=PATH for a peer that may have one.
    """
    found = {}
    for given in config.peer_pythons:
        name, _, path = given.partition("=")
        if name not in APART or not path:
            raise BenchError(f"--peer-python takes NAME=PATH, where NAME is one of {', '.join(APART)}; got {given!r}")
        # Links are not resolved: a virtual environment is known by its own path.
        found[name] = os.path.abspath(os.path.expanduser(path))
    return found


def contenders_at(config: BenchConfig, peers: Peers, batch_size: int) -> tuple[Contender, ...]:
    """Return the contenders of a cell; the quick grid leaves some out, unless peers are named."""
    found: list[Contender] = []
    for name, contenders in peers.items():
        if name == "detgen":
            found += _of_detgen(config, contenders, requests_at(config, batch_size))
            continue
        fitting = (c for c in contenders if c.most_batch is None or batch_size <= c.most_batch)
        found += (c for c in fitting if c.quick or config.full or config.peers)
    return tuple(found)


def _of_detgen(config: BenchConfig, contenders: list[Contender], requests: int) -> list[Contender]:
    """Return each drafter with the shares and rates that were asked for."""
    # Whole requests are verified, so rows are named by their real share.
    shares = sorted({ceil(f / 100 * requests - 1e-9) / requests for f in _fractions(config)})
    found = []
    for contender in contenders:
        if contender.name == SYNTHETIC:
            found += [replace(contender, fraction=1.0, acceptance=rate) for rate in config.acceptances]
        else:
            mixed = shares if contender.name in MIXED and contender.weights is None else []
            # Everything is compared with `none` on all requests, so that row is always there.
            whole = [1.0] if contender.name == "none" or 1.0 in shares else []
            found += [replace(contender, fraction=share) for share in dict.fromkeys((*mixed, *whole))]
    return found


def check(config: BenchConfig) -> None:
    """Refuse settings that cannot be measured.

    Raises:
        BenchError: names the option, its allowed values and the value.
    """
    for option, values, least, most in (
        ("--batch-size", config.batch_sizes, 1, 4096),
        ("--deterministic-fraction", config.fractions, 1, 100),
        ("--synthetic-acceptance", config.acceptances, 0.01, 0.99),
        ("--requests", [config.requests], 1, 10**6),
        ("--rounds", [config.rounds], 1, 1000),
        ("--max-tokens", [config.max_tokens], 2, 10**6),
        ("--scale", [config.scale], _LEAST_SCALE, 100),
    ):
        for value in values:
            if value is not None and not least <= value <= most:
                raise BenchError(f"{option} must be from {least:g} to {most:g}, got {value:g}")
    engine = config.engine
    if config.random_weights is not None and (engine.target or engine.draft):
        raise BenchError("--random-weights takes the place of --target and --draft; give one or the other")
    if config.random_weights is not None and {engine.target_quant, engine.draft_quant} & {"nf4", "int8"}:
        raise BenchError("--random-weights are not quantized by bitsandbytes; take q8, q4, q4_k or none")
    pythons(config)
    for name in config.peers:
        peer_class(name)
    for name in config.workloads:
        check_name(name)
    if config.random_weights is not None:
        settings_of(config.random_weights)
    if config.acceptances and config.random_weights is None and engine.target and engine.draft is None:
        raise BenchError("--synthetic-acceptance needs a draft model for its cost: give one with --draft")
