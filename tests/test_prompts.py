from __future__ import annotations

import gzip
import hashlib
import json
import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from detgen.engine.request import Request, SamplingParams
from detgen.prompts import BadLine, PromptsError, open_prompts
from detgen.prompts.array import _CHUNK

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


# --- one record ---


def test_all_keys_are_understood(tmp_path: Path) -> None:
    line = {
        "id": "a", "prompt": "hi", "max_tokens": 3, "temperature": 1, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 5,
        "n": 2, "stop": ["x", "y"], "deterministic": False, "logprobs": 3, "task": "t", "tags": [1, {"a": None}],
    }  # fmt: skip
    assert one(tmp_path, json.dumps(line)) == Request(
        index=0,
        id="a",
        prompt="hi",
        params=SamplingParams(3, 1, 0.9, 4, 0.1, 5, 2, ("x", "y"), 3, False),
        metadata={"task": "t", "tags": [1, {"a": None}]},
        line=1,
    )


def test_null_and_absence_mean_the_default(tmp_path: Path) -> None:
    keys = ("id", "messages", "stop", "max_tokens", "temperature", "seed", "n", "deterministic", "logprobs")
    expected = Request(index=0, id=1, prompt="hi", params=DEFAULTS, line=1)
    assert one(tmp_path, json.dumps({"prompt": "hi"} | dict.fromkeys(keys))) == expected
    assert one(tmp_path, '{"prompt": "hi"}') == expected


def test_stop_may_be_one_string_or_none_at_all(tmp_path: Path) -> None:
    items = read(write(tmp_path, "p.jsonl", '{"prompt": "a", "stop": "x"}\n{"prompt": "a", "stop": []}'))
    assert [item.params.stop for item in items if isinstance(item, Request)] == [("x",), ()]


def test_chats_are_carried_whole(tmp_path: Path) -> None:
    roles = ("system", "developer", "user", "assistant", "tool")
    messages = [{"role": role, "content": role, "name": "n"} for role in roles]
    item = one(tmp_path, json.dumps({"messages": messages}))
    assert isinstance(item, Request)
    assert item.prompt is None
    assert item.messages == messages


