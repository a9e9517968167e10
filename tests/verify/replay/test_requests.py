"""The digests of a run's requests: audited, too, since a later run finds samples by them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.tampering import edit_lines, edit_manifest

from detgen.verify.replay.result import AuditResult


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[0].update(request=lines[1]["request"]),
        lambda lines: lines[0].update(request=None),
        lambda lines: lines.pop(),
        lambda lines: lines.reverse(),
    ],
)
def test_digests_of_other_requests_are_found(
    folder: Path, audit: Callable[[Path], AuditResult], change: Callable[[list[dict[str, Any]]], Any]
) -> None:
    assert audit(folder).findings == []
    edit_lines(folder / "requests.jsonl", change)
    assert ("requests.jsonl", "file") in [(f.where, f.kind) for f in audit(folder).findings]
    data = (folder / "requests.jsonl").read_bytes()
    known = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    edit_manifest(folder, lambda manifest: manifest["files"].update({"requests.jsonl": known}))
    (finding,) = audit(folder).findings
    assert (finding.where, finding.what) == ("requests.jsonl", "is not what the prompts give")


def test_a_folder_of_before_has_none(folder: Path, audit: Callable[[Path], AuditResult]) -> None:
    (folder / "requests.jsonl").unlink()
    edit_manifest(folder, lambda manifest: manifest["files"].pop("requests.jsonl"))
    assert audit(folder).findings == []
