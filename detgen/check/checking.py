"""The check: a reference, the same again under each setting, compared bit for bit."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from detgen.check.axes import QUANTS, Axis, Setting, Value, make_axes, name_value
from detgen.check.comparing import Comparison, Difference, Key, Observed, Tally, compare
from detgen.check.plan import FULL, QUICK, embedded_prompts, read_axes, read_pool, select
from detgen.check.pool import Pool
from detgen.check.resuming import kill_and_resume
from detgen.check.running import FreshProcess, Subject, Task, breaking, known, short_of_memory, size
from detgen.engine.config import EngineConfig
from detgen.engine.request import Request, SamplingParams
from detgen.errors import CheckError, EngineError
from detgen.passes.pages import PAGE
from detgen.progress import Observer, Progress

_ENOUGH = 3  # settings that differ, after which nothing is gained by trying more
_MORE = 5.0  # seconds in which more of them are looked for once there is one


@dataclass(frozen=True, slots=True)
class Case:
    """A setting and the requests that are compared under it."""

    setting: Setting
    watched: list[Request]


@dataclass(frozen=True, slots=True)
class Failure:
    """A case in which something differs.

    Attributes:
        case: what was generated, and how.
        difference: the first one.
        error: what was raised, where that is the difference.
    """

    case: Case
    difference: Difference
    error: str | None = None


@dataclass(slots=True)
class CheckResult:
    """What a check found.

    Attributes:
        total: of all settings.
        by_axis: of the settings that change an axis.
        tried: values of each axis that were tried.
        failures: the first few settings that differ.
        kills: runs that were killed and resumed.
        preemptions: sequences that gave their pages back and were replayed.
        seconds: time taken.
        pairs: pairwise settings that were selected; 0 if axes were to be changed alone.
        notes: what could not be tried, and why.
    """

    total: Tally = field(default_factory=Tally)
    by_axis: dict[str, Tally] = field(default_factory=dict)
    tried: dict[str, set[Value]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    kills: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    pairs: int = 0
    notes: list[str] = field(default_factory=list)


class Check:
    """Generates and compares. A context manager that ends its other process.

    Args:
        config: how to build the engine; its drafter must be "auto", so that a draft model is there if there can be.
        pool: the prompts.
        axes: what may change.
        seed: of orders and adversaries.
        observer: is told how it goes.
        subject: the engine under test, built like that of `config`.

    Attributes:
        started: when it began, as `time.monotonic`.
        result: what it has found so far.
        fresh: the other process.
    """

    def __init__(
        self, config: EngineConfig, pool: Pool, axes: list[Axis], seed: int, observer: Observer, subject: Subject
    ) -> None:
        self.subject, self.config = subject, config
        self.pool, self.axes, self.seed = pool, axes, seed
        self.observer = observer
        self.started = time.monotonic()
        self.result = CheckResult()
        self.fresh = FreshProcess(config)
        self._references: dict[tuple[str, str], dict[Key, Observed]] = {}
        self._roomy = 0  # settings of a run whose cache was not too small

    def __enter__(self) -> Check:
        return self

    def __exit__(self, *error: object) -> None:
        self.fresh.close()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        r, engine = self.result, self.subject.engine()
        return {
            "equal": not r.failures,
            "seed": self.seed,
            "pairwise_settings": r.pairs,
            "prompts": len(self.pool.requests),
            "seconds": round(r.seconds, 3),
            "kills": r.kills,
            "preemptions": r.preemptions,
            "total": self._counts(r.total),
            "axes": {
                a.name: {
                    "tried": [name_value(a.name, v) for v in a.values if v in r.tried.get(a.name, ())],
                    **(self._counts(r.by_axis[a.name]) if a.name in r.by_axis else {}),
                }
                for a in self.axes
            },
            "notes": r.notes,
            "profile": engine.profile(),
            "probe": engine.probe_report(),
        }

    def _counts(self, tally: Tally) -> dict[str, int]:
        """A tally for JSON; chunks are those of models that think."""
        counts = asdict(tally)
        return counts if self.subject.engine().thinks else {n: c for n, c in counts.items() if "chunks" not in n}

    def learn(self) -> None:
        """Make the greedy reference of the pool, which other requests are made of.

        Raises:
            EngineError: as building the engine does.
            CheckError: if no prompt can run; the message says why the first one cannot.
        """
        greedy = self.reference(Case(Setting(), self.pool.requests))
        engine = self.subject.engine()
        if not greedy:
            raise CheckError(engine.generate(self.pool.requests[:1])[0].error or "no prompts")
        while not self.reference(Case(Setting(), [self.pool.longest()])) and len(self.pool.long) > 1:
            self.pool.long = self.pool.long[: len(self.pool.long) // 2]  # the model's context is shorter
        prompts = {r.id: engine.encode(r) for r in self.pool.requests if (r.id, 0) in greedy}
        self.pool.learn(greedy, prompts, lambda request: size(engine, request)[1], PAGE)

    def run(self, settings: list[Setting], more: Iterable[Setting] = (), deadline: float | None = None) -> CheckResult:
        """Try settings until they end, the deadline (as `time.monotonic`) has come, or enough differ.

        Args:
            settings: in an order in which another process can load the models of those ahead.
            more: tried after these.
            deadline: None takes as long as it takes.
        """
        started = time.monotonic()
        self._roomy = 0
        total = None if more else len(settings)
        fresh = [s for s in reversed(settings) if s.process == "fresh"]  # the next one last
        for setting in itertools.chain(settings, more):
            if len(self.result.failures) >= _ENOUGH or (deadline is not None and time.monotonic() > deadline):
                break
            if fresh:
                self.fresh.load(fresh[-1].quant)
            failure = self._try(setting)
            if fresh and fresh[-1] is setting:
                fresh.pop()
            if failure is not None:
                self.result.failures.append(failure)
                deadline = min(deadline or math.inf, time.monotonic() + _MORE)
            counts, seconds = self.result.total, time.monotonic() - self.started
            positions = f"{counts.positions:,} positions"
            self.observer.progress(Progress(counts.settings, total, "settings", seconds, figures=(positions,)))
        self.result.seconds += time.monotonic() - started
        if self._roomy:
            self.result.notes.append(f"in {self._roomy} of the settings with preemption nobody had to be preempted")
        return self.result

    def _try(self, setting: Setting) -> Failure | None:
        """Try a setting with its prompts, and count it."""
        case = Case(setting, self.pool.watched(setting))
        tally, preemptions = Tally(settings=1), self.result.preemptions
        failure = self.attempt(case, tally)
        if setting.preemption and failure is None and self.result.preemptions == preemptions:
            self._roomy += 1
        self.result.total.add(tally)
        for axis in self.axes:
            value = getattr(setting, axis.name)
            self.result.tried.setdefault(axis.name, set()).add(value)
            if value != axis.values[0]:
                self.result.by_axis.setdefault(axis.name, Tally()).add(tally)
        return failure

    def attempt(self, case: Case, tally: Tally | None = None) -> Failure | None:
        """Compare a case, where an error is a difference too; None if nothing differs.

        Args:
            case: what to generate.
            tally: counts of the comparison are added to it.
        """
        try:
            comparison = self.compare(case)
        except Exception as error:
            return Failure(case, Difference("", 0, "error", 0, 0), f"{type(error).__name__}: {error}")
        if tally is not None:
            tally.add(comparison.tally)
        return Failure(case, comparison.differences[0]) if comparison.differences else None

    def compare(self, case: Case) -> Comparison:
        """Generate a case and compare it with its reference.

        Raises:
            Exception: whatever the engine raises.
        """
        reference = self.reference(case)
        return compare(reference, self._generate(self.task(case, reference)))

    def task(self, case: Case, reference: dict[Key, Observed]) -> Task:
        """The case as plain data."""
        setting = case.setting
        needs = setting.drafter in ("oracle", "adversary")
        ahead = known(case.watched, reference, self.subject.engine(setting.quant)) if needs else []
        broken: tuple[int, ...] = ()
        if setting.neighbours == "broken":
            broken = breaking(case.watched, reference, self.subject.engine(setting.quant))
        queue = self.pool.arranged(case.watched, setting, self.seed, broken)
        before: list[Request] = []
        if setting.prefix_cache == "warm":
            before = [replace(r, params=SamplingParams(max_tokens=1)) for r in queue]
        elif setting.prefix_cache == "shared":
            engine = self.subject.engine(setting.quant)
            prompts = {r.id: engine.encode(r) for r in case.watched if (r.id, 0) in reference}
            before = self.pool.beginnings(case.watched, prompts)
        thinks = self.subject.engine().thinks
        return Task(setting, queue, ahead, self.seed, broken[0] if broken else None, before, thinks)

    def reference_task(self, case: Case) -> Task:
        """What the case is compared with: nothing drafted, one request at a time."""
        return Task(case.setting.reference(), case.watched, [], self.seed, thinks=self.subject.engine().thinks)

    def reference(self, case: Case) -> dict[Key, Observed]:
        """The reference of the case's requests; each is generated once."""
        setting = case.setting
        made = self._references.setdefault((setting.quant, setting.sampling), {})
        missing = [r for r in case.watched if (r.id, 0) not in made]
        if missing:
            made |= self.subject.generate(self.reference_task(replace(case, watched=missing))).samples
        wanted = {(r.id, sample) for r in case.watched for sample in range(r.params.n)}
        return {key: seen for key, seen in made.items() if key in wanted}

    def _generate(self, task: Task) -> dict[Key, Observed]:
        process = task.setting.process
        if process == "resumed":
            if short_of_memory():
                self.fresh.close()
            found, killed = kill_and_resume(task, self.config)
            self.result.kills += killed
            return found
        generated = (self.fresh if process == "fresh" else self.subject).generate(task)
        self.result.preemptions += generated.preemptions
        return generated.samples


