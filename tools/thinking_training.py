"""Training and measurement of the Thinking States models: batches, the loop, free reading of many stories at once."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from demo_training import Budget
from thinking_tasks import CONTEXT, TASKS, VOCABULARY, Example, Story, Task, example_of
from torch import nn
from transformers import DynamicCache, MistralConfig

from detgen.thinking.configuration import ThinkingStatesConfig
from detgen.thinking.modeling import IGNORED, ThinkingStatesForCausalLM

BATCH_TOKENS = 1024
MOST_STORIES = 64
WARMUP, FLOOR = 50, 0.01  # the learning rate rises over WARMUP steps, then falls to FLOOR of it
REPORT, REPORTED = 100, 60  # steps between reports, and stories read in each


@dataclass(frozen=True)
class Size:
    """The size of a model for a task.

    Attributes:
        width: width of its hidden states.
        layers: number of layers of the backbone.
        heads: number of heads, the same for keys and values.
        longest: most tokens of a thought.
        rate: highest learning rate.
        inject: layer to whose input the state is added.
    """

    width: int
    layers: int
    heads: int
    longest: int
    rate: float
    inject: int


SMALL, LARGE = Size(64, 3, 2, 2, 3e-3, 1), Size(128, 4, 4, 12, 1.5e-3, 2)
SIZES = {"coin": SMALL, "variables": LARGE, "both": LARGE}
CHUNK, WINDOW = 4, 32


def build_model(name: str, **changed: Any) -> ThinkingStatesForCausalLM:
    """Return an untrained model of a task's size, with some settings of its backbone changed."""
    size = SIZES[name]
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": size.width,
        "intermediate_size": 3 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "sliding_window": WINDOW,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    backbone = MistralConfig(**{**settings, **changed})
    config = ThinkingStatesConfig(backbone, CHUNK, size.inject, max_thought_tokens=size.longest)
    model = ThinkingStatesForCausalLM(config)
    start_weights(model)
    return model


def start_weights(model: ThinkingStatesForCausalLM) -> None:
    """Draw initial weights with which small models learn fast: large embeddings, small outputs of the layers."""
    layers = model.config.backbone.num_hidden_layers
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        elif "o_proj" in name or "down_proj" in name:
            nn.init.normal_(weight, std=0.02 * (2 * layers) ** -0.5)
        elif weight.ndim == 2:
            nn.init.normal_(weight, std=0.02 if "head" in name else 0.04)


@dataclass(frozen=True)
class Trained:
    """The extent of a training run: steps, and processor seconds per thread (on an idle machine, the clock's)."""

    steps: int
    seconds: float


@dataclass(frozen=True)
class Batch:
    """Some examples, padded at the end.

    Attributes:
        ids: int64 [stories, tokens], a whole number of chunks.
        labels: int64 [stories, tokens]; the answer's tokens, -100 elsewhere.
        thoughts: int64 [stories, chunks, width], as for `ThinkingStatesForCausalLM.forward`.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    thoughts: torch.Tensor


def batch_of(examples: Sequence[Example], chunk_size: int) -> Batch:
    """Make tensors of examples."""
    chunks = -(-max(len(e.prompt) + len(e.answer) for e in examples) // chunk_size)
    width = 1 + max((len(t) for e in examples for t in e.thoughts), default=0)
    ids = torch.zeros(len(examples), chunks * chunk_size, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    thoughts = torch.full((len(examples), chunks, width), IGNORED)
    for row, example in enumerate(examples):
        start, end = len(example.prompt), len(example.prompt) + len(example.answer)
        ids[row, :end] = torch.tensor(example.prompt + example.answer)
        labels[row, start:end] = torch.tensor(example.answer)
        for chunk, thought in enumerate(example.thoughts):
            thoughts[row, chunk, : len(thought) + 1] = torch.tensor([*thought, 0])
    return Batch(ids, labels, thoughts)


def examples_to_learn(task: Task, draw: random.Random, make: Callable[[Story], Example]) -> list[Example]:
    """Return examples of about the same length that fill a batch; `make` tokenizes a story."""
    most, examples, longest = draw.randint(1, task.steps), list[Example](), 0
    while len(examples) < MOST_STORIES:
        example = make(task.train(draw, max(1, most - draw.randint(0, 2))))
        longest = max(longest, len(example.prompt) + len(example.answer))
        if examples and longest * (len(examples) + 1) > BATCH_TOKENS:
            break
        examples.append(example)
    return examples


class Recent(DynamicCache):
    """Keys and values of the positions that a sliding window still reaches, so that long stories stay cheap."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a layer's keys and values; return all that the new rows may attend to."""
        keys, values = super().update(keys, values, layer)
        held = self.layers[layer]
        held.keys, held.values = (x[..., -(self.window - 1) :, :] for x in (keys, values))
        return keys, values


