"""Schemas as llguidance is given them: what fits its reading of one fits the schema, or the schema is refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from detgen.engine.grammars import as_grammar
from detgen.engine.schemas import exact
from detgen.errors import DEMO, RequestError

FAR = 2**53 + 1  # no double is this number


@pytest.fixture(scope="module")
def llguidance_tokenizer() -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer((DEMO / "target" / "tokenizer.json").read_text(), eos_token=0)


def fits(tokenizer: Any, schema: Any, text: str) -> bool:
    """By the masks."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, as_grammar("guided_json", json.dumps(schema)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"enum": [1, FAR]}, f"the number {FAR} is beyond 2^53, where numbers are not exact; make it a string"),
        ({"const": {"a": [-FAR]}}, f"the number -{FAR} is beyond 2^53"),
        ({"properties": {"a": {"items": {"minimum": 1e30}}}}, "minimum 1e+30 is beyond 2^53, where numbers are not"),
        ({"properties": {"const": {"minimum": FAR}}}, f"minimum {FAR} is beyond 2^53"),
        ({"exclusiveMaximum": -FAR}, f"exclusiveMaximum -{FAR} is beyond 2^53"),
        ({"type": "object", "minProperties": 1}, "minProperties counts keys of any name, one of which may be written"),
        ({"minProperties": 2, "required": ["a"], "additionalProperties": {"type": "null"}}, "minProperties counts"),
        ({"minProperties": 1, "additionalProperties": False, "patternProperties": {"a": {}}}, "minProperties counts"),
        ({"enum": [1, {"a": ["b\x01"]}]}, r"the string 'b\x01' has a control character, which cannot be written"),
        ({"const": "\x7f"}, r"the string '\x7f' has a control character"),
        ({"pattern": r"a\vb"}, r"the pattern 'a\\vb' asks for a control character, which cannot be written"),
        ({"patternProperties": {"^\x1f": {}}}, r"the pattern '^\x1f' asks for a control character"),
        *(
            ({"items": {"pattern": pattern}}, "the pattern ")
            for pattern in (
                r"\x01",
                r"\u007F",
                r"\x{0b}",
                r"\u{1}",
                r"\U0000001f",
                r"[\x01]b",
                r"[\v\a]",
                r"[\x01-\x01]",
                "[[\0]]",
            )
        ),
    ],
)
def test_what_llguidance_would_not_keep_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(RequestError) as refused:
        as_grammar("guided_json", json.dumps(schema))
    assert str(refused.value).startswith(reason)


def nested(depth: int) -> str:
    return '{"items": ' * depth + "{}" + "}" * depth


def test_a_schema_without_any_of_that_stays_as_it_is() -> None:
    kept = (
        {"enum": [2**53, 1e300, "9007199254740993", True]},
        {"properties": {"minimum": {"type": "string"}, "enum": {"const": -(2**53)}}, "minProperties": 0},
        {"minProperties": 1, "required": ["a"]},
        {"properties": {"minProperties": {"type": "null"}, "maximum": {}}, "const": {"maximum": 3, "minProperties": 1}},
        {"minProperties": 2, "properties": {"a": {}, "b": {}}, "additionalProperties": False},
        {"maximum": 3, "exclusiveMinimum": True},
        {"const": "\b\t\n\f\r\x80", "properties": {"\x01": {"pattern": "^x"}, "pattern": {"enum": ["\\x01"]}}},
        *(
            {"pattern": p}
            for p in ("^[^\x00/]+$", r"[ \v]", r"[^\x01-\x1f]", r"\\x01", r"\[\\v\]", r"[]\x01]", r"\x41\t\x0a")
        ),
        True,
        ["a"],
    )
    for schema in kept:
        assert exact(text := json.dumps(schema, indent=1)) is text
    with pytest.raises(RequestError, match="nested too deeply"):
        exact(nested(100_000))


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"type": "integer", "maximum": 2**63 - 1}, (0, 2**53, 2**53 + 2, 2**63, -5)),
        ({"type": "integer", "minimum": -(10**30), "exclusiveMaximum": 10**30}, (0, -(2**53), -(10**31), 10**30)),
        ({"type": "array", "items": {"type": "null"}, "uniqueItems": False}, ([], [None, None], [1])),
        ({"enum": [2**53, 3]}, (2**53, 2**53 + 1, 3)),
        (
            {"type": "string", "format": "date", "allOf": [{"pattern": "29$"}]},
            ("2023-02-29", "2024-02-29", "1900-02-29", "2000-02-29", "2023-03-29", "2023-10-29", "2024-02-28"),
        ),
        ({"properties": {"a": {"format": "date"}}}, ({"a": "2023-02-29"}, {"a": "2023-02-28"}, {"a": 3})),
    ],
)
def test_what_the_masks_let_through_fits(llguidance_tokenizer: Any, schema: Any, texts: tuple[Any, ...]) -> None:
    """Of each, something does."""
    let_through = [value for value in texts if fits(llguidance_tokenizer, schema, json.dumps(value))]
    assert let_through
    for value in let_through:
        jsonschema.validate(value, schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


@pytest.mark.parametrize(
    ("schema", "fitting", "others"),
    [
        (
            {"properties": {"a": {"type": "null"}}},
            ['{"a": null}', '{"b": 3, "é\\n": ""}'],
            [r'{"\u0061": 3}', r'{"b": 3, "\u0061": 3}', r'{"x": "\u0061"}', r'{"\u000a": 3}'],
        ),
        (
            {"patternProperties": {"^b": {"type": "null"}}},
            ['{"bc": null}', '{"a": 3}'],
            [r'{"\u0062c": 3}', r'{"\u0062c": null}'],
        ),
        (
            {"properties": {"a\n\t/": {"type": "null"}, "\x01": {"type": "null"}}},
            [r'{"a\n\t/": null}', r'{"\u0001": null}', '{"a": 3}'],
            [r'{"a\n\t/": 3}', r'{"a\n\t\/": 3}', r'{"a\u000a\t/": 3}', r'{"\u0001": 3}', r'{"\u0002": 3}'],
        ),
    ],
)
def test_no_escape_gets_a_key_around_the_schema_of_its_property(
    llguidance_tokenizer: Any, schema: Any, fitting: list[str], others: list[str]
) -> None:
    """In objects whose keys may have any name."""
    schema = {"type": "object", **schema}
    assert [text for text in [*fitting, *others] if fits(llguidance_tokenizer, schema, text)] == fitting
    for text in fitting:
        jsonschema.validate(json.loads(text), schema)


def test_dates_are_those_of_the_calendar(llguidance_tokenizer: Any) -> None:
    """February has a 29th in leap years, also where a time follows."""
    days = [f"{year}-02-29" for year in (1600, 1700, 1996, 1997, 2000, 2023, 2024, 2100)]
    for schema, rest in (({"format": "date"}, ""), ({"format": "date-time"}, "T00:00:00Z")):
        fitting = [day for day in days if fits(llguidance_tokenizer, schema, json.dumps(day + rest))]
        assert fitting == ["1600-02-29", "1996-02-29", "2000-02-29", "2024-02-29"]
