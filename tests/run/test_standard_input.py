"""Prompts that are piped in: kept in the folder, so that a run can be resumed without them."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.fakes import NAMES, content, go, lines, no_engine, stopping_at

from detgen.errors import RunError


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def feed(data: bytes) -> None:
        stream = SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: False)
        monkeypatch.setattr(sys, "stdin", stream)

    return feed


def test_standard_input_is_kept_for_resuming(
    tmp_path: Path, prompts: Path, pipe: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = prompts.read_bytes()
    pipe(data)
    monkeypatch.chdir(tmp_path)
    assert go("-", None, build=stopping_at(4)).output == Path("stdin-out")
    out = tmp_path / "stdin-out"
    assert (out / "stdin.jsonl").read_bytes() == data
    pipe(data)
    assert go("-", None, build=stopping_at(2)).resumed > 0
    pipe(b"")
    assert go("-", None).status == "finished"
    assert lines(out / "outputs.jsonl")[3]["error"] == "stdin:4: prompt must be a string, got a number"
    go(prompts, tmp_path / "whole")
    renamed = (tmp_path / "whole" / "outputs.jsonl").read_bytes().replace(b"prompts.jsonl:", b"stdin:")
    assert (out / "outputs.jsonl").read_bytes() == renamed
    pipe(data)
    assert go("-", None).status == "already finished"
    assert sorted(path.name for path in out.iterdir()) == sorted([*NAMES, "stdin.jsonl"])


def test_standard_input_of_nothing(tmp_path: Path, pipe: Callable[[bytes], None]) -> None:
    pipe(b"")
    with pytest.raises(RunError, match="no prompts on standard input; pipe JSON lines into detgen, or name a file"):
        go("-", tmp_path / "out", build=no_engine)
    pipe(b"\n\n")
    with pytest.raises(RunError, match="no prompts in standard input"):
        go("-", tmp_path / "out", build=no_engine)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", [b"Tell me a joke.\nAnd another one.\n", b'"a text"\n', b"[1]\n7\n", b"\xff{\n"])
def test_plain_text_is_refused_before_a_model_is_loaded(
    tmp_path: Path, pipe: Callable[[bytes], None], text: bytes
) -> None:
    pipe(text)
    with pytest.raises(RunError, match=r"no line of standard input is a JSON object; pipe lines such as .* \.txt file"):
        go("-", tmp_path / "out", build=no_engine)
    assert not (tmp_path / "out").exists()
    pipe(text + b'{"prompt": "x"}\n')
    assert go("-", tmp_path / "out").written.samples == 1


def test_a_terminal_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(RunError, match="no prompts on standard input"):
        go("-", tmp_path / "out", build=no_engine)


def test_overwrite_without_new_input_spares_the_old_run(
    tmp_path: Path, prompts: Path, pipe: Callable[[bytes], None]
) -> None:
    pipe(prompts.read_bytes())
    go("-", tmp_path / "out")
    before = content(tmp_path / "out")
    pipe(b"")
    with pytest.raises(RunError, match="no prompts on standard input"):
        go("-", tmp_path / "out", build=no_engine, overwrite=True)
    assert content(tmp_path / "out") == before
    pipe(b'{"prompt": "other"}\n')
    assert go("-", tmp_path / "out", overwrite=True).written.prompts == 1


def test_other_input_takes_what_the_earlier_run_finished(
    tmp_path: Path, prompts: Path, pipe: Callable[[bytes], None]
) -> None:
    out = tmp_path / "out"
    data = prompts.read_bytes()
    pipe(data)
    go("-", out)
    pipe(data + b'\n{"prompt": "new"}\n')
    summary = go("-", out, build=stopping_at(1))
    assert (summary.status, summary.resumed) == ("interrupted", 15)
    pipe(b"")
    assert go("-", out, limit=4).status == "finished", "what was piped last, with another limit"
    assert (out / "stdin.jsonl").read_bytes() == data + b'\n{"prompt": "new"}\n'
    pipe(b"")
    assert go("-", out).resumed == 15, "what the last run left out stays"
    assert go(prompts, out).resumed == 15
    assert sorted(path.name for path in out.iterdir()) == sorted(NAMES)
    go(prompts, tmp_path / "whole")
    assert content(out) == content(tmp_path / "whole")
