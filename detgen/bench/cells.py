"""The grid: which workloads, batch sizes and settings are measured."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from detgen.bench.interface import BenchConfig, Job, ModelSource, Peer, Setting, Variant, Workload
from detgen.bench.peers import NAMES, make_peer, versions
from detgen.bench.peers.detgen_engine import FAST, SYNTHETIC
from detgen.bench.workloads import SYNTHETIC as SYNTHETIC_WORKLOADS
from detgen.errors import BenchError

LEAST_SCALE = 1e-4
_QUICK_BATCHES, _FULL_BATCHES = (16, 1), (1, 4, 16, 32)
_FULL_FRACTIONS = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_MIXED = ("none", "self", "auto")  # drafters that partly verified batches are measured with


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload at one batch size, and the settings that take turns in it."""

    workload: Workload
    batch_size: int
    settings: tuple[Setting, ...]

    def job(self, setting: Setting, batch_size: int | None = None) -> Job:
        """What a setting is asked to run, at the cell's batch size or another one."""
        prompts = self.workload.prompts
        share = 1.0 if setting.fraction is None else setting.fraction
        verified = tuple(is_verified(i, share) for i in range(len(prompts)))
        return Job(prompts, batch_size or self.batch_size, verified, setting.acceptance)


def is_verified(index: int, fraction: float) -> bool:
    """Whether the request of this index is among the verified ones: the first one, and others spread evenly."""
    return ceil((index + 1) * fraction - 1e-9) > ceil(index * fraction - 1e-9)


def workload_names(config: BenchConfig) -> tuple[str, ...]:
    """The workloads asked for, or those of the grid."""
    if config.workloads:
        return config.workloads
    return ("sample", *SYNTHETIC_WORKLOADS) if config.full else ("sample",)


def batch_sizes(config: BenchConfig) -> tuple[int, ...]:
    """The batch sizes asked for, or those of the grid."""
    return config.batch_sizes or (_FULL_BATCHES if config.full else _QUICK_BATCHES)


def requests_at(config: BenchConfig, batch_size: int) -> int:
    """How many requests a cell has: two whole batches, enough to compare outputs, enough for the smallest share."""
    if config.requests is not None:
        return config.requests
    return max(2 * batch_size, 16 if config.full else 8, ceil(100 / min(_fractions(config))))


def _fractions(config: BenchConfig) -> tuple[float, ...]:
    """Percentages of verified requests that were asked for, or those of the grid."""
    return config.fractions or (_FULL_FRACTIONS if config.full or config.figures else (100.0,))


@dataclass(frozen=True, slots=True)
class Peers:
    """The peers that can be measured here.

    Attributes:
        variants: by peer.
        versions: by package.
        notes: which peers are left out, and why.
    """

    variants: dict[str, list[Variant]]
    versions: dict[str, str]
    notes: list[str]


def find_peers(config: BenchConfig, source: ModelSource) -> Peers:
    """See which peers are installed and can run these models.

    Raises:
        BenchError: if a peer was asked for by name and is not there.
    """
    found = Peers({}, {}, [])
    for name in config.peers or NAMES:
        peer: Peer = make_peer(name)
        try:
            found.versions.update(versions(peer))
        except BenchError as error:
            if config.peers:
                raise BenchError(f"peer {name}: {error}") from None
            found.notes.append(f"{name} skipped: {error}")
            continue
        variants = peer.variants(source)
        if variants:
            found.variants[name] = variants
        else:
            found.notes.append(f"{name} skipped: it does not run these models on {source.device}")
    return found


def settings_for(config: BenchConfig, peers: Peers, batch_size: int) -> tuple[Setting, ...]:
    """The rows of a cell; the quick grid has the first variant alone of peers that come with several precisions."""
    settings: list[Setting] = []
    for name, variants in peers.variants.items():
        if name == "detgen":
            settings += _detgen_settings(config, variants, requests_at(config, batch_size))
            continue
        fitting = [v for v in variants if v.most_batch is None or batch_size <= v.most_batch]
        settings += [Setting(name, v) for v in (fitting if config.full or config.peers else fitting[:1])]
    return tuple(settings)


def _detgen_settings(config: BenchConfig, variants: list[Variant], requests: int) -> list[Setting]:
    # Whole requests are verified, so a row is named by the share that it really has.
    shares = sorted({ceil(f / 100 * requests - 1e-9) / requests for f in _fractions(config)})
    settings = []
    for variant in variants:
        if variant.name == FAST:
            settings.append(Setting("detgen", variant, 0.0))
        elif variant.name == SYNTHETIC:
            settings += [Setting("detgen", variant, 1.0, rate) for rate in config.acceptances]
        else:
            mixed = shares if variant.name in _MIXED else []
            # All else is compared with `none` on every request, so that one is always there.
            whole = [1.0] if variant.name == "none" or 1.0 in shares else []
            settings += [Setting("detgen", variant, share) for share in dict.fromkeys((*mixed, *whole))]
    return settings


def check(config: BenchConfig) -> None:
    """Refuse what cannot be measured.

    Raises:
        BenchError: naming the option, what it may be and what it was.
    """
    for option, values, least, most in (
        ("--batch-size", config.batch_sizes, 1, 4096),
        ("--deterministic-fraction", config.fractions, 1, 100),
        ("--synthetic-acceptance", config.acceptances, 0.01, 0.99),
        ("--requests", [config.requests], 1, 10**6),
        ("--rounds", [config.rounds], 1, 1000),
        ("--threads", [config.threads], 1, 1024),
        ("--max-tokens", [config.max_tokens], 2, 10**6),
        ("--scale", [config.scale], LEAST_SCALE, 100),
    ):
        for value in values:
            if value is not None and not least <= value <= most:
                raise BenchError(f"{option} must be from {least:g} to {most:g}, got {value:g}")
    if config.random_weights is not None and (config.target or config.draft):
        raise BenchError("--random-weights takes the place of --target and --draft; give one or the other")
    if config.random_weights is not None and (config.target_quant, config.draft_quant) != ("none", "none"):
        raise BenchError("--random-weights are not quantized; leave out --target-quant and --draft-quant")
    if config.acceptances and not _has_draft(config):
        raise BenchError("--synthetic-acceptance needs a draft model for its cost: give one with --draft")


def _has_draft(config: BenchConfig) -> bool:
    return config.random_weights is not None or config.draft is not None or config.target is None
