"""The tasks of the Thinking States models: stories, and the gold thoughts of their chunks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"  # id 0; it ends an answer and a thought
VOCABULARY = 512
CONTEXT = 4096

_NAMES = """Alice Bob Carol Dan Emma Frank Grace Henry Irene Jack Kate Leo Mary Nick Olga Paul Quinn Rose Sam Tina
Ursula Victor Wendy Xavier Yara Zoe Adam Bella Colin Dora Eric Fiona George Hanna Ian Julia Kevin Laura Mark Nora
Oscar Petra Ralph Sarah Tom Uma Vera Walter Amir Chen Bruno Celine Dmitri Esther Fatima Gustav Hilde Ivan Jorge Keiko"""
NAMES, HELD_OUT = _NAMES.split()[:50], _NAMES.split()[50:]
MERGED = 24  # names that are one token each
BESIDES = (
    "The sun is shining.",
    "Nobody says a word.",
    "It is a quiet day in the village.",
    "A dog barks outside.",
    "The clock on the wall shows three.",
    "Rain falls on the roof.",
    "They talk about the weather.",
    "Somebody opens a window.",
    "The tea is getting cold.",
    "A train passes in the distance.",
    "The table is made of wood.",
    "Children play in the garden.",
)
OTHER_SIDE = {"heads": "tails", "tails": "heads"}
FLIPS, BREAKS = 0.75, 0.3  # share of the people who flip the coin, and of the steps that end a sentence
NUMBERS = 0.4  # share of the sums whose second operand is a number


@dataclass(frozen=True)
class Story:
    """A prompt, its answer and the events on the way.

    Attributes:
        text: the prompt.
        answer: the text that follows it.
        events: pairs of the characters up to an event's end and the thought about all events so far.
    """

    text: str
    answer: str
    events: tuple[tuple[int, str], ...]


def coin_flips(
    draw: random.Random, steps: int, names: Sequence[str] = NAMES, besides: float = 0.0, most_besides: int = 3
) -> Story:
    """Tell of a coin that people flip, or do not; a thought is the side after the last event.

    Args:
        draw: source of randomness.
        steps: number of people who come.
        names: their names.
        besides: probability of irrelevant sentences before each step.
        most_besides: most of these in a row.
    """
    side = draw.choice(["heads", "tails"])
    text = f"A coin's state is {side}"
    events = [(len(text), f" {side}")]
    text, begins = text + ".", True
    for step in range(steps):
        if draw.random() < besides:
            text += "" if begins else "."
            text += "".join(f" {draw.choice(BESIDES)}" for _ in range(draw.randint(1, most_besides)))
            begins = True
        text += (" " if begins else ", then ") + draw.choice(names)
        if draw.random() < FLIPS:
            side, text = OTHER_SIDE[side], text + " flips"
            events.append((len(text), f" {side}"))
        else:
            text += draw.choice([" does not flip", " waits"])
        begins = step == steps - 1 or draw.random() < BREAKS
        text += "." if begins else ""
    return Story(f"{text} What's the state? A:", f" {side}", tuple(events))


def variables(draw: random.Random, steps: int, count: int = 3, modulus: int = 10) -> Story:
    """Tell of variables that become sums; a thought is the sum with its operands, then the values of all variables.

    The event ends at the last operand, not the semicolon, which is often in the next chunk, without the operands.

    Args:
        draw: source of randomness.
        steps: number of sums after the first values.
        count: number of variables.
        modulus: modulus of the sums; at most 10.
    """
    names = "abcde"[:count]
    values: dict[str, int] = {}
    text, events = "", []
    for step in range(count + steps):
        name = names[step] if step < count else draw.choice(names)
        if step < count:
            words, said = str(draw.randrange(modulus)), ""
            values[name] = int(words)
        else:
            left = draw.choice(names)
            right = str(draw.randrange(modulus)) if draw.random() < NUMBERS else draw.choice(names)
            operands = values[left], values[right] if right in values else int(right)
            values[name] = sum(operands) % modulus
            words, said = f"{left}+{right}", f"{operands[0]}+{operands[1]}={values[name]};"
        text += f"{' ' if text else ''}{name}={words}"
        events.append((len(text), said + "".join(f"{name}{value}" for name, value in values.items())))
        text += ";"
    asked = draw.choice(names)
    return Story(f"{text} {asked}? A: ", str(values[asked]), tuple(events))


@dataclass(frozen=True)
class Task:
    """A kind of story to learn.

    Attributes:
        example: a short prompt.
        steps: most steps of a story in training.
        train: makes a story of a number of steps to learn from.
        tests: functions that make stories to read, by their names in the table.
        lengths: numbers of steps of these.
    """

    example: str
    steps: int
    train: Callable[[random.Random, int], Story]
    tests: dict[str, Callable[[random.Random, int], Story]]
    lengths: tuple[int, ...]


def _varied_coin_flips(draw: random.Random, steps: int) -> Story:
    """Tell of coins; half of the stories have other sentences in between, some few and some many."""
    return coin_flips(draw, steps, besides=draw.choice([0.0, draw.uniform(0.1, 0.8)]))


COIN = Task(
    "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:",
    20,
    _varied_coin_flips,
    {
        "coin flips": coin_flips,
        "held-out names": lambda draw, steps: coin_flips(draw, steps, HELD_OUT),
        "other sentences": lambda draw, steps: coin_flips(draw, steps, besides=0.5),
    },
    (20, 40, 100),
)
VARIABLES = Task("a=1; b=2; c=8; a=a+b; c=c+a; b? A: ", 10, variables, {"variables": variables}, (10, 20))
TASKS = {"coin": (COIN,), "variables": (VARIABLES,), "both": (COIN, VARIABLES)}


def train_tokenizer(stories: int = 4000, seed: int = 0) -> Tokenizer:
    """Train byte-level BPE on stories of both tasks; digits are split, and the end-of-text token has id 0.

    It sees only a few of the names, so that models learn from names of one token and of several.
    """
    coins, programs = random.Random(seed), random.Random(seed)
    learned = [coin_flips(coins, coins.randint(1, 20), NAMES[:MERGED], besides=0.1) for _ in range(stories)]
    learned += [variables(programs, programs.randint(1, 10)) for _ in range(stories)]
    tokenizer = Tokenizer(models.BPE())
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([f"{story.text}{story.answer}" for story in learned], trainer)
    return tokenizer


def hugging_face_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Wrap the tokenizer for saving in the standard folder layout."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class Example:
    """A story in tokens.

    Attributes:
        prompt: its tokens.
        answer: tokens of the answer, and the end of the sequence.
        thoughts: the gold thought of each full chunk of the prompt and answer.
    """

    prompt: list[int]
    answer: list[int]
    thoughts: list[tuple[int, ...]]


def example_of(story: Story, tokenizer: Any, chunk_size: int) -> Example:
    """Tokenize a story; a chunk's thought is that of the last event completed by a token of the chunk."""
    encoding = tokenizer.encode(story.text)
    prompt: list[int] = encoding.ids
    answer = [*tokenizer.encode(story.answer).ids, 0]
    thoughts: list[tuple[int, ...]] = [()] * ((len(prompt) + len(answer)) // chunk_size)
    ends = [end for _, end in encoding.offsets]
    token = 0
    for place, thought in story.events:
        while ends[token] < place:
            token += 1
        if token // chunk_size < len(thoughts):
            thoughts[token // chunk_size] = tuple(tokenizer.encode(thought).ids)
    return Example(prompt, answer, thoughts)
