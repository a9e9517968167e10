"""detgen run: every option arrives, results and errors go where they belong, exit statuses say what happened."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from helpers.commands import SUMMARY, RunWith, invoke

from detgen import cli
from detgen.drafters.registry import DRAFTERS
from detgen.engine.config import EngineConfig
from detgen.errors import DTypeName, EngineError, QuantName, RequestError, RunError
from detgen.outputs import Totals
from detgen.params import PARAMETERS, SamplingParams
from detgen.run import RunConfig, RunSummary
from detgen.workers.worker_config import WorkersConfig

PANELS = ("Options", "Sampling", "Model", "Speed", "Input and output", "Expert")
OPTIONS = (
    *("--output", "-o", "--target", "--draft", "--drafter", "--draft-tokens", "--batch-size"),
    *("--max-tokens", "--temperature", "--top-p", "--top-k", "--min-p", "--seed", "--n", "--stop", "--device"),
    *(
        "--dtype",
        "--kv-dtype",
        "--target-quant",
        "--draft-quant",
        "--threads",
        "--kv-memory",
        "--limit",
        "--overwrite",
        "--strict",
    ),
    *("--quiet", "-q", "--trust-remote-code"),
    *("--seed-per-line", "--prompt-column", "--echo", "--prefix-cache"),
    *("--speculative-prefill", "--show-thoughts", "--acceptance-log", "--output-format", "--workers", "--ray"),
)


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


def test_defaults_are_those_of_the_api(run_with: RunWith) -> None:
    result, config = run_with("prompts.jsonl")
    assert result.exit_code == 0, result.output
    assert config == RunConfig("prompts.jsonl", None, SamplingParams(), EngineConfig(), limit=None, overwrite=False)


def test_every_option_arrives(run_with: RunWith) -> None:
    result, config = run_with(
        *("-", "-o", "folder", "--target", "T", "--draft", "D", "--drafter", "ngram", "--draft-tokens", "4"),
        *("--batch-size", "6", "--max-tokens", "7", "--temperature", "0.8", "--top-p", "0.9"),
        *("--top-k", "10", "--min-p", "0.1", "--seed", "11", "--n", "2", "--stop", "\\n", "--stop", "END"),
        *("--min-tokens", "3", "--stop-token-id", "9", "--stop-token-id", "4", "--ignore-eos", "--logprobs", "5"),
        *("--repetition-penalty", "1.2", "--frequency-penalty", "-0.5", "--presence-penalty", "1"),
        "--no-deterministic",
        *("--device", "cuda:1", "--dtype", "bfloat16", "--target-quant", "nf4", "--draft-quant", "int8"),
        *(
            "--threads",
            "1",
            "--kv-memory",
            "4GiB",
            "--kv-dtype",
            "bf16",
            "--limit",
            "9",
            "--overwrite",
            "--strict",
            "--quiet",
        ),
        *("--prefix-cache", "off", "--speculative-prefill", "3", "--show-thoughts", "--acceptance-log", "zst"),
        *("--trust-remote-code", "--prompt-column", "q", "--seed-per-line", "--echo"),
        *("--output-format", "openai", "--adapter", "A", "--workers", "2", "--ray", "auto"),
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
        batch_size=6,
        device="cuda:1",
        dtype="bfloat16",
        kv_dtype="bfloat16",
        adapter="A",
        target_quant="nf4",
        draft_quant="int8",
        threads=1,
        kv_memory=4 * 2**30,
        prefix_cache=False,
        speculative_prefill=3,
        trust_remote_code=True,
    )
    asked: dict[str, Any] = {"prompt_column": "q", "seed_per_line": True, "echo": True, "show_thoughts": True}
    asked |= {"output_format": "openai", "acceptance_log": "zst", "workers": WorkersConfig(2, "auto")}
    assert config == RunConfig("-", Path("folder"), params, engine, limit=9, overwrite=True, **asked)


@pytest.mark.parametrize(
    ("given", "name"),
    [("f32", "float32"), ("fp32", "float32"), ("bf16", "bfloat16"), ("f16", "float16"), ("fp16", "float16")],
)
def test_number_formats_have_one_name_behind_the_command_line(run_with: RunWith, given: str, name: str) -> None:
    assert run_with("prompts.jsonl", "--dtype", given)[1].engine.dtype == name
    assert run_with("prompts.jsonl", "--dtype", name)[1].engine.dtype == name


def test_every_engine_and_sampling_setting_has_an_option() -> None:
    """All but one that is no text for a command line, and one that no output and no speed is better for."""
    names = set(inspect.signature(cli.run_command.run_command).parameters)
    settings = {*PARAMETERS, *EngineConfig.__slots__}
    assert settings - names == {"guided_grammar", "logit_bias", "prefill_chunk"}


@pytest.mark.parametrize("error", [RunError("no such file"), EngineError("no such file"), RequestError("no such file")])
def test_refusals_are_one_line(run_with: RunWith, error: Exception) -> None:
    result, _ = run_with("prompts.jsonl", "--quiet", outcome=error)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "detgen: error: no such file\n")


def test_a_fault_of_detgen_keeps_its_traceback(run_with: RunWith) -> None:
    result, _ = run_with("prompts.jsonl", outcome=ZeroDivisionError())
    assert isinstance(result.exception, ZeroDivisionError)


def test_errors_matter_under_strict_alone(run_with: RunWith) -> None:
    failed = replace(SUMMARY, written=Totals(errors=1))
    assert run_with("prompts.jsonl", outcome=failed)[0].exit_code == 0
    assert run_with("prompts.jsonl", "--strict", outcome=failed)[0].exit_code == 1
    assert run_with("prompts.jsonl", "--strict")[0].exit_code == 0
    assert run_with("prompts.jsonl", "--strict", outcome=replace(failed, status="already finished"))[0].exit_code == 1


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
@pytest.mark.parametrize("status", ["finished", "already finished"])
def test_a_run_in_which_every_prompt_failed_is_no_success(
    run_with: RunWith, tmp_path: Path, status: Any, quiet: list[str]
) -> None:
    lines = [f'{{"id":{n},"index":{n},"sample":0,"error":"p.jsonl:{n}: bad\\u001b[31m"}}\n' for n in range(1, 6)]
    (tmp_path / "outputs.jsonl").write_text("".join(lines))
    all_bad = replace(SUMMARY, status=status, output=tmp_path, written=Totals(prompts=5, errors=5))
    result, _ = run_with("prompts.jsonl", *quiet, outcome=all_bad)
    assert result.exit_code == 1
    shown = [line for line in result.stderr.splitlines() if "a message" not in line]
    assert shown[0] == "detgen: no prompt could be run:"
    assert [line[:24] for line in shown[1:4]] == [f"detgen:   p.jsonl:{n}: bad" for n in (1, 2, 3)]
    assert shown[4:] == [f"detgen:   2 more are in {tmp_path / 'outputs.jsonl'}, with an error"]


def test_the_first_errors_of_a_run_are_shown(run_with: RunWith, tmp_path: Path) -> None:
    (tmp_path / "outputs.jsonl").write_text('{"id":"b","index":1,"sample":0,"error":"p.jsonl:2: bad"}\n')
    some_bad = replace(SUMMARY, output=tmp_path, written=Totals(prompts=2, samples=1, errors=1, tokens=3))
    result, _ = run_with("prompts.jsonl", outcome=some_bad)
    assert result.exit_code == 0
    assert result.stderr.splitlines()[1:] == ["detgen: 1 prompt could not be run:", "detgen:   p.jsonl:2: bad"]
    assert run_with("prompts.jsonl")[0].stderr == "detgen: a message\n"


@pytest.mark.parametrize("outcome", [replace(SUMMARY, status="interrupted", sha256=None), KeyboardInterrupt()])
def test_an_interrupted_run_says_how_to_go_on(run_with: RunWith, outcome: RunSummary | BaseException) -> None:
    result, _ = run_with("my prompts.jsonl", "--overwrite", "-q", outcome=outcome)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.splitlines()[-1].strip() == "detgen run 'my prompts.jsonl' -q"


def test_an_interrupted_command_can_be_typed_again_whatever_is_in_it(run_with: RunWith) -> None:
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


def test_results_go_to_stdout_and_the_rest_to_stderr(run_with: RunWith) -> None:
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
        detgen.run.lifecycle.load_engine = FakeEngine
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


def test_quiet_shows_nothing(run_with: RunWith) -> None:
    result, _ = run_with("prompts.jsonl", "--quiet")
    assert result.output == ""


@pytest.mark.parametrize("fails", [False, True])
def test_the_status_file_says_how_a_run_ended(run_with: RunWith, tmp_path: Path, fails: bool) -> None:
    path = tmp_path / "status.json"
    outcome = RunError("no such file") if fails else SUMMARY
    result, _ = run_with("prompts.jsonl", "--status-file", str(path), outcome=outcome)
    assert result.exit_code == (2 if fails else 0), result.output
    assert json.loads(path.read_text("utf-8"))["state"] == ("failed" if fails else "finished")


def test_the_place_of_the_status_file_is_checked_first(run_with: RunWith, tmp_path: Path) -> None:
    result, config = run_with("prompts.jsonl", "--status-file", str(tmp_path / "nowhere" / "status.json"))
    assert (result.exit_code, config.prompts) == (2, "")
    assert "there is no folder" in result.output
