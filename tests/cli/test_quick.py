"""Quick use: prompts without a file, and texts or lines on standard output instead of a folder."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
from helpers.fakes import FakeEngine, Watcher

import detgen.run.lifecycle
from detgen.__main__ import main
from detgen.cli.quick import Following
from detgen.progress import Progress
from detgen.show.progress_view import QuietDisplay
from detgen.show.screen import Screen

CODE = f"""if True:
    import os, sys
    sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
    from helpers.fakes import FakeEngine
    import detgen.run.lifecycle
    def engine(config, observer=None):
        return FakeEngine(config, pause=float(os.environ.get("PAUSE", 0)))
    detgen.run.lifecycle.load_engine = engine
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
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path


Done = subprocess.CompletedProcess[bytes]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Runs a command line in this process, on streams of its own: one start less of Python and its libraries."""

    def run(*arguments: str, given: bytes = b"") -> Done:
        with ExitStack() as stack, monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["detgen", *arguments])
            files = {name: stack.enter_context(TemporaryFile(dir=tmp_path)) for name in ("stdin", "stdout", "stderr")}
            files["stdin"].write(given)
            files["stdin"].seek(0)
            for name, file in files.items():
                mode = "r" if name == "stdin" else "w"
                patch.setattr(
                    sys, name, stack.enter_context(open(file.fileno(), mode, encoding="utf-8", closefd=False))
                )
            with pytest.raises(SystemExit) as ended:
                main()
            sys.stdout.flush()
            sys.stderr.flush()
            out, err = ((files[name].seek(0), files[name].read())[1] for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(arguments, ended.value.code or 0, out, err)  # type: ignore[arg-type]

    return run


@pytest.fixture
def detgen_run(command: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Runs `detgen run` on an engine that computes nothing, and that does something in each step."""

    def run(*arguments: str, given: bytes = b"", on_step: Callable[[int], None] = lambda step: None) -> Done:
        def engine(config: Any, observer: Any = None) -> FakeEngine:
            made = FakeEngine(config)
            made.on_step = on_step
            return made

        monkeypatch.setattr(detgen.run.lifecycle, "load_engine", engine)
        return command("run", *arguments, "--max-tokens", "5", given=given)

    return run


def interrupted_at(step: int) -> Callable[[int], None]:
    return lambda now: os.kill(os.getpid(), signal.SIGINT) if now == step else None


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
    place: Path, detgen_run: Callable[..., Done], arguments: list[str], given: bytes, asked: list[str]
) -> None:
    printed = detgen_run(*arguments, "-q", given=given)
    assert (printed.returncode, printed.stderr, left(place)) == (0, b"", [])
    kept = detgen_run(*arguments, "-q", "-o", "out", "--echo", given=given)
    assert (kept.returncode, kept.stdout, kept.stderr) == (0, b"", b"")
    lines = texts("out")
    assert [line["prompt"] for line in lines] == asked
    assert printed.stdout.decode() == "".join(f"{line['text']}\n" for line in lines)
    echoed = detgen_run(*arguments, "-q", "--echo", given=given)
    assert echoed.stdout.decode() == "".join(f"{line['prompt']}{line['text']}\n" for line in lines)


def test_a_process_prints_what_is_printed_here(place: Path, detgen_run: Callable[..., Done]) -> None:
    command = [sys.executable, "-c", CODE, "run", "-q", "--max-tokens", "5"]
    done = subprocess.run(command, input=PLAIN, capture_output=True, check=False)
    printed = detgen_run("-q", given=PLAIN)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed.stdout, b"")
    assert printed.stdout


def test_lines_that_are_one_prompt_are_no_surprise(place: Path, detgen_run: Callable[..., Done]) -> None:
    said = b"detgen: standard input is plain text, and its 3 lines are one prompt; a .txt file has one a line\n"
    assert said in detgen_run(given=PLAIN).stderr
    assert b"one prompt" not in detgen_run(given=b"Tell me a joke.\n").stderr


def test_a_prompt_with_a_folder_is_a_run_like_others(place: Path, detgen_run: Callable[..., Done]) -> None:
    cut = detgen_run("--prompt", "a", "--prompt", "b", "-o", "out", on_step=interrupted_at(1))
    assert cut.returncode == 130
    assert b"to resume, run the same command again:" in cut.stderr
    again = detgen_run("--prompt", "a", "--prompt", "b", "-o", "out")
    assert again.returncode == 0
    assert b"SHA-256 of outputs.jsonl" in again.stdout
    assert len(texts("out")) == 2
    assert Path("out/stdin.jsonl").read_text() == '{"prompt": "a"}\n{"prompt": "b"}\n'
    assert b"already finished" in detgen_run("--prompt", "a", "--prompt", "b", "-o", "out").stdout


