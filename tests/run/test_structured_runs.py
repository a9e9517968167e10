"""Forms, calls of tools and an adapter in whole runs, beside free texts: the same bytes, and an audit of the masks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from helpers.adapters import factors, write
from helpers.checks import Silent
from helpers.commands import invoke
from helpers.examples import thorough, usual
from helpers.tampering import Changed, edit_manifest

from detgen import Engine, EngineConfig, SamplingParams
from detgen.outputs import KeptSamples
from detgen.prompts import open_prompts
from detgen.run import RunConfig, RunSummary, run
from detgen.verify.replay.audit import Audit
from detgen.verify.replay.claims import read_manifest

TEMPLATE = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}\n{% endfor %}{# <tool_call> #}"
FORM = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}},
    "required": ["ok", "tags"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get", "strict": True, "parameters": FORM}},
    {"type": "function", "function": {"name": "put"}},
]
PUT = {"type": "function", "function": {"name": "put"}}
ASKED = [{"role": "user", "content": "x = 1"}]
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 7}
LINES: list[dict[str, Any]] = [
    {"id": "schema", "prompt": "x = ", "guided_json": FORM, **DRAWN, "n": 2, "logprobs": 1, "max_tokens": 60},
    {"id": "plain", "prompt": "def add(a, b):\n", "max_tokens": 30},
    {"id": "regex", "prompt": "x = ", "guided_regex": "[a-f]{2,6}|[0-9]+", "repetition_penalty": 1.4, "stop": ["7"]},
    {"id": "required", "messages": ASKED, "tools": TOOLS, "tool_choice": "required", **DRAWN, "n": 2, "max_tokens": 90},
    {
        "id": "choice",
        "prompt": "import os\n",
        "guided_choice": ["yes", "no", "é\n"],
        "logit_bias": {"0": -50.0},
        "min_tokens": 9,
    },
    {"id": "grammar", "prompt": "x = ", "guided_grammar": 'root ::= "a" ("b" | "c")+', **DRAWN, "n": 3},
    {"id": "named", "messages": ASKED, "tools": TOOLS, "tool_choice": PUT, "max_tokens": 90},
    {"id": "auto", "messages": ASKED, "tools": TOOLS, **DRAWN},
    {"id": "object", "prompt": "x = ", "response_format": {"type": "json_object"}},
    {"id": "cut", "prompt": "x = ", "guided_json": FORM, "max_tokens": 3},
    {"id": "refused", "prompt": "x = ", "guided_json": {"not": {}}},
    {"id": "unverified", "prompt": "x = ", "guided_choice": ["yes", "no"], "deterministic": False, **DRAWN},
    {"id": "outputs", "prompt": "x = [", "structured_outputs": {"regex": '"[a-z]{3}"'}, "frequency_penalty": 0.8},
    {"id": "drawn", "prompt": "class A:\n", **DRAWN, "n": 2, "top_p": 0.9},
]
PARAMS = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def models(demo_models: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The embedded pair, the target with a chat template that has calls, and an adapter of it."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(demo_models.target, folder / "target")
    (folder / "target" / "chat_template.jinja").write_text(TEMPLATE)
    shapes = {"model.layers.0.self_attn.q_proj": (256, 256), "model.layers.3.mlp.down_proj": (256, 704)}
    write(folder / "adapter", factors(shapes))
    return {"target": folder / "target", "draft": demo_models.draft, "adapter": folder / "adapter"}


@pytest.fixture(scope="module")
def engine(models: dict[str, Path]) -> Engine:
    return Engine(**models, kv_memory=24 << 20)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


@pytest.fixture(scope="module")
def go(engine: Engine, models: dict[str, Path]) -> Callable[..., RunSummary]:
    """Runs a file into a folder: `go(prompts, out, **settings)`."""

    def go(prompts: Path, out: Path, cache: Path | None = None, **settings: Any) -> RunSummary:
        build: Any = Changed(engine.with_settings(**settings))
        config = EngineConfig(**models, drafter=settings.get("drafter", "auto"))
        return run(RunConfig(str(prompts), out, PARAMS, config, cache=cache), Silent(), build_engine=lambda _: build)

    return go


@pytest.fixture(scope="module")
def alone(go: Callable[..., RunSummary], prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one request at a time, without drafts."""
    out = tmp_path_factory.mktemp("alone")
    go(prompts, out / "out", cache=out / "cache", drafter="none", batch_size=1, threads=1)
    return out / "out"


