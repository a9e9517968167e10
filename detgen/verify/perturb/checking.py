"""The check: generate a reference, repeat it under each setting, compare bit for bit."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from detgen.engine.config import EngineConfig
from detgen.engine.request import Request
from detgen.errors import CheckError
from detgen.params import SamplingParams
from detgen.progress import Observer, Progress
from detgen.runner.block_manager import PAGE
from detgen.verify.perturb.axes import Axes, Setting, name_value
from detgen.verify.perturb.generation_digests import Difference, Key, Observed, Tally, compare
from detgen.verify.perturb.pool import Pool
from detgen.verify.perturb.prompts import left_out, repeated, shortened
from detgen.verify.perturb.result import Case, CheckResult, Failure
from detgen.verify.perturb.resuming import kill_and_resume
from detgen.verify.perturb.running import FreshProcess, Generated, Subject, Task, breaking, known, short_of_memory, size
from detgen.verify.perturb.selecting import ordered
from detgen.verify.perturb.timing import OutOfTime, Timing, measured, quickest
from detgen.verify.replay.reading import refusal

_ENOUGH = 3  # settings that differ, after which trying more gains nothing
_MORE = 5.0  # seconds for finding more of them after the first
_TOO_LONG = 50  # random settings in a row that do not fit into the time, after which no other will


class Check:
    """Generates and compares. A context manager that ends its other process.

    Args:
        config: configuration of the engine; its drafter must be "auto", so that any draft model is loaded.
        pool: the prompts.
        axes: the axes that may change.
        seed: seed of orders and adversaries.
        observer: receives messages and progress.
        subject: the engine under test, configured by `config`.

    Attributes:
        started: start of the check, in the time of `time.monotonic`.
        result: the result so far.
        fresh: the other process.
        references: samples that settings are compared with, by quantization and sampling.
    """

    def __init__(
        self, config: EngineConfig, pool: Pool, axes: Axes, seed: int, observer: Observer, subject: Subject
    ) -> None:
        self.subject, self.config = subject, config
        self.pool, self.axes, self.seed = pool, axes, seed
        self.observer = observer
        self.started = time.monotonic()
        self.result = CheckResult()
        self.fresh = FreshProcess(config)
        self.references: dict[tuple[str, str], dict[Key, Observed]] = {}
        self._roomy = 0  # settings that did not need to preempt
        self._until: float | None = None  # when to give up the current generation
        self._timing: Timing | None = None  # if the time is limited
        self._lengths: dict[str | int, int] = {}  # tokens of prompts

    def __enter__(self) -> Check:
        return self

    def __exit__(self, *error: object) -> None:
        self.fresh.close()

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        r, engine = self.result, self.subject.engine()

        def counts(tally: Tally | None) -> dict[str, int]:
            found = {} if tally is None else asdict(tally)  # only models that think have chunks
            return found if engine.thinks else {n: c for n, c in found.items() if "chunks" not in n}

        by_axis = {name: r.of_axis(name, values) for name, values in self.axes.items()}
        return {
            "equal": not r.failures,
            "seed": self.seed,
            "pairwise_settings": r.pairs,
            "selected_settings": len(r.selected),
            "selected_settings_tried": r.done,
            "prompts": len(self.pool.requests),
            "prompts_given": self.pool.given,
            "left_out": self.left_out(),
            "seconds": round(r.seconds, 3),
            "kills": r.kills,
            "preemptions": r.preemptions,
            "total": counts(r.total),
            "axes": {name: {"tried": tried, **counts(tally)} for name, (tried, tally) in by_axis.items()},
            "notes": r.notes,
            "profile": engine.profile(),
        }

    def left_out(self) -> dict[str, list[str]]:
        """Return the planned values of each axis, other than the reference's, that no setting has tried."""
        found = {}
        for name, values in self.axes.items():
            planned = {getattr(s, name) for s in self.result.selected}
            missing = planned - {getattr(s, name) for s, _ in self.result.tried}
            found[name] = [name_value(name, v) for v in values[1:] if v in missing]
        return {name: values for name, values in found.items() if values}

    def learn(self, until: float | None = None, start: float = 0.0) -> None:
        """Generate the pool's reference, from which further requests are made; drop prompts that cannot run.

        Args:
            until: when the settings must be done, in the time of `time.monotonic`; the pool is shortened to leave them
                time. None sets no limit.
            start: seconds that a process took to load the models.

        Raises:
            EngineError: if the engine cannot be built.
            CheckError: if no prompt can run; the message says why the first one cannot.
            OutOfTime: if there is no time for it.
        """
        engine, pool = self.subject.engine(), self.pool
        self._until = until
        try:
            given = len(pool.requests) + len(pool.errors)
            refusals = {r.id: refusal(engine, r) for r in pool.requests}
            pool.errors += [f"{pool.name}:{r.line}: {refusals[r.id]}" for r in pool.requests if refusals[r.id]]
            self.result.notes += left_out(pool.errors, given)
            if not (runnable := [r for r in pool.requests if not refusals[r.id]]):
                raise CheckError(refusals[pool.requests[0].id] or "no prompts")
            pool.requests = repeated(self._fitting(runnable, until, start))
            reference = self.reference(Case(Setting(), pool.requests))
            if not reference:
                raise CheckError(engine.generate(pool.requests[:1])[0].error or "no prompts")
            while not self.reference(Case(Setting(), [pool.longest()])) and len(pool.long) > 1:
                pool.long = pool.long[: len(pool.long) // 2]  # the model's context is shorter
        finally:
            self._until = None
        prompts = {r.id: engine.encode(r) for r in pool.requests if (r.id, 0) in reference}
        pool.learn(reference, prompts, lambda request: size(engine, request)[1], PAGE)
        for seen in self.reference(Case(Setting(), pool.crossing)).values():
            pool.cross(seen.tokens)

    def _fitting(self, requests: list[Request], until: float | None, start: float) -> list[Request]:
        """Return as many requests, with as many new tokens, as leave time for the settings; note it if that is less."""
        if until is None:
            return requests
        engine = self.subject.engine()
        self._timing = measured(
            lambda r: self.subject.generate(self._alone([r], Setting()), until), engine.encode(requests[0]), start
        )
        sizes = [(self._length(r), r.params.max_tokens, r.params.n) for r in requests]
        count, most = self._timing.fitting(sizes, until - time.monotonic())
        found = shortened(requests, count, most)
        if found != requests:
            fewer = f" with at most {most} new tokens each" if found != requests[:count] else ""
            self.result.notes.append(f"shortened to leave time: {count} of {len(requests)} prompts{fewer}")
        return found

    def _length(self, request: Request) -> int:
        """Return the number of a prompt's tokens, at least 1."""
        if request.id not in self._lengths:
            self._lengths[request.id] = max(size(self.subject.engine(), request)[0], 1)
        return self._lengths[request.id]

    def expected(self, setting: Setting) -> tuple[float, float]:
        """Return the seconds for a setting's requests one by one and for starting processes; 0 if time is unlimited."""
        if self._timing is None:
            return 0.0, 0.0
        made = self.references.get((setting.quant, setting.sampling), {})
        sizes = []
        for r in self.pool.watched(setting):
            seen = made.get((r.id, 0))
            tokens = r.params.n * (r.params.max_tokens if seen is None else len(seen.tokens))
            sizes.append((self._length(r), tokens, seen is not None))
        return self._timing.alone(setting, sizes), self._timing.starting(
            setting, loaded=self.fresh.loaded(setting.quant)
        )

    def run(self, settings: list[Setting], more: Iterable[Setting] = (), deadline: float | None = None) -> CheckResult:
        """Try settings until they end, the deadline (in the time of `time.monotonic`) has come, or enough differ.

        Settings expected to exceed the time are skipped; one that exceeds it nevertheless is given up and not counted.

        Args:
            settings: in an order that lets another process load the models of later ones; if time is limited, settings
                that add most new values per second come first.
            more: settings to try after these.
            deadline: None sets no limit.
        """
        result, timing = self.result, self._timing
        started, self._until = time.monotonic(), deadline
        self._roomy = too_long = 0
        total = None if more else len(settings)
        result.selected += settings
        if timing is not None:
            settings = ordered(quickest(settings, lambda s: sum(self.expected(s))), self.axes)
        fresh = [s for s in reversed(settings) if s.process == "fresh"]  # the next one last
        for i, setting in enumerate(itertools.chain(settings, more)):
            left = math.inf if deadline is None else deadline - time.monotonic()
            if len(result.failures) >= _ENOUGH or left < 0 or (i >= len(settings) and too_long >= _TOO_LONG):
                break
            if fresh and (timing is None or 2 * timing.start < left):
                self.fresh.load(fresh[-1].quant)
            if fresh and fresh[-1] is setting:
                fresh.pop()
            alone, starting = self.expected(setting)
            if timing is not None and alone * timing.pace + starting > left:
                too_long += 1
                continue
            too_long, began = 0, time.monotonic()
            try:
                failure = self._try(setting)
            except OutOfTime:
                break
            if timing is not None and not starting:
                timing.expected += alone
                timing.spent += time.monotonic() - began
            result.done += i < len(settings)
            if failure is not None:
                result.failures.append(failure)
                deadline = min(deadline or math.inf, time.monotonic() + _MORE)
            seconds, positions = time.monotonic() - self.started, f"{result.total.positions:,} positions"
            self.observer.progress(Progress(len(result.tried), total, "settings", seconds, figures=(positions,)))
        self._until = None
        result.seconds += time.monotonic() - started
        if self._roomy:
            result.notes.append(f"{self._roomy} of the settings with preemption did not need to preempt any request")
        return result

    def _try(self, setting: Setting) -> Failure | None:
        """Try a setting with its prompts and count it."""
        tally, preemptions = Tally(settings=1), self.result.preemptions
        failure = self.attempt(Case(setting, self.pool.watched(setting)), tally)
        if setting.preemption and failure is None and self.result.preemptions == preemptions:
            self._roomy += 1
        self.result.total.add(tally)
        self.result.tried.append((setting, tally))
        return failure

    def attempt(self, case: Case, tally: Tally | None = None) -> Failure | None:
        """Compare a case; an error is a difference, too. Return None if nothing differs.

        Args:
            case: what to generate.
            tally: receives the counts of the comparison.

        Raises:
            OutOfTime: if the time for the settings is over.
        """
        try:
            reference = self.reference(case)
            difference = compare(reference, self._generate(self.task(case, reference)), tally or Tally())
        except OutOfTime:
            raise
        except Exception as error:
            return Failure(case, Difference("", 0, "error", 0, 0), f"{type(error).__name__}: {error}")
        return None if difference is None else Failure(case, difference)

    def task(self, case: Case, reference: dict[Key, Observed]) -> Task:
        """Return the case as plain data."""
        setting, seed = case.setting, self.seed
        looks_ahead = setting.drafter in ("oracle", "adversary")
        prompts: dict[str | int, list[int]] = {}  # of the prompts that can run, if needed below
        if looks_ahead or setting.neighbours == "broken" or setting.prefix_cache == "shared":
            encode, can_run = self.subject.engine(setting.quant).encode, {id for id, _ in reference}
            prompts = {r.id: encode(r) for r in case.watched if r.id in can_run}
        ahead = known(case.watched, prompts, reference) if looks_ahead else []
        broken: tuple[int, ...] = ()
        if setting.neighbours == "broken":
            broken = breaking(prompts, reference, self.subject.engine(setting.quant).vocabulary)
        queue = self.pool.arranged(case.watched, setting, seed, broken)
        before: list[Request] = []
        if setting.prefix_cache == "warm":
            before = [replace(r, params=SamplingParams(max_tokens=1)) for r in queue]
        elif setting.prefix_cache == "shared":
            before = self.pool.beginnings(case.watched, prompts)
        thinks = self.subject.engine().thinks
        return Task(setting, queue, ahead, seed, broken[0] if broken else None, before, thinks)

    def reference_task(self, case: Case) -> Task:
        """Return the reference task of a case: nothing drafted, one request at a time."""
        return self._alone(case.watched, case.setting.reference())

    def _alone(self, requests: list[Request], setting: Setting) -> Task:
        return Task(setting, requests, [], self.seed, thinks=self.subject.engine().thinks)

    def reference(self, case: Case) -> dict[Key, Observed]:
        """Return the reference of the case's requests; each is generated once."""
        setting = case.setting
        made = self.references.setdefault((setting.quant, setting.sampling), {})
        missing = [r for r in case.watched if (r.id, 0) not in made]
        if missing:
            made |= self.subject.generate(self.reference_task(replace(case, watched=missing)), self._until).samples
        wanted = {(r.id, sample) for r in case.watched for sample in range(r.params.n)}
        return {key: seen for key, seen in made.items() if key in wanted}

    def _generate(self, task: Task) -> dict[Key, Observed]:
        generated = self._generated(task)
        self.result.kills += generated.kills
        self.result.preemptions += generated.preemptions
        return generated.samples

    def _generated(self, task: Task) -> Generated:
        process = task.setting.process
        if process == "resumed":
            if short_of_memory():
                self.fresh.close()
            return kill_and_resume(task, self.config, self._until)
        return (self.fresh if process == "fresh" else self.subject).generate(task, self._until)
