"""The engine's API: orders, samples, errors, counters, sharing, and streams that are left early."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from detgen import Engine, EngineError, Request, RequestError, SamplingParams
from detgen.drafters.protocol import Draft
from detgen.engine.stats import DrafterStats, count_records

SAMPLES = Path(__file__).parents[2] / "sample_prompts"
PROMPTS = ["import os\n", "def add(a, b):\n", "class Node:\n", "for i in range(", "try:\n    ", "x = [", "if __name__"]


def code(n: int) -> list[str]:
    """Some of the sample prompts, spread over the file."""
    lines = (SAMPLES / "code.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:: len(lines) // n]][:n]


def ids(length: int, first: int = 5) -> tuple[int, ...]:
    return tuple(first + 3 * i % 4000 for i in range(length))


def test_generate_returns_the_order_of_the_prompts(engines: Callable[..., Engine]) -> None:
    """Whatever finishes first: completions stand in the order of the prompts, and of their samples."""
    engine = engines(drafter="auto", batch_size=3)
    requests = [
        Request(
            9 - i, f"r{i}", prompt=p, params=SamplingParams(max_tokens=3 + 5 * (i % 3), n=1 + i % 2, temperature=1.0)
        )
        for i, p in enumerate(PROMPTS)
    ]
    done = engine.generate(requests)
    assert [(c.request.id, c.sample) for c in done] == [(r.id, s) for r in requests for s in range(r.params.n)]
    assert [c.request for c in engine.generate(requests)] == [c.request for c in done]


def test_generate_takes_texts(engines: Callable[..., Engine]) -> None:
    """Sampling parameters by name; text and tokens go together."""
    engine = engines(drafter="auto", batch_size=3)
    done = engine.generate(PROMPTS[:2], max_tokens=6, temperature=0.5, seed=4)
    for prompt, c in zip(PROMPTS, done, strict=False):
        assert c.request.prompt == prompt
        assert c.request.params == SamplingParams(max_tokens=6, temperature=0.5, seed=4)
        assert c.prompt_tokens == len(engine.tokenizer(prompt).input_ids)
        assert c.text == engine.tokenizer.decode(c.token_ids, skip_special_tokens=True)
        assert c.error is None
        assert len(c.token_ids) == 6 or c.finish_reason == "stop"
    assert engine.generate([]) == []
    with pytest.raises(RequestError, match="temperature"):
        engine.generate(["x"], temperature=-1.0)


def test_more_samples_than_slots(engines: Callable[..., Engine]) -> None:
    """n samples of one prompt, more than the batch: each its own text, the same as in a larger batch."""
    few, many = engines(drafter="auto", batch_size=3), engines(drafter="none", batch_size=16)
    params = SamplingParams(n=8, temperature=1.0, max_tokens=8, seed=1)
    done = [e.generate([Request(0, 0, prompt="def ", params=params)]) for e in (few, many)]
    assert [c.sample for c in done[0]] == list(range(8))
    assert [c.token_ids for c in done[0]] == [c.token_ids for c in done[1]]
    assert len({c.token_ids for c in done[0]}) > 4


def test_samples_are_made_when_there_is_room(engines: Callable[..., Engine]) -> None:
    """A billion samples of one prompt start at once, and take the memory of those that run."""
    engine = engines(drafter="none", batch_size=16)
    params = SamplingParams(n=10**9, temperature=1.0, max_tokens=2, seed=1)
    stream = engine.stream([Request(0, 0, prompt="def ", params=params)])
    done: list[int] = []
    for batch in stream:
        done += [c.sample for c in batch]
        if len(done) > 40:
            break
    stream.close()  # type: ignore[attr-defined]
    assert done == list(range(len(done)))


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


def test_engines_on_the_same_models(engines: Callable[..., Engine]) -> None:
    """Engines that share models and caches take turns: each its own drafter and packing, all the same output."""
    base = engines(drafter="auto", batch_size=3)
    requests = [
        Request(i, i, prompt=p, params=SamplingParams(max_tokens=9, n=2, temperature=0.5 * (i % 2)))
        for i, p in enumerate([*PROMPTS, PROMPTS[0] * 9, PROMPTS[0] * 9 + "x"])
    ]
    want = [c.token_ids for c in base.generate(requests)]
    others = [
        base.with_settings(drafter="none", batch_size=1),
        base.with_settings(drafter="model", draft_tokens=2),
        base.with_settings(drafter="self", threads=1, verify_window=3),
        base.with_settings(prefill_chunk=1, batch_size=16),
        base.with_settings(prefix_reuse=False),
    ]
    for engine in [*others, base, *others]:
        assert [c.token_ids for c in engine.generate(requests)] == want
    torch.set_num_threads(2)
    assert others[-1].stats.reused_tokens == 0 < others[0].stats.reused_tokens
    assert others[3].stats.target_passes > others[1].stats.target_passes
    with pytest.raises(EngineError, match="kv_memory"):
        base.with_settings(kv_memory=1 << 20)
    with pytest.raises(EngineError, match="this engine has none"):
        engines(drafter="none", batch_size=16).with_settings(drafter="model")


def test_chunks_of_prompts(engines: Callable[..., Engine]) -> None:
    """No pass reads more of a prompt than the chunk: a prompt of 50 tokens takes 50 passes of one."""
    engine = engines(drafter="none", batch_size=16).with_settings(prefill_chunk=1, batch_size=1)
    engine.generate([Request(0, 0, token_ids=ids(50), params=SamplingParams(max_tokens=1))])
    assert engine.stats.target_passes == 50


def test_a_drafter_of_ones_own(engines: Callable[..., Engine]) -> None:
    """A drafter from outside, given the engine's own by name: whatever it drafts, the output stays."""
    base = engines(drafter="auto", batch_size=3)
    given: list[Any] = []
    engine = base.with_settings(drafter=lambda named: given.append(sorted(named)) or Adversary(), draft_tokens=5)
    done = engine.generate(PROMPTS, max_tokens=8)
    assert given == [["model", "ngram", "self"]]
    assert [c.token_ids for c in done] == [c.token_ids for c in base.generate(PROMPTS, max_tokens=8)]
    wrong = engine.stats.drafters["adversary"]
    assert wrong.rolled_back > wrong.drafted / 2


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


