"""Lines of JSON or text, compressed or not, and Parquet."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest
import zstandard
from helpers.reading import DEFAULTS, read, write

from detgen.engine.request import Request
from detgen.errors import PromptsError
from detgen.prompts import BadLine, open_prompts

LINES = b"".join(b'{"prompt": "prompt %d"}\n' % n for n in range(5000))


def test_blank_lines_do_not_count_and_ids_are_line_numbers(tmp_path: Path) -> None:
    path = write(
        tmp_path, "p.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b", "id": 9}\n{"prompt": "c"}'
    )
    assert [(item.index, item.id, item.line) for item in read(path)] == [(0, 1, 1), (1, 9, 4), (2, 5, 5)]
    assert open_prompts(str(path)).inspect().prompts == 3


def test_limit_takes_the_first(tmp_path: Path) -> None:
    assert [item.id for item in read(write(tmp_path, "p.jsonl", '{"prompt": "a"}\n' * 5), limit=2)] == [1, 2]


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_compressed_lines(tmp_path: Path, ending: str, frames: int) -> None:
    compress = gzip.compress if ending == "gz" else zstandard.ZstdCompressor().compress
    data = compress(LINES) * frames
    path = write(tmp_path, f"p.jsonl.{ending}", data)
    source = open_prompts(str(path))
    inspection = source.inspect()
    assert inspection.prompts == 5000 * frames
    assert inspection.sha256 == hashlib.sha256(data).hexdigest()
    prompts = [item.prompt for item in source.read(DEFAULTS) if isinstance(item, Request)]
    assert prompts == [f"prompt {n}" for n in range(5000)] * frames
    assert source.stem == "p"


@pytest.mark.parametrize("ending", ["gz", "zst"])
@pytest.mark.parametrize("damage", ["cut", "foreign"])
def test_damaged_compression_is_refused_before_the_run(tmp_path: Path, ending: str, damage: str) -> None:
    compress = gzip.compress if ending == "gz" else zstandard.ZstdCompressor().compress
    data = compress(LINES)[:-20] if damage == "cut" else LINES
    with pytest.raises(PromptsError, match=rf"p\.jsonl\.{ending} is damaged and cannot be decompressed"):
        open_prompts(str(write(tmp_path, f"p.jsonl.{ending}", data))).inspect()


def test_text_has_a_prompt_a_line(tmp_path: Path) -> None:
    items = read(write(tmp_path, "p.txt", b"  first \r\n\n\xff\nlast"))
    assert [(item.line, getattr(item, "prompt", None)) for item in items] == [(1, "  first "), (3, None), (4, "last")]
    assert items[1] == BadLine(1, 3, 3, "p.txt:3: not valid UTF-8 at byte 1")


def test_parquet(tmp_path: Path) -> None:
    import datetime

    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = 3000
    table = pa.table(
        {
            "prompt": pa.array([f"p{n}" for n in range(rows)]),
            "max_tokens": pa.array([5.0, None] + [6.0] * (rows - 2)),
            "messages": pa.array([None] * rows, pa.list_(pa.struct([("role", pa.string())]))),
            "day": pa.array([datetime.date(2024, 1, 2)] * rows),
            "blob": pa.array([b"x"] * rows),
            "score": pa.array([float("nan")] * rows),
        }
    )
    pq.write_table(table, tmp_path / "p.parquet", row_group_size=700)
    source = open_prompts(str(tmp_path / "p.parquet"))
    assert source.inspect().prompts == rows
    items = [item for item in source.read(DEFAULTS) if isinstance(item, Request)]
    assert [(item.id, item.prompt) for item in items] == [(n + 1, f"p{n}") for n in range(rows)]
    assert [item.params.max_tokens for item in items[:3]] == [5, 7, 6]
    assert items[0].metadata == {"day": "2024-01-02", "score": None}


def test_parquet_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match="is not a Parquet file that can be read"):
        open_prompts(str(write(tmp_path, "p.parquet", b"PAR1 nothing of the kind"))).inspect()
