from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import detgen.show.status_file
from detgen.errors import RunError
from detgen.progress import Progress, Unobserved
from detgen.show.status_file import StatusFile

HALF = Progress(1, 2, "prompts", 3.0, 3.5, ("2 live",), 60, 20.0)


class Heard(Unobserved):
    def __init__(self) -> None:
        self.all: list[object] = []

    def message(self, text: str) -> None:
        self.all.append(text)

    def stage(self, text: str) -> None:
        self.all.append(text)

    def progress(self, progress: Progress) -> None:
        self.all.append(progress)


def said(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    assert found.pop("updated") > 1.7e9
    return found


def test_it_says_how_far_a_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detgen.show.status_file, "_INTERVAL", 0.0)
    path, heard = tmp_path / "status.json", Heard()
    with StatusFile(path, heard) as status:
        assert said(path) == {"state": "running", "stage": "starting"}
        status.stage("reading")
        status.message("by the way")
        status.progress(HALF)
        counts = {"done": 1, "total": 2, "unit": "prompts", "tokens": 60, "tokens_per_second": 20.0}
        times = {"seconds": 3.0, "left": 3.5, "figures": ["2 live"]}
        assert said(path) == {"state": "running", "stage": "reading", **counts, **times}
        status.end("finished")
    assert said(path)["state"] == "finished"
    assert heard.all == ["reading", "by the way", HALF]
    assert [each.name for each in tmp_path.iterdir()] == ["status.json"]


def test_it_is_written_once_a_second_at_most(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    with StatusFile(path, Heard()) as status:
        status.progress(HALF)
        assert "done" not in said(path)
        status.end("interrupted")
    assert said(path)["done"] == 1


@pytest.mark.parametrize(("error", "state"), [(KeyboardInterrupt, "interrupted"), (RunError("no room"), "failed")])
def test_an_exception_is_an_end_too(tmp_path: Path, error: Any, state: str) -> None:
    path = tmp_path / "status.json"
    with pytest.raises((KeyboardInterrupt, RunError)), StatusFile(path, Heard()):
        raise error
    assert said(path)["state"] == state
    assert said(path).get("error") == ("no room" if state == "failed" else None)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot write .*nowhere"):
        StatusFile(tmp_path / "nowhere" / "status.json", Heard())
