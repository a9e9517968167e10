"""Single changes to finished runs, with every digest renewed: an audit finds each, or it provably means the same.

pytest -m slow tests/campaigns/test_tampering.py
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.checks import Silent
from helpers.tampering import renew

from detgen import Engine, EngineConfig, SamplingParams
from detgen.drafters.registry import DRAFTERS
from detgen.engine.stats import DraftCounts
from detgen.errors import CheckError
from detgen.outputs import sampling_params
from detgen.run import RunConfig, run
from detgen.verify.replay.audit import Audit
from detgen.verify.replay.claims import read_manifest

pytestmark = pytest.mark.slow

FILES = ("outputs.jsonl", "acceptance.jsonl")
CHAT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "# {{ m.role }}: {{ m.content }}\n{% endfor %}"
)

# Fields that no audit can judge, since no output depends on them: see docs/auditing.md.
NOT_JUDGED = (
    "created",
    "seconds",
    "model",
    "model_stamp",
    "settings.",
    "draft",
    "profile.target.name",
    "input.path",
    "input.folder",
)


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        name: what is special about it.
        folder: its output folder.
        prompts: its input.
        drafter: who drafted.
    """

    name: str
    folder: Path
    prompts: Path
    drafter: str


def _prompts() -> dict[str, list[dict[str, Any]]]:
    """Small inputs, each with something of its own."""
    code = ["def add(a, b):\n", "class Stack:\n", "import os\n", "for i in range("]
    return {
        "greedy": [{"prompt": p} for p in code],
        "sampled": [{"id": f"s{i}", "prompt": p, "temperature": 0.9, "seed": i} for i, p in enumerate(code)],
        "samples": [{"prompt": p, "n": 3, "temperature": 1.2, "top_p": 0.9, "top_k": 40} for p in code[:2]],
        "stop": [{"prompt": p, "stop": [":", "\n"], "max_tokens": 20} for p in code],
        "logprobs": [{"prompt": p, "logprobs": 3, "note": {"é": [1.5, None]}} for p in code[:3]],
        "penalties": [
            {"prompt": p, "repetition_penalty": 1.3, "presence_penalty": 0.5, "min_tokens": 4, "temperature": 0.4 * i}
            for i, p in enumerate(code[:3])
        ],
        "errors": [{"prompt": code[0]}, {"prompt": 7, "x": 1}, {"prompt": "x = 1\n" * 900}, {"prompt": code[1]}],
        "unverified": [{"prompt": p, "deterministic": i % 2 == 0, "logprobs": i % 2} for i, p in enumerate(code)],
        "chats": [{"messages": [{"role": "user", "content": p}]} for p in code]
        + [{"messages": [{"role": "tool", "content": "x"}]}],
    }


@pytest.fixture(scope="module")
def chatting(engine: Engine) -> Engine:
    """The shared engine with a chat template."""
    engine.tokenizer.chat_template = CHAT
    return engine


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, chatting: Engine) -> list[Run]:
    """Each input with a drafter, all drafters in turn."""
    found = []
    place = tmp_path_factory.mktemp("tampering")
    for i, (name, lines) in enumerate(_prompts().items()):
        prompts = place / f"{name}.jsonl"
        prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        for drafter in (("none", "ngram", "auto")[i % 3], ("model", "auto", "ngram")[i % 3]):
            folder = place / f"{name}-{drafter}"
            config = RunConfig(str(prompts), folder, SamplingParams(max_tokens=12), EngineConfig(drafter=drafter))
            drafting = chatting.with_settings(drafter=drafter, batch_size=4)
            run(config, Silent(), build_engine=lambda _, engine=drafting: engine)  # type: ignore[misc]
            found.append(Run(name, folder, prompts, drafter))
    return found


# A change returns what was changed, in words, or None if there is nothing of the kind.
Change = Callable[[Path, random.Random], str | None]


