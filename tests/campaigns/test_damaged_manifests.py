"""Damaged manifests, through `detgen run` on a finished and on an interrupted run, and through `detgen audit`.

    pytest -m slow tests/campaigns/test_damaged_manifests.py

Whatever is wrong with it, the answer is one line and exit status 2 (an audit may also find faults: 1), and no file of
the folder is touched; a manifest that still means the same is as good as the old one.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.checks import Silent
from helpers.tampering import Changed
from typer.testing import CliRunner, Result

from detgen import Engine, EngineConfig, SamplingParams
from detgen.cli import app
from detgen.run import RunConfig, lifecycle, run
from detgen.verify.replay import audit

pytestmark = pytest.mark.slow

RUNNER = CliRunner()
PROMPTS = ["def add(a, b):\n", "class Stack:\n", "import os\n", "for i in range(", "while True:\n", "return "]
DEEP: Any = 0
for _ in range(300):
    DEEP = [DEEP]
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    7,
    0.5,
    1e308,
    2**63,
    10**400,
    "",
    "x",
    "é" * 5000,
    "\ud800",
    "\x1b[31m\r\n",
    [],
    [[]],
    [None],
    {},
    {"x": 1},
    DEEP,
]
Damage = tuple[str, Callable[[bytes], bytes]]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*path, key)
        yield from _paths(part, (*path, key))


def _edited(data: bytes, path: tuple[Any, ...], change: Callable[[Any, Any], Any]) -> bytes:
    """A manifest with one value changed; as it is if it does not have that value."""
    manifest = json.loads(data)
    holder = manifest
    for key in path[:-1]:
        holder = holder.get(key) if isinstance(holder, dict) else holder[key]
        if holder is None:
            return data
    if isinstance(holder, dict) and path[-1] not in holder:
        return data
    change(holder, path[-1])
    return json.dumps(manifest, indent=2).encode() + b"\n"


def _dropped(path: tuple[Any, ...]) -> Damage:
    return f"{path} dropped", lambda data: _edited(data, path, lambda holder, key: holder.__delitem__(key))


def _replaced(path: tuple[Any, ...], value: Any) -> Damage:
    return f"{path} is {value!r:.30}", lambda data: _edited(
        data, path, lambda holder, key: holder.__setitem__(key, copy.deepcopy(value))
    )


def _spelled(path: tuple[Any, ...], spelling: bytes) -> Damage:
    """A value that no encoder of JSON writes."""
    mark = "here-it-is"

    def damage(data: bytes) -> bytes:
        edited = _edited(data, path, lambda holder, key: holder.__setitem__(key, mark))
        return edited.replace(f'"{mark}"'.encode(), spelling)

    return f"{path} spelled {spelling[:20]!r}", damage


def _bytes(draw: random.Random) -> list[Damage]:
    """Damages of the bytes."""
    found: list[Damage] = [
        ("empty", lambda data: b""),
        ("space", lambda data: b"  \n"),
        ("null bytes", lambda data: b"\0" * len(data)),
        ("nested deep", lambda data: b"[" * 200_000),
        ("nested deep objects", lambda data: b'{"a":' * 200_000),
        ("deep inside", lambda data: data.replace(b'"limit": null', b'"limit": ' + b"[" * 99_999 + b"]" * 99_999)),
        ("many digits", lambda data: data.replace(b'"seconds": ', b'"seconds": ' + b"9" * 100_000, 1)),
        ("utf-16", lambda data: data.decode().encode("utf-16")),
        ("utf-32", lambda data: data.decode().encode("utf-32")),
        ("byte order mark", lambda data: b"\xef\xbb\xbf" + data),
        ("latin-1", lambda data: data.replace(b"embedded", "embé".encode("latin-1"))),
        ("twice", lambda data: data + data),
        ("one line", lambda data: json.dumps(json.loads(data)).encode()),
        ("a list", lambda data: b"[" + data + b"]"),
        ("not JSON", lambda data: data.replace(b'"', b"'")),
        ("random", lambda data: random.Random(1).randbytes(3000)),
    ]
    for key in ("detgen", "status", "parameters", "files", "top_p", "rows", "sha256"):
        twice = f'"{key}": 1, "{key}":'.encode()
        found.append((f"{key} twice", lambda data, key=key, twice=twice: data.replace(f'"{key}":'.encode(), twice, 1)))
    for _ in range(40):
        share = draw.random()
        found.append((f"cut at {share:.3f}", lambda data, share=share: data[: int(len(data) * share)]))
        flips = draw.randrange(1 << 30)
        found.append((f"a byte changed ({flips})", lambda data, flips=flips: _flipped(data, flips)))
    return found


def _flipped(data: bytes, seed: int) -> bytes:
    draw = random.Random(seed)
    changed = bytearray(data)
    changed[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(changed)


def damages(manifest: dict[str, Any]) -> list[Damage]:
    """All of them, the same in every campaign, in an order that has some of each kind early."""
    draw = random.Random(13)
    paths = list(_paths(manifest))
    values = [_replaced(path, draw.choice(VALUES)) for path in paths] + [
        _replaced(path, value) for path in paths if len(path) == 1 for value in VALUES
    ]
    spelled = [
        _spelled(path, spelling)
        for path in paths
        for spelling in draw.sample([b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0", b"1E2", b"0x1", b"nul"], 2)
    ]
    kinds = [[_dropped(path) for path in paths], values, spelled, _bytes(draw)]
    for kind in kinds:
        draw.shuffle(kind)
    return [kind[i] for i in range(max(map(len, kinds))) for kind in kinds if i < len(kind)]


@pytest.fixture
def folders(tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished and an interrupted run; the commands find the engine of the other tests."""
    small = engine.with_settings(drafter="ngram", batch_size=2)
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    params = SamplingParams(max_tokens=6)
    run(RunConfig("p.jsonl", Path("finished"), params, EngineConfig()), Silent(), build_engine=lambda _: small)
    stopped = Changed(small, stop=3)
    run(RunConfig("p.jsonl", Path("interrupted"), params, EngineConfig()), Silent(), build_engine=lambda _: stopped)
    assert json.loads(Path("interrupted/manifest.json").read_bytes())["status"] == "interrupted"
    monkeypatch.setattr(audit, "Engine", lambda *args, **settings: engine)
    monkeypatch.setattr(lifecycle, "load_engine", lambda *args, **settings: small)
    return tmp_path


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _check(what: str, result: Result, allowed: tuple[int, ...]) -> str | None:
    """What is wrong with a command's answer."""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"{what}: {result.exception!r}"
    if "Traceback" in result.output:
        return f"{what}: a traceback"
    if result.exit_code not in allowed:
        return f"{what}: exit status {result.exit_code}: {result.output[-300:]}"
    if result.exit_code == 2 and sum(line.startswith("detgen: error:") for line in result.stderr.splitlines()) != 1:
        return f"{what}: no line of its own: {result.stderr[-300:]}"
    if not all(c.isprintable() or c == "\n" for c in result.output):
        return f"{what}: control characters: {result.output[-300:]!r}"
    return None