def options_of(models: dict[str, Path]) -> list[str]:
    """Those of the command for the run."""
    return [*(f"--{name}={path}" for name, path in models.items()), "--max-tokens=24", "--quiet"]


def written(out: Path) -> dict[tuple[str, int], dict[str, Any]]:
    lines = map(json.loads, (out / "outputs.jsonl").read_bytes().splitlines())
    return {(line["id"], line["sample"]): line for line in lines}


def verified(out: Path) -> list[bytes]:
    """The lines of a run but those that are not verified, which may be others."""
    return [line for line in (out / "outputs.jsonl").read_bytes().splitlines() if b'"unverified"' not in line]


def test_what_is_written_fits(alone: Path) -> None:
    """Whatever else is asked of it."""
    lines = written(alone)
    assert len(lines) == sum(line.get("n", 1) for line in LINES)
    assert lines["refused", 0]["error"].startswith("prompts.jsonl:11: guided_json is refused: ")
    for sample in range(2):
        assert lines["schema", sample]["finish_reason"] == "stop"
        jsonschema.validate(json.loads(lines["schema", sample]["text"]), FORM)
        assert lines["required", sample]["tool_calls"]
        for call in [call["function"] for call in lines["required", sample]["tool_calls"]]:
            jsonschema.validate(json.loads(call["arguments"]), FORM if call["name"] == "get" else {"maxProperties": 0})
    assert set(lines["regex", 0]["text"]) <= set("abcdef0123456789")
    assert lines["choice", 0]["text"] in ("yes", "no", "é\n")
    assert [call["function"]["name"] for call in lines["named", 0]["tool_calls"]] == ["put"]
    assert lines["unverified", 0]["text"] in ("yes", "no")
    assert (lines["cut", 0]["finish_reason"], lines["cut", 0]["text"][0]) == ("length", "{")
    assert isinstance(json.loads(lines["object", 0]["text"]), dict)
    assert all(set(lines["grammar", i]["text"]) <= set("abc") for i in range(3))


