"""Fuzzed lines through the real reader, the real engine and the audit.

Each ends as the output lines of one prompt or as one error, nothing raises, and the lines beside it keep their bytes.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.checks import Silent
from helpers.fuzzed_lines import GOOD, TEMPLATE, mixed, text

from detgen import Engine, EngineConfig, SamplingParams
from detgen.run import RunConfig, run
from detgen.verify.replay.audit import Audit, read_manifest

LINES = 2000
TOGETHER = 50  # fuzzed lines of a run; every fifth line beside them is a good one


def without_index(line: bytes) -> bytes:
    """An output line without the place of its prompt in the input, which is all that may change."""
    return re.sub(rb'^(\{"id":"\w+",)"index":\d+,', rb"\1", line)


@pytest.mark.slow
def test_fuzzed_lines(
    tmp_path: Path,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    tries: Callable[[int], int],
    tally: Callable[..., None],
) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", TEMPLATE)
    draw = random.Random(13)
    params = SamplingParams(max_tokens=4)

    def go(name: str, data: bytes) -> list[bytes]:
        (tmp_path / name).write_bytes(data)
        out = tmp_path / f"{name}-out"
        run(RunConfig(str(tmp_path / name), out, params, EngineConfig()), Silent(), build_engine=lambda _: engine)
        assert Audit(out, read_manifest(out), engine, None).run(Silent()).findings == []
        return (out / "outputs.jsonl").read_bytes().splitlines(keepends=True)

    alone: dict[str, list[bytes]] = {}
    for line in go("good.jsonl", b"\n".join(text(good).encode() for good in GOOD)):
        alone.setdefault(json.loads(line)["id"], []).append(without_index(line))
    left, errors, neighbours, part = tries(LINES), 0, 0, 0
    counts = dict.fromkeys(("jsonl", "json", "csv", "tsv"), 0)
    while left:
        form = draw.choices(list(counts), weights=(6, 1, 1, 1))[0]
        count = min(TOGETHER, left)
        data, order = mixed(draw, form, count)
        found: dict[int, list[bytes]] = {}
        for line in go(f"part{part}.{form}", data):
            found.setdefault(json.loads(line)["index"], []).append(line)
        assert sorted(found) == list(range(len(order))), f"part {part}"
        for index, good in enumerate(order):
            lines = found[index]
            parsed = [json.loads(line) for line in lines]
            if good is not None:
                assert [without_index(line) for line in lines] == alone[good["id"]], f"part {part}, line {index}"
                neighbours += 1
            elif "error" in parsed[0]:
                assert len(lines) == 1
                errors += 1
            assert [each["sample"] for each in parsed] == list(range(len(lines)))
        left, part = left - count, part + 1
        counts[form] += count
    tally(**counts, errors=errors, neighbours=neighbours, differing=0)
