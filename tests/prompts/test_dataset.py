"""Datasets: saved ones, folders of data files, and those of the hub."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.reading import DEFAULTS, read, write

from detgen.engine.request import Request
from detgen.errors import PromptsError
from detgen.params import SamplingParams
from detgen.prompts import BadLine, open_prompts


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
        ("?split=dev", "no split dev; choose from train, test"),
        ("?split=test&column=text", "no column text; choose from question, prompt, seed"),
        ("?slit=test", "no option slit; choose from split, column, config, revision"),
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