def _another(value: Any, draw: random.Random) -> Any:
    """Another value of JSON, near or far."""
    near: list[Any] = [None, True, False, 0, 1, -1, 2**70, 0.5, -0.0, "", "x", [], {}, [value], {"x": value}]
    if isinstance(value, bool):
        near += [not value] * 10
    elif isinstance(value, int):
        near += [value + 1, value - 1, value + 100, -value, float(value), str(value)] * 2
    elif isinstance(value, float):
        near += [value * (1 + 2**-52), value + 1e-7, value / 2, -value, 1e300, str(value)] * 2
    elif isinstance(value, str):
        near += [value + " ", value[:-1], value.upper(), value + "\u0000", value.replace("a", "b")] * 2
    elif isinstance(value, list):
        near += [value[:-1], value[::-1], [*value, *value[-1:]], [*value, 1]] * 2
    elif isinstance(value, dict):
        near += [dict(list(value.items())[:-1]), {**value, "x": 1}] * 4
    others = [other for other in near if json.dumps(other) != json.dumps(value)]
    return draw.choice(others)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside a value."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, part in parts for found in ((*path, key), *_leaves(part, (*path, key)))]


def _change_value(value: Any, draw: random.Random) -> str:
    """Change, drop or add one value inside a value, in place; its path."""
    *way, last = draw.choice(_leaves(value))
    holder = value
    for key in way:
        holder = holder[key]
    how = draw.random()
    if how < 0.1 and isinstance(holder, dict):
        del holder[last]
    elif how < 0.2 and isinstance(holder, dict):
        holder[draw.choice(["x", "text", "error", "logprobs", "metadata", "echo"])] = draw.choice([1, None, "x"])
    else:
        holder[last] = _another(holder[last], draw)
    return ".".join(map(str, [*way, last]))


def _line_of(raw: bytes) -> Any:
    return json.loads(raw)


def _dump(line: Any) -> bytes:
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass") + b"\n"


def change_line_value(path: Path, draw: random.Random) -> str | None:
    """One value of one line."""
    lines = path.read_bytes().splitlines(keepends=True)
    at = draw.randrange(len(lines))
    line = _line_of(lines[at])
    what = _change_value(line, draw)
    lines[at] = _dump(line)
    path.write_bytes(b"".join(lines))
    return f"line {at + 1}: {what}"


def change_byte(path: Path, draw: random.Random) -> str | None:
    """One byte changed, dropped or added."""
    data = bytearray(path.read_bytes())
    at = draw.randrange(len(data))
    how = draw.randrange(4)
    if how == 0:
        data[at] ^= 1 << draw.randrange(8)
    elif how == 1:
        del data[at]
    elif how == 2:
        data.insert(at, draw.choice(b' 01"}{,:\n\xff\x00'))
    else:
        data[at] = draw.choice(b' 0123456789"}{,:\n\xff')
    path.write_bytes(bytes(data))
    return f"byte {at} ({how})"


def change_lines(path: Path, draw: random.Random) -> str | None:
    """Lines swapped, doubled, dropped, moved or cut."""
    lines = path.read_bytes().splitlines(keepends=True)
    at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    how = draw.choice(["swapped", "doubled", "dropped", "moved", "replaced", "cut", "emptied"])
    if how == "swapped":
        lines[at], lines[other] = lines[other], lines[at]
    elif how == "doubled":
        lines.insert(at, lines[at])
    elif how == "dropped":
        del lines[at]
    elif how == "moved":
        lines.insert(other, lines.pop(at))
    elif how == "replaced":
        lines[at] = lines[other]
    elif how == "cut":
        lines[at] = lines[at][: draw.randrange(len(lines[at]))]
    else:
        lines.insert(at, b"\n")
    path.write_bytes(b"".join(lines))
    return f"lines {at + 1} and {other + 1} {how}"


