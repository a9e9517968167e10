"""What `Engine.generate` takes for a prompt, and for parameters; and what it shows in a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engine_inputs import PROMPTS

from detgen import Completion, Engine, EngineConfig, Request, RequestError, SamplingParams, ScoreRequest
from detgen.engine.asking import requests_of

CHAT = [{"role": "user", "content": "Write a function."}]


def content(request: Request) -> Any:
    given = [x for x in (request.prompt, request.messages, request.token_ids) if x is not None]
    assert len(given) == 1
    return given[0]


@pytest.mark.parametrize(
    ("prompts", "want"),
    [
        ("a text", ["a text"]),
        (["one", "two"], ["one", "two"]),
        ((p for p in ("one", "two")), ["one", "two"]),
        ("", [""]),
        ([], []),
        ([5, 6, 7], [(5, 6, 7)]),
        ((5, 6), [(5, 6)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
        ([[]], [()]),
        (np.array([5, 6]), [(5, 6)]),
        (torch.tensor([[5, 6], [7, 8]]), [(5, 6), (7, 8)]),
        ([torch.tensor([5, 6]), "x"], [(5, 6), "x"]),
        (CHAT, [CHAT]),
        ([CHAT, CHAT], [CHAT, CHAT]),
        (["x", [5], CHAT, Request(3, "r", prompt="y")], ["x", (5,), CHAT, "y"]),
        (Request(3, "r", prompt="y"), ["y"]),
    ],
)
def test_forms(prompts: Any, want: list[Any]) -> None:
    """One prompt or several, of every kind."""
    assert [content(r) for r in requests_of(prompts, None, {})] == want


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        (5, "int"),
        (None, "NoneType"),
        (b"text", "bytes"),
        ({"prompt": "x"}, "dictionary"),
        (["x", 5], "prompt 1"),
        ([5, "x"], "prompt 0"),
        ([[5, "x"]], "prompt 0"),
        ([True, False], "prompt 0"),
        ([None], "prompt 0"),
    ],
)
def test_what_is_no_prompt(prompts: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        requests_of(prompts, None, {})


def test_parameters() -> None:
    """As an object, by name, or both; requests have their own, and nothing is silently left out."""
    params = SamplingParams(max_tokens=3, seed=4)
    assert requests_of("x", params, {})[0].params == params
    assert requests_of("x", params, {"seed": 5})[0].params == SamplingParams(max_tokens=3, seed=5)
    assert requests_of("x", None, {"stop": "end"})[0].params.stop == ("end",)
    assert requests_of("x", None, {"stop": ["a", "b"]})[0].params.stop == ("a", "b")
    own = Request(0, 0, prompt="x", params=params)
    assert requests_of([own], None, {})[0].params is params
    with pytest.raises(RequestError, match="seed"):
        requests_of(["x", own], None, {"seed": 5})
    with pytest.raises(RequestError, match="parameters of its own"):
        requests_of(own, params, {})
    with pytest.raises(TypeError, match="temprature"):
        requests_of("x", None, {"temprature": 1.0})


def test_generate(engines: Callable[..., Engine]) -> None:
    """One text gives one completion; the same request twice gives two, in their places."""
    engine = engines(drafter="auto", batch_size=3)
    (one,) = engine.generate(PROMPTS[0], max_tokens=4)
    ids = engine.tokenizer(PROMPTS[0]).input_ids
    assert engine.generate(ids, params=SamplingParams(max_tokens=4))[0].token_ids == one.token_ids
    assert engine.generate(CHAT, max_tokens=2)[0].error is None
    a, b = (Request(0, i, prompt=PROMPTS[i], params=SamplingParams(max_tokens=4 - i)) for i in (0, 1))
    done = engine.generate([a, b, a, b, b])
    assert [c.request.id for c in done] == [0, 1, 0, 1, 1]
    with pytest.raises(RequestError, match="stream takes Requests"):
        next(engine.stream(["x"]))  # type: ignore[list-item]


def test_requests_without_an_index_are_numbered(engines: Callable[..., Engine]) -> None:
    """By their places among those of the call; an index or an id that is given stays."""
    engine = engines(drafter="none", batch_size=3)
    params = SamplingParams(max_tokens=2)
    bare = Request(prompt="x", params=params)
    given = [bare, Request(7, prompt="y", params=params), Request(id="z", prompt="z", params=params), bare]
    want = [(0, 0), (7, 7), (2, "z"), (3, 3)]
    assert [(c.request.index, c.request.id) for c in engine.generate(given)] == want
    streamed = [c for batch in engine.stream([given[0], None, *given[1:]]) for c in batch]
    assert sorted((c.request.index, str(c.request.id)) for c in streamed) == sorted((i, str(n)) for i, n in want)
    scored = engine.score([ScoreRequest(prompt="a b"), ScoreRequest(id="s", prompt="c d")])
    assert [(s.request.index, s.request.id) for s in scored] == [(0, 0), (1, "s")]
    (refused,) = engine.generate([Request()])
    assert (refused.request.id, refused.error is None) == (0, False)


def test_the_target_comes_first(demo_models: Any) -> None:
    """A folder, or all settings."""
    engine = Engine(demo_models.target, drafter="none", kv_memory=16 << 20)
    assert engine.config.target == demo_models.target
    config = EngineConfig(drafter="none", kv_memory=16 << 20, batch_size=3)
    assert Engine(config, batch_size=2).config == EngineConfig(drafter="none", kv_memory=16 << 20, batch_size=2)
    assert Engine(config=config).config == config
    shown = repr(engine)
    assert shown.startswith("Engine(target=")
    assert shown.endswith("draft=None, device='cpu', drafter='none', batch_size=16)")


def test_in_a_line(engines: Callable[..., Engine]) -> None:
    """What an interpreter shows fits a line, however long the texts are."""
    engine = engines(drafter="auto", batch_size=3)
    prompt = "def add(a, b):\n" * 20
    (done,) = engine.generate(prompt, max_tokens=60)
    assert repr(done).startswith("Completion(id=0, sample=0, text='")
    assert repr(done).endswith(f"tokens={len(done.token_ids)}, finish_reason={done.finish_reason!r})")
    assert repr(Completion(done.request, error="why")) == "Completion(id=0, sample=0, error='why')"
    assert repr(EngineConfig(batch_size=3)) == "EngineConfig(batch_size=3)"
    long = Request(1, "x" * 300, messages=CHAT * 50, metadata={str(i): i for i in range(99)})
    for each in (done, done.request, long, engine.config, engine, Request(2, 2, token_ids=tuple(range(1000)))):
        assert len(repr(each)) < 240
        assert "\n" not in repr(each)