def test_the_last_of_duplicate_keys_wins(tmp_path: Path) -> None:
    item = one(tmp_path, '{"prompt": "a", "prompt": "b"}')
    assert isinstance(item, Request)
    assert item.prompt == "b"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "a" "id": 1}', "not valid JSON: Expecting ',' delimiter at column 16"),
        ('{"prompt": "a"', "not valid JSON: Expecting ',' delimiter at column 15"),
        ('{"prompt": "a}', "not valid JSON: Unterminated string starting at column 12"),
        ('{"prompt": "a"} {}', "not valid JSON: Extra data at column 17"),
        ('{"prompt": "a", "x": NaN}', "not valid JSON: NaN is not a JSON value"),
        ('{"prompt": "a", "x": -Infinity}', "not valid JSON: -Infinity is not a JSON value"),
        ('{"prompt": "a", "x": 1e999}', "not valid JSON: the number 1e999 is out of range"),
        ('{"prompt": "a", "x": ' + "1" * 5000 + "}", "not valid JSON: a number of too many digits"),
        ("[" * 100_000, "not valid JSON: nested too deeply"),
        ('{"prompt": "a", "x": ' + "[" * 150 + "]" * 150 + "}", "nested more than 100 deep"),
        (b'{"prompt": "\xff"}', "not valid UTF-8 at byte 13"),
        ('["a"]', 'a prompt must be an object such as {"prompt": "..."}, got a list'),
        ('"a"', 'a prompt must be an object such as {"prompt": "..."}, got a string'),
        ("null", 'a prompt must be an object such as {"prompt": "..."}, got null'),
        ("{}", "neither prompt nor messages is given"),
        ('{"prompt": null}', "neither prompt nor messages is given"),
        ('{"prompt": "a", "messages": []}', "both prompt and messages are given; give one of them"),
        ('{"prompt": ""}', "prompt is empty"),
        ('{"prompt": 3}', "prompt must be a string, got a number"),
        ('{"prompt": "a\\ud800b"}', r"prompt holds half a character, \ud800 at position 1"),
        ('{"prompt": "a", "stop": "\\udc00"}', r"stop holds half a character, \udc00 at position 0"),
        ('{"prompt": "a", "id": 1.5}', "id must be a string or a whole number, got a number"),
        ('{"prompt": "a", "id": true}', "id must be a string or a whole number, got true or false"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be a whole number of at least 1, got 0"),
        ('{"prompt": "a", "max_tokens": "9"}', "max_tokens must be a whole number of at least 1, got '9'"),
        ('{"prompt": "a", "temperature": -1}', "temperature must be a number from 0 to 10000, got -1"),
        ('{"prompt": "a", "stop": 5}', "stop must be a non-empty string or a list of them, got [5]"),
        ('{"prompt": "a", "stop": ["x", ""]}', "stop must be a non-empty string or a list of them, got ['x', '']"),
        ('{"prompt": "a", "deterministic": 1}', "deterministic must be true or false, got 1"),
        ('{"messages": {}}', "messages must be a list, got an object"),
        ('{"messages": []}', "messages is empty"),
        ('{"messages": ["hi"]}', "messages[0] must be an object with role and content, got a string"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "robot", "content": "a"}]}',
            "messages[1].role must be one of system, developer, user, assistant, tool, got 'robot'",
        ),
        (
            '{"messages": [{"content": "a"}]}',
            "messages[0].role must be one of system, developer, user, assistant, tool, got nothing",
        ),
        ('{"messages": [{"role": ["user"], "content": "a"}]}', "messages[0].role must be one of"),
        ('{"messages": [{"role": "user", "content": null}]}', "messages[0].content must be a string, got null"),
        (
            '{"messages": [{"role": "user", "content": "\\ud83d"}]}',
            r"messages[0].content holds half a character, \ud83d at position 0",
        ),
    ],
)
def test_a_line_that_cannot_run_says_where_and_why(tmp_path: Path, line: str | bytes, reason: str) -> None:
    assert error(tmp_path, line).startswith(f"p.jsonl:1: {reason}")


def test_a_bad_line_keeps_its_id_and_metadata(tmp_path: Path) -> None:
    assert one(tmp_path, '{"id": "x", "prompt": 1, "task": "t"}') == BadLine(
        0, 1, "x", "p.jsonl:1: prompt must be a string, got a number", {"task": "t"}
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
known_keys = st.sampled_from(["id", "prompt", "messages", "stop", "n", "seed", "temperature", "top_k", "logprobs", "x"])


@given(
    st.lists(st.binary(max_size=40) | st.dictionaries(known_keys, json_values).map(lambda d: json.dumps(d).encode()))
)
@settings(max_examples=150, deadline=None)
def test_no_line_stops_the_reader(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = write(tmp_path_factory.mktemp("any"), "p.jsonl", b"\n".join([b'{"prompt": "a"}', *lines]))
    items = read(path)
    shown = [n for n, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]
    assert [item.line for item in items] == shown
    assert [item.index for item in items] == list(range(len(items)))


# --- the formats ---


def test_blank_lines_do_not_count_and_ids_are_line_numbers(tmp_path: Path) -> None:
    path = write(
        tmp_path, "p.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b", "id": 9}\n{"prompt": "c"}'
    )
    assert [(item.index, item.id, item.line) for item in read(path)] == [(0, 1, 1), (1, 9, 4), (2, 5, 5)]
    assert open_prompts(str(path)).inspect().prompts == 3


def test_limit_takes_the_first(tmp_path: Path) -> None:
    assert [item.id for item in read(write(tmp_path, "p.jsonl", '{"prompt": "a"}\n' * 5), limit=2)] == [1, 2]


LINES = b"".join(b'{"prompt": "prompt %d"}\n' % n for n in range(5000))


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
        params=SamplingParams(3, 0.25, deterministic=False, stop=(".",)),
    )  # fmt: skip
    assert isinstance(second, Request)
    assert (second.id, second.params.max_tokens, second.params.stop) == (5, 4, ("x", "y"))
    assert isinstance(chat, Request)
    assert (chat.prompt, chat.messages) == (None, [{"role": "user", "content": "hi"}])
    assert [(item.id, item.error) for item in bad if isinstance(item, BadLine)] == [
        ("e", "p.csv:7: prompt is empty"),
        ("f", "p.csv:8: max_tokens must be a whole number of at least 1, got 'many'"),
        ("g", "p.csv:9: deterministic must be true or false, got 'perhaps'"),
        (10, "p.csv:10: 9 cells under 8 columns; quote a cell that holds a comma"),
    ]
    assert isinstance(short, Request)
    assert short.prompt == "short"


