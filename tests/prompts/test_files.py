"""Whatever the form: names that tell nothing, files without prompts, files that change, and memory."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pytest
from helpers.reading import DEFAULTS, write

from detgen.engine.request import Request
from detgen.errors import PromptsError
from detgen.prompts import open_prompts


@pytest.mark.parametrize(
    ("name", "data"), [("p.jsonl", ""), ("p.jsonl", " \n\n"), ("p.txt", ""), ("p.csv", "prompt\n"), ("p.json", "[]")]
)
def test_no_prompts(tmp_path: Path, name: str, data: str) -> None:
    with pytest.raises(PromptsError, match=rf"no prompts in .*{name}"):
        open_prompts(str(write(tmp_path, name, data))).inspect()


def test_names_that_nothing_can_be_read_from(tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match=r"there is no file .*missing\.jsonl"):
        open_prompts(str(tmp_path / "missing.jsonl"))
    for name in ("prompts", "p.yaml", "p.parquet.gz", "p.gz", ".jsonl"):
        with pytest.raises(PromptsError, match=rf"{name}: its name does not say what it holds; it must end in \.jsonl"):
            open_prompts(str(write(tmp_path, name, "x")))
    with pytest.raises(PromptsError, match="File name too long; name a file with prompts in it"):
        open_prompts("Write a poem. " * 40)
    with pytest.raises(PromptsError, match="a dataset's name is missing"):
        open_prompts("hf://?split=test")


def test_a_named_pipe_is_refused_since_it_could_be_read_only_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.jsonl")
    with pytest.raises(PromptsError, match=r"p\.jsonl is not a regular file; pass - and pipe to stdin"):
        open_prompts(str(tmp_path / "p.jsonl"))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(PromptsError, match="needs the package zstandard: pip install zstandard"):
        open_prompts(str(write(tmp_path, "p.jsonl.zst", b"x"))).inspect()


def test_a_file_that_changes_under_the_run_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path, "p.jsonl", '{"prompt": "a"}\n')
    source = open_prompts(str(path))
    source.inspect()
    source.check_unchanged()
    write(tmp_path, "p.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(PromptsError, match="changed while it was read"):
        source.check_unchanged()


@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.txt", "p.csv", "p.jsonl.gz"])
def test_readers_hold_one_record_at_a_time(tmp_path: Path, name: str) -> None:
    prompts = [f"prompt number {n}" for n in range(8_000)]
    objects = [json.dumps({"prompt": prompt}) for prompt in prompts]
    data = {
        "p.jsonl": "\n".join(objects),
        "p.json": "[" + ",".join(objects) + "]",
        "p.txt": "\n".join(prompts),
        "p.csv": "prompt\n" + "\n".join(prompts),
        "p.jsonl.gz": gzip.compress("\n".join(objects).encode()),
    }[name]
    source = open_prompts(str(write(tmp_path, name, data)))
    tracemalloc.start()
    try:
        source.inspect()
        last = None
        for item in source.read(DEFAULTS):
            last = item
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(last, Request)
    assert last.prompt == prompts[-1]
    assert peak < (4 if name.endswith(".gz") else 1) << 20  # all of them at once take 2.7 MiB, and gzip 2.6