@torch.no_grad()
def read_many(
    model: ThinkingStatesForCausalLM, rows: Sequence[Sequence[int]]
) -> list[tuple[list[int], list[tuple[int, ...]]]]:
    """Read many sequences at once, chunk by chunk, each as by `ThinkingStatesForCausalLM.read`.

    Returns:
        For each, the likeliest token after every one of its tokens, and the thoughts of its full chunks.
    """
    c, width = model.config.chunk_size, model.config.backbone.hidden_size
    chunks = -(-max(map(len, rows)) // c)
    ids = torch.tensor([[*row, *[0] * (chunks * c - len(row))] for row in rows])
    cache, states = Recent(model.config.backbone.sliding_window), torch.zeros(len(rows), c, width)
    following, thoughts = [], list[list[tuple[int, ...]]]()
    for first in range(0, chunks * c, c):
        logits, hidden = model.decode(ids[:, first : first + c], states, cache, first)
        following.append(logits.argmax(-1))
        thoughts.append(model.think(hidden))
        made = model.compress(thoughts[-1])
        thought = torch.tensor([bool(t) for t in thoughts[-1]])[:, None, None]
        states = torch.where(thought, made, states if model.config.empty_state == "keep" else torch.zeros(()))
    said = torch.cat(following, 1).tolist()
    return [(said[i][: len(row)], [t[i] for t in thoughts[: len(row) // c]]) for i, row in enumerate(rows)]


@dataclass(frozen=True)
class Score:
    """The shares of answers, and of thoughts of all full chunks of the prompts, that are right."""

    answers: float
    thoughts: float | None = None

    def __str__(self) -> str:
        shown = f"{100 * self.answers:.1f}"
        return f"{shown} %" if self.thoughts is None else f"{shown} / {100 * self.thoughts:.2f} %"


def score(model: ThinkingStatesForCausalLM, examples: Sequence[Example], at_once: int = 100) -> Score:
    """Return the shares of answers that are right to their end, and of right thoughts, read freely."""
    answers = right = total = 0
    for start in range(0, len(examples), at_once):
        part = examples[start : start + at_once]
        for example, (said, thoughts) in zip(
            part, read_many(model, [e.prompt + e.answer[:-1] for e in part]), strict=True
        ):
            answers += said[len(example.prompt) - 1 :] == example.answer
            full = len(example.prompt) // model.config.chunk_size
            right += sum(a == b for a, b in zip(thoughts[:full], example.thoughts, strict=False))
            total += full
    return Score(answers / len(examples), right / total)


def descend(
    model: nn.Module,
    loss_of: Callable[[], torch.Tensor],
    rate: float,
    budget: Budget,
    report: Callable[[str], None] = print,
) -> Trained:
    """Train until the budget is spent: AdamW, warm-up, linear decay, gradients cut at 1.

    Args:
        model: the model to train.
        loss_of: returns the loss of another batch.
        rate: highest learning rate.
        budget: steps, or minutes; the time of `report` does not count.
        report: called every hundred steps with a line of steps, seconds and mean loss.
    """
    weights = list(model.parameters())
    optimiser = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.05)
    step, seconds, mean = 0, 0.0, 0.0
    while (progress := budget.progress(step, seconds)) < 1.0:
        started = time.process_time()
        model.train()
        for group in optimiser.param_groups:
            group["lr"] = rate * max(min(1.0, (step + 1) / WARMUP) * (1.0 - progress), FLOOR)
        optimiser.zero_grad()
        loss = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        step += 1
        seconds += (time.process_time() - started) / torch.get_num_threads()
        mean = loss.item() if step == 1 else 0.95 * mean + 0.05 * loss.item()
        if step % REPORT == 0:
            model.eval()
            report(f"step {step}, {seconds:.0f} s: loss {mean:.4f}")
    model.eval()
    return Trained(step, seconds)


def train(
    name: str, tokenizer: Any, budget: Budget, seed: int = 0, report: Callable[[str], None] = print
) -> tuple[ThinkingStatesForCausalLM, Trained]:
    """Train a model on a task or tasks by name; the tool's help describes the reports."""
    torch.manual_seed(seed)
    draw, model = random.Random(seed), build_model(name)
    known: deque[float] = deque(maxlen=REPORT)

    def example(story: Story) -> Example:
        return example_of(story, tokenizer, model.config.chunk_size)

    def loss_of() -> torch.Tensor:
        batch = batch_of(examples_to_learn(draw.choice(TASKS[name]), draw, example), model.config.chunk_size)
        out = model(batch.ids, batch.thoughts, batch.labels)
        right = (out.thought_logits.argmax(-1) == batch.thoughts) | (batch.thoughts == IGNORED)
        known.append(right.all(-1)[batch.thoughts[..., 0] != IGNORED].float().mean().item())
        loss: torch.Tensor = out.loss
        return loss

    def told(line: str) -> None:
        freely = []
        for task in TASKS[name]:
            for steps in (task.steps, 2 * task.steps):
                held = random.Random(f"report {steps}")
                shares = score(model, [example(task.train(held, steps)) for _ in range(REPORTED)])
                freely.append(f"{shares} at {steps}")
        taught = 100 * sum(known) / len(known)
        report(f"{line}, thoughts {taught:.1f} % taught; read freely, answers / thoughts {', '.join(freely)} steps")

    trained = descend(model, loss_of, SIZES[name].rate, budget, told)
    return model, trained
