"""What all commands share: help, names, completion, and refusals that no terminal obeys."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import RunWith, invoke

from detgen import __version__
from detgen.cli import COMMANDS, whole


def test_root_help_has_the_commands_and_an_example() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert "run" in result.stdout
    assert "Example: detgen run" in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_the_root_help_says_what_the_command_says_first(name: str) -> None:
    assert (whole(name).help or "").split("\n")[0] == COMMANDS[name][1]


def test_no_arguments_show_the_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detgen.cli.at_a_terminal", lambda: True)
    assert "Usage: detgen run" in invoke("run").output
    assert "Usage: detgen score" in invoke("score").output
    assert "Usage: detgen" in invoke().output


def test_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"detgen {__version__}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["score", "--help"], ["--version"]])
def test_help_needs_no_heavy_import(arguments: list[str]) -> None:
    code = (
        "import sys; from detgen.cli import app; app(sys.argv[1:], standalone_mode=False);"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'bitsandbytes', 'detgen.outputs', 'detgen.prompts'};"
        "heavy |= {'pydantic'} if sys.argv[1:] == ['--help'] else set();"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "detgen", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"detgen {__version__}\n"


def test_an_interruption_while_the_command_line_is_loaded_ends_it_quietly() -> None:
    code = """if True:
        import os, signal, sys
        class Interrupting:
            def find_spec(self, name, *place):
                if name == "typer":
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Interrupting())
        from detgen.__main__ import main
        main()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_run_that_is_ended_before_it_generates_says_how_to_resume(name: str, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one")
    code = f"""if True:
        import os, signal, sys
        class Ending:
            def find_spec(self, name, *place):
                if name == "detgen.run.lifecycle":
                    os.kill(os.getpid(), signal.{name})
        sys.meta_path.insert(0, Ending())
        from detgen.__main__ import main
        main()
    """
    command = [sys.executable, "-c", code, "run", "p.txt", "-q"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert "to resume, run the same command again:\n  detgen run p.txt -q\n" in done.stderr


@pytest.mark.parametrize("command", ["run", "audit", "bench", "verify-determinism"])
def test_the_model_has_two_names(command: str, run_with: RunWith) -> None:
    help = invoke(command, "--help").stdout
    assert "--target,--model" in help
    if command == "run":
        for name in ("--target", "--model"):
            assert run_with("prompts.jsonl", name, "folder")[1].engine.target == "folder"


@pytest.mark.parametrize(
    ("words", "found"),
    [("run --prompt-c", "--prompt-column"), ("run p.jsonl --dtype float3", "float32"), ("au", "audit")],
)
def test_a_shell_completes_what_is_typed(words: str, found: str) -> None:
    asked = {
        "_DETGEN_COMPLETE": "complete_bash",
        "COMP_WORDS": f"detgen {words}",
        "COMP_CWORD": str(words.count(" ") + 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "detgen"], env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [found]


@pytest.mark.parametrize(
    "arguments",
    [
        ("\x1b[31mrun",),
        ("run", "p.jsonl", "--\x1b[31m"),
        ("run", "p.jsonl", "--drafter", "\x1b[31m"),
        ("run", "p.jsonl", "--kv-memory", "\x1b[31m\u202e"),
        ("run", "\x1b[31m.jsonl"),
        ("run", "p.csv"),
        ("run", "p.jsonl", "--target", "\x1b[31m"),
        ("run", "p.jsonl", "--target", "model"),
        ("run", "p.jsonl", "--output", "there\x1b[31m"),
        ("report", "\x1b[31m"),
        ("report", "there\x1b[31m", "-o", "\x1b[31m/x"),
        ("audit", "\x1b[31m"),
        ("audit", "there\x1b[31m", "--json", "\x1b[31m/x"),
        ("verify-determinism", "--axis", "\x1b[31m"),
        ("bench", "--workload", "\x1b[31m"),
        ("bench", "--batch-size", "\x1b[31m"),
    ],
)
def test_a_refusal_shows_no_control_character(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "p.csv").write_text("\x1b[31m,\u202e\na,b\n")
    (tmp_path / "there\x1b[31m").mkdir()
    (tmp_path / "there\x1b[31m" / "\x1b[31m.txt").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "hidden_size": "\x1b[31m"}')
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "x1b" in result.stderr or "it is not JSON" in result.stderr
    assert all(c.isprintable() or c == "\n" for c in result.stderr)


@pytest.mark.parametrize(
    ("given", "want"),
    [({}, "0"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["by itself", "a count of one's own", "a policy of one's own"],
)
def test_how_long_threads_spin(given: dict[str, str], want: str) -> None:
    """Set before torch is loaded, unless the person has said something about it."""
    kept = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import os, sys, detgen; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=kept | given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [want, "False"]
