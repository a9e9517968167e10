"""Scores: those of the model's ordinary forward pass to a tolerance, and the same bits whatever else is read."""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engine_inputs import PROMPTS, code, ids
from helpers.examples import examples, usual
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from detgen import Engine, EngineError, Request, RequestError, SamplingParams, Score, ScoreRequest

TOLERANCE = 1e-4


def bits(score: Score) -> tuple[Any, ...]:
    """All that a score says, numbers by their bits."""
    packed = struct.pack(f"<{len(score.logprobs) + 1}d", score.logprob, *score.logprobs)
    return score.token_ids, packed, score.greedy, score.is_greedy, score.prompt_tokens, score.error


def items() -> list[ScoreRequest]:
    """Prompts with one and with several completions, prompts that begin alike, token ids, texts, and errors."""
    shots = "".join(code(6))
    found: list[dict[str, Any]] = [{"prompt": shots + p, "completions": (" pass\n", "x", p)} for p in PROMPTS[:4]]
    found += [{"prompt": p, "completions": ("    return a + b\n",)} for p in PROMPTS]
    found += [{"prompt": text} for text in (*code(3), "x", shots)]
    found += [{"token_ids": ids(n), "completions": (ids(3), ids(90, 7), (5,))} for n in (1, 63, 64, 65, 200)]
    found += [{"token_ids": ids(130)}, {"token_ids": ids(1)}, {"prompt": "x", "completions": ("",)}]
    return [ScoreRequest(i, f"r{i}", **each) for i, each in enumerate(found)]


@pytest.fixture(scope="module")
def plain(engines: Callable[..., Engine]) -> Engine:
    return engines(drafter="none", batch_size=16)


@pytest.fixture(scope="module")
def want(plain: Engine) -> dict[tuple[Any, int], tuple[Any, ...]]:
    """The reference: one at a time, nothing shared."""
    alone = plain.with_settings(batch_size=1, prefix_cache=False)
    return {(s.request.id, s.sample): bits(s) for request in items() for s in alone.score(request)}


def reference(model: Any, tokens: list[int], scored: int) -> tuple[list[float], list[bool]]:
    """What transformers says of the last `scored` tokens."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokens[:-1]])).logits[0, -scored:].float()
    behind = torch.tensor(tokens[-scored:])
    found = torch.log_softmax(logits, -1).gather(-1, behind[:, None])[:, 0]
    return found.tolist(), (logits.argmax(-1) == behind).tolist()


def close(score: Score, model: Any, tokens: list[int], scored: int) -> None:
    """Compare a score with transformers'."""
    assert score.error is None
    logprobs, greedy = reference(model, tokens, scored)
    assert list(score.token_ids) == tokens[-scored:]
    assert np.abs(np.array(score.logprobs) - logprobs).max() < TOLERANCE
    assert list(score.greedy) == greedy
    assert score.logprob == pytest.approx(sum(logprobs), abs=TOLERANCE * scored)
    assert score.is_greedy == all(greedy)


def test_scores_are_those_of_transformers(plain: Engine, demo_models: Any) -> None:
    """Prompts with completions and texts by themselves; the reference reads each alone."""
    model = AutoModelForCausalLM.from_pretrained(demo_models.target, dtype=torch.float32)
    encode = plain.tokenizer.encode
    for prompt, completion in zip(code(5), (*PROMPTS[:4], "\n"), strict=True):
        (score,) = plain.score((prompt.rstrip(), completion))
        whole, alone = encode(prompt.rstrip() + completion), encode(prompt.rstrip())
        behind = whole[len(alone) :]
        close(score, model, alone + behind, len(behind))
        assert score.prompt_tokens == len(alone)
        (score,) = plain.score(prompt)
        tokens = encode(prompt)
        close(score, model, [plain.tokenizer.eos_token_id, *tokens], len(tokens))
        assert score.prompt_tokens == 0


