"""Reproduction files: everything comes back, a fault shows again while it is there, damage is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from helpers.faults import noise_keyed_by_slot

from detgen import EngineConfig
from detgen.check.axes import Setting
from detgen.check.checking import Case, Check, Observer
from detgen.check.comparing import Difference
from detgen.check.pool import Pool
from detgen.engine.request import Request, SamplingParams
from detgen.errors import CheckError
from detgen.explain import replay
from detgen.explain.explaining import Finding

SETTING = Setting(batch=3, order="reversed", neighbours="long", drafter="ngram", draft_tokens=2, sampling="T=1.3 n=2")


def _save(path: Path, pool: Pool, case: Case, config: EngineConfig, seed: int = 0) -> None:
    difference = Difference(case.watched[0].id, 0, "token", 20, 3, (5, 6))
    finding = Finding(case, case, difference, "a prompt", ("'a'", "'b'"), (), None)
    replay.save(path, finding, config, pool, seed, {"threads": 2})


@pytest.fixture
def saved(tmp_path: Path, pool: Pool, config: EngineConfig, make_check: Callable[..., Check]) -> tuple[Path, Case]:
    """A file, and the case that it holds: with token ids, with stop strings, as a check makes them."""
    make_check(pool).learn()
    case = Case(SETTING, [*pool.watched(SETTING), *pool.watched(SETTING.turned("sampling", "stop"))[:1]])
    _save(tmp_path / "found.json", pool, case, config, seed=2**40)
    return tmp_path / "found.json", case


def test_everything_comes_back(saved: tuple[Path, Case], pool: Pool, config: EngineConfig) -> None:
    path, case = saved
    assert any(r.token_ids for r in case.watched)
    assert any(r.params.stop for r in case.watched)
    loaded, prompts, seed, again = replay.load(path)
    assert again == case
    assert seed == 2**40
    assert asdict(loaded) == asdict(config)
    assert prompts.arranged(again.watched, again.setting, seed) == pool.arranged(case.watched, case.setting, seed)


def test_chats_come_back(tmp_path: Path, config: EngineConfig) -> None:
    request = Request(0, "chat", messages=[{"role": "user", "content": "é"}], params=SamplingParams(max_tokens=3))
    _save(tmp_path / "found.json", Pool([request], "long"), Case(Setting(), [request]), config)
    assert replay.load(tmp_path / "found.json")[3].watched == [request]


def test_fault_shows_again_until_it_is_mended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prompts: list[Request], config: EngineConfig, observer: Observer
) -> None:
    """In the same setting, with the same prompts; the finding names the token. Then nothing differs."""
    setting = Setting(batch=2, sampling="T=1.3 top-p")
    params = SamplingParams(max_tokens=6, temperature=1.3, top_p=0.95, seed=5)
    watched = [Request(i, i + 1, prompt=prompts[i].prompt, params=params) for i in range(2)]
    _save(tmp_path / "found.json", Pool(watched, "long"), Case(setting, watched), config)
    with monkeypatch.context() as patch:
        noise_keyed_by_slot(patch)
        finding = replay.again(tmp_path / "found.json", observer)
    assert finding is not None
    assert finding.error is None
    assert finding.case == Case(setting, watched)
    assert (finding.difference.id, finding.difference.what) == (2, "token")
    assert finding.words[0] != finding.words[1]
    assert replay.again(tmp_path / "found.json", observer) is None


def _without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda content: content.pop(name)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without("detgen"), "'detgen' is missing"),
        (_without("requests"), "'requests' is missing"),
        (_without("long"), "'long' is missing"),
        (lambda c: c.update(detgen="run"), "another program wrote it"),
        (lambda c: c.update(requests=7), "not iterable"),
        (lambda c: c.update(requests=[]), "it holds no requests"),
        (lambda c: c["requests"][0].update(colour="red"), "colour"),
        (lambda c: c["requests"][0]["params"].update(top_p=2), "top_p must be a number from 0 to 1, got 2"),
        (lambda c: c["setting"].update(weather="fine"), "weather"),
        (lambda c: c["setting"].update(batch="many"), "there is no batch size 'many'"),
        (lambda c: c["setting"].update(neighbours=[]), "there is no neighbours []"),
        (lambda c: c["config"].update(threads=-1), "threads must be a whole number of at least 1, got -1"),
        (lambda c: c.update(seed="x"), "invalid literal"),
    ],
)
def test_damaged(saved: tuple[Path, Case], damage: Callable[[dict[str, Any]], object], message: str) -> None:
    """The message names the file and what is wrong with it."""
    path, _ = saved
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(CheckError) as caught:
        replay.load(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b'{"detgen": ', b"\x89PNG\r\n", b"[" * 10**5])
def test_no_such_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(CheckError, match=r"other\.json is no reproduction file of detgen verify-determinism: "):
        replay.load(path)


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=r"cannot read .*nowhere\.json: No such file"):
        replay.load(tmp_path / "nowhere.json")
    with pytest.raises(CheckError, match="is no file"):
        replay.load(tmp_path)
