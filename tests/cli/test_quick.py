"""Quick use: prompts without a file, and texts or lines on standard output instead of a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import invoke
from helpers.fakes import Watcher

from detgen.cli.quick import Following
from detgen.progress import Progress
from detgen.show.progress_view import QuietDisplay
from detgen.show.screen import Screen

CODE = f"""if True:
    import os, signal, sys
    sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
    from helpers.fakes import FakeEngine
    import detgen.run.lifecycle
    def engine(config, observer=None):
        made = FakeEngine(config, pause=float(os.environ.get("PAUSE", 0)))
        at = int(os.environ.get("INTERRUPTED_AT", 0))
        made.on_step = lambda step: os.kill(os.getpid(), signal.SIGINT) if step == at else None
        return made
    detgen.run.lifecycle._load_engine = engine
    from detgen.__main__ import main
    main()
"""
PLAIN = b"Tell me a joke.\n\n{ and a story }\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, beside one for temporary files."""
    (tmp_path / "here").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    return tmp_path


def detgen(*arguments: str, given: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", CODE, "run", *arguments, "--max-tokens", "5"]
    return subprocess.run(command, input=given, capture_output=True, check=False, env={**os.environ, **environment})


def left(place: Path) -> list[str]:
    return sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())


def texts(folder: str, *names: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "outputs.jsonl").read_text("utf-8").split("\n")[:-1]]


def prompts(count: int) -> bytes:
    return b"".join(b'{"prompt": "%d"}\n' % n for n in range(count))


@pytest.mark.parametrize(
    ("arguments", "given", "asked"),
    [
        (["--prompt", "a"], b"not read", ["a"]),
        (["--prompt", "a", "--prompt", "b\n"], b"", ["a", "b\n"]),
        (["--prompt", "{}"], b"", ["{}"]),
        ([], PLAIN, [PLAIN.decode()[:-1]]),
        (["-"], PLAIN, [PLAIN.decode()[:-1]]),
        ([], b"\xef\xbb\xbf\n  x\r\n", ["\n  x"]),
    ],
)
def test_texts_alone_are_printed_and_nothing_is_left(
    place: Path, arguments: list[str], given: bytes, asked: list[str]
) -> None:
    printed = detgen(*arguments, "-q", given=given)
    assert (printed.returncode, printed.stderr, left(place)) == (0, b"", [])
    kept = detgen(*arguments, "-q", "-o", "out", "--echo", given=given)
    assert (kept.returncode, kept.stdout, kept.stderr) == (0, b"", b"")
    lines = texts("out")
    assert [line["prompt"] for line in lines] == asked
    assert printed.stdout.decode() == "".join(f"{line['text']}\n" for line in lines)
    echoed = detgen(*arguments, "-q", "--echo", given=given)
    assert echoed.stdout.decode() == "".join(f"{line['prompt']}{line['text']}\n" for line in lines)


def test_lines_that_are_one_prompt_are_no_surprise(place: Path) -> None:
    said = b"detgen: standard input is plain text, and its 3 lines are one prompt; a .txt file has one a line\n"
    assert said in detgen(given=PLAIN).stderr
    assert b"one prompt" not in detgen(given=b"Tell me a joke.\n").stderr


def test_a_prompt_with_a_folder_is_a_run_like_others(place: Path) -> None:
    cut = detgen("--prompt", "a", "--prompt", "b", "-o", "out", INTERRUPTED_AT="1", PAUSE="0.1")
    assert cut.returncode == 130
    assert b"to resume, run the same command again:" in cut.stderr
    again = detgen("--prompt", "a", "--prompt", "b", "-o", "out")
    assert again.returncode == 0
    assert b"SHA-256 of outputs.jsonl" in again.stdout
    assert len(texts("out")) == 2
    assert Path("out/stdin.jsonl").read_text() == '{"prompt": "a"}\n{"prompt": "b"}\n'
    assert b"already finished" in detgen("--prompt", "a", "--prompt", "b", "-o", "out").stdout


@pytest.mark.parametrize(
    "given", [prompts(3), b"\n \n" + prompts(2), b'{"broken\n' + prompts(1), b"[1]\n" + prompts(1)]
)
def test_json_lines_are_what_they_were(place: Path, given: bytes) -> None:
    Path("same.jsonl").write_bytes(given)
    assert detgen(given=given).returncode == detgen("same.jsonl").returncode == 0
    piped, named = (Path(f"{name}-out/outputs.jsonl").read_bytes() for name in ("stdin", "same"))
    assert piped.replace(b"stdin:", b"same.jsonl:") == named
    assert Path("stdin-out/stdin.jsonl").read_bytes() == given


