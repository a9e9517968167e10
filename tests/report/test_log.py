"""The acceptance log as columns: the same whatever the blocks, and what no run writes is found and left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.examples import examples
from helpers.records import log_line
from hypothesis import given
from hypothesis import strategies as st

from detgen.outputs import log_file
from detgen.report.counting import THRESHOLDS, Counts
from detgen.report.log import NONE, STATUSES, read_log
from detgen.report.streaming import Faults

Log = list[dict[str, Any]]


def entry(index: int = 0, sample: int = 0, position: int = 0, round: int = 0, **changes: Any) -> dict[str, Any]:
    values = {"token": 5, "drafter": "none", "drafted": None, "status": "plain", "logprob": -0.5, "margin": 1.5}
    place = {"index": index, "sample": sample, "position": position, "round": round}
    return {**place, **values, **changes}


def write(folder: Path, log: Log) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "acceptance.jsonl").write_text("".join(map(log_line, log)))


def read(folder: Path, manifest: dict[str, Any] | None = None) -> tuple[Log, Counts, Faults]:
    faults, counts, found = Faults(), Counts(), []
    for entries in read_log(folder, {"acceptance_log": "jsonl"} | (manifest or {}), faults):
        counts.add(entries)
        for number in range(len(entries.samples)):
            found += entries.of_sample(number)
    return found, counts, faults


_ROUNDS = st.lists(
    st.tuples(
        st.sampled_from(["ngram", "model", "none"]),
        st.integers(0, 4),
        st.integers(0, 3),
        st.booleans(),
        st.floats(0, 50, allow_nan=False, width=32),
    ),
    min_size=1,
    max_size=5,
)


def rounds(index: int, sample: int, drawn: list[tuple[str, int, int, bool, float]]) -> Log:
    """The entries of a sample: accepted tokens, one that is wrong or a bonus, and tokens behind a wrong one."""
    found: Log = []
    at = 0
    for number, (drafter, accepted, behind, wrong, margin) in enumerate(drawn):
        place = {"index": index, "sample": sample, "round": number, "drafter": drafter}
        for _ in range(accepted):
            found.append(entry(**place, position=at, drafted=5, status="accepted", margin=margin))
            at += 1
        found.append(
            entry(**place, position=at, drafted=7 if wrong else None, status="corrected" if wrong else "bonus")
        )
        at += 1
        for i in range(behind if wrong else 0):
            rest = {"token": None, "drafted": 8, "status": "rolled_back", "margin": None, "logprob": None}
            found.append(entry(**place, position=at + i, **rest))
    return found


@given(samples=st.lists(st.tuples(st.integers(1, 2), _ROUNDS), min_size=1, max_size=6), block=st.integers(1, 3000))
@examples(60)
def test_counts_are_those_of_the_entries_whatever_the_blocks(
    samples: list[tuple[int, Any]], block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    log = [e for i, (n, drawn) in enumerate(samples) for sample in range(n) for e in rounds(i, sample, drawn)]
    folder = tmp_path_factory.mktemp("log")
    write(folder, log)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_file, "_GIVEN_OUT", block)
        found, counts, faults = read(folder)
    assert found == log
    assert not faults.count
    assert counts.samples == len({(e["index"], e["sample"]) for e in log})
    for name, stats in counts.drafts().items():
        own = [e for e in log if e["drafter"] == name]
        assert stats.rounds == len({(e["index"], e["sample"], e["round"]) for e in own})
        assert stats.drafted == sum(e["drafted"] is not None for e in own)
        for status in STATUSES:
            assert getattr(stats, status) == sum(e["status"] == status for e in own)
    margins = [e["margin"] for e in log if e["margin"] is not None]
    assert counts.margins.sum() + counts.ties == len(margins)
    assert counts.near.tolist() == [sum(m < t for m in margins) for t in THRESHOLDS]
    assert [e["margin"] for e in counts.closest] == sorted(margins)[:20]
    committed = sum(e["token"] is not None for e in log)
    assert counts.stretches[:, 1].sum() == committed
    sizes = counts.committed.sum(0)
    assert (sizes * range(len(sizes))).sum() == committed


def test_unverified_tokens_have_no_part_in_the_margins(tmp_path: Path) -> None:
    write(tmp_path, [entry(status="unverified", margin=1e-9), entry(1)])
    _, counts, _ = read(tmp_path)
    assert [e["index"] for e in counts.closest] == [1]
    assert counts.near.tolist() == [0] * len(THRESHOLDS)


def test_ties_and_tokens_without_another_candidate(tmp_path: Path) -> None:
    write(tmp_path, [entry(margin=0.0), entry(1, margin=None), entry(2, margin=1e-30), entry(3, margin=1e30)])
    _, counts, faults = read(tmp_path)
    assert (counts.ties, counts.alone, counts.margins[0], counts.margins[-1]) == (1, 1, 1, 1)
    assert not faults.count


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "7",
        '"text"',
        "\x00" * 20,
        "[" * 2000,
        '{"index": 1, "sample": 0}',
        log_line(entry(1, status="made up")).strip(),
        log_line(entry(1, drafter="who")).strip(),
        log_line(entry(1, position="1")).strip(),
        log_line(entry(1, position=1.5)).strip(),
        log_line(entry(1, position=None)).strip(),
        log_line(entry(1, position=-3)).strip(),
        log_line(entry(1, token=2**70)).strip(),
        log_line(entry(1, margin="0.5")).strip(),
        log_line(entry(1, margin=[1])).strip(),
        log_line(entry(1)).strip() + log_line(entry(1)).strip(),
        log_line(entry(1, id="r1")).strip(),
        log_line(entry(1)).strip().replace("}", ',"drafted":null}'),
        log_line(entry(1, margin=None)).strip().replace("}", ',"margin":1e300}'),
        log_line(entry("1")).strip(),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_line_that_no_run_writes_is_named_and_left_out(tmp_path: Path, line: str, at: int) -> None:
    lines = [log_line(entry(0)).strip(), log_line(entry(2)).strip()]
    lines.insert(at, line)
    (tmp_path / "acceptance.jsonl").write_text("\n".join(lines) + "\n")
    found, _, faults = read(tmp_path)
    assert [e["index"] for e in found] == [0, 2]
    assert faults.first == [f"acceptance.jsonl:{at + 1}: is not a line of a run"]


def test_entries_out_of_order(tmp_path: Path) -> None:
    write(tmp_path, [entry(1), entry(0), entry(2)])
    _, _, faults = read(tmp_path)
    assert faults.first == ["acceptance.jsonl: prompt 0, sample 0 is out of order"]


def test_the_last_line_of_a_run_that_goes_on_may_be_torn(tmp_path: Path) -> None:
    write(tmp_path, [entry(0), entry(1)])
    path = tmp_path / "acceptance.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    found, _, faults = read(tmp_path)
    assert [e["index"] for e in found] == [0]
    assert not faults.count
    known = {"files": {"acceptance.jsonl": {"sha256": "0" * 64, "bytes": 1}}}
    _, _, faults = read(tmp_path, known)
    assert faults.first[0] == "acceptance.jsonl:2: is not a line of a run"
    assert "its size or SHA-256 is not what the manifest says" in faults.first[1]


def test_no_token_is_a_number_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, [entry(token=None, drafted=3, status="rolled_back")])
    (entries,) = read_log(tmp_path, {"acceptance_log": "jsonl"}, Faults())
    assert (entries.token.tolist(), entries.drafted.tolist()) == ([NONE], [3])
    assert entries.key(0) == (0, 0)
