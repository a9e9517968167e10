"""The check: a reference, the same again under each setting, compared bit for bit."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from detgen.check.axes import Axis, Setting, Value
from detgen.check.comparing import Comparison, Difference, Key, Observed, Tally, compare
from detgen.check.pool import Pool
from detgen.check.processes import Companion
from detgen.check.running import Subject, Task, known, scratch
from detgen.engine.config import EngineConfig
from detgen.engine.request import Request
from detgen.errors import CheckError

_ENOUGH = 3  # settings that differ, after which nothing is gained by trying more
_MORE = 5.0  # seconds in which more of them are looked for once there is one
_KILL = 24  # of so many runs that are stopped one is killed: the next process has to load everything anew


class Observer(Protocol):
    """Who is told how a check is going."""

    def message(self, text: str) -> None:
        """Something worth a line."""

    def tried(self, done: int, total: int | None, positions: int) -> None:
        """So many settings are done; the total is not known where time decides."""


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
        samples: samples that differ.
        error: what was raised, where that is the difference.
    """

    case: Case
    difference: Difference
    samples: int
    error: str | None = None


@dataclass(slots=True)
class CheckResult:
    """What a check found.

    Attributes:
        total: of all settings.
        by_axis: of the settings that turn an axis.
        tried: values of each axis that were tried.
        failures: the first few settings that differ.
        peak: most requests that were live at a time.
        kills: runs that were killed and resumed.
        stops: runs that were stopped without a kill, and resumed.
        seconds: time taken.
    """

    total: Tally = field(default_factory=Tally)
    by_axis: dict[str, Tally] = field(default_factory=dict)
    tried: dict[str, set[Value]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    peak: int = 0
    kills: int = 0
    stops: int = 0
    seconds: float = 0.0


class Check:
    """Generates and compares.

    Args:
        config: how to build the engine; its drafter must be "auto", so that a draft model is there if there can be.
        pool: the prompts.
        axes: what may be turned.
        seed: of orders and adversaries.
        observer: is told how it goes.
        subject: the engine under test, built like that of `config`.
    """

    def __init__(
        self, config: EngineConfig, pool: Pool, axes: list[Axis], seed: int, observer: Observer, subject: Subject
    ) -> None:
        self.subject, self.config = subject, config
        self.pool, self.axes, self.seed = pool, axes, seed
        self._companion = Companion(config)
        self._observer = observer
        self._references: dict[tuple[str, str], dict[Key, Observed]] = {}
        self._last: Setting | None = None
        self.result = CheckResult()

    def __enter__(self) -> Check:
        """Itself; leaving it ends the second process."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the second process."""
        self._companion.close()

    def expect_processes(self) -> None:
        """Start the second process, so that it loads while others work."""
        self._companion.start()

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
        self.pool.learn(greedy, {r.id: engine.encode(r) for r in self.pool.requests if (r.id, 0) in greedy})

    def run(self, settings: Iterable[Setting], total: int | None, deadline: float | None = None) -> CheckResult:
        """Try settings until they end, the deadline (as `time.monotonic`) has come, or enough differ."""
        started = time.monotonic()
        ahead: list[Setting] = []  # those that want the second process, the next one last
        if isinstance(settings, list):
            self._last = settings[-1]
            ahead = [s for s in reversed(settings) if s.process != "this"]
        for setting in settings:
            if deadline is not None and time.monotonic() > deadline:
                break
            if len(self.result.failures) >= _ENOUGH:
                break
            self._companion.prepare(ahead[-1].quant if ahead else setting.quant)
            failure = self._try(setting)
            if ahead and ahead[-1] is setting:
                ahead.pop()
            if failure is not None:
                self.result.failures.append(failure)
                deadline = min(deadline or math.inf, time.monotonic() + _MORE)
            self._observer.tried(self.result.total.settings, total, self.result.total.positions)
        self.result.seconds += time.monotonic() - started
        return self.result

    def _try(self, setting: Setting) -> Failure | None:
        """Try a setting with its prompts, and count it."""
        case = Case(setting, self.pool.watched(setting))
        tally = Tally(settings=1)
        failure = self.attempt(case, tally)
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
            nothing = Difference("", 0, "error", 0, 0)
            return Failure(case, nothing, 0, f"{type(error).__name__}: {error}")
        if tally is not None:
            tally.add(comparison.tally)
        found = comparison.differences
        return Failure(case, found[0], len(found)) if found else None

    def compare(self, case: Case) -> Comparison:
        """Generate a case and compare it with its reference.

        Raises:
            Exception: whatever the engine raises.
        """
        reference = self.reference(case)
        return compare(reference, self._generate(case, reference))

    def task(self, case: Case, reference: dict[Key, Observed]) -> Task:
        """The case as plain data."""
        setting = case.setting
        needs = setting.drafter in ("oracle", "adversary")
        ahead = known(case.watched, reference, self.subject.engine(setting.quant)) if needs else []
        return Task(setting, self.pool.arranged(case.watched, setting, self.seed), ahead, self.seed)

    def reference_task(self, case: Case) -> Task:
        """What the case is compared with: nothing drafted, one request at a time."""
        return Task(case.setting.reference(), case.watched, [], self.seed)

    def reference(self, case: Case) -> dict[Key, Observed]:
        """The reference of the case's requests; each is generated once."""
        setting = case.setting
        made = self._references.setdefault((setting.quant, setting.sampling), {})
        missing = [r for r in case.watched if (r.id, 0) not in made]
        if missing:
            made |= self.subject.generate(self.reference_task(replace(case, watched=missing)))
        wanted = {(r.id, sample) for r in case.watched for sample in range(r.params.n)}
        return {key: seen for key, seen in made.items() if key in wanted}

    def _generate(self, case: Case, reference: dict[Key, Observed]) -> dict[Key, Observed]:
        task = self.task(case, reference)
        process = case.setting.process
        if process == "fresh":
            found: dict[Key, Observed] = self._companion.call("generate", task)
            return found
        if process == "resumed":
            with scratch() as folder:
                self._stop_run(task, Path(folder))
                return self.subject.finish_run(task, Path(folder))
        return self.subject.generate(task)

    def _stop_run(self, task: Task, folder: Path) -> None:
        """Have a run stopped in the second process: as a kill would, and now and then, and at last, by one."""
        if (self.result.stops + self.result.kills) % _KILL == _KILL - 1 or task.setting == self._last:
            self._companion.call_and_die(task, folder)
            self.result.kills += 1
        else:
            self._companion.call("start_run", task, folder)
            self.result.stops += 1