def test_engine_errors(demo_models: Any) -> None:
    """What cannot be built is refused with the option to change."""
    with pytest.raises(EngineError, match=r"--kv-memory 1000 bytes .* at least \d+ bytes"):
        Engine(kv_memory=1000, drafter="none")
    with pytest.raises(EngineError, match="no device named"):
        Engine(device="abacus")
    with pytest.raises(EngineError, match="drafter must be one of"):
        Engine(drafter="oracle")
    with pytest.raises(EngineError, match="batch_size"):
        Engine(batch_size=0)
    with pytest.raises(EngineError, match="threads must be at most 1024, got 100000"):
        Engine(threads=100_000)
    with pytest.raises(EngineError, match="--drafter model needs a draft model"):
        Engine(target=demo_models.target, drafter="model")


def test_a_small_kv_memory(observe: Callable[..., Any], engines: Callable[..., Engine]) -> None:
    """With room for little, requests take turns or are refused, and the bits are those of a roomy engine."""
    roomy = engines(drafter="none", batch_size=1)
    with pytest.raises(EngineError) as refusal:
        Engine(kv_memory=1, drafter="none")
    least = int(str(refusal.value).rsplit("at least ", 1)[1].split()[0])
    some = [
        Request(i, i, token_ids=ids(n, 9 + i), params=SamplingParams(max_tokens=7))
        for i, n in enumerate((3, 90, 200, 40, 8, 600))
    ]
    want = observe(roomy, some)
    for memory in (least, int(least * 1.1), least * 2):
        engine = Engine(kv_memory=memory, drafter="none", batch_size=8)
        found = observe(engine, some)
        assert len(found) == len(some)
        for key, one in found.items():
            if one.completion.error is not None:
                assert "--kv-memory" in one.completion.error
                assert one.completion.request.token_ids is not None
                assert len(one.completion.request.token_ids) > 200
            else:
                assert one.differs(want[key]) is None, (key, memory)


def added_up(records: list[Any]) -> dict[str, DrafterStats]:
    """The logs of several samples together."""
    total: dict[str, DrafterStats] = {}
    for log in records:
        for name, counts in count_records(log).items():
            mine = total.setdefault(name, DrafterStats())
            for field in DrafterStats.__slots__:
                setattr(mine, field, getattr(mine, field) + getattr(counts, field))
    return total


