"""When the tokens of each prompt came: all prompts are submitted at once, so waiting for a slot counts."""

from __future__ import annotations

import time

from detgen.bench.interface import Job, Outcome


class Clock:
    """Takes the time of a job.

    Args:
        job: whose prompts it times; the clock runs from here.
    """

    def __init__(self, job: Job) -> None:
        self._wanted = [p.output for p in job.prompts]
        self._count = [0] * len(self._wanted)
        self._first: list[float | None] = [None] * len(self._wanted)
        self._last: list[float | None] = [None] * len(self._wanted)
        self._started = time.perf_counter()

    def tokens(self, index: int, count: int, at: float | None = None) -> None:
        """`count` more tokens of a prompt are there, now or `at` a moment of `time.perf_counter`.

        Those beyond its number, which static batches compute on the way, have no time.
        """
        if self._count[index] >= self._wanted[index]:
            return
        now = (time.perf_counter() if at is None else at) - self._started
        if not self._count[index]:
            self._first[index] = now
        self._count[index] += count
        self._last[index] = now

    def outcome(self, tokens: list[list[int]], passes: int | None, counts: dict[str, int] | None = None) -> Outcome:
        """The job is done: what it gave.

        Raises:
            RuntimeError: if a prompt has not as many tokens as were asked for.
        """
        seconds = time.perf_counter() - self._started
        for index, (made, wanted) in enumerate(zip(tokens, self._wanted, strict=True)):
            if len(made) != wanted:
                raise RuntimeError(f"prompt {index} got {len(made)} tokens instead of {wanted}")
        return Outcome(tokens, seconds, self._first, self._last, passes, counts or {})