@pytest.mark.parametrize("length", [1, 47, 48, 49, 96, 97, 200])
def test_texts_longer_than_the_context(random_model: Callable[..., Path], length: int) -> None:
    """Each window is what transformers says of it, and each token is scored once."""
    engine, model = _short(random_model)
    tokens = list(ids(length))
    (score,) = engine.score(ScoreRequest(0, 0, token_ids=tuple(tokens)))
    assert list(score.token_ids) == tokens
    logprobs: list[float] = []
    for start in range(0, length, 48):
        end = min(start + 48, length)
        before = [engine.tokenizer.eos_token_id] if not start else tokens[end - 49 : start]
        found, _ = reference(model, [*before, *tokens[start:end]], end - start)
        logprobs += found
    assert np.abs(np.array(score.logprobs) - logprobs).max() < TOLERANCE


_SHORT: list[tuple[Engine, Any]] = []


def _short(random_model: Callable[..., Path]) -> tuple[Engine, Any]:
    """A model with a context of 48 tokens, and transformers' own."""
    if not _SHORT:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        folder = random_model(LlamaConfig(vocab_size=4096, max_position_embeddings=48, eos_token_id=0, **sizes))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        _SHORT.append((Engine(str(folder), drafter="none", kv_memory=8 << 20), model))
    return _SHORT[0]


def test_a_prompt_may_fill_the_context(random_model: Callable[..., Path]) -> None:
    """The last token is not read, so there may be one more than the model has room for."""
    engine, model = _short(random_model)
    (score,) = engine.score(ScoreRequest(0, 0, token_ids=ids(40), completions=(ids(9),)))
    close(score, model, [*ids(40), *ids(9)], 9)
    scores = engine.score(ScoreRequest(0, 0, token_ids=ids(40), completions=(ids(9), ids(10))))
    (score,) = scores
    assert score.error == "the prompt has 40 tokens and completions[1] 10, the model's context is 48"
    assert score.refused


@examples(25)
@given(data=st.data())
def test_the_same_bits_in_any_company(
    plain: Engine, want: dict[tuple[Any, int], tuple[Any, ...]], data: st.DataObject
) -> None:
    """Batch size, order, neighbours, chunks, threads, and what the cache holds: nothing shows."""
    requests = data.draw(st.permutations(items()))[: data.draw(st.integers(1, len(want)))]
    settings = {
        "batch_size": data.draw(st.sampled_from([1, 2, 3, 8, 16])),
        "prefix_cache": data.draw(st.booleans()),
        "prefill_chunk": data.draw(st.sampled_from([None, 1, 5, 64])),
        "threads": data.draw(st.sampled_from([1, 2])),
        "kv_memory": data.draw(st.sampled_from([None, 24 * 64 * plain.position_bytes])),
    }
    engine = plain.with_settings(**settings)
    if data.draw(st.booleans()):
        engine.reset_prefix_cache()
    found = engine.score(requests)
    assert [s.request.id for s in found] == [r.id for r in requests for s in found if s.request.id == r.id]
    for score in found:
        assert bits(score) == want[score.request.id, score.sample], (settings, score)


def test_the_same_bits_where_requests_come_while_others_are_read(
    plain: Engine, want: dict[tuple[Any, int], tuple[Any, ...]]
) -> None:
    def with_pauses() -> Any:
        for request in items():
            yield from (None, request, None, None)

    batches = plain.with_settings(batch_size=3).score_stream(with_pauses())
    found = {(s.request.id, s.sample): bits(s) for batch in batches for s in batch}
    assert found == want


def test_a_device_says_the_same(plain: Engine, want: dict[tuple[Any, int], tuple[Any, ...]]) -> None:
    """Of given tokens, and waits once for a pass; also of rows that are not finite."""
    foreseeing = pytest.importorskip("helpers.foreseeing", exc_type=ImportError).foreseeing
    engine = plain.with_settings(batch_size=3, prefix_cache=False)
    broken = [ScoreRequest(0, 0, token_ids=ids(70), completions=((1, 4095, 2), (1, 2, 4095), (1, 2)))]
    with engine.canonical.decoder.breaking(4095):
        expected = [bits(s) for s in engine.score(broken)]
    passes = engine.stats.target_passes
    with foreseeing(engine) as waits:
        found = {(s.request.id, s.sample): bits(s) for s in engine.score(items())}
        assert len(waits) == engine.stats.target_passes - passes
        with engine.canonical.decoder.breaking(4095):
            assert [bits(s) for s in engine.score(broken)] == expected
    assert found == want


