"""Times the tokens of each prompt. All prompts are submitted at once, so waiting for a slot counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from detgen.bench.peer_interface import Job, Outcome
from detgen.bench.processor_time import CpuClock


class Clock:
    """Measures the time of a job; runs from its creation.

    Args:
        job: the job whose prompts are timed.
    """

    def __init__(self, job: Job) -> None:
        self._wanted = [p.output for p in job.prompts]
        self._count = [0] * len(self._wanted)
        self._first: list[float | None] = [None] * len(self._wanted)
        self._last: list[float | None] = [None] * len(self._wanted)
        self._cpu = CpuClock()
        self._started = time.perf_counter()

    def tokens(self, index: int, count: int, at: float | None = None) -> None:
        """Record `count` more tokens of a prompt, now or `at` a time of `time.perf_counter`.

        Tokens beyond the prompt's number, which static batches compute as well, are not timed.
        """
        if self._count[index] >= self._wanted[index]:
            return
        now = (time.perf_counter() if at is None else at) - self._started
        if not self._count[index]:
            self._first[index] = now
        self._count[index] += count
        self._last[index] = now

    def outcome(self, tokens: list[list[int]], passes: int | None, counts: dict[str, int] | None = None) -> Outcome:
        """End the job and return its outcome.

        Raises:
            RuntimeError: if a prompt does not have as many tokens as were asked for.
        """
        seconds, cpu_seconds = time.perf_counter() - self._started, self._cpu.seconds()
        for index, (made, wanted) in enumerate(zip(tokens, self._wanted, strict=True)):
            if len(made) != wanted:
                raise RuntimeError(f"prompt {index} got {len(made)} tokens instead of {wanted}")
        return Outcome(tokens, seconds, self._first, self._last, passes, counts or {}, cpu_seconds=cpu_seconds)


def run_stepwise(
    job: Job, submit: Callable[[int], None], step: Callable[[Collection[int]], Mapping[int, Sequence[int]]]
) -> Outcome:
    """Run a job pass by pass, with at most a batch of prompts at a time; a free place is filled at once.

    Args:
        job: what to run.
        submit: starts the prompt of an index.
        step: runs a pass; given the running prompts, it returns the new tokens of those that got some.
    """
    tokens: list[list[int]] = [[] for _ in job.prompts]
    waiting = list(range(len(job.prompts)))[::-1]
    live: set[int] = set()
    passes = 0
    clock = Clock(job)
    while waiting or live:
        while waiting and len(live) < job.batch_size:
            live.add(waiting[-1])
            submit(waiting.pop())
        for index, made in step(live).items():
            tokens[index] += made
            clock.tokens(index, len(made))
            if len(tokens[index]) >= job.prompts[index].output:
                live.discard(index)
        passes += 1
    return clock.outcome([made[: p.output] for made, p in zip(tokens, job.prompts, strict=True)], passes)
