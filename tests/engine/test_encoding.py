"""Prompts that are too long by their length alone: refused at once, and never wrongly."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from detgen import Engine, Request, SamplingParams
from detgen.engine.encoding import LeastTokens
from detgen.errors import DEMO

STATE: dict[str, Any] = json.loads((DEMO / "target" / "tokenizer.json").read_text(encoding="utf-8"))


class Backed:
    """What the bound needs of a tokenizer."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.backend_tokenizer = Tokenizer.from_str(json.dumps(state))


def byte_level(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(STATE), **changes}


def of_characters(**changes: Any) -> dict[str, Any]:
    """A vocabulary of characters that falls back to bytes, as Llama 2 has it."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for token in ("▁", "a", "b", "e", "ab", "ba", "abab", "▁▁", "▁▁▁▁", "▁a"):
        vocabulary[token] = len(vocabulary)
    merges = [["a", "b"], ["b", "a"], ["ab", "ab"], ["▁", "▁"], ["▁▁", "▁▁"], ["▁", "a"]]
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges, "byte_fallback": True, "fuse_unk": True}
    normalizer = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    return {**byte_level(), "model": {**model, **changes}, "normalizer": normalizer, "pre_tokenizer": None}


def stripping() -> dict[str, Any]:
    """An added token swallows white space on both sides."""
    state = byte_level()
    state["added_tokens"][0] |= {"lstrip": True, "rstrip": True}
    return state


SOUND = {
    "bytes": Backed(byte_level()),
    "bytes, composed": Backed(byte_level(normalizer={"type": "NFC"})),
    "bytes, stripping": Backed(stripping()),
    "characters": Backed(of_characters()),
}
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            ["ab", "abab", "    ", "\n", "<|endoftext|>", "e\u0301", "\u1112\u1161\u11ab", "é", "日本", "\U0001f600"]
        ),
        st.text(max_size=5),
        st.sampled_from(["def add(self, other):\n", "return ", "=" * 20, " " * 30]).map(lambda s: s * 3),
    ),
    max_size=20,
).map("".join)


@pytest.mark.parametrize("kind", SOUND)
@given(text=TEXTS)
def test_never_more_than_there_are(kind: str, text: str) -> None:
    """The bound holds for every text, special tokens, composed characters and unknown ones among them."""
    tokenizer = SOUND[kind]
    least = LeastTokens(tokenizer).of(text)
    assert least <= len(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
    assert bool(least) == bool(text.strip()) or kind == "bytes, stripping" or text.isspace()


def _model(**changes: Any) -> dict[str, Any]:
    return byte_level(model={**copy.deepcopy(STATE["model"]), **changes})


def _without(state: dict[str, Any], token: str) -> dict[str, Any]:
    state = copy.deepcopy(state)
    del state["model"]["vocab"][token]
    state["model"]["merges"] = [m for m in state["model"]["merges"] if token not in "".join(m)]
    return state


SPLIT = {"type": "Split", "pattern": {"String": "x"}, "behavior": "Removed", "invert": False}


@pytest.mark.parametrize(
    "state",
    [
        byte_level(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
        byte_level(normalizer={"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}),
        byte_level(normalizer={"type": "Replace", "pattern": {"String": "ab"}, "content": ""}),
        byte_level(pre_tokenizer={"type": "Sequence", "pretokenizers": [SPLIT, STATE["pre_tokenizer"]]}),
        byte_level(pre_tokenizer={"type": "WhitespaceSplit"}),
        byte_level(model={"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}),
        _model(continuing_subword_prefix="##"),
        of_characters(byte_fallback=False),
        _without(of_characters(), "<0xFF>"),
    ],
)
def test_no_bound_where_none_is_sound(state: dict[str, Any]) -> None:
    """Text may get lost, or unknown characters may become one token."""
    backend = SimpleNamespace(to_str=lambda: json.dumps(state))
    assert LeastTokens(SimpleNamespace(backend_tokenizer=backend)).of("ab" * 1000) == 0


def test_no_backend() -> None:
    assert LeastTokens(object()).of("x" * 1000) == 0


@pytest.mark.parametrize("text", ["def foo(a, b): return a+b\n" * 400_000, " " * 10_000_000, "é" * 5_000_000])
def test_refused_at_once(engines: Callable[..., Engine], text: str) -> None:
    """Ten megabytes; the neighbours do not wait, and the message says what is known."""
    engine = engines(drafter="none", batch_size=16)
    beside = Request(1, 1, prompt="def f(x):", params=SamplingParams(max_tokens=3))
    started = time.monotonic()
    huge, small = engine.generate([Request(0, 0, prompt=text), beside])
    assert time.monotonic() - started < 3  # a fiftieth of a second where nobody else works
    least = LeastTokens(engine.tokenizer).of(text)
    assert huge.error == (
        f"the prompt has {len(text)} characters, which are at least {least} tokens, the model's context is 1024"
    )
    assert small.token_ids == engine.generate([beside])[0].token_ids
    if text.isspace():
        return  # the template drops it
    chat = Request(0, 0, messages=[{"role": "user", "content": text}])
    assert "characters, which are at least" in (engine.generate(chat)[0].error or "")


def test_a_cache_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that fits the model and not the cache is refused with what to do; one that may fit is counted."""
    monkeypatch.setattr("detgen.engine.encoding._LARGE", 100)
    engine = Engine(drafter="none", kv_memory=3 << 20)
    capacity = engine._scheduler.capacity
    text = "abcdefgh" * 400
    assert engine.generate(text, max_tokens=900)[0].error == (
        f"the prompt has 3200 characters, which are at least {LeastTokens(engine.tokenizer).of(text)} tokens, "
        f"the KV cache holds sequences of {capacity}; give it more with --kv-memory"
    )
    assert "tokens and may grow to" in (engine.generate("abcdefgh" * 80, max_tokens=400)[0].error or "")