def test_completions_stand_in_order(plain: Engine) -> None:
    request = ScoreRequest(0, 0, prompt="def f", completions=tuple(f" = {c}" for c in "abcdefgh"))
    assert [s.sample for s in plain.with_settings(batch_size=3).score(request)] == list(range(8))


def test_generated_tokens_have_the_bits_that_generation_reported(plain: Engine) -> None:
    """Decoding a token and reading it are the same pass; greedy tokens are greedy."""
    requests = [
        Request(i, i, token_ids=ids(5 + 40 * i), params=SamplingParams(max_tokens=30, temperature=t, logprobs=0))
        for i, t in enumerate((0.0, 1.0, 0.0, 1.0))
    ]
    done = plain.generate(requests)
    scores = plain.score(
        [ScoreRequest(c.request.index, 0, token_ids=c.request.token_ids, completions=(c.token_ids,)) for c in done]
    )
    for completion, score in zip(done, scores, strict=True):
        assert completion.logprobs is not None
        assert score.logprobs == tuple(entry.logprob for entry in completion.logprobs)
        assert score.is_greedy == (completion.request.params.temperature == 0)


def test_a_model_that_thinks_scores_what_it_generates() -> None:
    """Its thoughts and states are those that it had when it generated."""
    engine = Engine("demo-thinking", drafter="none", kv_memory=64 << 20)
    lines = (Path(__file__).parents[2] / "sample_prompts" / "coin_flips.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[:8]]
    requests = [
        Request(i, i, prompt=p, params=SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0))
        for i, p in enumerate(prompts)
    ]
    done = engine.generate(requests)
    asked = [ScoreRequest(i, i, prompt=c.request.prompt, completions=(c.token_ids,)) for i, c in enumerate(done)]
    ways: list[tuple[Any, int]] = [("auto", 3), ("off", 1), (2, 3)]
    for ahead, size in usual(ways, itertools.product(("auto", "off", 2), (1, 3))):
        tried = engine.with_settings(speculative_prefill=ahead, batch_size=size)
        tried.reset_prefix_cache()
        for completion, score in zip(done, tried.score(asked), strict=True):
            assert completion.logprobs is not None
            assert score.error is None
            assert score.logprobs == tuple(entry.logprob for entry in completion.logprobs)
        assert tried.stats.thoughts > 0


def test_prompts_are_read_once(plain: Engine) -> None:
    """What completions and prompts have in common goes through one pass, the last token of a prompt aside."""
    prompt, count = ids(150), 6
    request = ScoreRequest(0, 0, token_ids=prompt, completions=tuple((i, i + 1) for i in range(1, count + 1)))
    cached, without = (plain.with_settings(prefix_cache=on, batch_size=4) for on in (True, False))
    cached.reset_prefix_cache()
    assert [bits(s) for s in cached.score(request)] == [bits(s) for s in without.score(request)]
    assert without.stats.prompt_tokens == count * 151
    assert cached.stats.prompt_tokens == 151 + (count - 1) * 2
    slowly = plain.with_settings(batch_size=4, prefill_chunk=70)  # others wait for the last, partial page, too
    slowly.reset_prefix_cache()
    slowly.score(request)
    assert slowly.stats.prompt_tokens == 151 + (count - 1) * 2
    few_shot = [ScoreRequest(i, i, token_ids=(*ids(192), i + 1, 9), completions=((3,),)) for i in range(8)]
    fresh = plain.with_settings(batch_size=8)
    fresh.reset_prefix_cache()
    fresh.score(few_shot)
    assert fresh.stats.prompt_tokens == 194 + 7 * 2


