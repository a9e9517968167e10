"""Texts that must have a form: they have it, whoever drafts, and follow the model's distribution within it."""

from __future__ import annotations

import json
import math
import random
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch
from helpers.examples import THOROUGH, thorough
from tokenizers import Tokenizer

from detgen import Engine, Request, SamplingParams
from detgen.engine import grammars
from detgen.engine.structure import Masks, Structures
from detgen.errors import RequestError

FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
# A chain of references, so long that llguidance recurses out of its stack.
LINKS: dict[str, Any] = {"$ref": "#/$defs/0", "$defs": {"3000": {"type": "string"}}}
LINKS["$defs"] |= {str(i): {"properties": {"x": {"$ref": f"#/$defs/{i + 1}"}}} for i in range(3000)}
SCALARS: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": -3, "maximum": 40},
    {"type": "number", "minimum": 0, "exclusiveMaximum": 2},
    {"type": "string", "maxLength": 5},
    {"type": "string", "pattern": "^[a-f]{2,4}$"},
    {"type": "string", "format": "date"},
    {"enum": ["a", 1, None, [True]]},
    {"const": {"k": [1, "é"]}},
    {"type": ["integer", "null"], "maximum": 9, "minimum": 0},
]


def schemas(count: int) -> list[dict[str, Any]]:
    """Small schemas of all sorts, always the same ones, each with texts of a bounded length."""
    rng = random.Random(5)

    def some(depth: int) -> dict[str, Any]:
        kind = rng.choice(["scalar", "scalar", "object", "array", "anyOf", "ref"] if depth else ["scalar"])
        if kind == "object":
            names = rng.sample(["a", "b b", "ü", "long_name", 'q"'], rng.randint(1, 3))
            return {
                "type": "object",
                "properties": {name: some(depth - 1) for name in names},
                "required": names[: rng.randint(0, len(names))],
                "additionalProperties": False,
            }
        if kind == "array":
            least = rng.randint(0, 1)
            return {"type": "array", "items": some(depth - 1), "minItems": least, "maxItems": least + 1}
        if kind == "anyOf":
            return {"anyOf": [some(depth - 1), some(depth - 1)]}
        if kind == "ref":
            return {"$defs": {"x": rng.choice(SCALARS)}, "type": "array", "items": {"$ref": "#/$defs/x"}, "maxItems": 2}
        return dict(rng.choice(SCALARS))

    made = [some(2) for _ in range(count)]
    # A reference is to the root, so only a root may have definitions.
    return [schema for schema in made if '"$defs"' not in json.dumps(schema)[10:]]


@pytest.fixture(scope="module")
def engine(engines: Callable[..., Engine]) -> Engine:
    return engines(drafter="auto", batch_size=16)


@pytest.fixture(scope="module")
def structures(engine: Engine) -> Structures:
    return Structures(engine.tokenizer, "the model", engine.vocabulary, frozenset({0}))


def texts(engine: Engine, params: list[SamplingParams], prompt: str = "x = ") -> list[Any]:
    return engine.generate([Request(prompt=prompt, params=p) for p in params])