def change_spelling(path: Path, draw: random.Random) -> str | None:
    """The same JSON, spelled in another way."""
    lines = path.read_bytes().splitlines(keepends=True)
    at = draw.randrange(len(lines))
    line = _line_of(lines[at])
    ways: list[Callable[[], bytes]] = [
        lambda: json.dumps(line).encode() + b"\n",
        lambda: _dump(dict(reversed(line.items()))),
        lambda: _dump(line)[:-1] + b"\r\n",
        lambda: b" " + _dump(line),
        lambda: _dump(line).replace(b'"id":', b'"\\u0069d":'),
    ]
    lines[at] = draw.choice(ways)()
    path.write_bytes(b"".join(lines))
    return f"line {at + 1} spelled in another way"


def change_manifest(path: Path, draw: random.Random) -> str | None:
    """One value of the manifest."""
    manifest = json.loads(path.read_text(encoding="utf-8"))
    what = _change_value(manifest, draw)
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return what


CHANGES: list[tuple[str, Change]] = [
    *((name, change) for name in FILES for change in (change_line_value, change_byte, change_lines, change_spelling)),
    *((name, change_line_value) for name in FILES),
    ("manifest.json", change_manifest),
    ("manifest.json", change_manifest),
    ("manifest.json", change_byte),
]


