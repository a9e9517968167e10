from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import timeit
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import detgen.outputs.journal
import detgen.outputs.writer
from detgen.engine.config import EngineConfig
from detgen.engine.request import Completion, Request, SamplingParams, TokenLogprobs, TokenRecord
from detgen.outputs import OutputError, OutputFolder, Writer, differences, model_stamp
from detgen.outputs.journal import Journal, make_entry
from detgen.outputs.lines import acceptance_lines, bad_line, dump, output_line, request_digest
from detgen.prompts import BadLine


def request(index: int, n: int = 1, **fields: Any) -> Request:
    return Request(index=index, id=index + 1, prompt=f"prompt {index}", params=SamplingParams(n=n), **fields)


def records(length: int) -> tuple[TokenRecord, ...]:
    out = []
    for p in range(length):
        status, drafted = (("accepted", 100 + p), ("corrected", 7), ("bonus", None), ("plain", None))[p % 4]
        out.append(TokenRecord(p, p // 4, 100 + p, "ngram" if p % 3 else "model", drafted, status, -0.5 * p, 1.25))
    out.append(TokenRecord(length, length // 4, None, "ngram", 9, "rolled_back", None, None))
    return tuple(out)


def completion(req: Request, sample: int = 0, length: int = 5) -> Completion:
    tokens = tuple(100 + p for p in range(length))
    return Completion(req, sample, f"text {req.index}.{sample}", tokens, "length", 3, None, records(length))


# --- lines ---


def test_an_output_line_has_its_keys_in_order() -> None:
    req = replace(request(4, metadata={"b": 1, "a": "é"}), params=SamplingParams(seed=9, logprobs=2))
    logprobs = (TokenLogprobs(-0.25, ((5, -0.25), (6, -2.0))), TokenLogprobs(-1.5, ((8, -0.5), (7, -1.5))))
    line = output_line(Completion(req, 2, "ein „Text“\n", (5, 7), "stop", 3, logprobs, ()))
    assert line == (
        '{"id":5,"index":4,"sample":2,"text":"ein „Text“\\n","token_ids":[5,7],"finish_reason":"stop",'
        '"prompt_tokens":3,"completion_tokens":2,"seed":9,'
        '"logprobs":[{"token":5,"logprob":-0.25,"top":[[5,-0.25],[6,-2.0]]},'
        '{"token":7,"logprob":-1.5,"top":[[8,-0.5],[7,-1.5]]}],"metadata":{"b":1,"a":"é"}}\n'
    )


def test_an_output_line_leaves_out_what_was_not_asked_for() -> None:
    keys = ["id", "index", "sample", "text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens", "seed"]
    assert list(json.loads(output_line(completion(request(0))))) == keys


def test_the_lines_of_errors() -> None:
    failed = Completion(request(3, metadata={"k": 1}), error="too long")
    assert output_line(failed) == '{"id":4,"index":3,"sample":0,"error":"too long","metadata":{"k":1}}\n'
    assert bad_line(BadLine(0, 1, "x", "p:1: bad")) == '{"id":"x","index":0,"sample":0,"error":"p:1: bad"}\n'


def test_an_acceptance_line_has_its_keys_in_order() -> None:
    record = TokenRecord(1, 0, 8, "self", 9, "corrected", -0.125, 0.5)
    lines = acceptance_lines(Completion(request(2), 1, "", (8,), "stop", 1, None, (record, records(0)[0])))
    assert lines == (
        '{"id":3,"index":2,"sample":1,"position":1,"round":0,"token":8,"drafter":"self","drafted":9,'
        '"status":"corrected","logprob":-0.125,"margin":0.5}\n'
        '{"id":3,"index":2,"sample":1,"position":0,"round":0,"token":null,"drafter":"ngram","drafted":9,'
        '"status":"rolled_back","logprob":null,"margin":null}\n'
    )


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=())), inner),
    )
)
def test_whatever_is_dumped_is_json_in_utf_8(value: Any) -> None:
    def expected(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, dict):
            return {key: expected(part) for key, part in value.items()}
        return [expected(part) for part in value] if isinstance(value, list) else value

    line = dump(value).encode()
    assert b"\n" not in line
    # a lead half beside a trail half cannot be told from the character that both spell
    assert json.dumps(json.loads(line)) == json.dumps(json.loads(json.dumps(expected(value))))


