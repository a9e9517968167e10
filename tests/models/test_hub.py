"""Models of the hub: downloaded once, found again without a network, refused quickly where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_hub import COMMIT, fake_hub

from detgen.engine.config import EngineConfig
from detgen.engine.model_pair import load_models
from detgen.engine.sources import check_sources
from detgen.errors import DEMO, EngineError
from detgen.models import hub
from detgen.models.folders import local_place
from detgen.models.hub import fetched
from detgen.progress import Observer, Unobserved

FETCH = """
import sys
from detgen.errors import EngineError
from detgen.models.hub import fetched
class Told:
    def message(self, text): print("message", text)
    def stage(self, text): print("stage", text)
    def progress(self, progress): print("progress", progress.unit, progress.figures)
try:
    for _ in range(2):
        print("folder", fetched(sys.argv[1], Told(), trusted=sys.argv[2:] == ["trusted"]))
except EngineError as error:
    print("error", error)
print("torch" in sys.modules)
"""

Fetch = Callable[..., list[str]]


@pytest.fixture
def repository(demo_models: Any, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(demo_models.draft, tmp_path / "repository"))
    for name in ("code.py", "pytorch_model.bin", "consolidated.safetensors"):
        (folder / name).write_text("# nothing")
    return folder


@pytest.fixture
def fetch(tmp_path: Path) -> Fetch:
    """Fetch a model, twice, in a process of its own, whose hub and cache are its own, too."""

    def fetch(url: str, name: str, *options: str, **environment: str) -> list[str]:
        place = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", FETCH, name, *options]
        done = subprocess.run(
            command, env={**os.environ, **place, **environment}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        *lines, torch = done.stdout.splitlines()
        assert torch == "False"
        if lines[-1].startswith("folder"):
            assert lines.pop() == lines[-1]
        return lines

    return fetch


@pytest.fixture
def served(repository: Path) -> Iterator[tuple[str, list[str]]]:
    with fake_hub({"some/model": repository}) as hub:
        yield hub


def test_a_download_is_told_of_and_made_once(served: tuple[str, list[str]], fetch: Fetch) -> None:
    """Only what the model is made of; the second time nothing; without a network the copy that is there."""
    url, asked = served
    first, *_, last = fetch(url, "some/model")
    assert first.startswith("stage downloading some/model (2.8 MB)")
    folder = Path(last.removeprefix("folder "))
    assert folder.name == COMMIT
    found = {p.name for p in folder.iterdir()}
    assert found == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("chat_template.jinja", "model.safetensors"),
    }
    asked.clear()
    assert fetch(url, "some/model") == [last]
    assert not [path for path in asked if "resolve" in path]
    assert asked.count("GET /api/models/some/model") == 1, "the second time this process knows it"
    assert fetch("http://127.0.0.1:9", "some/model") == [last]
    assert fetch(url, "some/model", HF_HUB_OFFLINE="1") == [last]


@pytest.fixture
def asked_for(demo_models: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What a hub that has the embedded draft model under any name is asked for."""
    asked: list[tuple[str, bool]] = []

    def fetch(name: str, observer: Observer, *, trusted: bool) -> Path:
        asked.append((name, trusted))
        return Path(demo_models.draft)

    monkeypatch.setattr(hub, "_found", {})
    monkeypatch.setattr(hub, "_fetch", fetch)
    return asked


def test_what_is_checked_is_what_is_loaded(asked_for: list[tuple[str, bool]]) -> None:
    """A hub that is asked twice may name another commit then, or let one wait twice for no answer."""
    config = EngineConfig(target="some/model", drafter="none")
    check_sources(config, Unobserved())
    load_models(config, Unobserved())
    assert asked_for == [("some/model", False)]


def test_the_hub_is_asked_again_for_code_and_for_what_was_deleted(
    asked_for: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for trusted in (False, True, False, True):
        fetched("some/model", Unobserved(), trusted=trusted)
    fetched("other/model", Unobserved(), trusted=False)
    assert asked_for == [("some/model", False), ("some/model", True), ("other/model", False)]
    monkeypatch.setattr(hub, "_found", {("some/model", False): tmp_path / "deleted"})
    assert fetched("some/model", Unobserved(), trusted=False).is_dir()


def test_code_is_fetched_only_if_it_is_trusted(served: tuple[str, list[str]], fetch: Fetch) -> None:
    folder = Path(fetch(served[0], "some/model", "trusted")[-1].removeprefix("folder "))
    assert (folder / "code.py").exists()


def test_what_the_hub_does_not_have(served: tuple[str, list[str]], fetch: Fetch) -> None:
    (line,) = fetch(served[0], "no/model")
    assert line.startswith("error cannot load the model no/model (not a local folder, and not available from the hub)")


def test_no_network(fetch: Fetch) -> None:
    started = time.monotonic()
    (line,) = fetch("http://127.0.0.1:9", "some/model")
    assert line.startswith(
        "error cannot load the model some/model (not a local folder, and not available from the hub)"
    )
    assert time.monotonic() - started < 10


def test_a_network_that_swallows_everything() -> None:
    """Even a name server that never answers is waited for only so long."""
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="check the network"):
        hub._within(0.1, lambda: time.sleep(60))
    assert time.monotonic() - started < 5
    assert hub._within(5, lambda: "found") == "found"
    with pytest.raises(ZeroDivisionError):
        hub._within(5, lambda: 1 / 0)


@pytest.mark.parametrize(
    "name", ["a b", "a/b/c", "a..b", "a--b", "x/y.git", "-a", "a/", "", " ", "a\nb", "a/\x1b", "x" * 97, "a" * 5000]
)
def test_names_that_no_model_has(name: str) -> None:
    """Refused at once: nothing is asked of anybody."""
    with pytest.raises(EngineError, match="cannot load the model"):
        local_place(name, name)


@pytest.mark.parametrize("name", ["gpt2", "a/b", "Qwen/Qwen3-0.6B", "some_one/model.v1_2-x"])
def test_names_that_a_model_may_have(name: str) -> None:
    assert local_place(name, name) is None


def test_a_shipped_model_has_a_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_place("demo-thinking", "demo-thinking") == DEMO / "thinking"
    (tmp_path / "demo-thinking").mkdir()
    monkeypatch.chdir(tmp_path)
    assert local_place("demo-thinking", "demo-thinking") == DEMO / "thinking"
    for mine in ("./demo-thinking", Path("demo-thinking")):
        assert local_place(mine, "mine") == Path("demo-thinking")
