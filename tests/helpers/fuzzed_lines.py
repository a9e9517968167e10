"""Fuzzed lines: anything that a file of prompts may hold by mistake, with good lines between it."""

from __future__ import annotations

import csv
import io
import json
import random
import re
from typing import Any

from detgen import RequestError, SamplingParams
from detgen.prompts.kinds import KEYS
from detgen.prompts.unsupported import OTHER_NAMES, UNSUPPORTED

ASKING_ELSEWHERE = ["suffix", "echo", "prefix", "assistant_prefix", "system", "beam_search", "smoothing_factor", "tfs"]
ALMOST = ["guided_json", "do_sample", "add_special_tokens", "temprature", "x"]
NAMES = sorted({*KEYS, *UNSUPPORTED, *OTHER_NAMES, *ASKING_ELSEWHERE, *ALMOST})

GOOD: list[dict[str, Any]] = [
    {"id": "plain", "prompt": "def add(a, b):\n"},
    {"id": "warm", "prompt": "class Stack:\n", "temperature": 0.9, "seed": 4, "n": 2},
    {"id": "chat", "messages": [{"role": "user", "content": "Sort a list."}]},
    {"id": "ids", "prompt_token_ids": [5, 6, 7], "logprobs": 1},
]
for each in GOOD:
    each["task"] = "kept"
BASES: list[dict[str, Any]] = [
    *GOOD,
    {"prompt": "x = é\U0001f600", "stop": ["\n"], "metadata": {"k": [1, {"a": None}]}},
    {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "def f("},
        ],
        "continue_final_message": True,
    },
    {"messages": [{"role": "tool", "tool_call_id": "1", "name": "f", "content": "3"}], "tools": [{"name": "f"}]},
    {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"enable_thinking": False}},
]
# Knows what chats may have, so that not all of them are refused.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }} {{ m.name }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ enable_thinking }}{% endif %}"
)
# Values that mean something, by key.
MEANT: dict[str, list[Any]] = {
    "temperature": [0, 0.7, 1.5],
    "top_p": [0.5, 1],
    "top_k": [0, 5, 10**6],
    "min_p": [0.1],
    "seed": [0, 7, 2**63 - 1],
    "n": [1, 2, 3],
    "stop": ["\n", ["a", " "], []],
    "logprobs": [0, 3],
    "max_tokens": [1, 9],
    "max_new_tokens": [4],
    "max_completion_tokens": [4],
    "deterministic": [True, False],
    "id": ["x", 3, "\ud800", ""],
    "metadata": [{"k": 1}, {"temperature": -1}, "text"],
    "tool_choice": ["auto"],
    "best_of": [1],
    "x": ["\u2028", {"a": [None]}],
}

WHOLE = [
    b"{}", b"[]", b"null", b"NaN", b'"text"', b"3", b"{", b"]", b"\xef\xbb\xbf", b"\xef\xbb\xbf{}",
    b"\xff\xfe{\x00}\x00",
    b"\x00", b"#", b'{"prompt":}', b"{'prompt': 'a'}", b'{"prompt": "a",}', b"[" * 100_000, b'{"a":' * 20_000,
    b"1" * 5000, b'{"prompt": ' + b"9" * 5000 + b"}", b'{"prompt": "a"}{"prompt": "b"}', b'{"prompt": "a"} // b',
    b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\\ud83d"}', b'{"\\ud800": 1, "prompt": "a"}', b"\xe2\x80\xa8",
]  # fmt: skip
PIECES = [
    b"\x00",
    b"\xff",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\\ud800",
    b'"',
    b"{",
    b"]",
    b",",
    b"NaN",
    b"\r",
    b"\t",
    b"1e999",
]
BOUNDED = False
try:
    SamplingParams(n=10**12)
except RequestError:
    BOUNDED = True  # or else as many samples would be made


def value(draw: random.Random, name: str = "") -> Any:
    """Any value; a deep one is a word that `text` replaces."""
    plain: list[Any] = [
        None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"), "", "a", "5", "\ud800",
        "\x00\x1b[31m", "text", "auto", "x" * 3000, [], {}, [None], ["a", 3], [[1]], {"a": 1}, {"": None},
        {"type": "text"},
        [{"type": "text", "text": "a"}], [{"role": "user", "content": "a"}], {"\ud800": 1}, {"5": -1.5}, [5, 6],
    ]  # fmt: skip
    plain += [f"DEEP{depth}" for depth in (20, 98, 99, 100, 101, 300, 2000)]
    plain += [f"DEEP{draw.randint(900, 1000)}"] * 10  # about as deep as Python goes
    plain += ["\ud800"] * 5
    if BOUNDED or name != "n":
        plain += [10**9, 10**30, -(10**30), 2**63, 10**400]
    if draw.random() < 0.2:
        return [value(draw) for _ in range(draw.randint(0, 3))]
    if draw.random() < 0.2:
        return {draw.choice(("a", "role", "content", "type", "text", "function")): value(draw) for _ in range(2)}
    return draw.choice(plain)


