"""One engine in several threads: calls take turns, and a call inside another one is refused at once."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers.engine_inputs import PROMPTS, adversary

from detgen import Engine, EngineError, Request, SamplingParams
from detgen.engine import streaming_rounds
from detgen.engine.streaming_rounds import Turns

NESTED = "generating already"


def requests(*places: int) -> list[Request]:
    return [Request(i, i, prompt=PROMPTS[i], params=SamplingParams(max_tokens=6 + i)) for i in places]


@pytest.fixture
def engine(engines: Callable[..., Engine]) -> Engine:
    return engines(drafter="auto", batch_size=3)


@pytest.fixture
def want(engine: Engine) -> list[tuple[int, ...]]:
    return [c.token_ids for c in engine.generate(requests(*range(7)))]


def test_threads_take_turns(engine: Engine, want: list[tuple[int, ...]]) -> None:
    """Eight threads, on the engine and on others with its models, by generate and by stream: each its own texts."""
    others = [engine, engine.with_settings(drafter="none", batch_size=1), engine.with_settings(drafter=adversary)]

    def call(i: int) -> bool:
        one, places = others[i % 3], [(i + j) % 7 for j in range(1 + i % 3)]
        if i % 4:
            found = {c.request.index: c.token_ids for c in one.generate(requests(*places))}
        else:
            found = {c.request.index: c.token_ids for batch in one.stream(requests(*places)) for c in batch}
        return found == {place: want[place] for place in places}

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(40)))


def test_a_nested_call_is_refused(engine: Engine, want: list[tuple[int, ...]]) -> None:
    """At once, in the same thread, also on another engine with the same models; the stream goes on unharmed."""
    other = engine.with_settings(drafter="none")
    found: dict[int, tuple[int, ...]] = {}
    for batch in engine.stream(requests(*range(7))):
        for one in (engine, other):
            with pytest.raises(EngineError, match=NESTED):
                one.generate(PROMPTS[0])
            with pytest.raises(EngineError, match=NESTED):
                next(one.stream(requests(0)))
        found |= {c.request.index: c.token_ids for c in batch}
    assert [found[i] for i in range(7)] == want
    assert engine.generate(requests(0))[0].token_ids == want[0]


def test_a_call_while_requests_are_read(engine: Engine, want: list[tuple[int, ...]]) -> None:
    """A source of requests that uses the engine itself."""

    def source() -> Any:
        yield from requests(0)
        with pytest.raises(EngineError, match=NESTED):
            engine.generate(PROMPTS[1])
        yield from requests(1)

    found = [c.token_ids for batch in engine.stream(source()) for c in batch]
    assert sorted(found) == sorted(want[:2])


@pytest.mark.parametrize("way", ["close", "drop", "never started"])
def test_a_stream_that_is_not_read(engine: Engine, want: list[tuple[int, ...]], way: str) -> None:
    """Once it is closed or collected, or if it never began, others have their turn."""
    stream: Any = engine.stream(requests(*range(7)))
    if way != "never started":
        next(stream)
    if way == "close":
        stream.close()
    elif way == "drop":
        del stream
        gc.collect()
    assert engine.generate(requests(2))[0].token_ids == want[2]


def test_another_threads_open_stream(
    engine: Engine, want: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call waits while the stream is read; if nobody reads it, it gives up instead of waiting for ever."""
    monkeypatch.setattr(streaming_rounds, "_PATIENCE", 1.5)
    monkeypatch.setattr(streaming_rounds, "_LOOK", 0.05)
    stream: Any = engine.stream(requests(*range(7)))
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.generate, requests(3))
        for _ in range(4):
            time.sleep(0.1)
            next(stream)
            assert not waiting.done()
        stream.close()
        assert waiting.result(20)[0].token_ids == want[3]
        stream = engine.stream(requests(*range(7)))
        next(stream)
        with pytest.raises(EngineError, match="not been read"):
            pool.submit(engine.generate, requests(3)).result(20)
        found = [c for batch in stream for c in batch]
        assert len(found) <= 7
        assert {c.token_ids for c in found} <= set(want)


def test_a_stream_that_changes_threads(engine: Engine) -> None:
    """The thread that read it last is the one that must not call."""
    stream: Any = engine.stream(requests(*range(7)))
    next(stream)

    def elsewhere() -> None:
        next(stream)
        with pytest.raises(EngineError, match=NESTED):
            engine.generate(PROMPTS[0])
        stream.close()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(elsewhere).result(20)
    assert engine.generate(PROMPTS[0], max_tokens=2)


def test_first_come_first_served() -> None:
    """A thread that calls again and again does not keep the others out."""
    all_turns, order = Turns(), []
    first = all_turns.take()

    def call(name: str) -> None:
        for _ in range(3):
            turn = all_turns.take()
            order.append(name)
            all_turns.give_back(turn)

    threads = []
    for name in "abc":
        threads.append(threading.Thread(target=call, args=(name,)))
        threads[-1].start()
        time.sleep(0.05)
    all_turns.give_back(first)
    for thread in threads:
        thread.join()
    assert order == list("abcabcabc")
