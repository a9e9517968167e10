"""detgen export: what arrives, what is shown, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.commands import invoke
from helpers.fakes import go


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    monkeypatch.chdir(tmp_path)
    go("p.txt", Path("out"))
    return Path("out")


def test_it_says_what_it_wrote(out: Path) -> None:
    result = invoke("export", "out", "--to", "openai")
    assert (result.exit_code, result.stdout) == (0, "out-results.jsonl: 2 results\n")
    result = invoke("export", "out", "--to", "csv", "-o", "x.csv", "-q")
    assert (result.exit_code, result.output) == (0, "")
    assert Path("x.csv").read_text().startswith('"id","index","sample","prompt","text",')
    Path("p.txt").rename("q.txt")
    result = invoke("export", "out", "q.txt", "--to", "csv", "-o", "y.csv")
    assert (result.exit_code, result.stdout) == (0, "y.csv: 2 rows\n")
    assert Path("x.csv").read_bytes() == Path("y.csv").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no", "--to", "csv"], "detgen: error: no has no manifest.json; give the output folder of a detgen run\n"),
        (["out", "--to", "csv", "-o", "p.txt"], "detgen: error: p.txt exists already; remove it, or choose another"),
        (["out", "no.txt", "--to", "csv"], "detgen: error: cannot read the run's prompts: there is no file no.txt;"),
        (["out", "--to", "xls"], "'--to': 'xls' is not one of 'csv', 'parquet', 'openai', 'hf'"),
        (["out"], "Missing option '--to'"),
    ],
)  # fmt: skip
def test_refusals(out: Path, arguments: list[str], said: str) -> None:
    result = invoke("export", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not list(Path().glob("out.*"))


def test_a_disk_that_is_full_is_told(out: Path) -> None:
    Path("full").mkdir(mode=0o700)
    result = invoke("export", "out", "--to", "parquet", "-o", "/proc/x.parquet")
    assert result.exit_code == 2
    assert "detgen: error: cannot write /proc/" in result.stderr
