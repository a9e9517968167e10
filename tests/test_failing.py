"""How the process ends on what no command expects: one line, and a status that says whose fault it is."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.examples import usual

from detgen.cli.declared import as_typed
from detgen.errors import EngineError
from detgen.failing import limit_reached

HELPERS = Path(__file__).parent


def start(code: str, *arguments: str, limit: str = "", debug: bool = False) -> subprocess.CompletedProcess[str]:
    """The command line with a fault planted in it, under a limit of the shell."""
    whole = f"import sys; sys.path.insert(0, {str(HELPERS)!r})\n{code}\nfrom detgen.__main__ import main\nmain()"
    command = [sys.executable, "-c", whole, *(["--debug"] if debug else []), *arguments]
    script = f'{limit or ":"} && exec "$@"'
    return subprocess.run(["sh", "-c", script, "sh", *command], capture_output=True, text=True, check=False)


CRASHING = """
import detgen.run.lifecycle
from helpers.fakes import FakeEngine
class Crashing(FakeEngine):
    def stream(self, requests):
        yield next(super().stream(requests))
        raise {error}
detgen.run.lifecycle.load_engine = Crashing
"""
NOTHING = """
import detgen.run.lifecycle
from helpers.fakes import FakeEngine
detgen.run.lifecycle.load_engine = FakeEngine
"""
BROKEN_AUDIT = """
import detgen.verify.replay.claims
detgen.verify.replay.claims.check_early = lambda *_: 1 / 0
"""


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    return path


def test_an_internal_error_is_one_line_and_a_file(tmp_path: Path, prompts: Path) -> None:
    done = start(
        CRASHING.format(error="ZeroDivisionError('what\x1b[31m')"), "run", str(prompts), "-o", f"{tmp_path}/out", "-q"
    )
    assert done.returncode == 70
    assert done.stdout == ""
    assert done.stderr == (
        f"detgen: error: internal error: ZeroDivisionError: what\\x1b[31m; the traceback is in {tmp_path}/out/"
        "detgen-error.log; what was finished is kept: run the same command again to resume\n"
    )
    assert "ZeroDivisionError" in (tmp_path / "out" / "detgen-error.log").read_text()
    again = start(NOTHING, "run", str(prompts), "-o", f"{tmp_path}/out", "-q")
    assert again.returncode == 0, again.stderr


def test_the_traceback_is_shown_on_demand(tmp_path: Path, prompts: Path) -> None:
    done = start(CRASHING.format(error="KeyError(1)"), "run", str(prompts), "-o", f"{tmp_path}/out", "-q", debug=True)
    assert done.returncode == 70
    assert done.stderr.startswith("Traceback")
    assert done.stderr.splitlines()[-1].startswith("detgen: error: internal error: KeyError: 1; the traceback is in")


def test_a_command_without_a_folder_says_how_to_see_the_traceback(tmp_path: Path) -> None:
    done = start(BROKEN_AUDIT, "audit", "some folder", "-q")
    assert (done.returncode, done.stdout) == (70, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("detgen: error: internal error: ")
    assert done.stderr.endswith("; to see the traceback: detgen --debug audit 'some folder' -q\n")


def test_an_error_of_the_command_line_itself_is_internal_too() -> None:
    done = start("import typer; typer.Typer.__call__ = lambda *_, **__: 1 / 0", "run", "x")
    assert (done.returncode, done.stderr.count("\n")) == (70, 1)
    done = start("sys.modules['typer'] = None", "run", "x")
    assert (done.returncode, done.stderr.count("\n")) == (70, 1)


def test_nobody_who_listens_changes_no_status() -> None:
    code = "import typer; typer.Typer.__call__ = lambda *_, **__: 1 / 0"
    assert start(code, limit="exec 2>/dev/full").returncode == 70
    assert start(code, limit="exec 2>&-").returncode == 70


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("MemoryError()", "memory is used up"),
        (
            'RuntimeError("DefaultCPUAllocator: can\'t allocate memory: you tried to allocate 8 bytes")',
            "memory is used up",
        ),
        ('RuntimeError("can\'t start new thread")', "no more threads"),
        ("OSError(24, 'Too many open files')", "too many open files"),
        ("RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')", "the GPU's memory is used up"),
    ],
)
def test_limits_end_a_run_with_a_line(tmp_path: Path, prompts: Path, error: str, said: str) -> None:
    done = start(CRASHING.format(error=error), "run", str(prompts), "-o", f"{tmp_path}/out", "-q")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr
    assert done.stderr.endswith("; what was finished is kept: run the same command again to resume\n")
    assert not (tmp_path / "out" / "detgen-error.log").exists()


@pytest.mark.parametrize(
    "error", ['RuntimeError("could not create a primitive")', 'SystemError("error return without exception set")']
)
@pytest.mark.parametrize(("limit", "status"), [("ulimit -v 100000000", 2), ("true", 70)])
def test_what_may_be_a_limit_is_one_where_there_is_one(
    tmp_path: Path, prompts: Path, error: str, limit: str, status: int
) -> None:
    done = start(CRASHING.format(error=error), "run", str(prompts), "-o", f"{tmp_path}/out", "-q", limit=limit)
    assert done.returncode == status, done.stderr
    assert ("memory is used up" in done.stderr) == (status == 2)


# The first has no room for a run, the second none for PyTorch, which this model takes.
@pytest.mark.parametrize(("kilobytes", "options"), usual([(500_000, ())], [(1_000_000, ("--target", "demo-thinking"))]))
def test_a_limit_of_memory_is_named(tmp_path: Path, prompts: Path, kilobytes: int, options: tuple[str, ...]) -> None:
    done = start("", "run", str(prompts), "-o", f"{tmp_path}/out", "-q", *options, limit=f"ulimit -v {kilobytes}")
    assert done.returncode == 2, done.stderr
    assert f"this process may have {kilobytes / 1024:,.0f} MiB of it; raise that: ulimit -v unlimited" in done.stderr
    assert len([line for line in done.stderr.splitlines() if "Traceback" in line]) == 0


@pytest.mark.parametrize("files", [6, 7, 8, 9])
def test_a_limit_of_files_is_named(tmp_path: Path, prompts: Path, files: int) -> None:
    done = start(NOTHING, "run", str(prompts), "-o", f"{tmp_path}/out", "-q", limit=f"ulimit -n {files}")
    if done.returncode:
        assert done.returncode == 2, done.stderr
        assert f"this process may have {files}; raise that: ulimit -n 1024" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_limit_of_a_file_is_named(tmp_path: Path, prompts: Path) -> None:
    done = start(NOTHING, "run", str(prompts), "-o", f"{tmp_path}/out", "-q", limit="ulimit -f 1")
    assert done.returncode == 2
    assert "raise that: ulimit -f unlimited; then run the same command again to resume" in done.stderr


def test_the_limit_behind_an_error_is_found() -> None:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    expected = f"too many open files: this process may have {files:,}; raise that: ulimit -n 1024"
    error = EngineError("cannot load x")
    error.__context__ = OSError(errno.EMFILE, "Too many open files")
    assert limit_reached(error) == expected
    assert as_typed(error) == f"cannot load x ({expected})"
    assert limit_reached(ValueError("x")) is None
    assert limit_reached(OSError(errno.ENOENT, "no such file")) is None
    loop = ValueError("a")
    loop.__cause__ = loop
    assert limit_reached(loop) is None