@pytest.mark.parametrize(
    "change",
    [
        {"id": 7},
        {"prompt": "other"},
        {"prompt": None, "messages": [{"role": "user", "content": "prompt 0"}]},
        {"params": SamplingParams(seed=1)},
        {"metadata": {"a": 1}},
    ],
)
def test_the_digest_covers_whatever_decides_a_line(change: dict[str, Any]) -> None:
    assert request_digest(replace(request(0), **change)) != request_digest(request(0))
    assert request_digest(replace(request(0), line=99)) == request_digest(request(0))


def test_lines_cost_little_beside_a_step() -> None:
    done = completion(request(0), length=64)
    assert min(timeit.repeat(lambda: make_entry(done), number=20, repeat=5)) / 20 < 1e-3


# --- journal ---


def journal_of(path: Path, completions: list[Completion]) -> list[int]:
    with closing(Journal(path)) as journal:
        offsets = [journal.append(make_entry(done)) for done in completions]
        journal.commit()
    return offsets


def test_a_journal_gives_back_what_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    done = [completion(request(5)), completion(request(2, n=2), 1), completion(request(2, n=2), 0)]
    done[0] = replace(done[0], text='"quotes"\u2028 \ud800 \\ud800')
    journal_of(path, done[:1])
    journal_of(path, done[1:])
    with closing(Journal(path)) as journal:
        assert journal.kept == 3
        assert [journal.offsets(index, 1) for index in (0, 2, 4, 6)] == [None] * 4
        assert journal.offsets(2, 3) is None
        found = {**{(5, s): o for s, o in (journal.offsets(5, 1) or {}).items()}}
        found |= {(2, s): o for s, o in (journal.offsets(2, 2) or {}).items()}
        assert set(found) == {(5, 0), (2, 0), (2, 1)}
        for each in done:
            assert journal.read(found[each.request.index, each.sample]) == make_entry(each)


def test_a_prompt_without_its_first_sample_is_not_there(tmp_path: Path) -> None:
    journal_of(tmp_path / "j", [completion(request(0, n=2), 1), completion(request(1))])
    with closing(Journal(tmp_path / "j")) as journal:
        assert journal.offsets(0, 1) is None
        assert journal.offsets(0, 2) is None