def test_csv_takes_long_prompts_and_goes_on_behind_broken_rows(tmp_path: Path) -> None:
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
    with pytest.raises(PromptsError, match="no column prompt or messages among question, answer; name one of them so"):
        open_prompts(str(write(tmp_path, "p.csv", "question,answer\na,b\n"))).inspect()


def test_json_array(tmp_path: Path) -> None:
    text = '\ufeff [ {"prompt": "a", "id": "x"},\n"b", 3, {"prompt": NaN}, [], {"prompt": "\\ud83d\\ude00 é"} ]\n'
    items = read(write(tmp_path, "p.json", text))
    assert [item.id for item in items] == ["x", 2, 3, 4, 5, 6]
    assert [getattr(item, "prompt", None) for item in items] == ["a", "b", None, None, None, "😀 é"]
    assert [item.error for item in items if isinstance(item, BadLine)] == [
        'p.json:3: a prompt must be an object such as {"prompt": "..."}, got a number',
        "p.json:4: not valid JSON: NaN is not a JSON value",
        'p.json:5: a prompt must be an object such as {"prompt": "..."}, got a list',
    ]


def test_json_array_with_bytes_that_are_no_text(tmp_path: Path) -> None:
    items = read(write(tmp_path, "p.json", b'["a", "\xff", "b"]'))
    assert [getattr(item, "error", item.id) for item in items] == [1, "p.json:2: not valid UTF-8", 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}', "not a JSON array of prompts"),
        ('["a",\n"b" "c"]', ":2: not valid JSON: expected a comma or ] behind element 2"),
        ('["a",\n{"prompt": }]', ":2: not valid JSON: Expecting value in element 2"),
        ('["a", "b', ":1: not valid JSON: Unterminated string starting in element 2"),
        ('["a", "b"', ":1: not valid JSON: expected a comma or ] behind element 2"),
        ('["a",]', ":1: not valid JSON: a comma without an element behind element 1"),
        ('["a"] x', ":1: not valid JSON: text behind the end of the array, behind element 1"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_broken_array_is_refused_before_the_run(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PromptsError, match=r"p\.json") as refusal:
        open_prompts(str(write(tmp_path, "p.json", text))).inspect()
    assert message in str(refusal.value)


@given(st.lists(json_values.filter(lambda v: v == v), min_size=1), st.integers(0, 3), st.integers(-40, 10))
@settings(max_examples=100, deadline=None)
def test_an_array_is_cut_right_wherever_a_chunk_ends(values: list[object], indent: int, shift: int) -> None:
    import io

    from detgen.prompts.array import array_elements

    filler = "x" * (_CHUNK - 8 + shift)
    text = json.dumps([filler, *values], indent=indent or None)
    elements = [element for _, element in array_elements(io.BytesIO(text.encode()), "p")]
    assert [json.dumps(json.loads(element)) for element in elements] == [json.dumps(v) for v in [filler, *values]]


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


# --- datasets ---


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    import datasets

    rows = [{"question": f"q{n}", "prompt": f"p{n}", "seed": n} for n in range(3)]
    parts = {"train": datasets.Dataset.from_list(rows[:1]), "test": datasets.Dataset.from_list(rows)}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


def test_a_saved_dataset(saved: Path) -> None:
    source = open_prompts(f"{saved}?split=test&column=question")
    assert source.inspect().prompts == 3
    items = [item for item in source.read(DEFAULTS) if isinstance(item, Request)]
    assert [(item.id, item.prompt, item.params.seed) for item in items] == [(1, "q0", 0), (2, "q1", 1), (3, "q2", 2)]
    assert (source.stem, source.name) == ("saved", "saved")


def test_a_folder_of_data_files(tmp_path: Path) -> None:
    write(tmp_path, "test.jsonl", "".join(f'{{"prompt": "p{n}", "task": {n}}}\n' for n in range(4)))
    source = open_prompts(str(tmp_path))
    before = source.inspect()
    items = [item for item in source.read(DEFAULTS) if isinstance(item, Request)]
    assert [(item.prompt, item.metadata) for item in items] == [(f"p{n}", {"task": n}) for n in range(4)]
    write(tmp_path, "test.jsonl", '{"prompt": "other", "task": 0}\n')
    assert open_prompts(str(tmp_path)).inspect().sha256 != before.sha256


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("", r"has the splits train, test: choose one, as in .*saved\?split=test"),
        ("?split=dev", "no split dev; there are train, test"),
        ("?split=test&column=text", "no column text; there are question, prompt, seed"),
        ("?slit=test", "no option slit; there are split, column, config, revision"),
    ],
)
def test_dataset_mistakes(saved: Path, query: str, message: str) -> None:
    with pytest.raises(PromptsError, match=message):
        open_prompts(f"{saved}{query}").inspect()


