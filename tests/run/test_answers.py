"""Answers taken apart in whole runs: the same bytes in every run, an audit that finds what was changed, and results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.batch_types import check
from helpers.checks import Silent
from helpers.tampering import Changed, renew
from openai.types.chat import ChatCompletion

from detgen import Engine, EngineConfig, SamplingParams
from detgen.run import RunConfig, run
from detgen.verify.replay.audit import Audit
from detgen.verify.replay.claims import read_manifest

# In the manner of Qwen's; the thoughts of "think" begin in the prompt.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tools }}<assistant>"
    "{% if think %}<think>{% endif %}{# <think></think><tool_call></tool_call> #}"
)
THINK = {"think": True}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
BROKEN = "<tool_call>{x</tool_call>"
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
WRITTEN = [
    CALL,
    f"Look: {CALL}\n{CALL}",
    "<think>a b</think>Yes",
    f"<think></think>{CALL}",
    "<tool_call>{x</tool_call>",
]


def _lines() -> list[dict[str, Any]]:
    """Chats that must write one of the texts, beside chats and texts that are free."""
    found: list[dict[str, Any]] = []
    for i, text in enumerate(WRITTEN):
        asked = [{"role": "user", "content": f"x = {i}"}]
        chat = {"messages": asked, "tools": TOOLS, "guided_choice": [text], "max_tokens": 90}
        found += [
            {"id": f"must {i}", **chat, "n": 1 + i % 2},
            {"id": f"none {i}", **chat, "tool_choice": "none", "temperature": 0.8},
            {
                "id": f"opened {i}",
                **chat,
                "guided_choice": [f"c</think>{text}"],
                "chat_template_kwargs": {"think": True},
            },
            {"id": f"free {i}", "messages": asked, "temperature": 1.0},
            {"id": f"text {i}", "prompt": f"def f{i}(", "stop": ["\n"]},
        ]
    unknown = {"messages": asked, "tools": TOOLS, "guided_choice": [CALL.replace('"f"', '"g"')], "max_tokens": 90}
    return [*found, {"id": "unknown", **unknown}]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answers") / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in _lines()))
    return path


@pytest.fixture
def go(
    prompts: Path, tmp_path: Path, engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """Runs the prompts into a folder: `go(name, stop=None, output_format=..., **settings)`."""

    def go(name: str, stop: int | None = None, output_format: Any = "detgen", **settings: Any) -> Path:
        engine = engines(**settings)
        monkeypatch.setattr(engine.tokenizer, "chat_template", TEMPLATE)
        build = Changed(engine, stop=stop)
        config = RunConfig(
            str(prompts), tmp_path / name, SamplingParams(max_tokens=12), EngineConfig(drafter=settings["drafter"]),
            output_format=output_format,
        )  # fmt: skip
        run(config, Silent(), build_engine=lambda _: build)  # type: ignore[arg-type, return-value]
        return tmp_path / name

    return go


def _outputs(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    lines = map(json.loads, (folder / "outputs.jsonl").read_text().splitlines())
    return {(line["id"], line["sample"]): line for line in lines}


def test_the_same_bytes_in_every_run(go: Callable[..., Path]) -> None:
    want = go("alone", drafter="none", batch_size=1)
    written = (want / "outputs.jsonl").read_bytes()
    for drafter, batch_size in (("auto", 7), ("ngram", 32)):
        found = go(f"{drafter} {batch_size}", drafter=drafter, batch_size=batch_size)
        assert (found / "outputs.jsonl").read_bytes() == written
    stopped = go("resumed", stop=9, drafter="auto", batch_size=7) / "outputs.jsonl"
    assert stopped.stat().st_size < len(written)
    assert (go("resumed", drafter="auto", batch_size=7) / "outputs.jsonl").read_bytes() == written

    lines = _outputs(want)
    called = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}

    def parts(id: str, sample: int = 0) -> tuple[Any, ...]:
        line = lines[id, sample]
        assert (line["text"], line["finish_reason"]) != ("", "length")
        calls = [{key: call[key] for key in called} for call in line.get("tool_calls", ())]
        return line.get("reasoning_content"), line.get("content", ...), calls

    assert [parts(f"must {i}") for i in range(5)] == [
        (None, None, [called]),
        (None, "Look:", [called, called]),
        ("a b", "Yes", []),
        ("", None, [called]),
        (None, ..., []),
    ]
    assert [parts(f"none {i}") for i in range(5)] == [
        (None, ..., []),
        (None, ..., []),
        ("a b", "Yes", []),
        ("", CALL, []),
        (None, ..., []),
    ]
    assert parts("opened 0") == ("c", None, [called])
    assert parts("opened 4") == ("c", BROKEN, [])
    assert all("content" not in line for (id, _), line in lines.items() if id.startswith(("free", "text")))
    assert [call["error"] for call in lines["unknown", 0]["tool_calls"]] == ["no tool has the name g"]
    ids = [call["id"] for line in lines.values() for call in line.get("tool_calls", ())]
    assert len(set(ids)) == len(ids) == 12
    assert all(len(id) == 9 and id.isalnum() for id in ids)


def test_an_audit_finds_a_part_that_was_changed(go: Callable[..., Path], engines: Callable[..., Engine]) -> None:
    folder = go("audited", drafter="auto", batch_size=7)
    judging = engines(drafter="auto", batch_size=16)  # with the same tokenizer
    assert Audit(folder, read_manifest(folder), judging, None).run(Silent()).findings == []
    path = folder / "outputs.jsonl"
    written = path.read_text()
    for part, other in (('"content":"Yes"', '"content":"No"'), (',"error":"no tool has the name g"', "")):
        assert part in written
        path.write_text(written.replace(part, other, 1))
        renew(folder)
        assert Audit(folder, read_manifest(folder), judging, None).run(Silent()).findings


def test_results(go: Callable[..., Path]) -> None:
    found = {}
    for line in (go("results", output_format="openai", drafter="auto", batch_size=7) / "results.jsonl").open("rb"):
        found[json.loads(line)["custom_id"]] = check(line)
    body = found["must 1"]
    assert isinstance(body, ChatCompletion)
    assert [choice.finish_reason for choice in body.choices] == ["tool_calls", "tool_calls"]
    message = body.choices[0].message
    assert message.content == "Look:"
    assert message.tool_calls is not None
    assert [call.type == "function" and json.loads(call.function.arguments) for call in message.tool_calls] == [
        {"x": 1},
        {"x": 1},
    ]
    body = found["unknown"]
    assert isinstance(body, ChatCompletion)
    [call] = body.choices[0].message.tool_calls or []
    assert set(call.to_dict()) == {"id", "type", "function"}
    body = found["must 2"]
    assert isinstance(body, ChatCompletion)
    assert (body.choices[0].finish_reason, body.choices[0].message.content) == ("stop", "Yes")
    assert body.choices[0].message.model_extra == {"reasoning_content": "a b"}
