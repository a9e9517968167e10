"""Streams that are left early or fail: requests are read as it goes, and the next stream has the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.engine_inputs import PROMPTS, adversary

from detgen import Engine, Request, SamplingParams


def test_a_stream_left_early(observe: Callable[..., Any], engines: Callable[..., Engine]) -> None:
    """After closing a stream midway the engine serves the next one, with the same bits."""
    some = [
        Request(i, i, prompt=p, params=SamplingParams(max_tokens=8, n=2, temperature=0.7))
        for i, p in enumerate(PROMPTS)
    ]
    want = observe(engines(drafter="none", batch_size=1), some)
    engine = engines(drafter="model", batch_size=3, draft_tokens=3)
    for rounds in (1, 2, 5):
        stream: Any = engine.stream(some)
        for _ in range(rounds):
            next(stream)
        stream.close()
        assert engine.stats.live == 0
        found = observe(engine, some[::-1])
        assert len(found) == len(want)
        for key, one in want.items():
            assert found[key].differs(one) is None


def test_a_source_that_fails(observe: Callable[..., Any], engines: Callable[..., Engine]) -> None:
    """An exception while requests are read reaches the caller; the engine goes on afterwards."""
    engine = engines(drafter="auto", batch_size=3)
    some = [Request(i, i, prompt=p, params=SamplingParams(max_tokens=9)) for i, p in enumerate(PROMPTS)]

    def broken() -> Any:
        yield from some
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        observe(engine, broken())
    want = observe(engines(drafter="none", batch_size=1), some)
    for key, one in observe(engine, some).items():
        assert one.differs(want[key]) is None


def test_a_pass_that_fails(
    observe: Callable[..., Any], engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in the middle of a round, drafts and all, leaves an engine that gives the same bits."""
    some = [Request(i, i, prompt=p, params=SamplingParams(max_tokens=14)) for i, p in enumerate(PROMPTS)]
    want = observe(engines(drafter="none", batch_size=1), some)
    both: list[dict[str, Any]] = [{"drafter": adversary, "draft_tokens": 4}, {"drafter": "model", "draft_tokens": 3}]
    for settings in both:
        engine = engines(batch_size=3, **settings)
        for after in (2, 5, 8):
            stream = engine.stream(some)
            forward, left = engine.canonical, [after]
            run = forward.run

            def fails(*args: Any, run: Any = run, left: list[int] = left, **scored: bool) -> Any:
                out = run(*args, **scored)
                left[0] -= 1
                if not left[0]:
                    raise KeyboardInterrupt
                return out

            monkeypatch.setattr(forward, "run", fails)
            with pytest.raises(KeyboardInterrupt):
                list(stream)
            monkeypatch.undo()
            for key, one in observe(engine, some).items():
                assert one.differs(want[key]) is None


def test_reads_as_it_goes(engines: Callable[..., Engine]) -> None:
    """Requests are read about a batch ahead, not the whole file."""
    engine = engines(drafter="none", batch_size=4)
    read = []

    def source() -> Any:
        for i in range(200):
            read.append(i)
            yield Request(i, i, prompt=PROMPTS[i % 7], params=SamplingParams(max_tokens=2))

    stream: Any = engine.stream(source())
    done = sum(len(next(stream)) for _ in range(10))
    stream.close()
    assert done > 0
    assert len(read) <= done + 3 * 4


def test_requests_that_come_while_the_stream_runs(observe: Callable[..., Any], engines: Callable[..., Engine]) -> None:
    """None in place of a request neither ends a stream nor keeps the others from going on; the bits are the same."""
    some = [
        Request(i, i, prompt=p, params=SamplingParams(max_tokens=8, n=2, temperature=0.7))
        for i, p in enumerate(PROMPTS)
    ]
    want = observe(engines(drafter="none", batch_size=1), some)
    for pauses in (1, 7, 40):  # of rounds; after the longest ones nothing runs any more
        engine = engines(drafter="auto", batch_size=3)

        def with_pauses(count: int = pauses) -> Any:
            for request in some:
                yield request
                yield from [None] * count

        found = observe(engine, with_pauses())
        assert len(found) == len(want)
        for key, one in want.items():
            assert found[key].differs(one) is None


def test_a_stream_that_has_nothing_to_run_yet_reads_on(engines: Callable[..., Engine]) -> None:
    engine = engines(drafter="none", batch_size=1)
    coming: list[Request] = []
    stream = engine.stream(coming.pop() if coming else None for _ in iter(int, 1))
    before = engine.stats.target_passes
    assert [next(stream) for _ in range(3)] == [[], [], []]
    assert engine.stats.target_passes == before
    coming.append(Request(0, 0, prompt="", params=SamplingParams(max_tokens=1)))
    assert [c.error for c in next(stream)] == ["the prompt is empty"]
    coming.append(Request(1, 1, prompt="x", params=SamplingParams(max_tokens=1)))
    done = [c for _ in range(3) for c in next(stream)]
    assert [len(c.token_ids) for c in done] == [1]
    stream.close()