def test_what_is_written_fits(engine: Engine) -> None:
    """Of many schemas, each has texts that fit as another library judges, or that the limit ended within."""
    given = schemas(count := 300 if THOROUGH else 80)
    done = texts(
        engine, [SamplingParams(guided_json=s, temperature=1.0, seed=i, max_tokens=90) for i, s in enumerate(given)]
    )
    ended = [(schema, c) for schema, c in zip(given, done, strict=True) if c.finish_reason == "stop"]
    assert len(given) > count * 2 / 3
    assert len(ended) > 0.9 * len(given)
    assert not [c.error for c in done if c.error]
    for schema, completion in ended:
        jsonschema.validate(json.loads(completion.text), schema, format_checker=jsonschema.FormatChecker())
    assert {c.finish_reason for c in done} <= {"stop", "length"}


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"guided_json": {"type": "strin"}}, "guided_json is refused: Invalid type: strin"),
        ({"guided_json": {"not": {"type": "null"}}}, 'guided_json is refused: Unimplemented keys: ["not"]'),
        (
            {"guided_json": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}},
            "guided_json is refused: oneOf constraints are not supported; write anyOf if a value may fit several",
        ),
        (
            {"guided_json": {"type": "array", "uniqueItems": True}},
            'guided_json is refused: Unimplemented keys: ["unique',
        ),
        ({"guided_json": {"$ref": "http://x/y"}}, "guided_json is refused: Resource 'http://x/y' is not present"),
        ({"guided_json": {"enum": []}}, "guided_json is refused: Unsatisfiable schema"),
        (
            {"guided_json": {"x-guidance": {"coerce_one_of": True}, "oneOf": [{"type": "string"}, {"minLength": 3}]}},
            "guided_json is refused: oneOf constraints are not supported",
        ),
        ({"guided_json": {"$ref": "#"}}, "guided_json is refused: no text fits it"),
        (
            {"guided_json": LINKS},
            "guided_json is refused: llguidance cannot read it: it broke down (signal 11); it may be",
        ),
        ({"guided_json": {"const": 2**53 + 1}}, "guided_json is refused: the number 9007199254740993 is beyond 2^53"),
        ({"guided_regex": "(?=x)y"}, "guided_regex is refused: invalid regular expression: look-around, including"),
        ({"guided_regex": "[a"}, "guided_regex is refused: invalid regular expression: unclosed character class"),
        ({"guided_grammar": "start: x"}, 'guided_grammar is refused: at 1(8): unknown name: "x"'),
        ({"guided_grammar": "root ::= ("}, "guided_grammar is refused: Failed to convert the grammar from GBNF"),
        (
            {"guided_regex": "a", "ignore_eos": True},
            "ignore_eos cannot be combined with guided_regex: a text that fits ends",
        ),
        ({"guided_regex": "(a{1000}){1000}"}, "guided_regex is refused: lexer error: too many expressions"),
    ],
)
def test_refused(engine: Engine, asked: dict[str, Any], reason: str | None) -> None:
    """With llguidance's reason; what is large takes bounded time, and is refused or not."""
    [completion, other] = texts(engine, [SamplingParams(**asked, max_tokens=3), SamplingParams(max_tokens=3)])
    assert other.error is None
    if reason is not None:
        assert completion.refused
        assert completion.error.startswith(reason)
        assert "\n" not in completion.error


