from __future__ import annotations

import json
from pathlib import Path

import pytest

from detgen.errors import OutputError
from detgen.outputs import read_manifest


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no manifest.json; give the output folder of a detgen run"),
        ("{", "not valid JSON"),
        (
            json.dumps(
                {
                    "detgen": "0.0.1",
                    "status": "finished",
                    "input": {"path": "p", "format": "jsonl", "sha256": "x"},
                    "parameters": {},
                }
            ),
            "was written by detgen '0.0.1', this is",
        ),
    ],
)
def test_what_is_no_manifest_of_this_version_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(OutputError) as error:
        read_manifest(tmp_path)
    assert words in str(error.value)


def test_a_manifest_is_a_plain_file(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").symlink_to("/dev/null")
    with pytest.raises(OutputError, match="is a symbolic link, not a plain file"):
        read_manifest(tmp_path)
    with pytest.raises(OutputError, match=r"has no manifest\.json"):
        read_manifest(tmp_path / "manifest.json" / "x")
