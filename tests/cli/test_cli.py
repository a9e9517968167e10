from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from typer.testing import CliRunner, Result

import detgen.run
from detgen import __version__, cli
from detgen.cli import options
from detgen.drafters.registry import DRAFTERS
from detgen.engine.config import EngineConfig
from detgen.engine.request import SamplingParams
from detgen.errors import DTypeName, EngineError, QuantName, RequestError, RunError
from detgen.outputs import Totals
from detgen.run import RunConfig, RunSummary

PANELS = ("Models", "Drafting", "Sampling", "Resources", "Run")
OPTIONS = (
    *("--output", "-o", "--target", "--draft", "--drafter", "--draft-tokens", "--verify-window", "--batch-size"),
    *("--max-tokens", "--temperature", "--top-p", "--top-k", "--min-p", "--seed", "--n", "--stop", "--device"),
    *("--dtype", "--target-quant", "--draft-quant", "--threads", "--kv-memory", "--limit", "--overwrite", "--strict"),
    *("--quiet", "-q", "--allow-nondeterministic", "--trust-remote-code"),
    *("--seed-per-line", "--prompt-column", "--echo", "--prefix-cache"),
)
SUMMARY = RunSummary(
    status="finished",
    output=Path("some-out"),
    written=Totals(prompts=3, samples=3),
    fresh=Totals(tokens=30),
    resumed=0,
    seconds=1.5,
    target_passes=10,
    peak_memory=2**20,
    sha256="f" * 64,
    deterministic=True,
)

Invoke = Callable[..., tuple[Result, RunConfig]]


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(cli.app, list(arguments), prog_name="detgen")