@pytest.mark.parametrize(
    "given", [prompts(3), b"\n \n" + prompts(2), b'{"broken\n' + prompts(1), b"[1]\n" + prompts(1)]
)
def test_json_lines_are_what_they_were(place: Path, detgen_run: Callable[..., Done], given: bytes) -> None:
    Path("same.jsonl").write_bytes(given)
    assert detgen_run(given=given).returncode == detgen_run("same.jsonl").returncode == 0
    piped, named = (Path(f"{name}-out/outputs.jsonl").read_bytes() for name in ("stdin", "same"))
    assert piped.replace(b"stdin:", b"same.jsonl:") == named
    assert Path("stdin-out/stdin.jsonl").read_bytes() == given


def test_lines_go_to_standard_output(place: Path, detgen_run: Callable[..., Done]) -> None:
    """The bytes of the file, and nothing else; progress beside them."""
    Path("p.jsonl").write_bytes(prompts(40) + b'{"prompt": 1}\n')
    detgen_run("p.jsonl", "-o", "out")
    printed = detgen_run("p.jsonl", "-o", "-")
    assert printed.stdout == Path("out/outputs.jsonl").read_bytes()
    assert printed.returncode == 0
    assert b"reading the prompts" in printed.stderr
    assert b"detgen: 1 prompt could not be run:\ndetgen:   p.jsonl:41: prompt must be" in printed.stderr
    assert not any(name.startswith("temporary") for name in left(place))


def test_a_line_comes_when_it_is_finished(place: Path) -> None:
    Path("p.jsonl").write_bytes(prompts(30))
    command = [sys.executable, "-c", CODE, "run", "p.jsonl", "-o", "-", "-q"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PAUSE": "0.05"}) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["index"] == 0
        assert process.poll() is None
        assert len(process.stdout.readlines()) == 29


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


def test_an_interrupted_one_says_that_it_is_lost(place: Path, detgen_run: Callable[..., Done]) -> None:
    cut = detgen_run("-o", "-", given=prompts(20), on_step=interrupted_at(3))
    assert cut.returncode == 130
    assert b"interrupted, and nothing is kept; a run with --output DIR can be resumed" in cut.stderr
    assert left(place) == []


def test_an_internal_error_says_nothing_of_a_folder_that_is_gone(place: Path, detgen_run: Callable[..., Done]) -> None:
    done = detgen_run("--prompt", "a", "-q", on_step=lambda step: 1 // 0)  # type: ignore[arg-type, return-value]
    assert done.returncode == 70
    assert b"to see the traceback: detgen --debug run --prompt a" in done.stderr
    assert b"detgen-error.log" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "given", "said"),
    [
        (["p.jsonl", "--prompt", "a"], b"", "PROMPTS and --prompt cannot be given together"),
        (["--prompt", "a", "--output-format", "openai"], b"", "--output-format openai writes a file to a folder"),
        (["--prompt", "a", "--show-thoughts", "-o", "-"], b"", "--show-thoughts writes to standard output, too"),
        ([], b"caf\xe9", "neither JSON lines nor plain text: not valid UTF-8 at byte 4\n"),
        ([], gzip.compress(b'{"prompt": "a"}', mtime=0), "not valid UTF-8 at byte 2; decompress it first, with zcat\n"),
        ([], b"[INST] Hi [/INST]", "no line of standard input is a JSON object"),
        ([], b"", "no prompts on standard input"),
        ([], b" \n\n", "no prompts in standard input"),
    ],
)
def test_refusals(place: Path, detgen_run: Callable[..., Done], arguments: list[str], given: bytes, said: str) -> None:
    done = detgen_run(*arguments, "-q", given=given)
    assert (done.returncode, done.stdout) == (2, b"")
    assert said in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1
    assert left(place) == []


def test_scores_go_to_standard_output(place: Path, command: Callable[..., Done]) -> None:
    samples = str(Path(__file__).parents[2] / "sample_prompts" / "scores.jsonl")
    asked = ("score", samples, "-q", "--kv-memory", "64MiB", "--limit", "3")
    printed = command(*asked, "-o", "-")
    assert left(place) == []
    assert command(*asked, "-o", "out").returncode == 0
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
