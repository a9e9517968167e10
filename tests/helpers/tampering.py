"""Runs to be tampered with: engines that stop or fail in the middle, and digests that fit whatever was changed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from detgen import Engine, Request
from detgen.engine.request import Completion
from helpers.records import log_entries, log_line

FILES = ("outputs.jsonl", "acceptance.jsonl")


class Changed:
    """An engine whose completions are changed, or which is interrupted, on their way to the run."""

    def __init__(
        self, engine: Engine, change: Callable[[Completion], Completion] = lambda c: c, stop: int | None = None
    ) -> None:
        """Interrupt the run after `stop` completions."""
        self._engine, self._change, self._stop = engine, change, stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def stream(self, requests: Iterable[Request]) -> Iterator[list[Completion]]:
        """The engine's own, changed."""
        done = 0
        for completions in self._engine.stream(requests):
            done += len(completions)
            if self._stop is not None and done >= self._stop:
                self._stop = None
                os.kill(os.getpid(), signal.SIGINT)
            yield [self._change(c) for c in completions]

    def generate(self, requests: list[Request]) -> list[Completion]:
        """The engine's own, changed."""
        return [self._change(c) for c in self._engine.generate(requests)]


def fail(completion: Completion) -> Completion:
    """A sample that ended with an error of its own."""
    empty: dict[str, Any] = {"text": "", "token_ids": (), "logprobs": None, "records": ()}
    error = "the values at position 5 are not finite"
    return replace(completion, finish_reason="error", error=error, drafts=type(completion.drafts)(), **empty)


def renew(folder: Path) -> None:
    """Make sizes and digests of the manifest those of the files."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    for name in manifest["files"]:
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def edit_lines(path: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Change the objects of a file of lines, which are written again as detgen does; of a log, its entries."""
    if path.name == "acceptance.jsonl":
        entries = log_entries(path)
        change(entries)
        path.write_text("".join(map(log_line, entries)), encoding="utf-8")
        return
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    change(lines)
    text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    change(manifest)
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
