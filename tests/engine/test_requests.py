"""What becomes of single requests: those that cannot run, those that reach the context, and chats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from helpers.engine_inputs import PROMPTS, ids
from transformers import LlamaConfig

from detgen import Engine, Request, SamplingParams
from detgen.engine.request import Chunk, chunks_of


def test_bad_requests_are_completions(engines: Callable[..., Engine]) -> None:
    """A request that cannot run says why; those beside it run as if it were not there."""
    engine = engines(drafter="auto", batch_size=3)
    good = Request(0, "good", prompt=PROMPTS[0], params=SamplingParams(max_tokens=5))
    some = [
        Request(1, "empty", prompt=""),
        good,
        Request(2, "long", token_ids=ids(1024)),
        Request(3, "unknown", token_ids=(5, 4096)),
        Request(4, "negative", token_ids=(-1,)),
        Request(5, "none", token_ids=()),
        Request(6, "role", messages=[{"role": "nobody", "content": "x"}]),
    ]
    found = {c.request.id: c for c in engine.generate(some)}
    assert list(found) == [r.id for r in some]
    assert "empty" in (found["empty"].error or "")
    assert "1024 tokens" in (found["long"].error or "")
    assert "4095" in (found["unknown"].error or "")
    assert "4095" in (found["negative"].error or "")
    assert "empty" in (found["none"].error or "")
    assert found["role"].error
    assert found["good"].error is None
    assert found["good"].token_ids == engine.generate([good])[0].token_ids
    for c in found.values():
        if c.error:
            assert (c.token_ids, c.text, c.finish_reason, c.records) == ((), "", None, ())


def test_only_bad_requests(engines: Callable[..., Engine]) -> None:
    """A stream of nothing but errors ends."""
    engine = engines(drafter="auto", batch_size=3)
    assert all(c.error for c in engine.generate([Request(i, i, prompt="") for i in range(50)]))


def test_up_to_the_context(engines: Callable[..., Engine]) -> None:
    """A prompt one token short of the context still gets its token; the completion ends at the context."""
    for engine in (engines(drafter="auto", batch_size=3), engines(drafter="model", batch_size=2, draft_tokens=4)):
        longest, near = engine.generate(
            [Request(i, i, token_ids=ids(n), params=SamplingParams(max_tokens=50)) for i, n in enumerate((1023, 1010))]
        )
        assert (len(longest.token_ids), longest.finish_reason) == (1, "length")
        assert len(near.token_ids) <= 14
        assert near.finish_reason == ("length" if len(near.token_ids) == 14 else "stop")


def test_a_chat(engines: Callable[..., Engine]) -> None:
    """Messages are rendered with the template, the assistant's turn opened."""
    engine = engines(drafter="auto", batch_size=3)
    messages = [{"role": "user", "content": "Write a function."}]
    want = engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    request = Request(0, 0, messages=messages, params=SamplingParams(max_tokens=4))
    assert engine.encode(request) == engine.tokenizer(want, add_special_tokens=False).input_ids
    assert engine.generate([request])[0].error is None


def test_no_chat_template(random_model: Callable[..., Path]) -> None:
    """Where there is no template the message says so, and what to use."""
    folder = random_model(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=128,
        )
    )
    engine = Engine(target=folder, drafter="none", kv_memory=4 << 20)
    done = engine.generate([Request(0, 0, messages=[{"role": "user", "content": "x"}])])[0]
    assert "no chat template" in (done.error or "")
    assert "prompt" in (done.error or "")


def _decode(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


def test_a_state_stays_or_is_emptied() -> None:
    """It is that of the last thought, from the next chunk on; or of the chunk before alone."""
    tokens, thoughts = list(range(11)), {0: "a", 6: "b"}
    kept = chunks_of(tokens, thoughts, 3, _decode, keeps=True)
    assert kept == [
        Chunk(0, 3, "0 1 2", None, "a"),
        Chunk(3, 6, "3 4 5", "a", None),
        Chunk(6, 9, "6 7 8", "a", "b"),
        Chunk(9, 11, "9 10", "b", None),
    ]
    assert [c.state for c in chunks_of(tokens, thoughts, 3, _decode, keeps=False)] == [None, "a", None, "b"]


def test_a_thought_without_text_is_one() -> None:
    """A thought of special tokens alone decodes to nothing."""
    assert [c.state for c in chunks_of([1, 2, 3], {0: "", 1: "x"}, 1, _decode, keeps=True)] == [None, "", "x"]