def test_errors_name_what_asked_for_the_form(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the request's own word for it, whoever asked for the same before by another."""

    def error(key: str | None, **asked: Any) -> str | None:
        request = Request(prompt="aa", params=SamplingParams(**asked), form_key=key)
        return engine.generate([request])[0].error

    lasting = {"guided_regex": "a", "ignore_eos": True}
    assert error(None, guided_regex="(a") == "guided_regex is refused: invalid regular expression: unclosed group"
    assert error("--regex", guided_regex="(a") == "--regex is refused: invalid regular expression: unclosed group"
    assert error("x.regex", **lasting) == "ignore_eos cannot be combined with x.regex: a text that fits ends"

    monkeypatch.setattr("detgen.engine.structure._STATES", 100)
    many = {"guided_regex": "(?:[ab]{1,2000}x){3}", "max_tokens": 200, "logit_bias": {0: -100.0}}
    for key in (None, "x.regex"):
        assert str(error(key, **many)).startswith(f"{key or 'guided_regex'} fails at token ")


def test_other_parameters(engine: Engine) -> None:
    """Limits, stop strings, least lengths, penalties and several samples, with a form."""
    asked: list[dict[str, Any]] = [
        {"guided_json": FORM, "max_tokens": 4},
        {"guided_json": FORM, "stop": '"age"', "max_tokens": 60},
        {"guided_choice": ["yes", "no"], "min_tokens": 20, "max_tokens": 30},
        {"guided_regex": "[0-9]+", "min_tokens": 5, "max_tokens": 30, "repetition_penalty": 1.5},
        {"guided_regex": "[0-9]{8}", "stop_token_ids": [engine.tokenizer.encode("7")[-1]], "max_tokens": 30},
        {"guided_choice": ['é\n"\\', "日本"], "logit_bias": {5: 100.0}},
        {"guided_grammar": 'root ::= "a" ("b" | "c")*', "max_tokens": 9, "logprobs": 2},
        {"guided_choice": ["yes", "no"], "temperature": 1.0, "deterministic": False, "n": 2},
    ]
    found = texts(engine, [SamplingParams(**{"seed": 4, **p}) for p in asked])
    within, stopped, least, digits, token, strange, grammar, *several = found
    assert (within.finish_reason, within.text[:1]) == ("length", "{")
    assert (stopped.finish_reason, stopped.stop_reason, stopped.text[-2:]) == ("stop", '"age"', ", ")
    assert least.text in ("yes", "no")
    assert least.finish_reason == "stop", "what is complete ends, whatever the least length is"
    assert len(digits.token_ids) > 5
    assert digits.text.isdigit()
    assert "7" not in token.text
    assert strange.text in ('é\n"\\', "日本")
    assert set(grammar.text) <= set("abc")
    assert grammar.logprobs is not None
    assert any(t[1] > e.logprob for e in grammar.logprobs for t in e.top), "of the model's own distribution"
    assert [c.text in ("yes", "no") for c in several] == [True, True]


def test_what_is_forced_is_drafted(engines: Callable[..., Engine]) -> None:
    """The form's own tokens are never wrong drafts, and the bytes are those without any."""
    request = [Request(prompt="x = ", params=SamplingParams(guided_json=FORM, max_tokens=60))]
    plain, drafted = (engines(drafter=name, batch_size=1) for name in ("none", "grammar"))
    rounds = [max(r.round for r in e.generate(request)[0].records) for e in (plain, drafted)]
    assert plain.generate(request)[0].token_ids == drafted.generate(request)[0].token_ids
    assert rounds[1] < 0.7 * rounds[0]
    statuses = Counter(r.status for r in drafted.generate(request)[0].records if r.drafter == "grammar")
    assert statuses["accepted"] > 5
    assert set(statuses) == {"accepted", "bonus"}


@pytest.mark.parametrize("change", [lambda t: t.enable_truncation(2), lambda t: t.enable_padding(length=40)])
def test_a_tokenizer_that_cuts_or_pads(structures: Structures, change: Callable[[Tokenizer], None]) -> None:
    """What it does to prompts is not done to what a form forces."""
    params = SamplingParams(guided_choice=("a text of many tokens, all forced",))
    changed = Tokenizer.from_str(structures._tokenizer.backend_tokenizer.to_str())
    change(changed)
    other = Structures(SimpleNamespace(backend_tokenizer=changed), "", 4096, frozenset({0}))
    known, found = (Masks(made.of(params)).forced([], 50) for made in (structures, other))  # type: ignore[arg-type]
    assert found == known
    assert len(found) > 5


def test_masks_are_made_while_the_pass_runs(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread of their own; who chooses makes none."""
    engine, makers = engines(drafter="grammar", batch_size=4), Counter[bool]()
    own = Masks.bits

    def bits(self: Masks, depth: int) -> Any:
        makers[threading.current_thread() is threading.main_thread()] += 1
        return own(self, depth)

    monkeypatch.setattr(Masks, "bits", bits)
    params = [SamplingParams(guided_json=FORM, temperature=1.0, seed=i, max_tokens=40) for i in range(6)]
    done = texts(engine, params)
    rows = sum(len(c.token_ids) for c in done)
    assert makers[False] >= rows
    assert not makers[True]

    makers.clear()
    done = texts(engine, [p.model_copy(update={"temperature": 0.0}) for p in params])
    assert not makers[False]
    assert makers[True] < 0.6 * sum(len(c.token_ids) for c in done), "the best logits tell what is chosen"


@pytest.mark.parametrize(
    "asked",
    [
        {"guided_json": FORM},
        {"guided_json": {"type": "object"}},
        {"guided_regex": "[äöüß日本]+x?|a.{2,9}"},
        {"guided_choice": ["a", "abc", "x y z"]},
        {"guided_grammar": 'root ::= "foo" ("fooba" | "bar" [0-9]+)*'},
    ],
)
def test_what_may_come_is_told_as_masks_say(structures: Structures, asked: dict[str, Any]) -> None:
    """Token for token, whichever was asked for first."""
    params, rng = SamplingParams(**asked), random.Random(11)
    own = Structures(structures._tokenizer, "", 4096, frozenset({0}))
    structure, other = structures.of(params), own.of(params)
    assert structure is not None
    assert other is not None
    for _ in range(5):
        text: list[int] = []
        masks = Masks(structure)
        while not text or (text[-1] and len(text) < 40):
            told, whole = masks.after(text), Masks(other).after(text)
            assert told is not None
            assert whole is not None
            every = whole.allowed(4096).nonzero()[0].tolist()
            if told.forced is not None:
                assert every == [told.forced]
            assert [i for i in range(4096) if told.allows(i)] == every
            assert bytes(told.bits) == bytes(whole.bits)
            text.append(rng.choice(every))
        if not text[-1]:
            assert masks.after(text) is None


@pytest.mark.parametrize("asked", [{"guided_json": FORM}, {"guided_choice": ["a", "abc", "x y z"]}])
def test_what_is_forced_is_all_that_may_come(structures: Structures, asked: dict[str, Any]) -> None:
    """One token after the other, the last one of the text too; asking leaves no trace, and a limit is kept."""
    structure, rng = structures.of(SamplingParams(**asked)), random.Random(8)
    assert structure is not None
    count = 0
    for _ in range(6):
        text: list[int] = []
        masks = Masks(structure)
        while True:
            forced, few = masks.forced(text, 30), masks.forced(text, 2)
            assert few == forced[:2]
            count += len(forced)
            for n, token in enumerate(forced):
                mask = Masks(structure).after([*text, *forced[:n]])
                assert mask is not None
                assert mask.forced == token
            mask = masks.after(text)
            assert mask is not None
            text.append(rng.choice([i for i in range(4096) if mask.allows(i)]))
            if text[-1] == 0:
                break
        assert masks.forced(text, 4) == []
    assert count > 20


def test_what_takes_for_ever_is_refused(structures: Structures, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a model is there, and with its tokenizer: here by shorter bounds."""
    patterns = {"type": "string", "allOf": [{"pattern": f".*a.{{{k}}}b"} for k in range(1, 20)]}
    reason = "llguidance cannot read it: it takes more than 0.3 seconds or 2 GiB of memory"
    monkeypatch.setattr(grammars._READ, "_seconds", 0.3)
    assert grammars.fault("guided_json", json.dumps(patterns)) == reason
    monkeypatch.setattr(structures._fault, "_seconds", 0.3)
    with pytest.raises(RequestError, match=f"guided_json is refused: {reason}"):
        structures.of(SamplingParams(guided_json=patterns))


@thorough
def test_sampled_texts_fit_the_distribution(engines: Callable[..., Engine], observe: Callable[..., Any]) -> None:
    """Chi-square at the 0.9999 quantile, against the softmax of the logits that the form allows.

    Of first tokens, and of those that come second after the most frequent first one, many of them drafted.
    """
    engine = engines(drafter="ngram", batch_size=64)
    params = SamplingParams(max_tokens=3, temperature=1.0, seed=77, n=1500, guided_regex="[0-9a-f]{2,6}")
    found = list(observe(engine, [Request(0, 0, prompt="for i in range(", params=params)]).values())
    structure = Structures(engine.tokenizer, "", engine.vocabulary, frozenset({0})).of(params)
    assert structure is not None
    first: list[int] = []
    for place in range(2):
        same = [one for one in found if [*one.completion.token_ids[:place]] == first]
        # Of one to which nothing was drafted until then, each pass has one row.
        logits = next(
            o.logits[place][0] for o in same if all(len(rows) == 1 for rows in o.logits[: place + 1])
        ).double()
        allowed = Masks(structure).after(first)
        assert allowed is not None
        logits[~torch.from_numpy(allowed.allowed(engine.vocabulary))] = -torch.inf
        counts, shares = Counter(one.completion.token_ids[place] for one in same), torch.softmax(logits, 0).tolist()
        common = {i: len(same) * p for i, p in enumerate(shares) if len(same) * p >= 5}
        assert all(shares[i] for i in counts)
        rest = len(same) - sum(common.values())
        chi = sum((counts[i] - want) ** 2 / want for i, want in common.items())
        chi += (len(same) - sum(counts[i] for i in common) - rest) ** 2 / rest if rest > 1 else 0
        freedom = len(common) - (rest <= 1)
        assert freedom >= 4
        assert chi < freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
        first = [counts.most_common(1)[0][0]]


@pytest.mark.parametrize(
    "asked", [{"guided_json": FORM}, {"guided_json": {"type": "object"}}, {"guided_regex": "a.{2,9}|b+"}]
)
def test_masks_remember_nothing(structures: Structures, asked: dict[str, Any]) -> None:
    """Whatever was asked before, of drafts that were rolled back and did not fit: the answer is that of a new one."""
    params = SamplingParams(**asked)
    structure = structures.of(params)
    other = Structures(structures._tokenizer, "", 4096, frozenset({0})).of(params)
    assert structure is not None
    assert other is not None
    rng = random.Random(3)
    for _ in range(4):
        text: list[int] = []
        masks = Masks(structure)
        while len(text) < 25:
            mask, new = masks.after(text), Masks(other).after(text)
            assert mask is not None
            assert new is not None
            assert bytes(mask.bits) == bytes(new.bits)
            some = [i for i in range(4096) if mask.allows(i)]
            if (token := rng.choice(some)) == 0:
                break
            draft = [rng.choice(some), *(rng.randrange(4096) for _ in range(rng.randrange(4)))]
            for n in range(len(draft) + 1):
                masks.after([*text, *draft[:n]])
            text.append(token)


def test_a_limit_of_one_text_is_none_of_another(structures: Structures, monkeypatch: pytest.MonkeyPatch) -> None:
    """States of other texts do not count; a text that needs too many itself ends with an error."""
    monkeypatch.setattr("detgen.engine.structure._STATES", 200)
    params = SamplingParams(guided_regex="(?:[ab]{1,2000}x){3}")
    structure = Structures(structures._tokenizer, "", 4096, frozenset({0})).of(params)
    assert structure is not None
    a, b = (structures._tokenizer.encode(t, add_special_tokens=False)[0] for t in "ab")
    longest = Masks(structure)
    errors = [told(longest.after([a] * n)) for n in range(0, 300)]
    assert "too many states" in errors[-1]
    first = next(n for n, error in enumerate(errors) if error)
    other = Masks(structure)
    assert not any(told(other.after([b] * n)) for n in range(first))
    assert told(other.after([b] * first))


def told(mask: Any) -> str:
    """Why a mask cannot be told."""
    assert mask is not None
    _ = mask.bits
    error: str = mask.error
    return error


def test_a_failure_ends_one_sample(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason, at the same token whoever drafts; neighbours go on."""
    monkeypatch.setattr("detgen.engine.structure._STATES", 100)
    params = SamplingParams(guided_regex="(?:[ab]{1,2000}x){3}", max_tokens=200, logit_bias={0: -100.0})
    errors = []
    for settings in ({"drafter": "none", "batch_size": 1}, {"drafter": "model", "batch_size": 3}):
        bad, good = engines(**settings).generate([Request(prompt="aa", params=params), Request(prompt="x =")])
        errors.append(bad.error)
        assert good.error is None
    assert errors[0] is not None
    assert errors[0].startswith("guided_regex fails at token ")
    assert errors[0] == errors[1]


def test_a_model_without_an_end(structures: Structures) -> None:
    with pytest.raises(RequestError, match="guided_regex needs a model with an end-of-sequence token"):
        Structures(structures._tokenizer, "m", 4096, frozenset()).of(SamplingParams(guided_regex="a"))


def test_a_form_whose_masks_take_long_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sequences would wait for them."""
    monkeypatch.setattr("detgen.engine.structure._PATIENCE", -1.0)
    made = Structures(engine.tokenizer, "the model", engine.vocabulary, frozenset({0}))
    with pytest.raises(
        RequestError, match="guided_regex is refused: llguidance takes more than -1 seconds for 16 tokens"
    ):
        made.of(SamplingParams(guided_regex="[a-z]{9}q"))