def test_a_torn_end_is_cut_off_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal_of(path, [completion(request(index), length=0) for index in range(2)])
    whole = path.read_bytes()
    ends = [0, *(at + 1 for at, byte in enumerate(whole) if byte == ord("\n"))]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = sum(end <= size for end in ends) - 1
        with closing(Journal(path)) as journal:
            assert journal.kept == kept
            journal.append(make_entry(completion(request(7))))
            journal.commit()
        assert path.read_bytes()[: ends[kept]] == whole[: ends[kept]]
        with closing(Journal(path)) as journal:
            assert journal.kept == kept + 1


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_damage_behind_the_last_fsync_is_cut_off(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("journal") / "j"
    offsets = journal_of(path, [completion(request(index), length=1) for index in range(3)])
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    with closing(Journal(path)) as journal:
        assert journal.kept == sum(offset <= at for offset in offsets) - 1


def test_commits_are_fsynced_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    for seconds, expected in ((0.0, 3), (60.0, 0)):
        monkeypatch.setattr(detgen.outputs.journal, "SYNC_SECONDS", seconds)
        synced.clear()
        with closing(Journal(tmp_path / "j")) as journal:
            for index in range(3):
                journal.append(make_entry(completion(request(index))))
                journal.commit()
            assert len(synced) == expected
            journal.commit(sync=True)
            assert len(synced) == expected + 1


# --- writer ---


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@given(
    samples=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    seed=st.randoms(use_true_random=False),
    cut=st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_any_order_in_input_order_out(
    tmp_path_factory: pytest.TempPathFactory, samples: list[int], seed: Any, cut: float
) -> None:
    """Prompts of 0 (a bad line) to 3 samples, finished in any order, stopped anywhere and resumed."""
    path = tmp_path_factory.mktemp("out")
    items: list[Request | BadLine] = [
        request(index, n=n) if n else BadLine(index, index + 1, index + 1, "bad") for index, n in enumerate(samples)
    ]
    expected = [(index, sample) for index, n in enumerate(samples) for sample in range(max(n, 1))]
    with OutputFolder(path) as folder:
        for last in (False, True):
            with closing(Writer(folder)) as writer:
                left = []
                for item in items:
                    if isinstance(item, BadLine):
                        writer.refuse(item)
                    elif not writer.recall(item):
                        left += [completion(item, sample, length=item.index % 5) for sample in range(item.params.n)]
                seed.shuffle(left)
                for done in left if last else left[: int(cut * len(left))]:
                    writer.finish(done)
                    writer.commit()
                    written = [(line["index"], line["sample"]) for line in lines_of(folder.outputs)]
                    assert written == expected[: len(written)]
                digests = writer.finish_all()
                totals = writer.totals
        assert writer.waiting == 0
        assert writer.done == totals.prompts == len(samples)
        assert writer.errors == totals.errors == samples.count(0)
        assert writer.resumed + writer.fresh.samples == totals.samples == sum(samples)
        assert [(line["index"], line["sample"]) for line in lines_of(folder.outputs)] == expected
        assert digests.outputs == hashlib.sha256(folder.outputs.read_bytes()).hexdigest()
        assert digests.acceptance == hashlib.sha256(folder.acceptance.read_bytes()).hexdigest()
        assert digests.acceptance_bytes == folder.acceptance.stat().st_size
        log = lines_of(folder.acceptance)
        counts = Counter(line["status"] for line in log)
        total = totals.total()
        assert all(getattr(total, status) == counts[status] for status in ("accepted", "corrected", "bonus", "plain"))
        assert total.rolled_back == counts["rolled_back"]
        assert total.drafted == sum(line["drafted"] is not None for line in log)
        tokens = {(line["index"], line["sample"]): line.get("token_ids", []) for line in lines_of(folder.outputs)}
        for key, ids in tokens.items():
            own = [line for line in log if (line["index"], line["sample"]) == key]
            assert [line["token"] for line in own if line["token"] is not None] == ids
        assert [(line["index"], line["sample"]) for line in log] == sorted(
            (line["index"], line["sample"]) for line in log
        )


def test_an_error_ends_all_samples_of_a_prompt(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "out") as folder, closing(Writer(folder)) as writer:
        writer.recall(request(0, n=3))
        writer.finish(Completion(request(0, n=3), error="too long"))
        writer.finish(completion(request(0, n=3), 1))
        writer.finish_all()
        assert [line.get("error") for line in lines_of(folder.outputs)] == ["too long"]
        assert (writer.done, writer.errors, writer.totals.samples) == (1, 1, 0)


def test_the_errors_of_an_engine_are_tried_again(tmp_path: Path) -> None:
    """They cost nothing, and whoever gives more memory on resuming expects them to run."""
    with OutputFolder(tmp_path / "out") as folder:
        with closing(Writer(folder)) as writer:
            writer.recall(request(0))
            writer.finish(Completion(request(0), error="needs more KV memory"))
            writer.commit()
        with closing(Writer(folder)) as writer:
            assert not writer.recall(request(0))


def test_a_journal_of_other_requests_is_refused(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "out") as folder:
        with closing(Writer(folder)) as writer:
            writer.recall(request(0))
            writer.finish(completion(request(0)))
            writer.commit()
        with closing(Writer(folder)) as writer, pytest.raises(OutputError, match="another prompt 1 than the input"):
            writer.recall(replace(request(0), prompt="other"))


def test_a_writer_is_full_when_too_much_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detgen.outputs.writer, "AHEAD_PROMPTS", 3)
    monkeypatch.setattr(detgen.outputs.writer, "AHEAD_BYTES", 1000)
    with OutputFolder(tmp_path / "out") as folder, closing(Writer(folder)) as writer:
        for index in range(3):
            assert not writer.full
            writer.recall(request(index))
        assert writer.full
        for index in (2, 0, 1):
            writer.finish(completion(request(index)))
            writer.commit()
            assert writer.full == (index == 2)
        writer.recall(request(3))
        writer.refuse(BadLine(4, 5, 5, "e" * 2000))
        assert writer.full
        writer.finish(completion(request(3)))
        writer.commit()
        assert not writer.full


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("victim", ["journal.jsonl", "outputs.jsonl", "acceptance.jsonl"])
def test_a_full_disk_is_reported_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, number: int
) -> None:
    write = os.write

    def half(file: int, data: Any) -> int:
        if os.readlink(f"/proc/self/fd/{file}").endswith(victim) and len(data) > 1:
            return write(file, data[: len(data) // 2])
        if os.readlink(f"/proc/self/fd/{file}").endswith(victim):
            raise OSError(number, os.strerror(number))
        return write(file, data)

    with OutputFolder(tmp_path / "out") as folder:
        with closing(Writer(folder)) as writer:
            for index in (0, 1):
                writer.recall(request(index))
            writer.finish(completion(request(0)))
            writer.commit()
            writer.finish(completion(request(1)))
            monkeypatch.setattr(os, "write", half)
            with pytest.raises(OutputError, match=rf"cannot write .*{victim}: .*; free some space and run the same"):
                writer.commit()
            monkeypatch.undo()
        with closing(Writer(folder)) as writer:
            for index in (0, 1):
                if not writer.recall(request(index)):
                    writer.finish(completion(request(index)))
            writer.finish_all()
            assert writer.resumed == (1 if victim == "journal.jsonl" else 2)
        assert [line["index"] for line in lines_of(folder.outputs)] == [0, 1]


# --- folder ---


INPUT = {"path": "p.jsonl", "format": "jsonl", "sha256": "00"}
MANIFEST = {"detgen": "1", "status": "running", "input": INPUT, "parameters": {}}


def test_only_one_run_may_have_a_folder(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "out"), pytest.raises(OutputError, match="another run is writing to"):
        OutputFolder(tmp_path / "out").__enter__()
    with OutputFolder(tmp_path / "out"):
        pass


def test_a_folder_that_nothing_came_of_is_removed(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "a" / "out"):
        pass
    assert not (tmp_path / "a" / "out").exists()
    (tmp_path / "mine").mkdir()
    with OutputFolder(tmp_path / "mine"):
        pass
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize("name", ["notes.txt", "outputs.jsonl", ".git"])
def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(
        OutputError, match=rf"holds files that are not of a detgen run \({name}\); choose another folder"
    ):
        OutputFolder(tmp_path).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "not JSON",
        '{"status": "finished", "name": "other tool"}',
        json.dumps(MANIFEST | {"input": {}}),
        json.dumps(MANIFEST | {"input": "p.jsonl"}),
    ],
)
def test_a_manifest_of_another_tool_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(OutputError, match=r"manifest\.json"):
        OutputFolder(tmp_path).__enter__()
    assert (tmp_path / "manifest.json").read_text() == text


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(OutputError, match="is a file, not a folder"):
        OutputFolder(tmp_path / "out").__enter__()


