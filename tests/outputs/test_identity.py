"""What makes two runs the same: whatever can change an output, and nothing else."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import detgen
from detgen.engine.config import EngineConfig
from detgen.outputs import differences, differences_in_kind, model_stamp, other_arithmetic
from detgen.program.operands import ARITHMETIC


def manifest(**changes: Any) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "detgen": "1",
        "input": {"path": "p.jsonl", "format": "jsonl", "sha256": "a" * 64},
        "parameters": {"temperature": 0.0, "limit": None},
        "profile": {
            "device": "cpu",
            "threads": 2,
            "draft": {"digest": "d"},
            "draft_quant": "none",
            "models": {"target": {"digest": "t", "path": "/a"}, "draft": {"digest": "d"}},
        },
    }
    return {**whole, **changes}


def test_what_cannot_change_an_output_makes_no_difference() -> None:
    profile = {"device": "cpu", "threads": 1, "models": {"target": {"digest": "t", "path": "/b", "name": "moved"}}}
    assert differences(manifest(), manifest(profile=profile, settings={"batch_size": 3})) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"detgen": "2"}, "detgen: 1 -> 2"),
        ({"parameters": {"temperature": 0.5, "limit": None}}, "temperature: 0.0 -> 0.5"),
        ({"parameters": {"temperature": 0.0, "limit": 4}}, "limit: None -> 4"),
        (
            {"input": {"path": "q.jsonl", "format": "jsonl", "sha256": "b" * 64}},
            "input: p.jsonl (sha256 aaaaaaaaaaaa) -> q.jsonl (sha256 bbbbbbbbbbbb)",
        ),
        ({"profile": {**manifest()["profile"], "device": "cuda"}}, "profile.device: cpu -> cuda"),
        (
            {"profile": {**manifest()["profile"], "models": {"target": {"digest": "u"}}}},
            "profile.models.target.digest: t -> u",
        ),
    ],
)
def test_each_difference_is_named(changes: dict[str, Any], message: str) -> None:
    assert differences(manifest(), manifest(**changes)) == [message]


def test_a_model_stamp_notices_a_change_without_reading_the_weights(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1234")
    config = EngineConfig(target=tmp_path)
    before = model_stamp(config)
    assert before is not None
    assert model_stamp(replace(config, batch_size=3, drafter="none", threads=1)) == before
    assert model_stamp(replace(config, dtype="bfloat16")) != before
    stat = weights.stat()
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert model_stamp(config) != before


def test_a_model_stamp_notices_another_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    before = model_stamp(EngineConfig())
    monkeypatch.setattr("detgen.outputs.identity.ARITHMETIC", "another")
    assert before != model_stamp(EngineConfig())


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (ARITHMETIC, ""),
        (f"{ARITHMETIC} and torch", ""),
        ("detgen-1 and torch", f"was made by the arithmetic detgen-1; this detgen computes {ARITHMETIC}"),
        ("\x1b[2J", rf"was made by the arithmetic \x1b[2J; this detgen computes {ARITHMETIC}"),
    ],
)
def test_another_arithmetic_is_named(made: str, found: str) -> None:
    assert other_arithmetic({"detgen": detgen.__version__, "profile": {"arithmetic": made}}) == found
    assert other_arithmetic({"detgen": "another"}) == ""


def test_a_model_stamp_notices_another_quantizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where bitsandbytes quantizes the target, and only there."""
    installed: dict[str, str] = {}

    def version(package: str) -> str:
        if package == "bitsandbytes" and package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed.get(package, "1")

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert model_stamp(EngineConfig(target_quant="nf4")) is None
    stamps = []
    for found in ("0.50", "0.51"):
        installed["bitsandbytes"] = found
        stamps.append([model_stamp(EngineConfig(target_quant=quant)) for quant in ("none", "q8", "nf4", "int8")])
    assert None not in stamps[0] + stamps[1]
    assert [one == other for one, other in zip(*stamps, strict=True)] == [True, True, False, False]


@pytest.mark.parametrize("target", ["somebody/never-downloaded", "/missing/folder"])
def test_a_model_that_is_not_at_hand_has_no_stamp(target: str) -> None:
    assert model_stamp(EngineConfig(target=target)) is None


def test_a_shipped_model_has_a_stamp() -> None:
    assert model_stamp(EngineConfig(target="demo-thinking"))
    assert model_stamp(EngineConfig(target="demo-thinking")) != model_stamp(EngineConfig())
    assert model_stamp(EngineConfig(kv_dtype="bfloat16")) != model_stamp(EngineConfig())


def test_what_another_model_version_or_command_gave_is_of_another_kind() -> None:
    other = manifest(
        input={"path": "q.jsonl", "format": "jsonl", "sha256": "b" * 64},
        parameters={"temperature": 0.5, "limit": 4},
    )
    assert len(differences(manifest(), other)) == 3
    assert differences_in_kind(manifest(), other) == []
    other |= {"detgen": "2", "profile": manifest()["profile"] | {"device": "cuda"}}
    assert differences_in_kind(manifest(), other) == ["detgen: 1 -> 2", "profile.device: cpu -> cuda"]
    assert differences_in_kind(manifest(), manifest(command="score")) == ["command: run -> score"]
