"""detgen cache, and detgen run --cache with the embedded model: what arrives, what is shown, and how it ends."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from helpers.commands import RunWith, invoke
from helpers.fakes import content, go, manifest_of

from detgen.cli.cache_command import parse_age
from detgen.outputs.store import STORE


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "p.txt").write_text("one\ntwo\nthree\n")
    monkeypatch.chdir(tmp_path)
    go("p.txt", Path("out"), cache=Path("cache"))
    return Path("cache")


def test_info(cache: Path) -> None:
    result = invoke("cache", "info", "cache")
    assert result.exit_code == 0
    shown = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    assert shown.keys() >= {"cache", "size", "latest use"}
    values = [value.strip() for value in shown.values()]
    assert values[0] == f"cache/{STORE}"
    assert values[2:4] == ["3", "9"]
    assert values[-1].startswith("fake (")
    assert values[-1].endswith("): 3 completions, 9 tokens")


def test_damage_is_found_if_it_is_asked_for(cache: Path) -> None:
    with sqlite3.connect(cache / STORE) as db:
        db.execute("UPDATE packed SET value = zeroblob(9) WHERE id = 2")
    assert invoke("cache", "info", "cache").exit_code == 0
    result = invoke("cache", "info", "--check", "cache")
    assert result.exit_code == 1
    assert "damaged           1\n" in result.stdout
    result = invoke("cache", "prune", "cache")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"cache/{STORE}: 1 completion removed, ")
    assert invoke("cache", "info", "--check", "cache").exit_code == 0


def test_prune(cache: Path) -> None:
    assert invoke("cache", "prune", "cache", "--older-than", "30d", "--max-size", "2GB", "-q").output == ""
    result = invoke("cache", "prune", "cache", "--max-size", "1")
    assert "3 completions removed" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["info", "no"], "there is no cache in no; detgen run --cache no makes one"),
        (["info"], "there is no cache in {xdg}/detgen; detgen run --cache auto makes one"),
        (["prune", "no"], "there is no cache in no;"),
        (["info", "text"], f"text/{STORE} is not a store of detgen; name another folder, or move it"),
        (["prune", "cache", "--older-than", "30"], "'30' is not a time such as 30d, 12h or 2w (s, m, h, d, w)"),
        (["prune", "cache", "--max-size", "much"], "'much' is not an amount of memory"),
        (["shrink"], "No such command 'shrink'"),
    ],
)
def test_refusals(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    Path("text").mkdir()
    (Path("text") / STORE).write_text("no database\n" * 50)
    result = invoke("cache", *arguments)
    assert result.exit_code == 2
    assert said.format(xdg=tmp_path / "xdg") in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("text", "seconds"), [("30d", 30 * 86400), ("1.5h", 5400), ("2W", 14 * 86400), ("90m", 5400), (" 10 s", 10)]
)
def test_ages(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


def test_the_option_arrives(run_with: RunWith) -> None:
    assert run_with("p.jsonl", "--cache", "auto")[1].cache == "auto"
    assert run_with("p.jsonl", "--cache", "some/where")[1].cache == Path("some/where")
    assert run_with("p.jsonl")[1].cache is None
    result, _ = run_with("p.jsonl", "--cache", "")
    assert result.exit_code == 2
    assert "neither auto nor a folder" in result.stderr


def test_the_embedded_model_generates_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a folder of its own through a cache, and into the folder of the run before; both pass an audit."""
    monkeypatch.chdir(tmp_path)
    first = [{"id": n, "prompt": f"def f{n}(", "n": 1 + n % 2, "temperature": n % 3 / 2} for n in range(12)]
    second = [*first[::-1], {"prompt": "import "}, first[4] | {"prompt": "class "}, first[3] | {"logprobs": 1}]
    second[2] = second[2] | {"n": 4}
    for name, records in (("a", first), ("b", second)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = ("--max-tokens", "12", "--threads", "1")
    assert invoke("run", "a.jsonl", "-o", "a", "--cache", "cache", *options).exit_code == 0
    done = invoke("run", "b.jsonl", "-o", "b", "--cache", "cache", "--drafter", "none", *options)
    assert done.exit_code == 0, done.stderr
    assert "reused                    18 samples of earlier runs;" in done.stdout.replace("resumed", "")
    assert invoke("run", "b.jsonl", "-o", "fresh", *options).exit_code == 0
    assert (Path("b") / "outputs.jsonl").read_bytes() == (Path("fresh") / "outputs.jsonl").read_bytes()
    into = invoke("run", "b.jsonl", "-o", "a", *options)
    assert "18 finished samples can be reused" in into.stderr
    assert content(Path("a"))["outputs.jsonl"] == content(Path("fresh"))["outputs.jsonl"]
    assert manifest_of(Path("a"))["summary"]["tokens"] == manifest_of(Path("fresh"))["summary"]["tokens"]
    assert sorted(path.name for path in Path("a").iterdir()) == sorted(path.name for path in Path("fresh").iterdir())
    for folder in "ab":
        audit = invoke("audit", folder, "--threads", "1")
        assert audit.exit_code == 0, audit.stdout + audit.stderr
        assert "nothing differs" in audit.stdout
        assert invoke("report", folder, "-o", f"{folder}.html").exit_code == 0