def test_a_folder_without_data(tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match=r"cannot load the dataset .*; it must hold data files"):
        open_prompts(str(tmp_path)).inspect()


def test_a_dataset_of_the_hub_is_read_at_one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    calls = []
    commits = iter(["c1", "c1", "c2"])

    def load(path: str, name: str | None, revision: str, streaming: bool) -> dict[str, object]:
        calls.append((path, name, revision, streaming))
        rows = datasets.Dataset.from_list([{"prompt": "p"}, {"prompt": None}]).to_iterable_dataset()
        return {"test": rows}

    api = SimpleNamespace(dataset_info=lambda name, revision, timeout: SimpleNamespace(sha=next(commits)))
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    given = "hf://org/name?split=test&config=main"
    source = open_prompts(given)
    first = source.inspect()
    assert first.prompts is None
    assert calls == [("org/name", "main", "c1", True)]
    good, bad = source.read(DEFAULTS)
    assert isinstance(good, Request)
    assert isinstance(bad, BadLine)
    assert bad.error == "name:2: neither prompt nor messages is given"
    assert source.stem == "name"
    assert open_prompts(given).inspect().sha256 == first.sha256
    assert open_prompts(given).inspect().sha256 != first.sha256


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*args: object, **options: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(dataset_info=fail))
    with pytest.raises(PromptsError, match="cannot find hf://org/name on the Hugging Face hub: no route; check the"):
        open_prompts("hf://org/name").inspect()


# --- inputs that are none ---


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
        with pytest.raises(
            PromptsError, match=rf"{name}: its name does not tell what it holds; it must end in \.jsonl"
        ):
            open_prompts(str(write(tmp_path, name, "x")))
    with pytest.raises(PromptsError, match="File name too long; name a file with prompts in it"):
        open_prompts("Write a poem. " * 40)
    with pytest.raises(PromptsError, match="a dataset's name is missing"):
        open_prompts("hf://?split=test")


def test_a_named_pipe_is_refused_since_it_could_be_read_only_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.jsonl")
    with pytest.raises(PromptsError, match=r"p\.jsonl is no file that can be read twice; pipe JSON lines in"):
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
    prompts = [f"prompt number {n}" for n in range(30_000)]
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
    assert peak < 4 << 20