@pytest.fixture
def run_with(monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Invoke `detgen run` with a run that does not run: it ends as `outcome` says and keeps what it was given."""

    def run_with(*arguments: str, outcome: RunSummary | BaseException = SUMMARY) -> tuple[Result, RunConfig]:
        seen: list[RunConfig] = []

        def run(config: RunConfig, observer: Any) -> RunSummary:
            seen.append(config)
            observer.message("a message")
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(detgen.run, "run", run)
        monkeypatch.setattr(sys, "argv", ["detgen", "run", *arguments])
        result = invoke("run", *arguments)
        return result, seen[0] if seen else RunConfig("", None, SamplingParams(), EngineConfig())

    return run_with


def test_root_help_has_the_commands_and_an_example() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert "run" in result.stdout
    assert "Example: detgen run" in result.stdout


def test_run_help_has_every_option_in_a_panel_and_examples() -> None:
    result = invoke("run", "--help")
    assert result.exit_code == 0
    positions = [result.stdout.index(f"─ {panel} ─") for panel in PANELS]
    assert positions == sorted(positions)
    words = result.stdout[positions[0] :].split()
    assert [option for option in OPTIONS if option not in words] == []
    for choice in (*DRAFTERS, *get_args(DTypeName), *get_args(QuantName)):
        assert choice in result.stdout
    assert "  detgen run prompts.jsonl" in result.stdout


def test_no_arguments_show_the_help() -> None:
    assert "Usage: detgen run" in invoke("run").output
    assert "Usage: detgen" in invoke().output


def test_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"detgen {__version__}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_needs_no_heavy_import(arguments: list[str]) -> None:
    code = (
        "import sys; from detgen.cli import app; app(sys.argv[1:], standalone_mode=False);"
        "print(sorted({'torch', 'transformers', 'datasets', 'numpy', 'bitsandbytes'} & set(sys.modules)))"
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


def test_defaults_are_those_of_the_api(run_with: Invoke) -> None:
    result, config = run_with("prompts.jsonl")
    assert result.exit_code == 0, result.output
    assert config == RunConfig("prompts.jsonl", None, SamplingParams(), EngineConfig(), limit=None, overwrite=False)


def test_every_option_arrives(run_with: Invoke) -> None:
    result, config = run_with(
        *("-", "-o", "folder", "--target", "T", "--draft", "D", "--drafter", "ngram", "--draft-tokens", "4"),
        *("--verify-window", "5", "--batch-size", "6", "--max-tokens", "7", "--temperature", "0.8", "--top-p", "0.9"),
        *("--top-k", "10", "--min-p", "0.1", "--seed", "11", "--n", "2", "--stop", "\\n", "--stop", "END"),
        *("--min-tokens", "3", "--stop-token-id", "9", "--stop-token-id", "4", "--ignore-eos", "--logprobs", "5"),
        *("--repetition-penalty", "1.2", "--frequency-penalty", "-0.5", "--presence-penalty", "1"),
        "--no-deterministic",
        *("--device", "cuda:1", "--dtype", "bfloat16", "--target-quant", "nf4", "--draft-quant", "int8"),
        *("--threads", "1", "--kv-memory", "4GiB", "--limit", "9", "--overwrite", "--strict", "--quiet"),
        *("--prefix-cache", "off"),
        *("--allow-nondeterministic", "--trust-remote-code", "--prompt-column", "q", "--seed-per-line", "--echo"),
    )
    assert result.exit_code == 0, result.output
    params = SamplingParams(
        max_tokens=7,
        temperature=0.8,
        top_p=0.9,
        top_k=10,
        min_p=0.1,
        seed=11,
        n=2,
        stop=("\\n", "END"),
        logprobs=5,
        deterministic=False,
        min_tokens=3,
        stop_token_ids=(9, 4),
        ignore_eos=True,
        repetition_penalty=1.2,
        frequency_penalty=-0.5,
        presence_penalty=1.0,
    )
    engine = EngineConfig(
        target="T",
        draft="D",
        drafter="ngram",
        draft_tokens=4,
        verify_window=5,
        batch_size=6,
        device="cuda:1",
        dtype="bfloat16",
        target_quant="nf4",
        draft_quant="int8",
        threads=1,
        kv_memory=4 * 2**30,
        prefix_cache=False,
        allow_nondeterministic=True,
        trust_remote_code=True,
    )
    asked: dict[str, Any] = {"prompt_column": "q", "seed_per_line": True, "echo": True}
    assert config == RunConfig("-", Path("folder"), params, engine, limit=9, overwrite=True, **asked)


@pytest.mark.parametrize("command", ["run", "audit", "bench", "verify-determinism"])
def test_the_model_has_two_names(command: str, run_with: Invoke) -> None:
    help = invoke(command, "--help").stdout
    assert "--target,--model" in help
    if command == "run":
        for name in ("--target", "--model"):
            assert run_with("prompts.jsonl", name, "folder")[1].engine.target == "folder"


@pytest.mark.parametrize(
    ("given", "name"),
    [("f32", "float32"), ("fp32", "float32"), ("bf16", "bfloat16"), ("f16", "float16"), ("fp16", "float16")],
)
def test_number_formats_have_one_name_behind_the_command_line(run_with: Invoke, given: str, name: str) -> None:
    assert run_with("prompts.jsonl", "--dtype", given)[1].engine.dtype == name
    assert run_with("prompts.jsonl", "--dtype", name)[1].engine.dtype == name


@pytest.mark.parametrize(
    ("words", "found"), [("run --prompt-c", "--prompt-column"), ("run p.jsonl --dtype bf", "bfloat16"), ("au", "audit")]
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


def test_every_engine_and_sampling_setting_has_an_option() -> None:
    """All but one that is no text for a command line, and one that no output and no speed is better for."""
    names = set(inspect.signature(cli.run.run_command).parameters)
    settings = {*SamplingParams.__slots__, *EngineConfig.__slots__}
    assert settings - names == {"logit_bias", "prefill_chunk"}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1073741824", 2**30),
        ("4GiB", 4 * 2**30),
        ("4gib", 4 * 2**30),
        ("4G", 4 * 2**30),
        ("500MB", 500_000_000),
        ("1.5 KiB", 1536),
        ("2TB", 2 * 10**12),
        ("100b", 100),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert options.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "0", "-1", "4 PiB", "4Gi", "1e9", "0.1b", "inf"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="amount of memory"):
        options.parse_size(text)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--drafter", "best", DRAFTERS),
        ("--dtype", "float8", get_args(DTypeName)),
        ("--target-quant", "int4", get_args(QuantName)),
        ("--draft-quant", "int4", get_args(QuantName)),
        ("--device", "tpu", ("auto", "cpu", "cuda", "cuda:N")),
        ("--draft-tokens", "many", ("auto", "whole number")),
        ("--draft-tokens", "0", ("auto", "whole number")),
        ("--kv-memory", "much", ("4GiB",)),
        ("--prefix-cache", "yes", ("on", "off")),
        ("--limit", "0", ("--limit",)),
        ("--stop-token-id", "-1", ("--stop-token-id",)),
        ("--seed", "x", ("--seed",)),
    ],
)
def test_wrong_values_are_refused_with_what_is_allowed(option: str, value: str, said: tuple[str, ...]) -> None:
    result = invoke("run", "prompts.jsonl", option, value)
    assert result.exit_code == 2
    for word in (option, *said):
        assert word in result.stderr


@pytest.mark.parametrize("error", [RunError("no such file"), EngineError("no such file"), RequestError("no such file")])
def test_refusals_are_one_line(run_with: Invoke, error: Exception) -> None:
    result, _ = run_with("prompts.jsonl", "--quiet", outcome=error)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "detgen: error: no such file\n")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--top-p", "2", "must be a number from 0 to 1, got 2.0"),
        ("--top-p", "0", "must be above 0 (1 turns it off), got 0"),
        ("--n", "0", "must be a whole number of at least 1, got 0"),
        ("--n", "1000001", "must be at most 1000000, got 1000001"),
        ("--min-tokens", "129", "must be at most max_tokens (128), got 129"),
        ("--repetition-penalty", "0", "must be a number from 0.01 to 100, got 0.0"),
        ("--logprobs", "101", "must be a whole number from 0 to 100, got 101"),
        ("--batch-size", "0", "must be a whole number of at least 1, got 0"),
        ("--threads", "5000", "must be at most 1024, got 5000"),
    ],
)
def test_settings_out_of_range_are_refused_in_one_line_that_names_the_option(
    option: str, value: str, said: str
) -> None:
    result = invoke("run", "prompts.jsonl", "--quiet", option, value)
    assert (result.exit_code, result.stderr) == (2, f"detgen: error: {option} {said}\n")


def test_only_the_range_of_a_setting_is_told_in_other_words() -> None:
    for said in ("p.jsonl:3: max_tokens must be at least 1", "device 'x' is not supported", "no model must be"):
        assert options.as_typed(EngineError(said)) == said


def test_a_fault_of_detgen_keeps_its_traceback(run_with: Invoke) -> None:
    result, _ = run_with("prompts.jsonl", outcome=ZeroDivisionError())
    assert isinstance(result.exception, ZeroDivisionError)


def test_errors_matter_under_strict_alone(run_with: Invoke) -> None:
    failed = replace(SUMMARY, written=Totals(errors=1))
    assert run_with("prompts.jsonl", outcome=failed)[0].exit_code == 0
    assert run_with("prompts.jsonl", "--strict", outcome=failed)[0].exit_code == 1
    assert run_with("prompts.jsonl", "--strict")[0].exit_code == 0
    assert run_with("prompts.jsonl", "--strict", outcome=replace(failed, status="already finished"))[0].exit_code == 1


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
@pytest.mark.parametrize("status", ["finished", "already finished"])
def test_a_run_in_which_every_prompt_failed_is_no_success(
    run_with: Invoke, tmp_path: Path, status: Any, quiet: list[str]
) -> None:
    lines = [f'{{"error":"p.jsonl:{n}: bad\\u001b[31m"}}\n' for n in range(1, 6)]
    (tmp_path / "outputs.jsonl").write_text("".join(lines))
    all_bad = replace(SUMMARY, status=status, output=tmp_path, written=Totals(prompts=5, errors=5))
    result, _ = run_with("prompts.jsonl", *quiet, outcome=all_bad)
    assert result.exit_code == 1
    shown = [line for line in result.stderr.splitlines() if "a message" not in line]
    assert shown[0] == "detgen: no prompt could be run:"
    assert [line[:24] for line in shown[1:4]] == [f"detgen:   p.jsonl:{n}: bad" for n in (1, 2, 3)]
    assert shown[4:] == [f"detgen:   2 more are in {tmp_path / 'outputs.jsonl'}, with an error"]


def test_the_first_errors_of_a_run_are_shown(run_with: Invoke, tmp_path: Path) -> None:
    (tmp_path / "outputs.jsonl").write_text('{"text":"a"}\n{"error":"p.jsonl:2: bad"}\n')
    some_bad = replace(SUMMARY, output=tmp_path, written=Totals(prompts=2, samples=1, errors=1, tokens=3))
    result, _ = run_with("prompts.jsonl", outcome=some_bad)
    assert result.exit_code == 0
    assert result.stderr.splitlines()[1:] == ["detgen: 1 prompt could not be run:", "detgen:   p.jsonl:2: bad"]
    assert run_with("prompts.jsonl")[0].stderr == "detgen: a message\n"


@pytest.mark.parametrize("outcome", [replace(SUMMARY, status="interrupted", sha256=None), KeyboardInterrupt()])
def test_an_interrupted_run_says_how_to_go_on(run_with: Invoke, outcome: RunSummary | BaseException) -> None:
    result, _ = run_with("my prompts.jsonl", "--overwrite", "-q", outcome=outcome)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.splitlines()[-1].strip() == "detgen run 'my prompts.jsonl' -q"


def test_an_interrupted_command_can_be_typed_again_whatever_is_in_it(run_with: Invoke) -> None:
    """Shown without what a terminal obeys, in a form that a shell reads back."""
    word = "it's\x1b[31m \\ é\n\u202e"
    result, _ = run_with("p.jsonl", "--stop", word, "-q", outcome=KeyboardInterrupt())
    shown = result.stderr.splitlines()[-1].strip()
    assert shown.isprintable()
    words = shown.removeprefix("detgen ")
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {words}"],
        capture_output=True,
        check=True,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )
    assert done.stdout.decode().split("\0")[:-1] == ["run", "p.jsonl", "--stop", word, "-q"]


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


def test_results_go_to_stdout_and_the_rest_to_stderr(run_with: Invoke) -> None:
    result, _ = run_with("prompts.jsonl")
    assert "f" * 64 in result.stdout
    assert "a message" not in result.stdout
    assert result.stderr == "detgen: a message\n"


@pytest.mark.parametrize("closed", ["by the reader", "from the start"])
def test_a_run_that_nobody_looks_at_ends_as_any_other(tmp_path: Path, closed: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    code = f"""if True:
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from helpers.fakes import FakeEngine
        import detgen.run.lifecycle
        detgen.run.lifecycle._load_engine = FakeEngine
        from detgen.__main__ import main
        main()
    """
    command = [sys.executable, "-c", code, "run", str(prompts), "-o", str(tmp_path / "out"), "--max-tokens", "2"]
    if closed == "from the start":
        done = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command], check=False)
    else:
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(command, stdout=writer, stderr=writer, check=False)
        os.close(writer)
    assert done.returncode == 0
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["status"] == "finished"


def test_quiet_shows_nothing(run_with: Invoke) -> None:
    result, _ = run_with("prompts.jsonl", "--quiet")
    assert result.output == ""


@pytest.mark.parametrize(
    ("given", "want"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["by itself", "a count of one's own", "a policy of one's own"],
)
def test_how_long_threads_spin(given: dict[str, str], want: str) -> None:
    """Set before torch is loaded, unless the person has said something about it."""
    kept = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import os, sys, detgen; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=kept | given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [want, "False"]
