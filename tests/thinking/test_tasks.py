"""The stories' gold thoughts against a reader of the text that keeps the state itself."""

from __future__ import annotations

import json
import random
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import make_coin_flips  # noqa: E402
from thinking_tasks import HELD_OUT, NAMES, Story, coin_flips, example_of, train_tokenizer, variables  # noqa: E402

FOLDER = ROOT / "detgen" / "demo_models" / "thinking"


@cache
def tokenizer() -> Any:
    return train_tokenizer()


def coin_after(text: str) -> list[tuple[int, str]]:
    """Where each event of a story of a coin ends, and the side then."""
    side, found = "", []
    for match in re.finditer(r"state is (heads|tails)|\w+ flips", text):
        side = match[1] or {"heads": "tails", "tails": "heads"}[side]
        found.append((match.end(), f" {side}"))
    return found


def sums_after(text: str) -> list[tuple[int, str]]:
    """Where each assignment of a program ends, without its semicolon, and what should be thought then."""
    values: dict[str, int] = {}
    found = []
    for match in re.finditer(r"([a-e])=([^;]+);", text):
        operands = [int(part) if part.isdigit() else values[part] for part in match[2].split("+")]
        values[match[1]] = sum(operands) % 10
        work = f"{operands[0]}+{operands[1]}={sum(operands) % 10};" if len(operands) == 2 else ""
        found.append((match.end() - 1, work + "".join(f"{name}{value}" for name, value in values.items())))
    return found


def expected(encoding: Any, events: list[tuple[int, str]], chunk_size: int, count: int) -> list[str]:
    """The thought of each chunk: that of the last event whose last character is in it."""
    thoughts = [""] * count
    for end, thought in events:
        (token,) = (i for i, (first, last) in enumerate(encoding.offsets) if first < end <= last)
        if token // chunk_size < count:
            thoughts[token // chunk_size] = thought
    return thoughts


coins = st.builds(
    lambda seed, steps, names, besides: coin_flips(random.Random(seed), steps, names, besides),
    st.integers(0, 2**32),
    st.integers(1, 60),
    st.sampled_from([NAMES, HELD_OUT]),
    st.sampled_from([0.0, 0.5, 1.0]),
)

programs = st.builds(lambda seed, n: variables(random.Random(seed), n), st.integers(0, 2**32), st.integers(1, 30))


@examples(100)
@given(story=coins, chunk_size=st.integers(1, 9))
def test_thoughts_about_a_coin(story: Story, chunk_size: int) -> None:
    example = example_of(story, tokenizer(), chunk_size)
    events = coin_after(story.text)
    assert story.answer == events[-1][1]
    assert len(example.thoughts) == (len(example.prompt) + len(example.answer)) // chunk_size
    said = [tokenizer().decode(thought) for thought in example.thoughts]
    assert said == expected(tokenizer().encode(story.text), events, chunk_size, len(said))
    assert tokenizer().decode(example.prompt) == story.text
    assert tokenizer().decode(example.answer, skip_special_tokens=False) == f"{story.answer}<|endoftext|>"


@examples(100)
@given(story=programs, chunk_size=st.integers(1, 9))
def test_thoughts_about_variables(story: Story, chunk_size: int) -> None:
    example = example_of(story, tokenizer(), chunk_size)
    events = sums_after(story.text)
    asked = re.search(r"; ([a-c])\? A: $", story.text)
    assert asked
    assert re.search(rf"{asked[1]}(\d)[^;]*$", events[-1][1])[1] == story.answer  # type: ignore[index]
    said = [tokenizer().decode(thought) for thought in example.thoughts]
    assert said == expected(tokenizer().encode(story.text), events, chunk_size, len(said))
    assert tokenizer().decode(example.prompt) == story.text


def test_a_chunk_with_an_operand_holds_the_thought_about_it() -> None:
    """Not the next one: a sum needs its operands, and the semicolon often is in the chunk after them."""
    story = variables(random.Random(1), 5)
    assert story.text == "a=2; b=9; c=1; b=a+b; b=c+3; a=b+6; b=c+a; c=b+3; c? A: "
    example = example_of(story, tokenizer(), 4)
    chunks = [tokenizer().decode(example.prompt[first : first + 4]) for first in range(0, 20, 4)]
    assert chunks == ["a=2;", " b=9;", " c=1;", " b=a+", "b; b="]
    said = [tokenizer().decode(thought) for thought in example.thoughts[:5]]
    assert said == ["a2", "a2b9", "a2b9c1", "", "2+9=1;a2b1c1"]
    assert max(len(tokenizer().encode(thought).ids) for _, thought in story.events) == 12


def test_stories_have_what_they_should() -> None:
    draw = random.Random(0)
    plain = [coin_flips(draw, 20).text for _ in range(50)]
    assert all(len(re.findall(r"flips|waits|does not flip", text)) == 20 for text in plain)
    assert not any("window" in text for text in plain)
    besides = [coin_flips(draw, 20, HELD_OUT, 0.5).text for _ in range(50)]
    assert sum("window" in text for text in besides) > 25
    assert not any(re.search(rf"\b({'|'.join(NAMES)})\b", text) for text in besides)
    assert len(HELD_OUT) == 10
    assert not set(HELD_OUT) & set(NAMES)
    for word in ("flips", "waits", "does not flip", ", then", "heads.", "tails."):
        assert any(word in text for text in plain)


def test_the_tokenizer_is_the_one_that_is_shipped() -> None:
    made, shipped = json.loads(tokenizer().to_str()), json.loads((FOLDER / "tokenizer.json").read_text("utf-8"))
    assert made["model"] == shipped["model"]
    assert tokenizer().get_vocab_size() == 512
    pieces = [len(tokenizer().encode(f" {name}").ids) for name in NAMES + HELD_OUT]
    assert pieces[:2] == [1, 1]
    assert min(pieces[-10:]) > 1  # held-out names are of pieces that the model saw in others
    assert max(pieces[24:50]) > 3


def test_the_samples_are_the_stories_that_the_script_makes() -> None:
    lines = (ROOT / "sample_prompts" / "coin_flips.jsonl").read_text("utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    assert found == make_coin_flips.records()
    assert len(found) == 64
    for record in found:
        assert coin_after(record["prompt"])[-1][1] == f" {record['answer']}"