@pytest.mark.parametrize(
    "settings",
    [
        {"drafter": "none"},
        {"drafter": "ngram", "draft_tokens": 3},
        {"drafter": "model", "draft_tokens": 4},
        {"drafter": "self", "verify_window": 5},
        {"drafter": "auto"},
    ],
    ids=lambda s: s["drafter"],
)
def test_stats_add_up(settings: dict[str, Any]) -> None:
    """The acceptance logs give the engine's counters, the committed tokens, and every drafted token's fate."""
    engine = Engine(batch_size=4, kv_memory=32 << 20, **settings)
    some = [
        Request(
            i,
            i,
            prompt=p,
            params=SamplingParams(max_tokens=20, temperature=0.4 * (i % 3), deterministic=i != 2, n=1 + i % 2),
        )
        for i, p in enumerate(PROMPTS)
    ]
    done = engine.generate(some)
    stats = engine.stats
    assert {k: v for k, v in stats.drafters.items() if v.rounds} == added_up([c.records for c in done])
    assert stats.tokens == sum(len(c.token_ids) for c in done)
    total = stats.total()
    assert total.drafted == total.accepted + total.corrected + total.rolled_back
    assert stats.tokens == total.accepted + total.corrected + total.bonus + total.plain + total.unverified
    assert stats.prompt_tokens + stats.reused_tokens == sum(c.prompt_tokens for c in done)
    assert stats.reused_tokens >= 3
    assert 1 < stats.peak_live <= 4
    assert stats.live == 0
    assert stats.rows >= stats.padding_rows + stats.prompt_tokens
    assert stats.fast_passes > 0 or settings["drafter"] != "self"
    assert stats.target_passes > 0
    assert (stats.draft_passes > 0) <= (settings["drafter"] in ("model", "auto"))
    for c in done:
        assert [r.token for r in c.records if r.token is not None] == list(c.token_ids)
        assert [r.position for r in c.records if r.token is not None] == list(range(len(c.token_ids)))


def test_drafts_save_passes() -> None:
    """The embedded draft model is worth having: on code, many of its tokens are accepted and save a pass."""
    engine = Engine(batch_size=1, drafter="model", draft_tokens=3, kv_memory=32 << 20)
    done = engine.generate(code(6), max_tokens=32)
    assert (engine.stats.of("model").acceptance or 0) > 0.3
    assert engine.stats.target_passes < 0.7 * sum(len(c.token_ids) for c in done)


def test_samples_share_the_prompt() -> None:
    """The prompt of n samples is read once, unverified samples' too."""
    for deterministic in (True, False):
        engine = Engine(batch_size=4, drafter="none", kv_memory=32 << 20)
        params = SamplingParams(n=4, max_tokens=4, temperature=1.0, deterministic=deterministic)
        engine.generate([Request(0, 0, token_ids=ids(101), params=params)])
        assert engine.stats.prompt_tokens == 101 + 3
        assert engine.stats.reused_tokens == 3 * 100


def test_a_prefix_is_reused(observe: Callable[..., Any], engines: Callable[..., Engine]) -> None:
    """A later prompt with the same beginning does not read it again, and its bits are the same."""
    engine = Engine(batch_size=1, drafter="ngram", kv_memory=32 << 20)
    first = Request(0, 0, token_ids=ids(80), params=SamplingParams(max_tokens=6))
    longer = Request(1, 1, token_ids=(*ids(80), 7, 7, 7), params=SamplingParams(max_tokens=6))
    observe(engine, [first])
    before = engine.stats.prompt_tokens
    found = observe(engine, [longer])
    assert engine.stats.prompt_tokens - before == 3
    want = observe(engines(drafter="none", batch_size=16), [longer])
    assert found[1, 0].differs(want[1, 0]) is None


def test_a_stream_left_early(observe: Callable[..., Any], engines: Callable[..., Engine]) -> None:
    """After closing a stream midway the engine serves the next one, with the same bits."""
    some = [
        Request(i, i, prompt=p, params=SamplingParams(max_tokens=12, n=2, temperature=0.7))
        for i, p in enumerate(PROMPTS)
    ]
    want = observe(engines(drafter="none", batch_size=1), some)
    engine = Engine(batch_size=3, drafter="model", draft_tokens=3, kv_memory=32 << 20)
    for rounds in (1, 2, 5, 9):
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
    some = [Request(i, i, prompt=p, params=SamplingParams(max_tokens=24)) for i, p in enumerate(PROMPTS)]
    want = observe(engines(drafter="none", batch_size=1), some)
    both: list[dict[str, Any]] = [{"drafter": "self", "verify_window": 4}, {"drafter": "model", "draft_tokens": 3}]
    for settings in both:
        engine = Engine(batch_size=3, kv_memory=32 << 20, **settings)
        for after in (2, 5, 8):
            stream = engine.stream(some)
            forward, left = engine.canonical[0], [after]
            run = forward.run

            def fails(*args: Any, run: Any = run, left: list[int] = left) -> Any:
                out = run(*args)
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