def test_lines_go_to_standard_output(place: Path) -> None:
    """The bytes of the file, and nothing else; progress beside them."""
    Path("p.jsonl").write_bytes(prompts(40) + b'{"prompt": 1}\n')
    detgen("p.jsonl", "-o", "out")
    printed = detgen("p.jsonl", "-o", "-")
    assert printed.stdout == Path("out/outputs.jsonl").read_bytes()
    assert printed.returncode == 0
    assert b"reading the prompts" in printed.stderr
    assert b"detgen: 1 prompt could not be run:\ndetgen:   p.jsonl:41: prompt must be" in printed.stderr
    assert not any(name.startswith("temporary") for name in left(place))


def test_a_line_comes_when_it_is_finished(place: Path) -> None:
    Path("p.jsonl").write_bytes(prompts(60))
    command = [sys.executable, "-c", CODE, "run", "p.jsonl", "-o", "-", "-q"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PAUSE": "0.05"}) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["index"] == 0
        assert process.poll() is None
        assert len(process.stdout.readlines()) == 59


def test_a_reader_who_leaves_ends_the_run_quietly(place: Path) -> None:
    Path("p.jsonl").write_bytes(prompts(1000))
    command = [sys.executable, "-c", CODE, "run", "p.jsonl", "-o", "-", "-q"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PAUSE": "0.05"}
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=20) == 0
    assert left(place) == ["here/p.jsonl"]


def test_what_cannot_be_written_is_no_success(place: Path) -> None:
    command = [sys.executable, "-c", CODE, "run", "--prompt", "a", "-q", "-o", "-"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 2
    assert done.stderr == b"detgen: error: cannot write to standard output: No space left on device\n"
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE, check=False)
    assert (closed.returncode, b"standard output is closed" in closed.stderr) == (2, True)


def test_an_interrupted_one_says_that_it_is_lost(place: Path) -> None:
    cut = detgen("-o", "-", given=prompts(20), INTERRUPTED_AT="3", PAUSE="0.05")
    assert cut.returncode == 130
    assert b"interrupted, and nothing is kept; a run with --output DIR can be resumed" in cut.stderr
    assert left(place) == []


def test_an_internal_error_says_nothing_of_a_folder_that_is_gone(place: Path) -> None:
    code = CODE.replace("os.kill(os.getpid(), signal.SIGINT) if step == at else None", "1 / 0")
    command = [sys.executable, "-c", code, "run", "--prompt", "a", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 70
    assert "to see the traceback: detgen --debug run --prompt a" in done.stderr
    assert "detgen-error.log" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "given", "said"),
    [
        (["p.jsonl", "--prompt", "a"], b"", "PROMPTS and --prompt cannot be given together"),
        (["--prompt", "a", "--output-format", "openai"], b"", "--output-format openai writes a file to a folder"),
        (["--prompt", "a", "--show-thoughts", "-o", "-"], b"", "--show-thoughts writes to standard output, too"),
        ([], b"caf\xe9", "neither JSON lines nor plain text: not valid UTF-8 at byte 4"),
        ([], b"[INST] Hi [/INST]", "no line of standard input is a JSON object"),
        ([], b"", "no prompts on standard input"),
        ([], b" \n\n", "no prompts in standard input"),
    ],
)
def test_refusals(place: Path, arguments: list[str], given: bytes, said: str) -> None:
    done = detgen(*arguments, "-q", given=given)
    assert (done.returncode, done.stdout) == (2, b"")
    assert said in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1
    assert left(place) == []


def test_scores_go_to_standard_output(place: Path) -> None:
    samples = str(Path(__file__).parents[2] / "sample_prompts" / "scores.jsonl")
    command = [sys.executable, "-m", "detgen", "score", samples, "-q", "--kv-memory", "64MiB", "--limit", "3"]
    printed = subprocess.run([*command, "-o", "-"], capture_output=True, check=True)
    assert left(place) == []
    assert invoke(*command[3:], "-o", "out").exit_code == 0
    assert printed.stdout == Path("out/outputs.jsonl").read_bytes()


def test_whole_lines_are_copied_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also lines that are longer than what is read at a time."""
    path, watcher = tmp_path / "outputs.jsonl", Watcher()
    display: Any = QuietDisplay(Screen(stderr=True))
    display.progress = watcher.progress
    following = Following(display, path, bare=False)
    following.follow()
    written = ["short\n", "x" * 3_000_000 + "\n", "y" * 1_500_000, "y\nlast"]
    for part in written:
        with path.open("a") as file:
            file.write(part)
        following.progress(Progress(1, None, "prompts", 1.0))
    assert capfd.readouterr().out == "".join(written).removesuffix("last")
    assert len(watcher.reports) == 4


def test_a_terminal_finds_nothing_to_obey_in_a_text(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "outputs.jsonl"
    path.write_text('{"text": "a\\tb\\n\\u001b[31mc\\n"}\n{"error": "no"}\n')
    for terminal, shown in ((True, "a\tb\n\\x1b[31mc\n"), (False, "a\tb\n\x1b[31mc\n")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        Following(QuietDisplay(Screen(stderr=True)), path, bare=True).follow()
        assert capfd.readouterr().out == shown
