"""CSV: cells become values of their columns' types; broken rows stop nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.reading import read, write

from detgen.engine.request import Request
from detgen.errors import PromptsError
from detgen.params import SamplingParams
from detgen.prompts import BadLine, open_prompts


def test_csv_cells_have_their_columns_types(tmp_path: Path) -> None:
    text = (
        "\ufeffid,prompt,max_tokens,temperature,deterministic,stop,task,messages\n"
        '7,"two\nlines, ""quoted""",3,0.25,FALSE,.,5,\n'
        "\n"
        ',b,4.0,,,"[""x"", ""y""]",,\n'
        ',,,,,,,"[{""role"": ""user"", ""content"": ""hi""}]"\n'
        "e,,,,,,,\n"
        "f,p,many,,,,,\n"
        "g,p,,,perhaps,,,\n"
        "h,p,,,,,,,9\n"
        ",short\n"
    )
    items = read(write(tmp_path, "p.csv", text))
    first, second, chat, *bad, short = items
    assert first == Request(
        index=0, id="7", prompt='two\nlines, "quoted"', metadata={"task": "5"}, line=2,
        params=SamplingParams(max_tokens=3, temperature=0.25, deterministic=False, stop=(".",)),
    )  # fmt: skip
    assert isinstance(second, Request)
    assert (second.id, second.params.max_tokens, second.params.stop) == ("5", 4, ("x", "y"))
    assert isinstance(chat, Request)
    assert (chat.prompt, chat.messages) == (None, [{"role": "user", "content": "hi"}])
    assert [(item.id, item.error) for item in bad if isinstance(item, BadLine)] == [
        ("e", "p.csv:7: prompt is empty"),
        ("f", "p.csv:8: max_tokens must be a whole number of at least 1, got 'many'"),
        ("g", "p.csv:9: deterministic must be true or false, got 'perhaps'"),
        ("10", "p.csv:10: 9 cells under 8 columns; quote a cell that holds a comma"),
    ]
    assert isinstance(short, Request)
    assert short.prompt == "short"


def test_csv_takes_long_prompts_and_goes_on_after_broken_rows(tmp_path: Path) -> None:
    data = b"prompt,x\n" + b"a" * 300_000 + b',1\n"b"c,2\n\xff,3\nd,4\n"open,5\n'
    items = read(write(tmp_path, "p.csv", data))
    assert [len(getattr(item, "prompt", "")) for item in items] == [300_000, 0, 0, 1, 0]
    errors = [item.error for item in items if isinstance(item, BadLine)]
    assert errors == [
        "p.csv:3: not valid CSV: ',' expected after '\"'",
        "p.csv:4: not valid UTF-8",
        "p.csv:6: not valid CSV: unexpected end of data",
    ]


def test_a_table_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match="no column prompt or messages among question, answer; rename one of them"):
        open_prompts(str(write(tmp_path, "p.csv", "question,answer\na,b\n"))).inspect()