def test_damaged_manifests(folders: Path, tries: Callable[[int], int], tally: Callable[..., None]) -> None:
    finished, interrupted = folders / "finished", folders / "interrupted"
    outputs = (finished / "outputs.jsonl").read_bytes()
    found = damages(json.loads((finished / "manifest.json").read_bytes()))
    assert len(found) >= 400
    counts = {"manifests": 0, "commands": 0, "refused": 0, "faults": 0, "same": 0, "wrong": 0}
    wrong: list[str] = []
    for what, damage in found[: tries(400)]:
        counts["manifests"] += 1
        for source, command in ((finished, "audit"), (finished, "run"), (interrupted, "run")):
            data = (source / "manifest.json").read_bytes()
            changed = damage(data)
            if changed == data:
                continue
            counts["commands"] += 1
            shutil.rmtree("out", ignore_errors=True)
            shutil.copytree(source, "out")
            Path("out/manifest.json").write_bytes(changed)
            before = _content(Path("out"))
            if command == "audit":
                result = RUNNER.invoke(app, ["audit", "out", "p.jsonl", "-q"])
            else:
                result = RUNNER.invoke(app, ["run", "p.jsonl", "-o", "out", "--max-tokens", "6", "-q"])
            name = f"{what}: {command} {source.name}"
            trouble = _check(name, result, (0, 1, 2) if command == "audit" else (0, 2))
            after = _content(Path("out"))
            if trouble is None and (command == "audit" or result.exit_code == 2) and after != before:
                trouble = f"{name}: {sorted(set(before.items()) ^ set(after.items()))[0][0]} was changed"
            if trouble is None and result.exit_code == 0 and command == "run" and after["outputs.jsonl"] != outputs:
                trouble = f"{name}: other outputs"
            if trouble is not None:
                counts["wrong"] += 1
                wrong.append(trouble)
                continue
            counts[("same", "faults", "refused")[result.exit_code]] += 1
    tally(**counts)
    assert wrong == []
