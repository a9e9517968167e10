"""A finished run to be drawn, copies of it to be tampered with, and folders of any size that no model wrote."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.checks import Silent
from helpers.hostile import ALL, HOSTILE
from helpers.records import log_entries, log_line

from detgen import Engine, EngineConfig, SamplingParams
from detgen.outputs.manifest import FILES
from detgen.report.texts import Texts
from detgen.run import RunConfig, run

LINES: list[dict[str, Any]] = [
    {"id": "greedy", "prompt": "def add(a, b):\n", "max_tokens": 48},
    {"id": "repeats", "prompt": "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [1, 2,", "max_tokens": 48},
    {"id": "<script>alert(1)</script>", "prompt": "s = '<b>&amp;</b>'\nt = '<b>", "max_tokens": 24},
    {"id": "sampled", "prompt": "class Stack:\n", "max_tokens": 16, "temperature": 0.9, "seed": 4, "n": 2},
    {"id": "stopped", "prompt": "for i in range(", "max_tokens": 40, "stop": [":"]},
    {"id": "unverified", "prompt": "while True:\n", "max_tokens": 8, "deterministic": False},
    {"id": "broken<i>", "prompt": 7},
    {"id": "too long", "prompt": "x = 1\n" * 700},
    {"id": "last", "prompt": "return ", "max_tokens": 12, "logprobs": 2},
]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Path:
    """The output folder of a run that drafts by repeats in the text, with the prompts beside the outputs."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    drafting = engine.with_settings(drafter="ngram", draft_tokens=4, batch_size=6)
    config = RunConfig(str(folder / "prompts.jsonl"), folder / "out", SamplingParams(), EngineConfig(), echo=True)
    run(config, Silent(), build_engine=lambda _: drafting)
    return folder / "out"


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A copy of that folder, to be tampered with."""
    shutil.copytree(finished, tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture(scope="session")
def log(finished: Path, outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of its acceptance log, with the ids of their prompts."""
    return _with_ids(log_entries(finished / "acceptance.jsonl"), outputs)


@pytest.fixture(scope="session")
def outputs(finished: Path) -> list[dict[str, Any]]:
    """Its output lines."""
    return [json.loads(line) for line in (finished / "outputs.jsonl").read_text().splitlines()]


def _with_ids(log: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ids = {line["index"]: line["id"] for line in outputs}
    return [{**entry, "id": ids[entry["index"]]} for entry in log]


Rewrite = Callable[[Path, Callable[[str, list[dict[str, Any]]], list[dict[str, Any]]]], None]


@pytest.fixture
def rewrite() -> Rewrite:
    """Change the lines of a folder's samples, and its manifest with them, so that nothing is wrong with it."""

    def rewrite(folder: Path, change: Callable[[str, list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        outputs = [json.loads(line) for line in (folder / FILES[0]).read_text().splitlines()]
        log = _with_ids(log_entries(folder / FILES[1]), outputs)
        for name, lines in zip(FILES, (outputs, log), strict=True):
            known = manifest["files"][name]
            if name == FILES[1]:
                entries = ({k: v for k, v in entry.items() if k != "id"} for entry in change(name, lines))
                data = "".join(map(log_line, entries))
            else:
                data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in change(name, lines))
            (folder / name).write_text(data)
            known.update(sha256=hashlib.sha256(data.encode()).hexdigest(), bytes=len(data.encode()))
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return rewrite


@pytest.fixture
def hostile(out: Path, rewrite: Rewrite, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that has it everywhere: the tokenizer, too, gives it as the text of each token."""

    def change(name: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for line in lines:
            text = HOSTILE[line["index"] % len(HOSTILE)]
            line["id"] = f"{line['id']} {text}"
            if "error" in line:
                line["error"] += ALL
            elif name == "outputs.jsonl":
                line.update(text=f"{text}\n{ALL}", prompt=f"{ALL}\n{text}", finish_reason=line["finish_reason"])
                line["thoughts"] = [[0, ALL]]
        return lines

    rewrite(out, change)
    manifest = json.loads((out / "manifest.json").read_text())
    whole = ALL.replace("\ud800", "").replace("\udfff", "")  # half a character is refused where a manifest is read
    manifest["input"]["path"] = whole
    manifest["profile"]["target"]["name"] = HOSTILE[-1] + whole
    manifest["profile"]["arithmetic"] = whole
    manifest["parameters"]["stop"] = [whole, HOSTILE[-1]]
    (out / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(Texts, "of", lambda self, token: ALL)
    monkeypatch.setattr(Texts, "check", lambda self, line: None)
    return out