def test_what_a_crash_left_before_the_manifest_is_no_obstacle(tmp_path: Path) -> None:
    for name in (".lock", "stdin.jsonl.tmp", "manifest.json.tmp"):
        (tmp_path / name).write_text("half")
    with OutputFolder(tmp_path) as folder:
        assert folder.manifest() is None
        folder.write_manifest(MANIFEST)
        assert folder.manifest() == MANIFEST


def test_clearing_deletes_only_what_a_run_wrote(tmp_path: Path) -> None:
    with OutputFolder(tmp_path) as folder:
        folder.write_manifest(MANIFEST)
        for name in ("outputs.jsonl", "acceptance.jsonl", "journal.jsonl", "stdin.jsonl", "notes.txt"):
            (tmp_path / name).write_text("x")
        folder.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_manifest_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with OutputFolder(tmp_path) as folder:
        folder.write_manifest(MANIFEST)

        def full(file: int, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OutputError, match=r"cannot write .*manifest\.json: No space left on device"):
            folder.write_manifest(MANIFEST | {"status": "finished"})
        assert folder.manifest() == MANIFEST


# --- identity ---


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


@pytest.mark.parametrize("target", ["somebody/never-downloaded", "/missing/folder"])
def test_a_model_that_is_not_at_hand_has_no_stamp(target: str) -> None:
    assert model_stamp(EngineConfig(target=target)) is None
