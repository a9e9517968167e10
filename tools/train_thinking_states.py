"""Train a Thinking States model on coin flips, on variables or on both, and write its folder.

    python tools/train_thinking_states.py --task coin --minutes 10 --threads 2 -o my-thinking

Every hundred steps it prints the loss, the share of thoughts that are right given the gold thoughts before them, and
the shares of answers and of thoughts that are right when the model reads freely, for the longest stories of the
training and for twice their length. At the end it prints a table, which the folder's README repeats. With `--baselines`
it also trains the backbone alone, each time as long, to give the answer at once or after a chain of thought.

Coin flips take 500 steps, under a minute on a core; variables take 1,600 to 3,000 of a larger model, 7 to 13 minutes.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from demo_training import Budget
from thinking_baselines import BASELINES, baseline_score, train_baseline
from thinking_tasks import TASKS, Story, example_of, hugging_face_tokenizer, train_tokenizer
from thinking_training import BATCH_TOKENS, SIZES, Score, Trained, score, train
from transformers.utils.logging import disable_progress_bar

COUNT = 500  # stories per cell of the table

CARD = """---
license: apache-2.0
library_name: detgen
pipeline_tag: text-generation
tags: [thinking-states, detgen]
---
# detgen demo model: thinking

A small Thinking States model (Amos et al., [arXiv 2602.08332](https://arxiv.org/abs/2602.08332)) of
{parameters:.2f} million parameters in float32. It reads in chunks of {chunk_size} tokens; after each it may write a
short thought, which becomes a state that is added to the next chunk. Thoughts never enter the context.
It knows {stories}, and nothing else:

{prompts}

- **Thoughts**: {thoughts}
- **Training**: from nothing, {steps} batches of about {batch:,} tokens, {minutes:.1f} minutes on {threads}.
  AdamW, learning rate {rate:g}, warm-up, linear decay; cross-entropy of answers and thoughts, none of prompts.
- **Data**: stories made by `tools/thinking_tasks.py`, of {lengths}. No other text.
- **Model**: {layers} Mistral layers of {width}, sliding window of {window}; T and C are one such layer each.
  The state goes into layer {inject}, T reads what the last layer reads; an empty thought {empty}.
- **Tokenizer**: byte-level BPE, {vocabulary} entries, trained on such stories. Context: {context} tokens.

Read freely, from the first chunk to the answer; {count} stories in each cell{compared}:

{table}

Made by `python tools/train_thinking_states.py {command}`.
"""
COMPARED = """.
The other columns are the backbone alone, with full attention, trained on as many batches to give the answer at once,
or to write all thoughts in a row before it"""
EMPTY = {"keep": "leaves the state as it was", "zero": "clears the state"}
STORIES = {
    "coin": "stories of coins that people flip",
    "variables": "programs that add variables",
    "both": "stories of coins that people flip and programs that add variables",
}
_SIDE = 'the side after the last event that a chunk completes (" tails").'
_SUM = """the last sum of a chunk, and all values after it ("3+2=5;a3b5c8"). The chunk that holds the last
  operand thinks, not the one with the semicolon."""
THOUGHTS = {"coin": _SIDE, "variables": _SUM, "both": f"of a coin, {_SIDE}\n  Of a program, {_SUM}"}


def table_of(name: str, columns: dict[str, Callable[[list[Story]], Score]], count: int) -> str:
    """Return a table of each column's results on the task's test stories."""
    titles = " | ".join(columns)
    lines = [f"| stories | steps | {titles} |", "| --- |" + " --- |" * (1 + len(columns))]
    for task in TASKS[name]:
        for kind, make in task.tests.items():
            for steps in task.lengths:
                draw = random.Random(f"{kind} {steps}")
                stories = [make(draw, steps) for _ in range(count)]
                shown = " | ".join(str(column(stories)) for column in columns.values())
                lines.append(f"| {kind} | {steps} | {shown} |")
    return "\n".join(lines)


def card(model: Any, name: str, trained: Trained, table: str, options: argparse.Namespace) -> str:
    """Return the README of the folder."""
    config = model.config
    length = f"--minutes {options.minutes:g}" if options.steps is None else f"--steps {options.steps}"
    return CARD.format(
        parameters=sum(weight.numel() for weight in model.parameters()) / 1e6,
        chunk_size=config.chunk_size,
        stories=STORIES[name],
        prompts="\n".join(f"    {task.example}" for task in TASKS[name]),
        thoughts=THOUGHTS[name],
        steps=f"{trained.steps:,}",
        batch=BATCH_TOKENS,
        minutes=trained.seconds / 60,
        threads="one core of a CPU" if options.threads == 1 else f"{options.threads} cores of a CPU",
        rate=SIZES[name].rate,
        lengths=" and of ".join(f"1 to {task.steps} steps" for task in TASKS[name]),
        layers=config.backbone.num_hidden_layers,
        width=config.backbone.hidden_size,
        window=config.backbone.sliding_window,
        inject=config.inject_layer,
        empty=EMPTY[config.empty_state],
        vocabulary=config.backbone.vocab_size,
        context=f"{config.backbone.max_position_embeddings:,}",
        count=options.count,
        compared=COMPARED if options.baselines else "",
        table=table,
        command=f"--task {name} {length} --threads {options.threads}{' --baselines' if options.baselines else ''}",
    )


def save_model(folder: Path, model: Any, tokenizer: Any, text: str) -> None:
    """Write the folder of a model in the standard layout."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    hugging_face_tokenizer(tokenizer).save_pretrained(folder)
    (folder / "README.md").write_text(text, encoding="utf-8")


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--task", choices=TASKS, default="coin")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=20.0, help="training of each model, on an idle machine")
    length.add_argument("--steps", type=int, help="training of each model, in batches")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--count", type=int, default=COUNT, help="stories in a cell of the table")
    parser.add_argument("--baselines", action="store_true", help="train the backbone alone, too, and compare")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the model")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Train, measure, and write the folder."""
    options = parse_options(arguments)
    disable_progress_bar()
    torch.set_num_threads(options.threads)
    tokenizer, name = train_tokenizer(), options.task
    budget = Budget(minutes=options.minutes) if options.steps is None else Budget(steps=options.steps)

    def report(line: str) -> None:
        print(line, flush=True)

    model, trained = train(name, tokenizer, budget, report=report)
    chunk_size = model.config.chunk_size

    def thinking(stories: list[Story]) -> Score:
        return score(model, [example_of(story, tokenizer, chunk_size) for story in stories])

    columns: dict[str, Callable[[list[Story]], Score]] = {"answers / thoughts": thinking}
    save_model(options.output, model, tokenizer, "")
    for title, chain in BASELINES.items() if options.baselines else ():
        report(f"{title}:")
        columns[title] = baseline(train_baseline(name, tokenizer, budget, chain=chain, report=report), tokenizer, chain)
    table = table_of(name, columns, options.count)
    report(table)
    save_model(options.output, model, tokenizer, card(model, name, trained, table, options))


def baseline(model: Any, tokenizer: Any, chain: bool) -> Callable[[list[Story]], Score]:
    """Return a column of the table: the scores of a model without states."""
    return lambda stories: baseline_score(model, stories, tokenizer, chain=chain)


if __name__ == "__main__":
    main()
