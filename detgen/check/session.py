"""A whole check: from prompts to a result, with the settings of its extent, and an explanation of what differs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from detgen.check.axes import TITLES, Axis, Setting, alone, make_axes, name_value
from detgen.check.checking import Check, CheckResult, Observer
from detgen.check.covering import at_random, pairwise
from detgen.check.pool import Pool, make_pool
from detgen.check.running import Subject
from detgen.engine import Engine
from detgen.engine.config import EngineConfig
from detgen.engine.request import Request, SamplingParams
from detgen.errors import DEMO, CheckError, EngineError, PromptsError
from detgen.explain.explaining import Finding, explain
from detgen.prompts import BadLine, open_prompts

Extent = Literal["quick", "full"]

_RANDOM = 300  # random settings of a full check without a time
_EXPLAINING = 5.0, 20.0  # seconds for shrinking a difference, at least and at most
_MINUTE = 44.0  # seconds that may have passed then, where the check is that quick
# (requests, tokens each) of the first requests, the next ones, and so on; batches of 64 need many short ones.
_TOKENS: dict[Extent, tuple[tuple[int, int], ...]] = {
    "quick": ((1, 24), (3, 8), (12, 4), (1, 2)),
    "full": ((4, 80), (12, 40), (1, 16)),
}
_PROMPTS: dict[Extent, int] = {"quick": 66, "full": 96}
_LONG: dict[Extent, int] = {"quick": 600, "full": 4000}  # characters of a long neighbour
_CUT: dict[Extent, int | None] = {"quick": 40, "full": None}


@dataclass(slots=True)
class Session:
    """A check and what came of it.

    Attributes:
        check: the check, with its pool and its result.
        engine: the engine under test.
        axes: what was turned.
        seed: of the selection.
        notes: what could not be tried, and why.
        findings: explanations of the first difference.
        covering: pairwise settings, 0 if the selection was none.
    """

    check: Check
    engine: Engine
    axes: list[Axis]
    seed: int
    notes: list[str]
    findings: list[Finding] = field(default_factory=list)
    covering: int = 0

    @property
    def result(self) -> CheckResult:
        """What was compared."""
        return self.check.result

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        r = self.result
        return {
            "equal": not r.failures,
            "seed": self.seed,
            "pairwise_settings": self.covering,
            "prompts": len(self.check.pool.requests),
            "seconds": round(r.seconds, 3),
            "kills": r.kills,
            "stops": r.stops,
            "total": asdict(r.total),
            "axes": {
                a.name: {
                    "tried": [name_value(a.name, v) for v in a.values if v in r.tried.get(a.name, ())],
                    **(asdict(r.by_axis[a.name]) if a.name in r.by_axis else {}),
                }
                for a in self.axes
            },
            "notes": self.notes,
            "findings": [f.as_dict() for f in self.findings],
            "profile": self.engine.profile(),
            "probe": self.engine.probe_report(),
        }


def read_requests(prompts: str | None, limit: int | None, observer: Observer) -> list[Request]:
    """The prompts that can be read, no more than a check uses; the embedded ones where none are named.

    Args:
        prompts: as `run` takes them.
        limit: most prompts.
        observer: is told what is left out.

    Raises:
        PromptsError: none can be read.
    """
    source = open_prompts(prompts or str(DEMO / "prompts.jsonl"))
    items = list(source.read(SamplingParams(), min(limit or _PROMPTS["full"], _PROMPTS["full"])))
    found = [item for item in items if not isinstance(item, BadLine)]
    bad = [item.error for item in items if isinstance(item, BadLine)]
    if not found:
        raise PromptsError(f"no prompts in {source.given}: {bad[0] if bad else 'it is empty'}")
    if bad:
        observer.message(f"{len(bad)} of {len(items)} prompts cannot be read and are left out; {bad[0]}")
    return found


def read_pool(requests: list[Request], extent: Extent) -> Pool:
    """The prompts of a check, repeated with another beginning where there are too few for its largest batch."""
    wanted = _PROMPTS[extent]
    rounds = itertools.count(1)
    many = list(requests)
    while len(many) < wanted:
        words = f"{next(rounds)}. "
        again = [replace(r, prompt=words + r.prompt) for r in requests if r.prompt is not None]
        many += again or [replace(r, prompt=words + str((r.messages or [{}])[0]), messages=None) for r in requests]
    return make_pool(many[:wanted], _TOKENS[extent], _LONG[extent], _CUT[extent])


def run_check(
    config: EngineConfig,
    pool: Pool,
    extent: Extent,
    seed: int,
    minutes: float | None,
    only: list[str],
    observer: Observer,
) -> Session:
    """Check the contract.

    Args:
        config: names the models.
        pool: the prompts.
        extent: how much is tried: a pairwise selection, or that and random settings.
        seed: of the selection.
        minutes: time for settings; None takes as long as they take.
        only: names of axes, each turned alone; none takes all of them together.
        observer: is told how it goes.

    Raises:
        EngineError: if the engine cannot be built.
        CheckError: for an unknown axis.
        CheckError: if no prompt can run.
    """
    if unknown := [name for name in only if name not in TITLES]:
        raise CheckError(f"there is no axis {unknown[0]!r}; the axes are {', '.join(TITLES)}")
    started = time.monotonic()
    config = replace(config, drafter="auto", batch_size=len(pool.requests) + 8)
    notes: list[str] = []
    subject = Subject(config)
    engine = subject.engine()
    observer.message(f"{len(pool.requests)} prompts, {engine.profile()['target']['name']}, seed {seed}")
    with Check(config, pool, [], seed, observer, subject) as check:
        processes = _elsewhere(config) and (not only or "process" in only)
        if processes:
            check.expect_processes()
        quants = _quants(config, subject, notes) if not only or "quant" in only else ["none"]
        axes = make_axes(has_draft=engine.draft_profile() is not None, quants=quants, processes=processes)
        if missing := [name for name in only if name not in {a.name for a in axes}]:
            raise CheckError(f"the axis {missing[0]} has only one value here")
        check.axes = axes
        session = Session(check, engine, axes, seed, notes)
        check.learn()
        settings, total = _settings(session, extent, minutes, only)
        check.run(settings, total, time.monotonic() + 60 * minutes if minutes else None)
        if check.result.failures:
            observer.message("something differs; looking for the smallest setting that does")
            seconds = _explaining(time.monotonic() - started)
            session.findings.append(explain(check, check.result.failures[0], seconds))
    return session


def _explaining(passed: float) -> float:
    """Seconds for shrinking: what is left of a minute; where that is over, it may take its time."""
    least, most = _EXPLAINING
    return min(max(_MINUTE - passed, least), most) if passed < _MINUTE else most


def _settings(
    session: Session, extent: Extent, minutes: float | None, only: list[str]
) -> tuple[Iterable[Setting], int | None]:
    """What to try, and how many that are if time does not decide."""
    axes, seed = session.axes, session.seed
    if only:
        some = ordered([s for a in axes if a.name in only for s in alone(a)], axes)
        return some, len(some)
    pairs = ordered(pairwise(axes, seed), axes)
    session.covering = len(pairs)
    if extent == "quick" and minutes is None:
        return pairs, len(pairs)
    more = at_random(axes, seed)
    if minutes is not None:
        return itertools.chain(pairs, more), None
    both = [*pairs, *ordered(list(itertools.islice(more, _RANDOM)), axes)]
    return both, len(both)


def ordered(settings: list[Setting], axes: list[Axis]) -> list[Setting]:
    """Settings in an order in which nobody waits for a model to be loaded.

    By quantization; of all but the first, those that need the second process first: it loads the next model while the
    others are tried. At last a run that is resumed, if there is one: it is killed, and no other process is needed.
    """
    quants = next((list(a.values) for a in axes if a.name == "quant"), ["none"])
    found = sorted(settings, key=lambda s: (quants.index(s.quant), s.quant != quants[0] and s.process == "this"))
    last = max((i for i, s in enumerate(found) if s.process == "resumed"), default=len(found) - 1)
    return [*found[:last], *found[last + 1 :], found[last]]


def _elsewhere(config: EngineConfig) -> bool:
    """Whether another process can load the model: not one that exists in this process alone."""
    return all(model is None or isinstance(model, str) or hasattr(model, "joinpath") for model in _models(config))


def _models(config: EngineConfig) -> tuple[Any, Any]:
    return config.target, config.draft


def _quants(config: EngineConfig, subject: Subject, notes: list[str]) -> list[str]:
    """Quantizations of the target that can be tried here, the one that was asked for first."""
    if config.target_quant != "none" or not _elsewhere(config):
        return ["none"]
    found = ["none"]
    for quant in ("nf4", "int8"):
        try:
            subject.engine(quant)
        except (EngineError, RuntimeError, ValueError) as error:
            notes.append(f"quantization {quant} was not tried: {error}")
        else:
            found.append(quant)
    return found
