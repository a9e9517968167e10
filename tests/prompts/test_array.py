"""A JSON array is read element by element, wherever the chunks of the file end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.examples import examples
from helpers.reading import json_values, read, write
from hypothesis import given
from hypothesis import strategies as st

from detgen.errors import PromptsError
from detgen.prompts import BadLine, open_prompts
from detgen.prompts.array import _CHUNK


def test_json_array(tmp_path: Path) -> None:
    text = '\ufeff [ {"prompt": "a", "id": "x"},\n"b", 3, {"prompt": NaN}, [], {"prompt": "\\ud83d\\ude00 é"} ]\n'
    items = read(write(tmp_path, "p.json", text))
    assert [item.id for item in items] == ["x", "2", "3", "4", "5", "6"]
    assert [getattr(item, "prompt", None) for item in items] == ["a", "b", None, None, None, "😀 é"]
    assert [item.error for item in items if isinstance(item, BadLine)] == [
        'p.json:3: a prompt must be an object such as {"prompt": "..."}, got a number',
        "p.json:4: not valid JSON: NaN is not a JSON value",
        'p.json:5: a prompt must be an object such as {"prompt": "..."}, got a list',
    ]


def test_json_array_with_bytes_that_are_no_text(tmp_path: Path) -> None:
    items = read(write(tmp_path, "p.json", b'["a", "\xff", "b"]'))
    assert [getattr(item, "error", item.id) for item in items] == [1, "p.json:2: not valid UTF-8 at byte 2", 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}', "not a JSON array of prompts"),
        ('["a",\n"b" "c"]', ":2: not valid JSON: expected a comma or ] after element 2"),
        ('["a",\n{"prompt": }]', ":2: not valid JSON: Expecting value in element 2"),
        ('["a", "b', ":1: not valid JSON: Unterminated string starting in element 2"),
        ('["a", "b"', ":1: not valid JSON: expected a comma or ] after element 2"),
        ('["a",]', ":1: not valid JSON: a comma without an element after element 1"),
        ('["a"] x', ":1: not valid JSON: text after the end of the array, after element 1"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_broken_array_is_refused_before_the_run(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PromptsError, match=r"p\.json") as refusal:
        open_prompts(str(write(tmp_path, "p.json", text))).inspect()
    assert message in str(refusal.value)


@given(st.lists(json_values.filter(lambda v: v == v), min_size=1), st.integers(0, 3), st.integers(-40, 10))
@examples(40)
def test_an_array_is_cut_right_wherever_a_chunk_ends(values: list[object], indent: int, shift: int) -> None:
    import io

    from detgen.prompts.array import array_elements

    filler = "x" * (_CHUNK - 8 + shift)
    text = json.dumps([filler, *values], indent=indent or None)
    elements = [element for _, element in array_elements(io.BytesIO(text.encode()), "p")]
    assert [json.dumps(json.loads(element)) for element in elements] == [json.dumps(v) for v in [filler, *values]]