def test_ties_are_the_lowest_ids(random_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equally likely tokens, the one with the lowest id is greedy."""
    engine, _ = _short(random_model)
    run = engine.canonical.run

    def tied(*args: Any, **named: Any) -> np.ndarray:
        logits = run(*args, **named)
        logits[:, [7, 9]] = 50.0
        return logits

    monkeypatch.setattr(engine.canonical, "run", tied)
    scores = engine.score(ScoreRequest(0, 0, token_ids=(1,), completions=((7,), (9,), (7, 7), (7, 9))))
    assert [s.greedy for s in scores] == [(True,), (False,), (True, True), (True, False)]
    assert [s.is_greedy for s in scores] == [True, False, True, False]
    assert scores[0].logprobs == scores[1].logprobs == (pytest.approx(-math.log(2), abs=1e-5),)


def test_white_space_of_a_prompt_counts_as_the_completions(plain: Engine) -> None:
    """As in EleutherAI's harness; of token ids and of a prompt that is nothing else, it stays."""
    moved, given_there, kept = plain.score([("x =\n ", "1"), ("x =", "\n 1"), (" \n", "1")])
    assert bits(moved) == bits(given_there)
    assert plain.tokenizer.decode(moved.token_ids) == "\n 1"
    assert plain.tokenizer.decode(kept.token_ids) == "1"
    apart = plain.score((plain.tokenizer.encode("x =\n "), "1"))[0]
    assert plain.tokenizer.decode(apart.token_ids) == "1"


def test_chats(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat's completion comes behind what the template writes, white space and all."""
    template = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}<a> \n{% endif %}"
    monkeypatch.setattr(plain.tokenizer, "chat_template", template)
    (chat,) = plain.score(([{"role": "user", "content": "sort"}], "def sort("))
    encode = plain.tokenizer.encode
    assert chat.error is None
    assert chat.prompt_tokens == len(encode("<user> sort\n<a> \n"))
    assert plain.tokenizer.decode(chat.token_ids) == "def sort("
    (refused,) = plain.score([ScoreRequest(0, 0, messages=[{"role": "user", "content": "x"}])])
    assert refused.error == "messages are scored with a completion only; give one, or a text"


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"prompt": "x", "completions": ()}, "completions is empty"),
        ({"prompt": "x", "completions": (" y", "")}, "completions[1] is empty"),
        ({"prompt": "def f", "completions": ("a",)}, "the completion adds no token to the prompt"),
        ({"prompt": "", "completions": ("y",)}, "the prompt is empty"),
        ({"prompt": ""}, "the text is empty"),
        ({"token_ids": (1,), "completions": ((),)}, "the completion is empty"),
        ({"token_ids": (1,), "completions": ((4096,),)}, "the completion must have token ids from 0 to 4095"),
        ({"token_ids": (1, -1), "completions": ((1,),)}, "token_ids must be from 0 to 4095, got -1"),
        ({"token_ids": (4096,)}, "the text must have token ids from 0 to 4095"),
        (
            {"token_ids": ids(1000), "completions": (ids(30),)},
            "the prompt has 1000 tokens and the completion 30, the model's context is 1024",
        ),
    ],
)
def test_errors(plain: Engine, asked: dict[str, Any], error: str) -> None:
    """A request that cannot run is refused as a whole, and harms no other."""
    before, refused, after = plain.score(["a", ScoreRequest(0, 0, **asked), "a"])
    assert (refused.error, refused.refused, refused.token_ids) == (error, True, ())
    assert bits(before) == bits(after)
    assert before.error is None


def test_no_room(plain: Engine) -> None:
    small = plain.with_settings(kv_memory=2 * 64 * plain.position_bytes)
    (refused,) = small.score(ScoreRequest(0, 0, token_ids=ids(128), completions=((1, 2),)))
    assert refused.error == (
        "the prompt has 128 tokens and the completion 2, the KV cache holds sequences of 128; give it more with"
        " --kv-memory"
    )
    (fits,) = small.score(ScoreRequest(0, 0, token_ids=ids(128), completions=((1,),)))
    assert fits.error is None
    (text,) = small.score(ScoreRequest(0, 0, token_ids=ids(129)))
    assert text.error is not None
    assert text.error.startswith("the text has windows of 129 tokens, the KV cache holds sequences of 128;")


