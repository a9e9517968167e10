"""`detgen report`: exit codes, messages, and where the page goes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.checks import Silent
from helpers.commands import invoke
from helpers.pages import read_page

from detgen import Engine, EngineConfig, SamplingParams
from detgen.run import RunConfig, run

PROMPTS = '{"id": "a", "prompt": "def add(a, b):\\n", "max_tokens": 8}\n{"prompt": "import os\\n", "max_tokens": 8}\n'


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Path:
    folder = tmp_path_factory.mktemp("reported")
    (folder / "prompts.jsonl").write_text(PROMPTS)
    config = RunConfig(str(folder / "prompts.jsonl"), folder / "out", SamplingParams(), EngineConfig())
    run(config, Silent(), build_engine=lambda _: engine)
    return folder / "out"


@pytest.fixture
def out(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, "out")
    return "out"


def test_a_page(out: str) -> None:
    result = invoke("report", out)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("report.html: 2 samples, ")
    assert "detgen: [" in result.stderr
    page = read_page(Path("report.html").read_text())
    assert page.one("h1").text == "What happened in out"
    again = Path("report.html").read_bytes()
    result = invoke("report", out, "-q")
    assert (result.exit_code, result.stderr) == (0, "")
    assert Path("report.html").read_bytes() == again


def test_a_place_and_requests_of_ones_own(out: str) -> None:
    """An id is given as it is written, a number, too."""
    result = invoke("report", out, "-o", "x.html", "--request", "2", "--request", "a")
    assert result.exit_code == 0, result.output
    headings = [h.text for h in read_page(Path("x.html").read_text()).all("h3")]
    assert [h for h in headings if h.startswith("Request")] == ["Request 2", "Request a"]
    assert "2 of them window by window" in result.stdout


def test_two_folders(out: str, finished: Path) -> None:
    result = invoke("report", out, "--against", str(finished))
    assert result.exit_code == 0
    assert "2 of 2 output lines that both runs have are equal" in result.stdout
    assert read_page(Path("report.html").read_text()).one(id="verdict").text.strip().startswith("Nothing")


def test_a_folder_that_was_changed(out: str) -> None:
    """The page is written and says so; exit status 1."""
    path = Path(out, "acceptance.jsonl")
    path.write_text(path.read_text().replace('"round":1', '"round":"1"'))
    result = invoke("report", out)
    assert result.exit_code == 1
    assert "acceptance.jsonl:2: is not a line of a run" in result.stdout
    assert "changed after its run wrote it" in Path("report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((".",), "has no manifest.json; give the output folder of a detgen run"),
        (("nowhere",), "has no manifest.json; give the output folder of a detgen run"),
        (("out", "--against", "."), "has no manifest.json; give the output folder of a detgen run"),
        (("out", "--request", "b"), "has no request with the id 'b'; name one that it has"),
        (("out", "-o", "mine.txt"), "mine.txt was not written by detgen report; choose another file with -o"),
        (("out", "-o", "out/outputs.jsonl"), "was not written by detgen report; choose another file with -o"),
        (("out", "-o", "nowhere/x.html"), "cannot write nowhere/x.html: there is no folder"),
        (("out", "-o", "out"), "cannot write out: it is a folder"),
        (("out", "other"), "unexpected extra argument"),
        ((), "Usage: detgen report"),
    ],
)
def test_refusals(out: str, arguments: tuple[str, ...], words: str) -> None:
    """Nothing is written, and nothing that was there is lost."""
    Path("mine.txt").write_text("mine")
    before = Path(out, "outputs.jsonl").read_bytes()
    result = invoke("report", *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())
    assert not Path("report.html").exists()
    assert Path("mine.txt").read_text() == "mine"
    assert Path(out, "outputs.jsonl").read_bytes() == before


def test_no_model_and_no_engine_is_loaded(out: str) -> None:
    code = (
        "import sys; from detgen.cli import app; app(sys.argv[1:], standalone_mode=False);"
        "print(sorted({'torch', 'transformers', 'datasets', 'detgen.engine.engine'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, "report", out, "-q"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert json.loads(Path(out, "manifest.json").read_text())["status"] == "finished"
