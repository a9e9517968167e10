"""What needs no model to be refused is refused in a second: before the engine is imported, in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from helpers.fakes import go
from helpers.tampering import edit_manifest

# Runs command lines, each in a copy of a process that has loaded what all of them load.
CODE = """
import gc, json, os, sys, time
import detgen.verify.replay.claims, detgen.show.answers, detgen.show.progress_view, rich.markup, typer.rich_utils
from detgen.__main__ import main
gc.freeze()  # else each copy copies, and then clears, all that was loaded
for name, arguments in json.load(sys.stdin).items():
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        for stream in (1, 2):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
        sys.argv = ["detgen", *arguments]
        try:
            main()
        finally:
            if sys.modules.keys() & {"detgen.engine.engine", "torch", "transformers"}:
                sys.stderr.write("the engine was imported\\n")
        sys.exit("it came back")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([status, time.monotonic() - started]), flush=True)
"""
SECONDS = 5.0  # it takes a tenth of one where nothing else runs

CASES = {
    "run no.jsonl": "there is no file no.jsonl",
    "run p.jsonl --top-p 2": "--top-p",
    "run p.jsonl --batch-size 0": "--batch-size",
    "run p.jsonl --drafter model --target some/model": "--drafter model needs a draft model",
    "run p.jsonl --json-schema not.json": '--json-schema is refused: Unimplemented keys: ["not"]',
    "run p.jsonl --json-schema no.json": "cannot read no.json: No such file or directory",
    "run p.jsonl --json-schema list.json": "list.json must hold a JSON schema, which is an object, got [1]",
    "run p.jsonl --json-schema void.json": "void.json is not JSON: Expecting value: line 1 column 1 (char 0)",
    "run p.jsonl --regex (a": "--regex is refused: invalid regular expression: ",
    "run p.jsonl --choice a --ignore-eos": "--ignore-eos cannot be combined with --choice: a text that fits ends",
    "run p.jsonl --choice a --regex b": "both --regex and --choice are given; give one of them",
    "run p.jsonl -o p.jsonl": "is a file, not a folder",
    **dict.fromkeys(
        ("export out --to csv -o -", "report out -o -", "bench -o -"),
        "nothing is written to standard output",
    ),
    "run p.jsonl -o /proc/nowhere": "cannot use the folder",
    "run p.jsonl --target ./no": "there is no such folder",
    "run p.jsonl --target a/b/c": "not a name on the hub",
    "run p.jsonl --target empty": "no config.json",
    "run p.jsonl --adapter ./no": "cannot use the adapter ./no: there is no such folder",
    "run p.jsonl --adapter empty": "adapter_config.json is not in this folder",
    "run p.jsonl --draft ./no": "there is no such folder",
    "audit no": "no manifest.json",
    "audit out": "there is no such folder",
    "audit out --target empty": "no config.json",
    "audit out no.jsonl": "there is no file no.jsonl",
    "audit out --json no/where.json": "there is no folder",
    "export no --to csv": "no manifest.json",
    "export out --to xls": "'--to': 'xls' is not one of 'csv', 'parquet', 'openai', 'hf'",
    "export out no.jsonl --to openai": "there is no file no.jsonl",
    "export out --to hf -o p.jsonl": "exists already",
    "verify-determinism no.jsonl": "there is no file no.jsonl",
    "verify-determinism --axis shape": "there is no axis 'shape'",
    "verify-determinism --target ./no": "there is no such folder",
    "verify-determinism --replay no.json": "there is no such file",
    "verify-determinism --against no": "no manifest.json",
    "verify-determinism --threads 0": "--threads must be",
    "bench --target ./no": "there is no such folder",
    "bench --random-weights no": "there is no configuration",
    "bench --workload no": "there is no workload",
    "bench --workload file:no.jsonl": "there is no such file",
    "bench -o /proc/nowhere": "cannot write to /proc/nowhere",
    "bench --rounds 0": "--rounds must be",
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, float, str]]:
    """Exit status, seconds and what was written, by command line."""
    folder, written = tmp_path_factory.mktemp("asked"), tmp_path_factory.mktemp("written")
    (folder / "p.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "not.json").write_text('{"not": {}}')
    (folder / "list.json").write_text("[1]")
    (folder / "void.json").write_text("")
    (folder / "empty").mkdir()
    go(folder / "p.jsonl", folder / "out")
    edit_manifest(folder / "out", lambda manifest: manifest.update(model="./no"))
    files = {case: written / str(n) for n, case in enumerate(CASES)}
    asked = {str(file): case.split() for case, file in files.items()}
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=folder, input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    ends: list[Any] = [json.loads(line) for line in done.stdout.splitlines()]
    return {case: (*end, files[case].read_text()) for case, end in zip(CASES, ends, strict=True)}


@pytest.mark.parametrize("arguments", CASES)
def test_refused_before_the_engine_is_imported(refused: dict[str, tuple[int, float, str]], arguments: str) -> None:
    status, seconds, written = refused[arguments]
    assert status == 2, written
    assert "the engine was imported" not in written
    assert "Traceback" not in written
    said = " ".join(written.replace("│", " ").split())
    assert CASES[arguments] in said
    assert len([line for line in written.splitlines() if "error: " in line]) == (0 if "╭" in said else 1)
    assert seconds < SECONDS
