"""A line that is too long is an error in its place, and is not held in memory; other lines run."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from helpers.examples import examples
from helpers.reading import DEFAULTS, json_values, read, write
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from detgen.cli import app
from detgen.engine.request import Request
from detgen.errors import PromptsError
from detgen.prompts import BadLine, open_prompts
from detgen.prompts.array import LONGEST, array_elements

LIMIT = 1 << 20
SAID = "longer than 64 MiB, the most that is read; shorten the prompt, or divide it"


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def limit(size: int) -> None:
        for module in ("array", "formats"):
            monkeypatch.setattr(f"detgen.prompts.{module}.LONGEST", size)

    return limit


def test_the_limit_is_what_is_said() -> None:
    assert LONGEST == 64 * 2**20


@pytest.mark.parametrize("name", ["p.jsonl", "p.ndjson", "p.txt", "p.jsonl.gz", "p.txt.zst"])
def test_lines(tmp_path: Path, limited: Callable[[int], None], name: str) -> None:
    """Up to the limit with its end; the first, one in between, and the last, which has no end; one of white space."""
    limited(100)
    wrap = ("", "") if "txt" in name else ('{"prompt": "', '"}')
    lengths = [99, 100, 101, 5000, 3, 99, 300]
    lines = [wrap[0] + "x" * (length - len("".join(wrap))) + wrap[1] for length in lengths[:4]]
    lines += [lines[0][:9] if "txt" in name else lines[0], "", lines[0], " " * 5000, lines[3]]
    data = "\n".join(lines).encode()
    compress = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}.get(name[-3:].strip("."), bytes)
    path = write(tmp_path, name, compress(data))
    items = read(path)
    assert [(item.line, getattr(item, "error", None)) for item in items] == [
        *((1, None), (2, f"{path.name}:2: {SAID}"), (3, f"{path.name}:3: {SAID}"), (4, f"{path.name}:4: {SAID}")),
        *((5, None), (7, None), (8, f"{path.name}:8: {SAID}"), (9, f"{path.name}:9: {SAID}")),
    ]
    assert open_prompts(str(path)).inspect().prompts == 8


LONG = [
    *(
        '"' + "x" * 500 + '"',
        '{"prompt": "' + 'a\\"]}\\\\' * 100 + '", "id": "x"}',
        "[" * 20 + "1, " * 300 + "2" + "]" * 20,
    ),
    *("1" * 500, '{"prompt": [' + '{"a": "]"}, ' * 99 + "{}]}"),
]


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_elements(tmp_path: Path, limited: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Whatever they hold, and wherever the chunks of the file end."""
    limited(100)
    monkeypatch.setattr("detgen.prompts.array._CHUNK", chunk)
    path = write(tmp_path, "p.json", "[" + ", ".join(f'"a",\n {long}' for long in LONG) + "]")
    for number, item in enumerate(read(path), 1):
        if number % 2:
            assert isinstance(item, Request)
        else:
            assert isinstance(item, BadLine)
            assert item.error == f"p.json:{number}: {SAID}"
    assert number == 2 * len(LONG)


@given(st.lists(json_values.filter(lambda value: value == value), max_size=5), st.text('a\\"[]{},', max_size=30))
@examples(40)
def test_elements_of_all_kinds(values: list[object], text: str) -> None:
    values = [text, *values, [text]]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("detgen.prompts.array.LONGEST", 12)
        patched.setattr("detgen.prompts.array._CHUNK", 3)
        found = list(array_elements(io.BytesIO(json.dumps(values).encode()), "x"))
    elements = [json.dumps(value) for value in values]
    assert found == [(i, element if len(element) <= 12 else "") for i, element in enumerate(elements, 1)]


def test_an_element_without_an_end(tmp_path: Path, limited: Callable[[int], None]) -> None:
    limited(100)
    path = write(tmp_path, "p.json", '["a", ["' + "x" * 10**6)
    with pytest.raises(PromptsError, match=r"p\.json:1: not valid JSON: .* element 2"):
        open_prompts(str(path)).inspect()


@pytest.mark.parametrize("row", ["x" * 200, '"' + "x\n" * 100 + '"', ",".join(["x" * 40] * 5)])
def test_rows(tmp_path: Path, limited: Callable[[int], None], row: str) -> None:
    """A table is refused: where a row ends is known from its beginning only."""
    limited(150)
    path = write(tmp_path, "p.csv", f"prompt,b,c,d,e\n{'x' * 140},,,,\n{row}\na,,,,\n")
    with pytest.raises(PromptsError, match=rf"p\.csv:\d+: the row is {SAID}; a quote may be missing before"):
        open_prompts(str(path)).inspect()


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "p.jsonl.zst", "p.json"])
def test_memory(tmp_path: Path, limited: Callable[[int], None], name: str) -> None:
    """The memory that is taken has nothing to do with the length of a line; zstandard's blocks are the largest part."""
    limited(LIMIT)
    line = b'{"prompt": "' + b"x" * (64 << 20) + b'"}'
    data = b"[" + line + b', "a"]' if name == "p.json" else line + b'\n{"prompt": "a"}\n'
    compress = {"gz": lambda b: gzip.compress(b, 1), "zst": zstandard.ZstdCompressor().compress}
    path = write(tmp_path, name, compress.get(name.rpartition(".")[2], bytes)(data))
    del line, data
    source = open_prompts(str(path))
    tracemalloc.start()
    try:
        assert source.inspect().prompts == 2
        found = list(source.read(DEFAULTS))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [getattr(item, "error", None) for item in found] == [f"{name}:1: {SAID}", None]
    assert peak < (24 << 20 if name.endswith("zst") else 12 << 20)


def test_standard_input(tmp_path: Path, limited: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run writes the error, and runs the other lines."""
    limited(1000)
    monkeypatch.chdir(tmp_path)
    lines = "".join(json.dumps({"prompt": text}) + "\n" for text in ("def f(", "x" * 2000, "import os"))
    done = CliRunner().invoke(app, ["run", "-", "-o", "out", "--max-tokens", "4"], input=lines)
    assert done.exit_code == 0, done.stderr
    outputs = [json.loads(line) for line in (tmp_path / "out/outputs.jsonl").read_text().splitlines()]
    assert [output.get("error") for output in outputs] == [None, f"stdin:2: {SAID}", None]
