"""The command: its forms, exit codes, messages and the files that it writes."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from detgen import Engine
from detgen.cli import app
from detgen.errors import DEMO
from detgen.verify.perturb import running
from detgen.verify.perturb.axes import TITLES
from detgen.verify.perturb.checking import Check
from detgen.verify.perturb.generation_digests import Watching
from detgen.verify.perturb.timing import OutOfTime, Timing

RUNNER = CliRunner()
PROMPTS = '{"prompt": "def add(a, b):\\n", "max_tokens": 8}\n{"prompt": "import os\\n", "max_tokens": 8}\n'


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "prompts.jsonl"
    path.write_text(PROMPTS)
    return path


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Commands find the engine of the other tests instead of loading one."""
    monkeypatch.setattr(running, "Engine", lambda config, **_: engine)


def test_one_axis(prompts: Path) -> None:
    """A table with the axis, one line to quote, and the same as JSON."""
    result = RUNNER.invoke(app, ["verify-determinism", str(prompts), "--axis", "unverified", "--json", "r.json"])
    assert result.exit_code == 0, result.output
    *_, last = result.stdout.strip().splitlines()
    found = json.loads(Path("r.json").read_text())
    assert last == f"{found['total']['settings']} settings, {found['total']['positions']:,} positions: every bit equal"
    assert "unverified requests" in result.output
    assert found["equal"] is True
    assert found["total"]["positions"] == found["total"]["entries_equal"] > 0
    assert found["axes"]["unverified"]["tried"] == ["0", "1", "4"]


