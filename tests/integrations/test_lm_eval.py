"""The harness's model without the harness: what it asks of the engine, and what it makes of the answers."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.engine_inputs import PROMPTS, code, ids

from detgen import Engine, ScoreRequest
from detgen.errors import EngineError, RequestError
from detgen.models.loading import pick_device

STAND_INS = Path(__file__).parent / "stand_ins"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, on a stand-in for the harness."""
    for name in loaded():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(STAND_INS))
    yield importlib.import_module("detgen.integrations.lm_eval")
    for name in loaded():
        del sys.modules[name]


def loaded() -> list[str]:
    """The harness's modules, and the one that uses it, as far as they are loaded."""
    return [name for name in sys.modules if name.split(".")[0] == "lm_eval" or name == "detgen.integrations.lm_eval"]


def instances(*asked: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=args) for args in asked]


def test_it_is_registered(model: Any) -> None:
    from lm_eval.api.registry import MODELS  # the stand-in's

    assert list(MODELS.items()) == [("detgen", model.DetgenLM)]


def test_without_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in loaded():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"the harness is not installed .*: pip install 'detgen\[lm-eval\]'"):
        importlib.import_module("detgen.integrations.lm_eval")


def test_log_likelihoods(model: Any, engine: Engine) -> None:
    """The same in every batch, in the order in which they were asked for; the harness's cache hears of each."""
    asked = [((f"c{i}", "x"), list(ids(3 + 20 * (i % 4))), list(ids(1 + i % 5, i + 1))) for i in range(12)]
    want = [
        (score.logprob, score.is_greedy)
        for _, context, continuation in asked
        for score in engine.score(ScoreRequest(0, 0, token_ids=tuple(context), completions=(tuple(continuation),)))
    ]
    for size in (1, 3, 16):
        lm = model.DetgenLM(engine=engine, batch_size=size)
        assert lm._loglikelihood_tokens(asked, disable_tqdm=True) == want
        assert lm.cache_hook.told == [
            ("loglikelihood", pair, found) for (pair, _, _), found in zip(asked, want, strict=True)
        ]


def test_whole_texts(model: Any, engine: Engine) -> None:
    """In windows of the model's context, or of a shorter one that is asked for."""
    texts = ["".join(code(40)), "x", "", code(1)[0]]
    lm = model.DetgenLM(engine=engine)
    found = lm.loglikelihood_rolling(instances(*((text,) for text in texts)), disable_tqdm=True)
    assert found == [engine.score(text)[0].logprob if text else 0.0 for text in texts]
    assert lm.cache_hook.told == [
        ("loglikelihood_rolling", (text,), value) for text, value in zip(texts, found, strict=True)
    ]
    short = model.DetgenLM(engine=engine, max_length=100).loglikelihood_rolling(
        instances((texts[0],)), disable_tqdm=True
    )
    assert short[0] < found[0]


def generate(lm: Any, context: str, **asked: Any) -> str:
    (text,) = lm.generate_until(instances((context, asked)), disable_tqdm=True)
    return str(text)


def test_generation(model: Any, engine: Engine) -> None:
    """Parameters under the names that tasks use; greedy unless they say otherwise."""
    lm = model.DetgenLM(engine=engine, max_gen_toks=9)
    context = code(1)[0]
    plain = generate(lm, context)
    assert plain == engine.generate(context, max_tokens=9)[0].text
    for name in ("max_gen_toks", "max_new_tokens", "max_tokens"):
        assert generate(lm, context, **{name: 9}, temperature=0.7, do_sample=False) == plain
    until = plain[3]
    assert generate(lm, context, until=until) == generate(lm, context, until=[until, ""]) == plain.split(until)[0]
    sampled = generate(lm, context, do_sample=True, temperature=1.5, seed=3)
    assert sampled == engine.generate(context, max_tokens=9, temperature=1.5, seed=3)[0].text != plain
    assert generate(lm, context, temperature=1.5, seed=3) == sampled
    assert generate(lm, context, do_sample=True, top_k=1) == plain
    done = lm.generate_until(instances(*((p, {"max_gen_toks": 4}) for p in PROMPTS)), disable_tqdm=True)
    assert done == [c.text for c in engine.generate(PROMPTS, max_tokens=4)]
    assert len(lm.tok_encode("".join(code(40)))) > lm.max_length
    assert generate(lm, "".join(code(40))) == generate(lm, "".join(code(40)), max_gen_toks=9)
    with pytest.raises(RequestError, match="num_beams: detgen has no such generation parameter"):
        generate(lm, context, num_beams=4)
    with pytest.raises(RequestError, match="max_gen_toks must be below 1024, got 1024"):
        generate(lm, context, max_gen_toks=1024)


