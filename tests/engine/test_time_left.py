"""The estimate of the time left, on a clock that is simulated: rounds that cost what rounds of a model cost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from detgen.engine.request import Completion, Request
from detgen.engine.score_requests import Score, ScoreRequest
from detgen.engine.stats import EngineStats
from detgen.engine.time_left import TimeLeft
from detgen.params import SamplingParams

# Seconds of a round, of a token in it, and of a token of a prompt.
_ROUND, _TOKEN, _PROMPT_TOKEN = 0.02, 0.004, 0.001
_CHUNK = 512  # tokens of prompts that a round reads


@dataclass
class Sample:
    request: Request
    unread: int
    length: int
    made: int = 0


def reports(lengths: list[int], prompts: list[int], most: int, batch: int) -> Iterator[tuple[float, float | None]]:
    """Seconds and estimate after each round of a run whose samples have these lengths."""
    estimate, stats, clock = TimeLeft(), EngineStats(), 0.0
    requests = [Request(i, params=SamplingParams(max_tokens=most)) for i in range(len(lengths))]
    waiting = [Sample(*each) for each in zip(requests, prompts, lengths, strict=True)]
    queue: list[Sample] = []
    live: list[Sample] = []
    while waiting or queue or live:
        while waiting and len(queue) < batch:
            queue.append(waiting.pop(0))
            estimate.ask(queue[-1].request, clock, stats)
        while queue and len(live) < batch:
            live.append(queue.pop(0))
        room, read, tokens = _CHUNK, 0, 0
        for sample in live:
            part = min(sample.unread, room)
            sample.unread -= part
            room, read = room - part, read + part
            if not sample.unread:
                sample.made, tokens = sample.made + 1, tokens + 1
        clock += _ROUND + _TOKEN * tokens + _PROMPT_TOKEN * read
        stats.tokens, stats.prompt_tokens = stats.tokens + tokens, stats.prompt_tokens + read
        for sample in [each for each in live if each.made == each.length]:
            live.remove(sample)
            estimate.finish(Completion(sample.request, token_ids=(0,) * sample.length, finish_reason="stop"))
        stats.live = len(live)
        estimate.spend(clock, stats)
        yield clock, estimate.left(len(waiting), len(live))


def worst(seen: list[tuple[float, float | None]]) -> float:
    """How far the estimated whole is from the real one from a third of the run on, as a share of it."""
    whole = seen[-1][0]
    late = [(seconds, left) for seconds, left in seen if seconds >= whole / 3 and seconds < whole]
    assert all(left is not None for _, left in late)
    return max(abs(seconds + (left or 0.0) - whole) / whole for seconds, left in late)


def drawn(kind: str, number: int, most: int) -> list[int]:
    """Lengths of samples, in one of `KINDS`."""
    order = random.Random(7)
    if kind == "all of the limit":
        return [most] * number
    if kind == "even":
        return [order.randint(1, most) for _ in range(number)]
    if kind == "a third of the limit":
        return [most if order.random() < 0.33 else order.randint(5, most) for _ in range(number)]
    return [min(most, 1 + int(order.lognormvariate(3.5, 0.8))) for _ in range(number)]  # "chats"


KINDS = ["all of the limit", "even", "a third of the limit", "chats"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("number", "batch"), [(200, 16), (300, 64)])
@pytest.mark.parametrize("prompt", [10, 400])
def test_the_estimate_is_right_from_a_third_on(kind: str, number: int, batch: int, prompt: int) -> None:
    order = random.Random(3)
    prompts = [order.randint(prompt // 2, prompt * 3 // 2) for _ in range(number)]
    assert worst(list(reports(drawn(kind, number, 256), prompts, 256, batch))) <= 0.2


@pytest.mark.parametrize(("number", "batch"), [(1, 1), (20, 1), (64, 64), (70, 16)])
def test_few_samples_of_one_length_suffice(number: int, batch: int) -> None:
    """Also where all of them run at once, and nothing but their limit tells how long they will be."""
    assert worst(list(reports([256] * number, [10] * number, 256, batch))) <= 0.05


def test_what_was_refused_takes_no_time() -> None:
    estimate, stats = TimeLeft(), EngineStats()
    requests = [Request(i, params=SamplingParams(max_tokens=10, n=2)) for i in range(4)]
    for request in requests:
        estimate.ask(request, 0.0, stats)
    for request in requests[:3]:
        estimate.finish(Completion(request, error="too long"))
    stats.live, stats.tokens = 2, 10
    estimate.spend(5.0, stats)
    assert estimate.left(0, 2) == pytest.approx(5.0)
    assert estimate.left(None, 2) is None


def test_scores_take_as_long_as_those_before() -> None:
    estimate, stats = TimeLeft(), EngineStats()
    for index in range(4):
        estimate.ask(ScoreRequest(index, completions=("a",)), 0.0, stats)
    stats.live, stats.prompt_tokens = 1, 100
    estimate.spend(2.0, stats)
    estimate.finish(Score(ScoreRequest(0, completions=("a",)), token_ids=(1,)))
    assert estimate.left(4, 0) == pytest.approx(7 * 2.0)


def test_nothing_is_said_before_there_is_anything_to_say() -> None:
    estimate = TimeLeft()
    assert estimate.left(10, 0) is None
    estimate.ask(Request(0), 1.0, EngineStats())
    assert estimate.left(10, 0) is None
