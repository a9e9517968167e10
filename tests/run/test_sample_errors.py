"""Samples that end with an error of their own: lines and entries of the store as other samples have them."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.fakes import FakeEngine, Watcher, content, go, kept_in, lines, manifest_of, stopping_at

TEXTS = (
    '{"prompt": "a", "n": 2}',
    '{"prompt": "overflow 0", "id": "one", "task": 1}',
    '{"prompt": "overflow 1 2", "id": "some", "n": 4}',
    '{"prompt": "overflow 0 1", "id": "all", "n": 2}',
    "{broken",
    '{"prompt": "too long", "id": "long"}',
    '{"prompt": "b"}',
    '{"prompt": "overflow 1", "id": "last", "n": 2}',
)


@pytest.fixture
def overflowing(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(TEXTS))
    return path


def test_each_has_a_line_with_its_own_number(tmp_path: Path, overflowing: Path) -> None:
    out, watcher = tmp_path / "out", Watcher()
    summary = go(overflowing, out, watcher)
    written = lines(out / "outputs.jsonl")
    assert [(line["index"], line["sample"], "error" in line) for line in written] == [
        *((0, 0, False), (0, 1, False), (1, 0, True)),
        *((2, 0, False), (2, 1, True), (2, 2, True), (2, 3, False)),
        *((3, 0, True), (3, 1, True), (4, 0, True), (5, 0, True), (6, 0, False), (7, 0, False), (7, 1, True)),
    ]
    error = "prompts.jsonl:2: the logits are not finite"
    assert written[2] == {"id": "one", "index": 1, "sample": 0, "error": error, "metadata": {"task": 1}}
    assert written[4]["error"] == "prompts.jsonl:3: the logits are not finite"
    log = {(line["index"], line["sample"]) for line in lines(out / "acceptance.jsonl")}
    assert log == {(line["index"], line["sample"]) for line in written if "error" not in line}
    totals = summary.written
    assert (totals.prompts, totals.samples, totals.errors) == (8, 6, 6)  # prompts with an error, however many
    assert totals.tokens == sum(line.get("completion_tokens", 0) for line in written)
    assert totals.prompt_tokens == sum(line.get("prompt_tokens", 0) for line in written if line["sample"] == 0)
    assert manifest_of(out)["summary"]["errors"] == 6
    assert watcher.reports[-1].figures[-1] == "6 errors"


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_the_order_of_finishing_changes_no_byte(tmp_path: Path, overflowing: Path, batch_size: int) -> None:
    go(overflowing, tmp_path / "a")
    go(overflowing, tmp_path / "b", batch_size=batch_size)
    assert content(tmp_path / "a") == content(tmp_path / "b")


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_they_are_kept_and_not_run_again(tmp_path: Path, overflowing: Path, step: int) -> None:
    whole = go(overflowing, tmp_path / "whole")
    out = tmp_path / "out"
    assert go(overflowing, out, build=stopping_at(step)).status == "interrupted"
    kept = kept_in(out)
    engines: list[FakeEngine] = []

    def build(config: object) -> FakeEngine:
        engines.append(FakeEngine(config))  # type: ignore[arg-type]
        return engines[0]

    again = go(overflowing, out, build=build)
    assert again.written == whole.written
    assert again.resumed == kept
    assert engines[0].pulled < 8 if step > 2 else engines[0].pulled < 9
    assert content(out) == content(tmp_path / "whole")


def test_an_error_that_is_kept_names_its_own_line(tmp_path: Path, overflowing: Path) -> None:
    """It is taken again in its place only, and there without running."""
    out = tmp_path / "out"
    go(overflowing, out)
    overflowing.write_text("\n".join([*TEXTS[:2], "", *TEXTS[2:], '{"prompt": "new"}']))
    summary = go(overflowing, out)
    assert summary.fresh.samples == 1
    go(overflowing, tmp_path / "whole")
    assert content(out) == content(tmp_path / "whole")