def _renew(folder: Path, changed: str) -> None:
    """Make digests, sizes and, if something else was changed, the summary what the files give."""
    if changed == "manifest.json":
        return
    renew(folder)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if (found := _summary(folder)) is not None:
        manifest["summary"] = found
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _summary(folder: Path) -> dict[str, Any] | None:
    """The totals of a run as its lines have them; None if they cannot be read."""
    try:
        outputs = [json.loads(line) for line in (folder / FILES[0]).read_bytes().splitlines()]
        records = [json.loads(line) for line in (folder / FILES[1]).read_bytes().splitlines()]
        drafts = DraftCounts()
        for r in records:
            stats = drafts[r["drafter"]]
            setattr(stats, r["status"], getattr(stats, r["status"]) + 1)
            stats.drafted += r["drafted"] is not None
        for (*_, drafter), _ in {(r["index"], r["sample"], r["round"], r["drafter"]): 0 for r in records}.items():
            drafts[drafter].rounds += 1
        texts = [line for line in outputs if "error" not in line]
        return {
            "prompts": len({line["index"] for line in outputs}),
            "samples": len(texts),
            "errors": len({line["index"] for line in outputs if "error" in line}),
            "tokens": sum(len(line["token_ids"]) for line in texts),
            "prompt_tokens": sum(line["prompt_tokens"] for line in texts if line["sample"] == 0),
            "drafters": {name: asdict(stats) for name, stats in drafts.items()},
            "total": asdict(drafts.total()),
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _same(before: Run, folder: Path, engine: Engine, place: Path) -> str | None:
    """Why a changed run means the same as before; None if that cannot be proved."""
    old, new = (json.loads((f / "manifest.json").read_text(encoding="utf-8")) for f in (before.folder, folder))
    if all((before.folder / name).read_bytes() == (folder / name).read_bytes() for name in FILES):
        return _same_manifest(before, old, new, engine, place)
    if (before.folder / FILES[0]).read_bytes() == (folder / FILES[0]).read_bytes():
        return _same_but_for_drafts(before.folder, folder)
    return None


def _same_manifest(before: Run, old: dict[str, Any], new: dict[str, Any], engine: Engine, place: Path) -> str | None:
    if old == new and repr(old) == repr(new):
        return "the manifest is spelled in another way"
    changed = _changed(old, new)
    if all(any(path == one or path.startswith(one) for one in NOT_JUDGED) for path in changed):
        return "nothing that an output depends on"
    if all(path.startswith("parameters.") for path in changed):
        # Proved by doing it: a run with these parameters writes the same bytes.
        asked = new["parameters"]
        folder = place / "again"
        shutil.rmtree(folder, ignore_errors=True)
        also = {name: asked[name] for name in ("limit", "seed_per_line", "echo")}
        config = RunConfig(str(before.prompts), folder, sampling_params(asked), EngineConfig(), **also)
        run(config, Silent(), build_engine=lambda _: engine)
        if (folder / FILES[0]).read_bytes() == (before.folder / FILES[0]).read_bytes():
            return "parameters that give the same bytes"
    if all(isinstance(a, int | float) and a == b for a, b in _values(old, new, changed)):
        return "the same number, spelled in another way"
    return None


def _same_but_for_drafts(old: Path, new: Path) -> str | None:
    """Whether the logs have the same tokens and differ in who drafted what in vain."""

    def committed(folder: Path) -> list[Any]:
        records = [json.loads(line) for line in (folder / FILES[1]).read_bytes().splitlines()]
        names = ("id", "index", "sample", "position", "token", "logprob", "margin")
        judged = {True: names, False: names[:-2]}  # nothing is promised of an unverified sample's logits
        return [[r[n] for n in judged[r["status"] != "unverified"]] for r in records if r["token"] is not None]

    records = [json.loads(line) for line in (new / FILES[1]).read_bytes().splitlines()]
    if any(r["drafter"] not in DRAFTERS.keys() - {"auto"} for r in records):
        return None
    return "the same tokens, drafted by others" if committed(old) == committed(new) else None


def _changed(old: Any, new: Any, path: str = "") -> list[str]:
    """The paths of the values that differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [p for k in {**old, **new} for p in _changed(old.get(k, ...), new.get(k, ...), f"{path}.{k}".strip("."))]
    return [] if type(old) is type(new) and repr(old) == repr(new) else [path]


def _values(old: Any, new: Any, paths: list[str]) -> list[tuple[Any, Any]]:
    found = []
    for path in paths:
        a, b = old, new
        for key in path.split("."):
            a, b = (part.get(key, math.nan) if isinstance(part, dict) else math.nan for part in (a, b))
        found.append((a, b))
    return found


def test_single_changes(
    runs: list[Run],
    chatting: Engine,
    tries: Callable[[int], int],
    tally: Callable[..., None],
    tmp_path: Path,
) -> None:
    judging = chatting.with_settings(drafter="none", batch_size=16)
    for each in runs:
        assert Audit(each.folder, read_manifest(each.folder), judging, None).run(Silent()).findings == []
    counts = {"changes": 0, "found": 0, "refused": 0, "another profile": 0, "same": 0, "missed": 0}
    missed: list[str] = []
    number = lines = 0
    while counts["changes"] < tries(1000):
        draw = random.Random(number)
        number += 1
        one, (name, change) = runs[number % len(runs)], draw.choice(CHANGES)
        folder = tmp_path / "out"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(one.folder, folder)
        before = (folder / name).read_bytes()
        what = change(folder / name, draw)
        if (folder / name).read_bytes() == before:
            continue
        counts["changes"] += 1
        _renew(folder, name)
        try:
            result = Audit(folder, read_manifest(folder), judging, str(one.prompts)).run(Silent())
        except CheckError as error:
            counts["refused"] += 1
            lines += str(error).count("\n")
            continue
        if result.faults:
            counts["found"] += 1
        elif result.other_profile:
            counts["another profile"] += 1
        elif _same(one, folder, chatting, tmp_path):
            counts["same"] += 1
        else:
            counts["missed"] += 1
            missed.append(f"{number - 1}: {one.name}-{one.drafter} {name} {change.__name__}: {what}")
    tally(**{key.replace(" ", "_"): count for key, count in counts.items()})
    assert missed == []
    assert not lines, "a refusal of several lines"


def test_the_rule_knows_what_is_not_the_same(runs: list[Run], chatting: Engine, tmp_path: Path) -> None:
    """What the campaign calls the same must not hide a change of an output."""
    one = runs[0]
    folder = tmp_path / "out"
    shutil.copytree(one.folder, folder)
    path = folder / "outputs.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"sample":0', b'"sample":1', 1))
    assert _same(one, folder, chatting, tmp_path) is None
    shutil.rmtree(folder)
    shutil.copytree(one.folder, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["parameters"]["temperature"] = 0.9
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert _same(one, folder, chatting, tmp_path) is None
