"""Audits of models that think: their thoughts are read again, and each that is wrong, missing or made up is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.checks import Silent
from helpers.tampering import edit_lines, renew
from helpers.thinking_models import random_model, save_model

from detgen import Engine, EngineConfig, Request, SamplingParams
from detgen.run import RunConfig, run
from detgen.verify.replay.audit import Audit
from detgen.verify.replay.claims import read_manifest
from detgen.verify.replay.reading import Known, read
from detgen.verify.replay.result import AuditResult

STORY = "A coin's state is heads. Alice flips, then Bob flips, then Carol waits. {} What's the state? A:"
LINES: list[dict[str, Any]] = [
    {"id": "greedy", "prompt": STORY.format("The sun shines. Dan flips. " * 5), "max_tokens": 12, "ignore_eos": True},
    {"id": "sampled", "prompt": STORY.format("Emma flips."), "temperature": 1.0, "n": 3, "max_tokens": 9},
    {"id": "unverified", "prompt": STORY.format(""), "deterministic": False, "max_tokens": 5},
    {"id": "short", "prompt": "A", "max_tokens": 1},
    {"id": "bad", "prompt": 7},
]
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module", params=["embedded", "random"])
def thinking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, demo_models: Any) -> Engine:
    """The embedded model, which seldom thinks where a story has other sentences, and one whose thoughts are noise."""
    if request.param == "embedded":
        return Engine(target="demo-thinking", kv_memory=16 << 20)
    model = random_model(empty_state="zero", seed=4)
    return Engine(target=save_model(tmp_path_factory.mktemp("model"), model, demo_models.target), kv_memory=16 << 20)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, thinking: Engine) -> Path:
    """The output folder of a run, four at a time, drafted and read ahead."""
    folder = tmp_path_factory.mktemp("audit")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    drafting = thinking.with_settings(drafter="ngram", draft_tokens=3, batch_size=4, speculative_prefill=3)
    config = RunConfig(str(folder / "prompts.jsonl"), folder / "out", SamplingParams(), EngineConfig())
    run(config, Silent(), build_engine=lambda _: drafting)
    return folder / "out"


@pytest.fixture
def audit(thinking: Engine) -> Callable[[Path], AuditResult]:
    return lambda folder: Audit(folder, read_manifest(folder), thinking, None).run(Silent())


@pytest.fixture
def change(written: Path, tmp_path: Path, audit: Callable[[Path], AuditResult]) -> Callable[..., list[str]]:
    """Audits a copy whose output lines were changed, and whose digests fit; returns what is found."""

    def change(how: Callable[[Lines], object]) -> list[str]:
        shutil.copytree(written, tmp_path / "out")
        edit_lines(tmp_path / "out" / "outputs.jsonl", how)
        renew(tmp_path / "out")
        return [f"{finding.kind} {finding.what}" for finding in audit(tmp_path / "out").findings]

    return change


def test_untouched(written: Path, audit: Callable[[Path], AuditResult]) -> None:
    result = audit(written)
    assert result.findings == []
    assert (result.samples, result.unverified) == (5, 1)
    lines = [json.loads(line) for line in (written / "outputs.jsonl").read_text().splitlines()]
    assert sum(len(line.get("thoughts", ())) for line in lines) > 12


@pytest.mark.parametrize("sample", range(4))
@pytest.mark.parametrize("place", [0, -1])
def test_a_wrong_thought(change: Any, sample: int, place: int) -> None:
    def other(lines: Lines) -> None:
        lines[sample]["thoughts"][place][1] += "x"

    (found,) = change(other)
    assert found.startswith("line thoughts[")
    assert "x'], should be [" in found


@pytest.mark.parametrize("sample", range(4))
@pytest.mark.parametrize("place", [0, -1])
def test_a_missing_thought(change: Any, sample: int, place: int) -> None:
    (found,) = change(lambda lines: lines[sample]["thoughts"].pop(place))
    assert found.startswith("line thoughts has ")
    assert "], should be [" in found or "is nothing, should be [" in found


@pytest.mark.parametrize("first", [0, 4, 1, -4, 4000])
def test_a_thought_that_nobody_had(change: Any, first: int) -> None:
    """Of a chunk that thought nothing, or of none at all."""

    def more(lines: Lines) -> None:
        others = [pair for pair in lines[0]["thoughts"] if pair[0] != first]
        lines[0]["thoughts"] = sorted([*others, [first, "no such thing"]])

    (found,) = change(more)
    assert f"is [{first}, 'no such thing'], should be " in found


def test_thoughts_twice_or_out_of_order(change: Any) -> None:
    (found,) = change(lambda lines: lines[0]["thoughts"].insert(0, lines[0]["thoughts"][0]))
    assert found.startswith("line thoughts has ")


@pytest.mark.parametrize("value", [None, {}, [4], [[4]], [["4", "x"]], [[True, "x"]], [[4, None]], [[4, "x", 1]], "x"])
def test_thoughts_that_are_none(change: Any, value: Any) -> None:
    found = change(lambda lines: lines[0].update(thoughts=value))
    assert found[0].startswith(("line thoughts is ", "line thoughts has "))


def test_no_thoughts_at_all(change: Any) -> None:
    (found,) = change(lambda lines: lines[0].pop("thoughts"))
    assert found.startswith("line thoughts is None, should be [[")


@pytest.mark.parametrize("thoughts", [[[1, "x"]], [[4, "x"], [0, "y"]], [[400, "x"]], [[0, "x"], [0, "x"]]])
def test_an_unverified_line_has_thoughts_of_chunks(change: Any, thoughts: Any) -> None:
    """What they say is not promised; where they are has to be possible."""
    (found,) = change(lambda lines: lines[4].update(thoughts=thoughts))
    assert found.startswith("line thoughts has ")


def test_another_token_is_found_beside_right_thoughts(change: Any, thinking: Engine) -> None:
    """The last one, behind which nothing is thought."""

    def other(lines: Lines) -> None:
        lines[0]["token_ids"][-1] = (lines[0]["token_ids"][-1] + 1) % thinking.vocabulary

    assert any(what.startswith("differs token 11 is ") for what in change(other))


def test_a_model_that_does_not_think_has_no_thoughts(tmp_path: Path, engine: Engine) -> None:
    (tmp_path / "prompts.txt").write_text("def f\n")
    config = RunConfig(str(tmp_path / "prompts.txt"), tmp_path / "out", SamplingParams(max_tokens=3), EngineConfig())
    run(config, Silent(), build_engine=lambda _: engine)
    edit_lines(tmp_path / "out" / "outputs.jsonl", lambda lines: lines[0].update(thoughts=[]))
    renew(tmp_path / "out")
    (finding,) = Audit(tmp_path / "out", read_manifest(tmp_path / "out"), engine, None).run(Silent()).findings
    assert "has 'thoughts', which no run writes here" in finding.what


def test_after_many_sequences_at_a_time(thinking: Engine) -> None:
    """An engine can judge whatever it generated before."""
    many = thinking.with_settings(batch_size=40, prefix_cache=False)
    requests = [Request(i, i, prompt=f"{i} Alice flips.", params=SamplingParams(max_tokens=3)) for i in range(40)]
    done = many.generate(requests)
    assert many.stats.peak_live == 40
    samples = [Known(next(many.sequences(c.request)), list(c.token_ids)) for c in done]
    found = list(read(many, samples))
    assert sorted(map(id, found)) == sorted(map(id, samples))
    for completion, known in zip(done, samples, strict=True):
        assert not known.mismatches
        said = [thought.tokens for thought in completion.thoughts or ()]
        assert said == [thought for thought in known.sequence.thoughts if thought]
