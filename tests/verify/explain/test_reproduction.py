"""Reproduction files: everything comes back, a fault shows again while it is there, damage is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from helpers.checks import Silent
from helpers.faults import noise_keyed_by_slot

from detgen import Engine, EngineConfig
from detgen.engine.request import Request
from detgen.errors import CheckError
from detgen.params import SamplingParams
from detgen.verify.explain import reproduction
from detgen.verify.explain.explaining import Explanation
from detgen.verify.perturb import running
from detgen.verify.perturb.axes import Setting
from detgen.verify.perturb.checking import Check
from detgen.verify.perturb.generation_digests import Difference
from detgen.verify.perturb.pool import Pool
from detgen.verify.perturb.prompts import Extent, read_pool
from detgen.verify.perturb.result import Case
from detgen.verify.perturb.running import Subject

SETTING = Setting(batch=3, order="reversed", neighbours="long", drafter="ngram", draft_tokens=2, sampling="T=1.3 n=2")


def _save(path: Path, check: Check, case: Case) -> None:
    difference = Difference(case.watched[0].id, 0, "token", 20, 3, (5, 6))
    found = Explanation(case, case, difference, "a prompt", ("'a'", "'b'"), (), None)
    assert reproduction.save_replay(path, found, check) == f"detgen verify-determinism --replay {path}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, engine: Engine, config: EngineConfig) -> tuple[Path, Case, Pool]:
    """A file, the case that it holds, with token ids and with stop strings, as a check makes them, and its pool."""
    pool = read_pool(None, None, None, Extent(4, ((1, 6), (1, 3)), longest=200, cut=60, random=0))
    check = Check(config, pool, {}, 2**40, Silent(), Subject(config, engine))
    check.learn()
    case = Case(SETTING, [*pool.watched(SETTING), *pool.watched(SETTING.turned("sampling", "stop"))[:1]])
    path = tmp_path_factory.mktemp("replay") / "found.json"
    _save(path, check, case)
    return path, case, pool


def test_everything_comes_back(saved: tuple[Path, Case, Pool], config: EngineConfig) -> None:
    path, case, pool = saved
    assert any(r.token_ids for r in case.watched)
    assert any(r.params.stop for r in case.watched)
    loaded, prompts, seed, again = reproduction.load(path)
    assert again == case
    assert seed == 2**40
    assert asdict(loaded) == asdict(config)
    assert prompts.arranged(again.watched, again.setting, seed) == pool.arranged(case.watched, case.setting, seed)


def test_chats_come_back(tmp_path: Path, make_check: Callable[..., Check]) -> None:
    request = Request(0, "chat", messages=[{"role": "user", "content": "é"}], params=SamplingParams(max_tokens=3))
    _save(tmp_path / "found.json", make_check(Pool([request], "long")), Case(Setting(), [request]))
    assert reproduction.load(tmp_path / "found.json")[3].watched == [request]


def test_fault_shows_again_until_it_is_fixed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    prompts: list[Request],
    engine: Engine,
    make_check: Callable[..., Check],
    observer: Silent,
) -> None:
    """In the same setting, with the same prompts; the explanation names the token. Then nothing differs."""
    monkeypatch.setattr(running, "Engine", lambda config, **_: engine)
    setting = Setting(batch=2, sampling="T=1.3 top-p")
    params = SamplingParams(max_tokens=6, temperature=1.3, top_p=0.95, seed=5)
    watched = [Request(i, i + 1, prompt=prompts[i].prompt, params=params) for i in range(2)]
    _save(tmp_path / "found.json", make_check(Pool(watched, "long")), Case(setting, watched))
    with monkeypatch.context() as patch:
        noise_keyed_by_slot(patch)
        found = reproduction.again(tmp_path / "found.json", observer)
    assert found is not None
    assert found.error is None
    assert found.case == Case(setting, watched)
    assert (found.difference.id, found.difference.what) == (2, "token")
    assert found.words[0] != found.words[1]
    assert reproduction.again(tmp_path / "found.json", observer) is None


def test_a_file_cannot_have_a_models_code_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, saved: tuple[Path, Case, Pool], observer: Silent
) -> None:
    """Only who gives the command can."""
    content = json.loads(saved[0].read_text())
    content["config"]["trust_remote_code"] = True
    path = tmp_path / "found.json"
    path.write_text(json.dumps(content))

    class SeenError(Exception):
        pass

    def seen(config: EngineConfig, _: object) -> None:
        raise SeenError(config.trust_remote_code)

    monkeypatch.setattr(reproduction, "check_sources", seen)
    for trusted in (False, True):
        with pytest.raises(SeenError, match=str(trusted)):
            reproduction.again(path, observer, trusted=trusted)


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
def test_damaged(
    tmp_path: Path, saved: tuple[Path, Case, Pool], damage: Callable[[dict[str, Any]], object], message: str
) -> None:
    """The message names the file and what is wrong with it."""
    content = json.loads(saved[0].read_text())
    damage(content)
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(content))
    with pytest.raises(CheckError) as caught:
        reproduction.load(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b'{"detgen": ', b"\x89PNG\r\n", b"[" * 10**5])
def test_no_such_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(CheckError, match=r"other\.json is not a reproduction file of detgen verify-determinism: "):
        reproduction.load(path)


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=r"cannot read .*nowhere\.json: No such file"):
        reproduction.load(tmp_path / "nowhere.json")
    with pytest.raises(CheckError, match="is not a regular file"):
        reproduction.load(tmp_path)