def test_what_is_not_finite_is_an_error_of_its_own(plain: Engine) -> None:
    """The error depends on the request alone; others, also other completions, have their scores."""
    broken = 4095
    asked = [
        ScoreRequest(0, "prompt", token_ids=(*ids(80), broken, *ids(9)), completions=((1,), (2, 3))),
        ScoreRequest(1, "completion", token_ids=ids(70), completions=((1, broken, 2), (1, 2, broken), (1, 2))),
        ScoreRequest(2, "text", token_ids=(*ids(1500), broken, *ids(1000))),
        ScoreRequest(3, "good", token_ids=ids(300)),
    ]
    expected = plain.score([asked[3], ScoreRequest(1, 1, token_ids=ids(70), completions=((1, 2, broken), (1, 2)))])
    where = "the model's hidden states or logits are not finite"
    for size, chunk in ((1, None), (3, 7), (16, None)):
        engine = plain.with_settings(batch_size=size, prefill_chunk=chunk)
        engine.reset_prefix_cache()
        with engine.canonical.decoder.breaking(broken):
            found = {(s.request.id, s.sample): s for s in engine.score(asked)}
        engine.reset_prefix_cache()
        for sample in (0, 1):
            assert found["prompt", sample].error == f"{where} at position 80 (token 80 of the prompt)"
        assert found["completion", 0].error == f"{where} at position 71 (token 1 of the completion)"
        assert found["text", 0].error == f"{where} before token 1501 of the text"
        assert not any(s.refused for s in found.values())
        assert bits(found["good", 0]) == bits(expected[0])
        assert [bits(found["completion", i]) for i in (1, 2)] == [bits(s) for s in expected[1:]]


def test_logits_that_are_not_finite(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN, or an infinity above all others, where the hidden states are; one below them makes a token impossible."""
    request = ScoreRequest(0, 0, token_ids=ids(7), completions=((1, 2, 3),))
    engine = plain.with_settings(prefix_cache=False)
    (whole,) = engine.score(request)
    run = engine.canonical.run
    for value, place, error in ((math.nan, 5, True), (math.inf, 5, True), (-math.inf, 5, False), (-math.inf, 2, False)):

        def broken(*args: Any, value: float = value, place: int = place, **named: Any) -> np.ndarray:
            logits = run(*args, **named)
            logits[1, place] = value
            return logits

        monkeypatch.setattr(engine.canonical, "run", broken)
        (score,) = engine.score(request)
        if error:
            where = "the model's hidden states or logits are not finite at position 7 (token 0 of the completion)"
            assert (score.error, score.refused, score.logprobs) == (where, False, ())
        else:
            assert score.error is None
            assert (score.logprobs[0], score.logprobs[2]) == (whole.logprobs[0], whole.logprobs[2])
            assert (score.logprob == -math.inf) == (place == 2)


def test_what_score_takes(plain: Engine) -> None:
    """Texts, pairs and requests; the same object twice is two items."""
    request = ScoreRequest(5, "five", prompt="a", completions=(" b",))
    found = plain.score([request, ("a", [" b", " c"]), "a b", request, ("a", np.array([5, 6]))])
    assert [(s.request.id, s.sample) for s in found] == [("five", 0), (1, 0), (1, 1), (2, 0), ("five", 0), (4, 0)]
    assert bits(found[0]) == bits(found[1]) == bits(found[4])
    assert found[5].token_ids == (5, 6)
    assert plain.score([]) == []
    for wrong in (7, [7], b"a", {"a": 1}, ("a",), [("a", 7)], [(7, "a")]):
        with pytest.raises(RequestError):
            plain.score(wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="score_stream takes ScoreRequests, got Request"):
        list(plain.score_stream([Request(0, 0, prompt="x")]))  # type: ignore[list-item]


def test_scoring_takes_turns_with_generation(plain: Engine) -> None:
    """A stream that is being read keeps others of its thread out, and one that is closed leaves nothing behind."""
    stream = plain.score_stream(items())
    next(stream)
    with pytest.raises(EngineError, match="generating already"):
        plain.generate("x")
    stream.close()  # type: ignore[attr-defined]
    assert not plain.live
    assert plain.generate("x", max_tokens=2)[0].error is None


def test_some_scores_of_a_request(engines: Callable[..., Engine]) -> None:
    """A request may ask for the scores of some of its completions."""
    engine = engines(drafter="none", batch_size=4)
    whole = ScoreRequest(0, 0, prompt=PROMPTS[0], completions=(" a", " b", " c"))
    done = engine.score([whole])
    some = engine.score([replace(whole, only=(2, 0))])
    assert [score.sample for score in some] == [0, 2]
    assert list(map(bits, some)) == [bits(done[0]), bits(done[2])]
