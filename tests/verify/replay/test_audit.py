"""Audits: an untouched run passes whoever drafted it, and each tampering is found and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.checks import Silent
from helpers.completions import lines_of
from helpers.tampering import edit_lines, edit_manifest, renew

from detgen import Engine, EngineConfig, SamplingParams
from detgen.errors import CheckError
from detgen.run import RunConfig, run
from detgen.verify.replay.audit import Audit
from detgen.verify.replay.claims import config_of, read_manifest
from detgen.verify.replay.result import AuditResult


def edit(folder: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Change the output lines and make the manifest's digest fit, so that only the content can tell."""
    edit_lines(folder / "outputs.jsonl", change)
    renew(folder)


def test_untouched(folder: Path, audit: Callable[[Path], AuditResult]) -> None:
    """Greedy, sampled and stopped outputs pass; unverified ones are not judged."""
    result = audit(folder)
    assert result.findings == []
    assert result.samples == 7
    assert result.unverified == 1
    assert 60 < result.tokens < 150
    assert result.missing == 0
    assert result.run_speed is not None


def test_a_run_with_all_that_can_be_asked(tmp_path: Path, engine: Engine) -> None:
    """The audit reads the prompts as the run did, and judges the prompts beside the outputs."""
    lines: list[dict[str, Any]] = [
        {"q": "def add(a, b):\n"},
        {"q": "def add(a, b):\n", "id": "named", "max_new_tokens": 5},
        {"q": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {
            "q": [{"role": "user", "content": "sort"}, {"role": "assistant", "content": "def sort("}],
            "continue_final_message": True,
        },
        {"q": [5, 6, 7], "n": 2},
        {"q": "x", "num_beams": 4},
        {"prompt": "not asked for"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked: dict[str, Any] = {"prompt_column": "q", "seed_per_line": True, "echo": True}
    params = SamplingParams(max_tokens=8, temperature=1.0)
    run(
        RunConfig(str(path), tmp_path / "out", params, EngineConfig(), **asked), Silent(), build_engine=lambda _: engine
    )
    found = [json.loads(line) for line in (tmp_path / "out" / "outputs.jsonl").read_text().splitlines()]
    assert [line["id"] for line in found] == ["1", "named", "3", "4", "5", "5", "6", "7"]
    assert found[0]["text"] != found[1]["text"]
    out = tmp_path / "out"
    result = Audit(out, read_manifest(out), engine, None).run(Silent())
    assert result.findings == []
    assert result.samples == 6
    shutil.copytree(out, tmp_path / "seeds")
    edit_manifest(tmp_path / "seeds", lambda manifest: manifest["parameters"].update(seed_per_line=False))
    assert Audit(tmp_path / "seeds", read_manifest(tmp_path / "seeds"), engine, None).run(Silent()).findings
    shutil.copytree(out, tmp_path / "column")
    edit_manifest(tmp_path / "column", lambda manifest: manifest["input"].update(prompt_column=None))
    assert Audit(tmp_path / "column", read_manifest(tmp_path / "column"), engine, None).run(Silent()).findings

    def claim_another(found: list[dict[str, Any]]) -> None:
        found[0]["prompt"] = "another"

    edit(out, claim_another)
    (finding, *_) = Audit(out, read_manifest(out), engine, None).run(Silent()).findings
    assert "prompt is 'another'" in str(finding)


@pytest.mark.parametrize("sample", [0, 1, 3, 4, 5])
def test_another_token(folder: Path, audit: Callable[[Path], AuditResult], sample: int) -> None:
    """A token that was exchanged is found at its position, in greedy and in sampled outputs."""

    def change(lines: list[dict[str, Any]]) -> None:
        tokens = lines[sample]["token_ids"]
        tokens[1] = (tokens[1] + 1) % 4096

    edit(folder, change)
    result = audit(folder)
    assert result.differing >= 1
    first = next(f for f in result.findings if f.kind == "differs")
    assert first.where == f"outputs.jsonl:{sample + 1}"
    assert first.what.startswith("token 1 is ")


def test_digest_of_outputs(folder: Path, audit: Callable[[Path], AuditResult]) -> None:
    """Bytes that change nothing of the content are found by the digest."""
    path = folder / "acceptance.jsonl"
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    found = audit(folder).findings
    assert [(f.where, f.kind) for f in found[:2]] == [("acceptance.jsonl", "file")] * 2  # digest and size
    assert "is not a line of a run" in found[2].what


@pytest.mark.parametrize(
    ("change", "where", "words"),
    [
        (lambda lines: lines.__setitem__(slice(0, 2), lines[1::-1]), "outputs.jsonl:1", "but prompt 0, sample 0"),
        (lambda lines: lines.pop(), "outputs.jsonl", "ends before prompt 7, sample 0"),
        (lambda lines: lines.append(lines[-1]), "outputs.jsonl:11", "after the last prompt"),
        (lambda lines: lines[0].update(text="nothing"), "outputs.jsonl:1", "text is 'nothing'"),
        (lambda lines: lines[0]["token_ids"].pop(), "outputs.jsonl:1", "finish_reason is 'length'"),
        (lambda lines: lines[2].update(seed=5), "outputs.jsonl:3", "seed is 5"),
        (lambda lines: lines[0]["token_ids"].__setitem__(0, 10**6), "outputs.jsonl:1", "not in the vocabulary"),
        (
            lambda lines: lines[0]["token_ids"].extend([5] * 9000),
            "outputs.jsonl:1",
            "9,024 tokens, but may have 24 at most",
        ),
        (
            lambda lines: lines[7].update(error="no"),
            "outputs.jsonl:8",
            "error is 'no', should be 'prompts.jsonl:6: prompt must be",
        ),
        (lambda lines: lines[0].update(error="no"), "outputs.jsonl:1", "the prompt can run"),
        (lambda lines: lines[9].update(metadata={"note": "other"}), "outputs.jsonl:10", "metadata is"),
        (lambda lines: lines[9].pop("logprobs"), "outputs.jsonl:10", "logprobs is None, should be [{"),
        (lambda lines: lines[0].update(logprobs=[]), "outputs.jsonl:1", "has 'logprobs', which no run writes here"),
        (
            lambda lines: lines[9]["logprobs"][3].update(logprob=-0.5),
            "outputs.jsonl:10",
            "logprobs[3] is {'logprob': -0.5",
        ),
        (
            lambda lines: lines[9]["logprobs"][3]["top"].reverse(),
            "outputs.jsonl:10",
            "logprobs[3] is {",
        ),
    ],
    ids=[
        *("swapped", "dropped", "added", "text", "shorter", "seed", "unknown", "longer", "other error", "hidden"),
        *("metadata", "no logprobs", "unasked logprobs", "logprob", "top"),
    ],
)
def test_lines(
    folder: Path,
    audit: Callable[[Path], AuditResult],
    change: Callable[[list[dict[str, Any]]], Any],
    where: str,
    words: str,
) -> None:
    """Lines in another place, missing ones, and fields that do not go with the tokens."""
    edit(folder, change)
    found = audit(folder).findings
    assert any(f.where == where and words in f.what for f in found), found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m["profile"]["target"].update(digest="0" * 64), "weights or the tokenizer"),
        (lambda m: m["input"].update(sha256="0" * 64), "input's SHA-256"),
        (lambda m: m["files"]["outputs.jsonl"].update(sha256="0" * 64), "its SHA-256"),
    ],
    ids=["weights", "input", "output"],
)
def test_digests(
    folder: Path, audit: Callable[[Path], AuditResult], change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    """An edited digest is a fault, while the tokens are what they must be."""
    edit_manifest(folder, change)
    result = audit(folder)
    assert [words in f.what for f in result.findings] == [True]
    assert result.differing == 0


def test_parameters(folder: Path, audit: Callable[[Path], AuditResult]) -> None:
    """Parameters that were edited do not give the tokens."""
    edit_manifest(folder, lambda m: m["parameters"].update(temperature=0.5))
    assert audit(folder).differing > 0


def test_other_profile(folder: Path, audit: Callable[[Path], AuditResult]) -> None:
    """Another profile is said, and a token far from a tie differs all the same."""
    edit_manifest(
        folder,
        lambda m: m["profile"].update(device="another", versions={"torch": "1", "transformers": "1"}),
    )
    result = audit(folder)
    assert any("torch" in line for line in result.other_profile)
    assert result.findings == []

    def nudge(lines: list[dict[str, Any]]) -> None:
        lines[9]["logprobs"][3]["logprob"] += 1e-6

    edit(folder, nudge)
    result = audit(folder)
    assert (result.ties, result.faults) == (1, 0)

    edit(folder, lambda lines: lines[0]["token_ids"].__setitem__(2, 5))
    result = audit(folder)
    assert result.differing >= 1


def test_tie(folder: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under another profile a token within the tolerance is a tie, under the same one it differs."""
    edit(folder, lambda lines: lines[0]["token_ids"].__setitem__(2, 5))
    monkeypatch.setattr("detgen.verify.replay.audit.TOLERANCE", {"float32": 10.0})
    same = Audit(folder, read_manifest(folder), engine, None).run(Silent())
    edit_manifest(folder, lambda m: m["profile"].update(device="another"))
    other = Audit(folder, read_manifest(folder), engine, None).run(Silent())
    assert same.differing > 0
    assert same.ties == other.differing == 0
    assert other.ties >= same.differing


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=r"no manifest\.json; give the output folder"):
        read_manifest(tmp_path)


def test_config_takes_the_runs_model(folder: Path) -> None:
    """Model, number formats and quantization are the run's where nothing else is asked for."""
    manifest = read_manifest(folder)
    manifest["model"], manifest["adapter"], manifest["profile"]["dtype"] = "models/x", "adapters/x", "bfloat16"
    config = config_of(manifest, EngineConfig())
    assert (config.target, config.dtype, config.drafter) == ("models/x", "bfloat16", "none")
    assert config.kv_dtype == "float32", "and not what --dtype bfloat16 would have"
    assert config_of(manifest, EngineConfig(target="y", kv_dtype="bfloat16")).kv_dtype == "bfloat16"
    assert config_of(manifest, EngineConfig(target="y")).target == "y"
    assert config.adapter == "adapters/x"
    assert config_of(manifest, EngineConfig(target="y")).adapter == "adapters/x", "where the model was moved alone"
    assert config_of(manifest, EngineConfig(adapter="y")).adapter == "y"
    for dtype, rounded, asked in (
        ("float32", "float32", "float32"),
        ("float32", "float16", "auto"),
        ("float16", "float16", "float16"),
        ("bfloat16-tc25", "bfloat16", "bfloat16-tc25"),
        ("bfloat16-tc25", "float32", "auto"),
    ):
        manifest["profile"]["dtype"], manifest["profile"]["target"]["adapter_dtype"] = dtype, rounded
        assert config_of(manifest, EngineConfig()).dtype == asked


@pytest.mark.parametrize(
    ("sample", "name", "by", "ties", "faults"),
    [
        ("greedy", "logprob", 1e-6, 1, 0),
        ("greedy", "margin", 1e-6, 1, 0),
        ("greedy", "logprob", -0.5, 0, 1),
        ("greedy", "margin", 0.5, 0, 1),
        ("filtered", "margin", 0.5, 1, 0),
        ("filtered", "logprob", -0.5, 0, 1),
    ],
)
def test_the_log_of_another_profile(
    folder: Path, audit: Callable[[Path], AuditResult], sample: str, name: str, by: float, ties: int, faults: int
) -> None:
    """Rounding explains small differences, and of a filtered sample any margin: another runner-up may be dropped."""

    def nudge(lines: list[dict[str, Any]]) -> None:
        line = [line for line in lines if line["index"] == index and line["margin"] is not None][2]
        line[name] += by

    index = next(line["index"] for line in lines_of(folder / "outputs.jsonl") if line["id"] == sample)
    edit_lines(folder / "acceptance.jsonl", nudge)
    renew(folder)
    assert audit(folder).faults == 1
    edit_manifest(folder, lambda m: m["profile"].update(device="another"))
    result = audit(folder)
    assert (result.ties, result.faults) == (ties, faults), result.findings


def test_what_stands_beside_a_wrong_token_is_not_judged(folder: Path, audit: Callable[[Path], AuditResult]) -> None:
    """Its own log-probability is none that the logits of the right one give; that of the next one is judged."""

    def change(lines: list[dict[str, Any]]) -> None:
        line = lines[9]
        line["token_ids"][-1] = (line["token_ids"][-1] + 1) % 4096
        line["logprobs"][-1]["token"] = line["token_ids"][-1]
        line["logprobs"][-1]["logprob"] = -3.25

    edit(folder, change)
    findings = audit(folder).findings
    assert [f.kind for f in findings if f.kind == "differs"] == ["differs"]
    assert not any("logprobs" in f.what for f in findings)