def message(draw: random.Random) -> Any:
    """A message, or something like one."""
    if draw.random() < 0.1:
        return value(draw)
    roles = ("system", "user", "assistant", "tool", "developer", "robot", None)
    made = {
        "role": draw.choice(roles[:4] if draw.random() < 0.8 else roles),
        "content": draw.choice(("a", "b\u0300 \U0001f600", [{"type": "text", "text": "b"}], "")),
    }
    for key in ("content", "name", "tool_calls", "tool_call_id", "reasoning_content"):
        if draw.random() < 0.08:
            made[key] = value(draw)
    if draw.random() < 0.1:
        name = draw.choice(("f", value(draw)))
        made["tool_calls"] = [{"function": {"name": name, "arguments": value(draw)}}, value(draw)][: draw.randint(1, 2)]
    return made


def record(draw: random.Random) -> dict[str, Any]:
    """A record with some values of any kind."""
    made = dict(draw.choice(BASES))
    if draw.random() < 0.4:
        made = {"messages": [message(draw) for _ in range(draw.choice((1, 1, 2, 3, 0)))]}
        if draw.random() < 0.3:
            made["continue_final_message"] = draw.random() < 0.5
    for _ in range(draw.randint(0, 2)):
        name = draw.choice(sorted(MEANT))
        made[name] = draw.choice(MEANT[name])
    for _ in range(draw.choice((0, 0, 0, 1, 2))):
        name = draw.choice(NAMES)
        made[name] = value(draw, name)
    return made


def text(made: Any) -> str:
    """A value as JSON text, or nearly."""
    deep = json.dumps(made)
    return re.sub(r'"DEEP(\d+)"', lambda found: "[" * int(found[1]) + "]" * int(found[1]), deep)


def fuzzed(draw: random.Random) -> bytes:
    """A line of JSON lines, without an end of line in it, that is not blank."""
    kind = draw.random()
    if kind < 0.1:
        return draw.choice(WHOLE)
    line = text(record(draw)).encode()
    if kind < 0.2:  # keys given twice
        line = line[:-1] + b", " + text(record(draw)).encode()[1:]
    if kind > 0.7:
        for _ in range(draw.randint(1, 4)):
            at, size = draw.randrange(len(line) + 1), draw.randint(0, 6)
            line = line[:at] + draw.choice((b"", draw.choice(PIECES), draw.randbytes(2))) + line[at + size :]
    line = line.replace(b"\n", b" ")
    return line if line.strip() else b"{"


def cell(draw: random.Random, name: str) -> str:
    """A cell of a table."""
    if (name in ("messages", "prompt_token_ids") and draw.random() < 0.8) or draw.random() < 0.5:
        return ""
    if name in ("prompt", *MEANT) and draw.random() < 0.9:
        meant = draw.choice(MEANT.get(name, ["a,\tb", 'x = "\n"']))
        return meant if isinstance(meant, str) else json.dumps(meant)
    made = draw.choice(
        ("", "a", "5", "true", "[", "{", "1e999", "nan", "\x1b[31m", text(value(draw)), text(record(draw)))
    )
    return re.sub(r'[\r\n"]', "'", made) if draw.random() < 0.2 else made.replace("\n", " ").replace("\r", " ")


def mixed(draw: random.Random, form: str, count: int) -> tuple[bytes, list[dict[str, Any] | None]]:
    """A file of fuzzed lines with good ones between them, and which ones are good."""
    order: list[dict[str, Any] | None] = []
    for n in range(count):
        order += [None, draw.choice(GOOD)] if n % 5 == 0 else [None]
    if form == "jsonl":
        return b"\n".join(fuzzed(draw) if g is None else text(g).encode() for g in order), order
    if form == "json":
        parts = [text(record(draw) if draw.random() < 0.8 else value(draw)) if g is None else text(g) for g in order]
        deep = re.compile(r"\[{900}")  # such an element is not cut off; the array is refused as a whole
        return f"[{', '.join('3' if deep.search(part) else part for part in parts)}]".encode(), order
    columns = ["prompt", "id", "temperature", "seed", "n", "messages", "prompt_token_ids", "logprobs", "task"]
    columns += draw.sample([name for name in NAMES if name not in columns], 6)
    out = io.StringIO()
    writer = csv.writer(out, delimiter="\t" if form == "tsv" else ",", lineterminator="\n")
    writer.writerow(columns)
    for good in order:
        if good is None:
            writer.writerow(
                [cell(draw, name) if name != "n" or BOUNDED else "" for name in columns][: draw.randint(3, 20)]
            )
        else:
            writer.writerow([c if isinstance(c := good.get(name, ""), str) else json.dumps(c) for name in columns[:9]])
    return out.getvalue().encode("utf-8", "surrogatepass"), order