def test_what_the_model_has_no_room_for(model: Any, engine: Engine) -> None:
    """A context loses its beginning; a continuation that does not fit is refused."""
    lm = model.DetgenLM(engine=engine, max_length=20)
    (long,) = lm._loglikelihood_tokens([(("", ""), list(ids(50)), list(ids(20)))], disable_tqdm=True)
    (cut,) = lm._loglikelihood_tokens([(("", ""), list(ids(50)[-1:]), list(ids(20)))], disable_tqdm=True)
    assert long == cut
    assert math.isfinite(long[0])
    with pytest.raises(RequestError, match=r"request 0 has 5 tokens of context and 21 of continuation, .* for 20"):
        lm._loglikelihood_tokens([(("", ""), list(ids(5)), list(ids(21)))], disable_tqdm=True)
    with pytest.raises(RequestError, match="5 tokens of context and 0 of continuation"):
        lm._loglikelihood_tokens([(("", ""), list(ids(5)), [])], disable_tqdm=True)
    with pytest.raises(RequestError, match="request 0: token_ids must be from 0 to 4095"):
        lm._loglikelihood_tokens([(("", ""), [4096], [1])], disable_tqdm=True)


def test_settings(model: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the harness's command line, and any of detgen's."""
    made: list[Any] = []

    def build(*given: Any, **named: Any) -> Engine:
        made.append((given, named))
        return engine

    monkeypatch.setattr(model, "Engine", build)
    named = {"pretrained": "folder", "dtype": "float32", "kv_memory": 1000}
    model.DetgenLM.create_from_arg_obj(named, {"batch_size": "4", "max_batch_size": None, "device": "cpu"})
    model.DetgenLM(batch_size="auto", device="cuda:0")
    model.DetgenLM(pretrained="embedded:target")
    assert made == [
        (("folder",), {"dtype": "float32", "kv_memory": 1000, "batch_size": 4, "device": "cpu"}),
        ((None,), {}),
        ((None,), {}),
    ]
    for wrong, said in (
        ({"target": "a", "pretrained": "b"}, "all name the model; give one of them"),
        ({"peft": "x"}, "peft: no such setting of detgen"),
        ({"engine": engine, "dtype": "float16"}, "dtype cannot change on loaded models"),
    ):
        with pytest.raises(EngineError, match=said):
            model.DetgenLM(**wrong)
    lm = model.DetgenLM(engine=engine)
    assert lm.get_model_info() == {"detgen_profile": engine.profile()}
    assert lm.tok_encode("<|endoftext|>a") == [engine.tokenizer.eos_token_id, *engine.tokenizer.encode("a")]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (None, {"pretrained": "embedded:target"}),
        ({"target": "folder", "dtype": "float32"}, {"pretrained": "folder", "dtype": "float32"}),
        ({"target": "a", "pretrained": "b"}, {"target": "a", "pretrained": "b"}),  # refused when it is loaded
    ],
)
def test_results_name_the_model_and_the_device(model: Any, given: Any, named: dict[str, str]) -> None:
    typed = SimpleNamespace(model_args=given, device=None)
    model.name_what_runs(typed)
    assert (typed.model_args, typed.device) == (named, str(pick_device("auto")))
    typed = SimpleNamespace(model_args=given, device="cuda:1")
    model.name_what_runs(typed)
    assert typed.device == "cuda:1"