@pytest.mark.parametrize(
    "settings",
    usual(
        [
            {"drafter": "auto", "batch_size": 7},
            {"drafter": "model", "batch_size": 7, "draft_tokens": 5, "prefill_chunk": 3},
            {"drafter": "grammar", "batch_size": 1},
            {"drafter": "none", "batch_size": 32},
        ],
        [
            {"drafter": "ngram", "batch_size": 32, "threads": 1},
            {"drafter": "self", "batch_size": 32, "draft_tokens": 2, "prefix_cache": False},
        ],
    ),
)
def test_the_same_bytes(
    go: Callable[..., RunSummary], alone: Path, prompts: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Whoever drafts, in any batch."""
    go(prompts, tmp_path / "out", **settings)
    assert verified(tmp_path / "out") == verified(alone)


def test_little_memory_preempts(engine: Engine, prompts: Path) -> None:
    """Forms go on where they were."""
    text = "def add(a, b):\n    return a + b\n" * 4
    read: Any = [request for request in open_prompts(str(prompts)).read(PARAMS) if request.prompt]
    long = [replace(request, prompt=text) for request in read if request.params.deterministic]
    roomy = engine.with_settings(drafter="none", batch_size=1)
    small = engine.with_settings(drafter="ngram", batch_size=8, kv_memory=2 << 20)
    wanted, found = ([(c.request.id, c.error, c.token_ids) for c in e.generate(long)] for e in (roomy, small))
    assert found == wanted
    assert small.stats.preemptions


def test_a_cache_gives_the_same_bytes(
    go: Callable[..., RunSummary], alone: Path, prompts: Path, tmp_path: Path
) -> None:
    """All but what is unverified or refused comes from it."""
    summary = go(prompts, tmp_path / "out", cache=alone.parent / "cache", drafter="auto", batch_size=7)
    assert summary.fresh.samples <= 2
    assert verified(tmp_path / "out") == verified(alone)


@thorough
def test_workers_write_the_same_bytes(models: dict[str, Path], alone: Path, prompts: Path, tmp_path: Path) -> None:
    """Processes of their own, with an adapter."""
    done = invoke("run", str(prompts), "-o", str(tmp_path / "out"), *options_of(models), "--workers=2", "--threads=2")
    assert done.exit_code == 0, done.output
    assert verified(tmp_path / "out") == verified(alone)


@thorough
def test_a_killed_run_resumes_to_the_same_bytes(
    go: Callable[..., RunSummary], models: dict[str, Path], alone: Path, prompts: Path, tmp_path: Path
) -> None:
    """The real command, in plain C, killed when some samples are committed; this process ends it."""
    options = [*options_of(models), "--batch-size=2", "--drafter=none"]
    code = (
        "import sys, detgen.engine.decoding as d, time; step = d.Decoding.step;"
        "d.Decoding.step = lambda self: (time.sleep(0.05), step(self))[1];"
        "import runpy; sys.argv = ['detgen', *sys.argv[1:]]; runpy.run_module('detgen', run_name='__main__')"
    )
    command = [sys.executable, "-c", code, "run", str(prompts), "-o", str(tmp_path / "out"), *options]
    with subprocess.Popen(command, env=os.environ | {"DETGEN_BUILD": "plain"}) as child:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and child.poll() is None:
            if (tmp_path / "out").exists():
                with KeptSamples(tmp_path / "out") as kept:
                    if kept.count() > 3:
                        break
            time.sleep(0.01)
        child.kill()
    assert child.returncode == -signal.SIGKILL
    summary = go(prompts, tmp_path / "out", drafter="auto", batch_size=7)
    assert summary.resumed > 3
    assert summary.fresh.samples > 3
    assert verified(tmp_path / "out") == verified(alone)


def test_an_audit_derives_the_masks(engine: Engine, alone: Path) -> None:
    assert Audit(alone, read_manifest(alone), engine, None).run(Silent()).findings == []


def test_an_adapter_that_has_moved(models: dict[str, Path], tmp_path: Path) -> None:
    """Audited and resumed from where it is now; another one in its place is a fault, or ends the resumed run."""
    here, there, out = tmp_path / "here", tmp_path / "there", str(tmp_path / "out")
    shutil.copytree(models["adapter"], here)
    (tmp_path / "p.jsonl").write_text('{"prompt": "x = "}\n')
    command = ["run", str(tmp_path / "p.jsonl"), "-o", out, f"--target={models['target']}", "--max-tokens=4", "--quiet"]
    assert invoke(*command, f"--adapter={here}").exit_code == 0
    here.rename(there)

    done = invoke("audit", out)
    assert done.exit_code == 2
    assert f"cannot use the adapter {here}: there is no such folder; give --adapter one" in done.output
    assert invoke("audit", out, f"--adapter={there}").exit_code == 0
    assert invoke("verify-determinism", "--against", out, f"--adapter={there}").exit_code == 0
    assert invoke(*command, f"--adapter={there}").exit_code == 0

    write(there, factors({"model.layers.0.self_attn.q_proj": (256, 256)}, seed=1))
    done = invoke("audit", out, f"--adapter={there}")
    assert done.exit_code == 1
    assert "manifest.json: the adapter is not that of the run, which --adapter names: " in done.output
    done = invoke(*command, f"--adapter={there}")
    assert done.exit_code == 2
    assert "profile.target.adapter: " in done.output


@pytest.mark.parametrize(
    "form",
    [
        {"guided_json": FORM},
        {"guided_regex": "[A-Z]+"},
        {"guided_choice": ["yes", "no"]},
        {"messages": ASKED, "tools": TOOLS, "tool_choice": "required"},
        {"guided_choice": ["yes", "no"], "deterministic": False},
    ],
)
def test_an_audit_finds_a_text_that_does_not_fit(
    go: Callable[..., RunSummary], engine: Engine, tmp_path: Path, form: dict[str, Any]
) -> None:
    """A text that was free when it was written, of a prompt that is said to have asked for a form."""
    path = tmp_path / "prompts.jsonl"
    prompt = {key: form.pop(key) for key in ("messages", "tools", "deterministic") if key in form}
    prompt |= {} if "messages" in prompt else {"prompt": "x = "}
    for name, asked in (("free", {}), ("asked", form)):
        path.write_text(json.dumps({**prompt, **asked}) + "\n")
        go(path, tmp_path / name, drafter="auto", batch_size=7)
    input_of = read_manifest(tmp_path / "asked")["input"]
    edit_manifest(tmp_path / "free", lambda manifest: manifest.update(input=input_of))
    result = Audit(tmp_path / "free", read_manifest(tmp_path / "free"), engine, None).run(Silent())
    assert any("token" in str(finding) for finding in result.findings), result.findings
    assert Audit(tmp_path / "asked", read_manifest(tmp_path / "asked"), engine, None).run(Silent()).findings == []