@contextmanager
def run_check(
    config: EngineConfig,
    prompts: str | None,
    observer: Observer,
    *,
    limit: int | None = None,
    full: bool = False,
    seed: int = 0,
    minutes: float | None = None,
    only: Iterable[str] = (),
) -> Iterator[Check]:
    """Check the contract; the check that is yielded can try more.

    Args:
        config: names the models.
        prompts: as `detgen run` takes them; None takes the embedded ones.
        observer: is told how it goes.
        limit: most prompts to read.
        full: longer texts, and many random settings after those that combine each pair of values.
        seed: of the selection.
        minutes: time for settings, filled with random ones; None takes as long as the others take.
        only: names of axes, each changed alone; none combines all of them.

    Raises:
        PromptsError: no prompt can be read.
        EngineError: the engine cannot be built.
        CheckError: there is no such axis, or no prompt can run.
    """
    names, extent = read_axes(only), FULL if full else QUICK
    pool = read_pool(prompts or embedded_prompts(config.target), limit, extent, observer)
    config = replace(config, drafter="auto", batch_size=len(pool.requests) + 8)
    subject = Subject(config, observer=observer)
    with Check(config, pool, [], seed, observer, subject) as check:
        engine = subject.engine()
        observer.message(f"{len(pool.requests)} prompts, {engine.profile()['target']['name']}, seed {seed}")
        elsewhere = all(isinstance(model, str | Path | None) for model in (config.target, config.draft))
        processes = elsewhere and (not names or "process" in names)
        if processes:
            check.fresh.load("none")  # while this process loads other quantizations
        quants = ["none"]
        if elsewhere and config.target_quant == "none" and (not names or "quant" in names):
            quants += _quants(subject, check.result.notes)
        has_draft = engine.draft_profile() is not None
        check.axes = make_axes(has_draft=has_draft, quants=quants, processes=processes, thinks=engine.thinks)
        settings, check.result.pairs, more = select(check.axes, names, extent, seed)
        check.learn()
        check.run(settings, more if minutes and not names else (), time.monotonic() + 60 * minutes if minutes else None)
        yield check


def _quants(subject: Subject, notes: list[str]) -> list[str]:
    """Other quantizations of the target that can be tried here."""
    found = []
    for quant in QUANTS[1:]:
        try:
            subject.engine(quant)
        except (EngineError, RuntimeError, ValueError) as error:
            notes.append(f"quantization {quant} was not tried: {error}")
        else:
            found.append(quant)
    return found
