"""Prompts under another key or column, and further endings of names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.reading import DEFAULTS, write

from detgen.engine.request import Request
from detgen.errors import PromptsError
from detgen.prompts import BadLine, open_prompts
from detgen.prompts.formats import spooled_prompts

ROWS = [{"q": "first", "prompt": "other", "n": 2}, {"q": "second", "prompt": "other", "task": "t"}]


def read(given: Path | str, column: str | None) -> list[Request | BadLine]:
    source = open_prompts(str(given), column)
    source.inspect()
    return list(source.read(DEFAULTS))


def table(folder: Path, ending: str) -> Path:
    """The rows in a file of that ending."""
    path = folder / f"p.{ending}"
    if ending == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist([{**dict.fromkeys(("q", "prompt", "n", "task")), **r} for r in ROWS]), path)
    elif ending == "json":
        path.write_text(json.dumps(ROWS))
    elif ending in ("jsonl", "ndjson"):
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        separator = "\t" if ending == "tsv" else ","
        path.write_text("\n".join(separator.join(row) for row in (("q", "prompt", "n"), ("first", "other", "2"))))
    return path


@pytest.mark.parametrize("ending", ["jsonl", "ndjson", "json", "csv", "tsv", "parquet"])
def test_the_column_is_the_prompt(tmp_path: Path, ending: str) -> None:
    path = table(tmp_path, ending)
    chosen = read(path, "q")[0]
    assert isinstance(chosen, Request)
    assert (chosen.prompt, chosen.params.n, "prompt" in chosen.metadata) == ("first", 2, False)
    usual = read(path, None)[0]
    assert isinstance(usual, Request)
    assert (usual.prompt, usual.metadata["q"]) == ("other", "first")


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
def test_a_table_without_the_column_is_refused(tmp_path: Path, ending: str) -> None:
    with pytest.raises(PromptsError, match=r"p\.\w+: no column text; choose from q, prompt, n"):
        open_prompts(str(table(tmp_path, ending)), "text").inspect()


def test_a_line_without_the_key_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "p.jsonl", '{"prompt": "a"}\n{"q": null}\n{"q": ""}\n{"q": 3}\n"text"\n{"q": "b"}\n')
    items = read(path, "q")
    assert [getattr(item, "error", "") for item in items] == [
        "p.jsonl:1: there is no 'q', which --prompt-column names",
        "p.jsonl:2: neither prompt nor messages is given",
        "p.jsonl:3: prompt is empty",
        "p.jsonl:4: prompt must be a string, got a number",
        'p.jsonl:5: a prompt must be an object such as {"prompt": "..."}, got a string',
        "",
    ]


def test_a_column_may_hold_chats_or_token_ids(tmp_path: Path) -> None:
    path = write(tmp_path, "p.jsonl", '{"q": [{"role": "user", "content": "a"}]}\n{"q": [3, 4]}\n{"q": []}\n')
    chat, ids, empty = read(path, "q")
    assert isinstance(chat, Request)
    assert chat.messages == [{"role": "user", "content": "a"}]
    assert isinstance(ids, Request)
    assert ids.token_ids == (3, 4)
    assert isinstance(empty, BadLine)


def test_an_empty_cell_of_the_column_is_an_empty_prompt(tmp_path: Path) -> None:
    items = read(write(tmp_path, "p.csv", "q,task\n,1\nb,2\n"), "q")
    assert [getattr(item, "error", item.id) for item in items] == ["p.csv:2: prompt is empty", 3]


def test_text_has_no_columns(tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match=r"p\.txt: a line of text has no columns; leave out --prompt-column"):
        open_prompts(str(write(tmp_path, "p.txt", "a\n")), "q")


def test_standard_input_has_keys(tmp_path: Path) -> None:
    (item,) = spooled_prompts(write(tmp_path, "stdin.jsonl", '{"q": "a"}\n'), "q").read(DEFAULTS)
    assert isinstance(item, Request)
    assert item.prompt == "a"


def test_a_dataset_names_its_column_once(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"q": "a", "prompt": "b"}]).save_to_disk(str(tmp_path / "saved"))
    for given, column in ((f"{tmp_path / 'saved'}", "q"), (f"{tmp_path / 'saved'}?column=q", "q")):
        (item,) = read(given, column)
        assert isinstance(item, Request)
        assert item.prompt == "a"
    with pytest.raises(PromptsError, match="names the column q, --prompt-column prompt; leave one of them out"):
        open_prompts(f"{tmp_path / 'saved'}?column=q", "prompt")
    with pytest.raises(PromptsError, match="no column x; choose from q, prompt"):
        open_prompts(f"{tmp_path / 'saved'}", "x").inspect()


def test_tabs_are_read_as_commas_are(tmp_path: Path) -> None:
    text = 'prompt\tmax_tokens\tstop\n"a\tb, ""c"""\t3\t"[""x""]"\nd\t4\t5\t6\n'
    path = write(tmp_path, "p.tsv", text)
    first, second = read(path, None)
    assert isinstance(first, Request)
    assert (first.prompt, first.params.max_tokens, first.params.stop) == ('a\tb, "c"', 3, ("x",))
    assert isinstance(second, BadLine)
    assert second.error == "p.tsv:3: 4 cells under 3 columns; quote a cell that holds a tab"
    assert open_prompts(str(path)).format == "tsv"


def test_ndjson_is_jsonl(tmp_path: Path) -> None:
    source = open_prompts(str(write(tmp_path, "p.NDJSON", '{"prompt": "a"}\n')))
    assert (source.format, source.stem, source.inspect().prompts) == ("jsonl", "p", 1)