def test_logprobs(engines: Callable[..., Engine], observe: Callable[..., Any]) -> None:
    """The natural logarithm of the softmax at temperature 1, best first, as many as asked for."""
    engine = engines(drafter="auto", batch_size=3)
    request = Request(0, 0, prompt=PROMPTS[1], params=SamplingParams(max_tokens=6, temperature=0.9, logprobs=4))
    one = observe(engine, [request])[0, 0]
    assert one.completion.logprobs is not None
    for token, row, entry, r in zip(
        one.completion.token_ids,
        torch.log_softmax(torch.cat(one.logits).double(), -1),
        one.completion.logprobs,
        [r for r in one.completion.records if r.token is not None],
        strict=True,
    ):
        assert entry.logprob == r.logprob == pytest.approx(row[token].item(), abs=1e-5)
        values, places = row.topk(4)
        assert [t for t, _ in entry.top] == places.tolist()
        assert [p for _, p in entry.top] == pytest.approx(values.tolist(), abs=1e-5)
    zero = engine.generate([request.with_params(logprobs=0)])[0].logprobs
    assert zero is not None
    assert all(e.top == () for e in zero)
    assert engine.generate([request.with_params(logprobs=None)])[0].logprobs is None


def test_greedy_margins(engines: Callable[..., Engine], observe: Callable[..., Any]) -> None:
    """At temperature 0 the margin is the lead over the runner-up's logit."""
    engine = engines(drafter="auto", batch_size=3)
    one = observe(engine, [Request(0, 0, prompt=PROMPTS[1], params=SamplingParams(max_tokens=6))])[0, 0]
    top = torch.cat(one.logits).double().topk(2).values
    want = (top[:, 0] - top[:, 1]).tolist()
    assert [r.margin for r in one.completion.records if r.token is not None] == pytest.approx(want, abs=1e-5)


class Allocations(TorchDispatchMode):
    """Sizes of the largest tensors that operators return in memory of their own."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known = known
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return out


class Adversary:
    """A drafter most of whose tokens are wrong."""

    name = "adversary"

    def draft(self, seqs: Any, lengths: list[int]) -> list[Draft]:
        """Tokens that nothing predicts."""
        return [
            Draft([(s.tokens[-1] * 7 + i + 1) % 4096 for i in range(n)], self.name)
            for s, n in zip(seqs, lengths, strict=True)
        ]


@pytest.mark.parametrize(
    "settings", [{"drafter": lambda _: Adversary(), "draft_tokens": 6}, {"drafter": "self", "verify_window": 6}]
)
def test_truncation_allocates_nothing(
    engines: Callable[..., Engine], observe: Callable[..., Any], settings: dict[str, Any]
) -> None:
    """Through hundreds of roll-backs the cache's tensors stay where they are, and none of their size is made."""
    engine = Engine(batch_size=16, kv_memory=256 << 20, **settings)
    caches = [passes.cache for passes in engine._prepared.passes]
    tensors = [x for cache in caches for x in (*cache.keys, *cache.values)]
    identities = [(id(x), x.data_ptr(), x.untyped_storage().nbytes()) for x in tensors]
    some = [
        Request(i, i, token_ids=ids(n, 3 + i), params=SamplingParams(max_tokens=24, temperature=1.0, n=2))
        for i, n in enumerate((4, 60, 9, 200, 33, 4, 700))
    ]
    with Allocations({x.untyped_storage().data_ptr() for x in tensors}) as made:
        found = observe(engine, some)
    now = [x for cache in caches for x in (*cache.keys, *cache.values)]
    assert [(id(x), x.data_ptr(), x.untyped_storage().nbytes()) for x in now] == identities
    assert 0 < made.largest < max(size for _, _, size in identities) / 2
    if settings["drafter"] != "self":
        assert engine.stats.total().rolled_back > 500
    want = observe(engines(drafter="none", batch_size=1), some)
    for key, one in want.items():
        assert found[key].differs(one) is None


def test_equals_generate(observe: Callable[..., Any], engines: Callable[..., Engine], demo_models: Any) -> None:
    """Greedy completions of real prompts are those of transformers' float32 `generate`, near-ties aside."""
    engine = engines(drafter="auto", batch_size=3)
    some = [Request(i, i, prompt=p, params=SamplingParams(max_tokens=32)) for i, p in enumerate(code(12))]
    found = observe(engine, some)
    model = AutoModelForCausalLM.from_pretrained(demo_models.target, dtype=torch.float32).eval()
    same = 0
    for request in some:
        one = found[request.id, 0]
        prompt = torch.tensor([engine.encode(request)])
        own = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=32,
            output_logits=True,
            return_dict_in_generate=True,
        )
        theirs = own.sequences[0, prompt.shape[1] :].tolist()
        if theirs == list(one.completion.token_ids):
            same += 1
            assert one.completion.text == engine.tokenizer.decode(theirs, skip_special_tokens=True)
            continue
        at = next(i for i, (a, b) in enumerate(zip(one.completion.token_ids, theirs, strict=False)) if a != b)
        top = own.logits[at][0].float().topk(2).values
        assert top[0] - top[1] < 1e-4, f"prompt {request.id} differs at token {at}"
    assert same >= 10