@pytest.mark.usefixtures("loaded")
def test_difference_is_shown_and_replayed(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 1, the difference on the screen, a file that shows it again; once that is fixed, the file exits with 0."""
    with monkeypatch.context() as patch:
        patch.setattr(Watching, "committed", _noisy(Watching.committed))
        arguments = ["verify-determinism", str(prompts), "--axis", "prefix-cache", "-q", "--save", "d.json"]
        result = RUNNER.invoke(app, arguments)
        assert result.exit_code == 1, result.output
        assert re.search(r"\d settings? differ", result.output)
        assert re.search(r"smallest setting +batch size 2", result.output)
        assert "every module agrees at this row" in result.output
        assert result.output.endswith("detgen verify-determinism --replay d.json\n")
        again = RUNNER.invoke(app, ["verify-determinism", "--replay", "d.json", "-q"])
        assert again.exit_code == 1, again.output
        assert "smallest setting" in again.output
    again = RUNNER.invoke(app, ["verify-determinism", "--replay", "d.json"])
    assert again.exit_code == 0, again.output
    assert "every bit equal" in again.output
    quiet = RUNNER.invoke(app, ["verify-determinism", "--replay", "d.json", "-q"])
    assert (quiet.exit_code, quiet.output) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--axis", "weather"], "no axis 'weather'; the axes are batch, order"),
        (["--axis", "draft-token"], "no axis 'draft-token'"),
        (["--against", "out", "--replay", "d.json"], "--against and --replay cannot be given together"),
        (["--replay", "d.json", "--axis", "slot"], "--axis has no effect with --replay; leave it out"),
        (["--replay", "d.json", "--adapter", "a"], "--adapter has no effect with --replay; leave it out"),
        (["--against", "out", "--draft", "d"], "--draft has no effect with --against; leave it out"),
        (["prompts.jsonl", "--replay", "prompts.jsonl"], "PROMPTS has no effect with --replay; leave it out"),
        (["--json", "nowhere/r.json"], "cannot write nowhere/r.json: there is no folder"),
        (["--json", "."], "cannot write .: it is a folder"),
        (["--save", "."], "cannot write .: it is a folder"),
        (["--minutes", "0"], "error: --minutes must be a number of at least 0.01, got 0.0"),
        (["--limit", "0"], "error: --limit must be a number of at least 1, got 0"),
        (["--seed", "-1"], "error: --seed must be a number of at least 0, got -1"),
        (["empty.jsonl"], "no prompts in empty.jsonl"),
        (["broken.jsonl"], "broken.jsonl:1: not valid JSON"),
        (["--replay", "."], ". is not a regular file"),
        (["--against", "nowhere"], "nowhere has no manifest.json"),
        (["--replay", "nowhere.json"], "cannot read nowhere.json"),
        (["--replay", "prompts.jsonl"], "not a reproduction file"),
        (["nowhere.jsonl"], "no file nowhere.jsonl"),
        (["--target", "nowhere"], "cannot load the model nowhere"),
        (["--threads", "0"], "error: --threads must be a whole number of at least 1"),
    ],
)
def test_refused(prompts: Path, arguments: list[str], message: str) -> None:
    """Exit 2 with one line that names what is wrong, before anything is computed."""
    Path("empty.jsonl").write_text("")
    Path("broken.jsonl").write_text('{"prompt": ')
    result = RUNNER.invoke(app, ["verify-determinism", *arguments])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output


@pytest.mark.usefixtures("loaded")
def test_lines_that_are_left_out(prompts: Path) -> None:
    """The check goes on with the others, and says so."""
    with prompts.open("a") as file:
        file.write('{"prompt": \n')
    result = RUNNER.invoke(app, ["verify-determinism", str(prompts), "--axis", "slot"])
    assert result.exit_code == 0, result.output
    assert "1 of 3 prompts could not be run and were left out:\n  prompts.jsonl:3: not valid JSON" in result.stdout


@pytest.mark.usefixtures("loaded")
def test_says_what_was_done(prompts: Path) -> None:
    """Settings, prompts and tokens; the time is kept."""
    with prompts.open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "Add."}], "max_tokens": 5}\n')
    arguments = ["verify-determinism", str(prompts), "--axis", "slot", "--minutes", "1", "--limit", "2"]
    result = RUNNER.invoke(app, [*arguments, "--json", "r.json"])
    assert result.exit_code == 0, result.output
    assert (
        "2 of 3 prompts, repeated to 4 requests for batches, of 8 new tokens each; one axis at a time" in result.stdout
    )
    found = json.loads(Path("r.json").read_text())
    assert (found["selected_settings"], found["selected_settings_tried"], found["left_out"]) == (3, 3, {})
    assert (found["prompts"], found["prompts_given"]) == (4, 3)


@pytest.mark.usefixtures("loaded")
def test_too_few_minutes(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused with what the time went into."""

    def fitting(*_: object) -> None:
        raise OutOfTime

    monkeypatch.setattr(Timing, "fitting", fitting)
    result = RUNNER.invoke(app, ["verify-determinism", str(prompts), "--axis", "slot", "--minutes", "2"])
    assert result.exit_code == 2, result.output
    assert "--minutes 2 is too short: it took 0 s to load the models" in result.stderr


@pytest.mark.usefixtures("loaded")
def test_no_setting_fits(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That nothing was compared is no answer."""
    monkeypatch.setattr(Check, "expected", lambda *_: (1e6, 0.0))
    result = RUNNER.invoke(app, ["verify-determinism", str(prompts), "--axis", "slot", "--minutes", "1"])
    assert result.exit_code == 2, result.output
    assert "what was left is no time for a setting; give more minutes" in result.stderr
    assert "every bit equal" not in result.output


@pytest.mark.usefixtures("loaded")
def test_interrupted(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and the exit status of an interruption."""

    def interrupt(self: Watching, *arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Watching, "committed", interrupt)
    result = RUNNER.invoke(app, ["verify-determinism", str(prompts), "--axis", "slot", "-q"])
    assert result.exit_code == 130
    assert result.stdout == ""
    assert result.stderr == "detgen: interrupted; nothing was concluded\n"


@pytest.mark.usefixtures("loaded")
def test_difference_that_cannot_be_saved(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shown all the same, and the exit status says so."""
    monkeypatch.setattr(Watching, "committed", _noisy(Watching.committed))
    monkeypatch.setattr(Path, "write_text", _full)
    arguments = ["verify-determinism", str(prompts), "--axis", "slot", "-q", "--save", "d.json", "--json", "r.json"]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 1, result.output
    assert re.search(r"\d settings? differ", result.stdout)
    assert "cannot write d.json: No space left on device" in result.stdout
    assert "cannot write r.json: No space left on device" in result.stderr


def _noisy(committed: Callable[..., None]) -> Callable[..., None]:
    """Another value for each slot."""
    return lambda self, seq, first, logits: committed(self, seq, first, logits + seq.slot)


def _full(path: Path, *arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_help_is_quick_and_complete() -> None:
    """No heavy library is imported for the help."""
    code = "import sys; from detgen.__main__ import main; sys.argv = ['detgen', 'verify-determinism', '--help']\n"
    code += "try: main()\nfinally: assert not {'torch', 'transformers'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for option in ("--against", "--replay", "--full", "--minutes", "--axis", "--json"):
        assert option in done.stdout
    words = " ".join(done.stdout.replace("│", " ").split())
    assert ", ".join(TITLES).replace("_", "-") in words


def test_embedded_prompts_are_the_sample_prompts() -> None:
    """The package carries a copy of the sample prompts, since an installed one has no folder beside it."""
    samples = Path(__file__).parents[2] / "sample_prompts" / "code.jsonl"
    assert (DEMO / "prompts.jsonl").read_bytes() == samples.read_bytes()
