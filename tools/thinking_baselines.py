"""The backbone by itself on the stories: with the answer only, and with a chain of thought before it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from demo_training import Budget
from thinking_tasks import TASKS, Example, Story
from thinking_training import SIZES, Score, batch_of, build_model, descend, examples_to_learn
from torch import nn

BASELINES = {"answer alone": False, "chain of thought": True}


def plain_example(story: Story, tokenizer: Any, *, chain: bool) -> Example:
    """Return a story without thoughts; with a chain, its answer is all thoughts in a row, "So:" and the answer."""
    thoughts = "".join(f"{thought};" for _, thought in story.events)
    answer = f"{thoughts} So:{story.answer}" if chain else story.answer
    return Example(tokenizer.encode(story.text).ids, [*tokenizer.encode(answer).ids, 0], [])


def train_baseline(
    name: str, tokenizer: Any, budget: Budget, *, chain: bool, seed: int = 0, report: Callable[[str], None] = print
) -> nn.Module:
    """Train the backbone of a task's model, with full attention: without states, it needs the whole story."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model: nn.Module = build_model(name, sliding_window=None).backbone

    def example(story: Story) -> Example:
        return plain_example(story, tokenizer, chain=chain)

    def loss_of() -> torch.Tensor:
        batch = batch_of(examples_to_learn(draw.choice(TASKS[name]), draw, example), 1)
        loss: torch.Tensor = model(batch.ids, labels=batch.labels, use_cache=False).loss
        return loss

    descend(model, loss_of, SIZES[name].rate, budget, report)
    return model


@torch.no_grad()
def baseline_score(model: Any, stories: Sequence[Story], tokenizer: Any, *, chain: bool, at_once: int = 100) -> Score:
    """Return the share of answers that are right to their end; with a chain, its text does not matter."""
    right = 0
    for start in range(0, len(stories), at_once):
        part = stories[start : start + at_once]
        examples = [plain_example(story, tokenizer, chain=chain) for story in part]
        longest = max(len(e.prompt) for e in examples)
        ids = torch.tensor([[0] * (longest - len(e.prompt)) + e.prompt for e in examples])
        mask = torch.tensor([[0] * (longest - len(e.prompt)) + [1] * len(e.prompt) for e in examples])
        most = max(len(e.answer) for e in examples)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=0)
        for story, said in zip(part, out[:, longest:].tolist(), strict=True):
            answer, ended, _ = tokenizer.decode(said, skip_special_tokens=False).partition("<|endoftext|>")
            right += bool(ended) and answer.rpartition("So:")[2] == story.answer
    return Score(right / len(stories))
