"""Short ways to write an input and read it, and JSON of any kind."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from detgen.engine.request import Request
from detgen.params import SamplingParams
from detgen.prompts import BadLine, open_prompts

DEFAULTS = SamplingParams(max_tokens=7, temperature=0.5, stop=("END",))


def read(path: Path | str, limit: int | None = None) -> list[Request | BadLine]:
    source = open_prompts(str(path))
    source.inspect()
    return list(source.read(DEFAULTS, limit))


def write(folder: Path, name: str, data: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def one(folder: Path, line: str | bytes) -> Request | BadLine:
    (item,) = read(write(folder, "p.jsonl", line))
    return item


def error(folder: Path, line: str | bytes) -> str:
    item = one(folder, line)
    assert isinstance(item, BadLine)
    return item.error


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
