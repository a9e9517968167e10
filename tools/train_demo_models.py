"""Train the two demo models that detgen ships, and write their folders.

    python tools/train_demo_models.py --out detgen/demo_models
    python tools/keep_demo_models.py    # afterwards: what transformers tells of them is shipped, too

The target learns the standard library's source; the draft learns the target's
predictions on the same text. The work folder keeps checkpoints: an interrupted
run resumes from them, and a finished stage is not repeated. Needs torch 2.9 or
later, for its Muon.
"""

from __future__ import annotations

import argparse
import platform
from copy import deepcopy
from pathlib import Path
from typing import Any

import make_sample_prompts
import torch
from demo_corpus import HELD_OUT, read_corpus
from demo_tokenizer import CONTEXT, hugging_face_tokenizer, train_tokenizer
from demo_training import (
    EOS,
    Budget,
    Result,
    Windows,
    agreement,
    as_shipped,
    bits_per_byte,
    build_model,
    greedy_agreement,
    token_stream,
    train,
)
from tokenizers import Tokenizer
from transformers import GenerationConfig

SEED = 0
TARGET_STEPS = 4103
DRAFT_STEPS = 4200
TARGET_SHARE = 0.75  # of the minutes, if the budget is given in minutes

CARD = """---
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
library_name: transformers
pipeline_tag: text-generation
tags: [code, python, detgen]
---
# detgen demo model: {role}

A small Llama ({parameters:.2f} million parameters, bfloat16) that continues Python source.
It ships with detgen so that every command can be tried without a download.
It is a demonstration, not a coding assistant: what it writes looks like Python and rarely works,
and at temperature 0 it soon repeats itself, which is easy for a drafter to predict.

- **Training data**: the source of the Python {python} standard library, as installed with the
  interpreter that ran the script ({library_mb:.1f} MB of modules, and {tests_mb:.1f} MB of their tests, sampled
  less often). No other text.
- **Licence of the data**: PSF-2.0, copyright Python Software Foundation.
- **Held out of training**, with their tests: {held_out}.
- **Training**: {steps} steps, {tokens:.1f} million tokens, {minutes:.0f} minutes on two cores of a
  CPU. {method}
- **Tokenizer**: byte-level BPE, {vocabulary} entries, the same for both models. Context: {context}
  tokens.

| held-out modules | |
| --- | --- |
{figures}

Made by `python tools/train_demo_models.py {budget}`.
"""

METHODS = {
    "target": "Muon for the matrices of the layers, AdamW for the rest, cross-entropy.",
    "draft": "Distilled: nine parts divergence from the target's predictions, one part cross-entropy.",
}


def prepare_tokenizer(work: Path, texts: list[str]) -> Tokenizer:
    """Return the tokenizer of the work folder, training it first if there is none."""
    path = work / "tokenizer.json"
    if not path.exists():
        train_tokenizer(texts).save(str(path))
    return Tokenizer.from_file(str(path))


def save_model(folder: Path, model: Any, tokenizer: Tokenizer, card: str) -> None:
    """Write the folder of a model in the standard layout, weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = deepcopy(model).to(torch.bfloat16)
    stored.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=EOS)
    stored.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    hugging_face_tokenizer(tokenizer).save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")


def budgets(options: argparse.Namespace) -> tuple[Budget, Budget]:
    """Return the budgets of target and draft, in minutes if given, else in steps."""
    if options.minutes is None:
        return Budget(steps=options.target_steps), Budget(steps=options.draft_steps)
    target = options.minutes * TARGET_SHARE
    return Budget(minutes=target), Budget(minutes=options.minutes - target)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("detgen/demo_models"))
    parser.add_argument("--work", type=Path, default=Path("build/demo_training"))
    parser.add_argument("--target-steps", type=int, default=TARGET_STEPS)
    parser.add_argument("--draft-steps", type=int, default=DRAFT_STEPS)
    parser.add_argument("--minutes", type=float, help="train by the clock, not by steps")
    return parser.parse_args()


def main() -> None:
    """Train both models, measure them, write their folders."""
    options = parse_options()
    options.work.mkdir(parents=True, exist_ok=True)
    corpus = read_corpus()
    library, tests = list(corpus.library.values()), list(corpus.tests.values())
    tokenizer = prepare_tokenizer(options.work, library)
    streams = token_stream(tokenizer, library), token_stream(tokenizer, tests)
    target_budget, draft_budget = budgets(options)
    by_steps = f"--target-steps {options.target_steps} --draft-steps {options.draft_steps}"
    budget = by_steps if options.minutes is None else f"--minutes {options.minutes:g}"

    def report(line: str) -> None:
        print(line, flush=True)

    def card(role: str, model: torch.nn.Module, result: Result, figures: dict[str, str]) -> str:
        return CARD.format(
            role=role,
            parameters=sum(parameter.numel() for parameter in model.parameters()) / 1e6,
            python=platform.python_version(),
            library_mb=sum(len(text.encode()) for text in library) / 1e6,
            tests_mb=sum(len(text.encode()) for text in tests) / 1e6,
            held_out=", ".join(HELD_OUT),
            steps=result.steps,
            tokens=result.tokens / 1e6,
            minutes=result.seconds / 60,
            method=METHODS[role],
            budget=budget,
            vocabulary=tokenizer.get_vocab_size(),
            context=CONTEXT,
            figures="\n".join(f"| {name} | {value} |" for name, value in figures.items()),
        )

    torch.manual_seed(SEED)
    target = build_model("target", tokenizer.get_vocab_size())
    windows = Windows(*streams, seed=SEED + 1)
    result = train(target, windows, target_budget, options.work / "target.pt", report=report)
    target = as_shipped(target)
    figures = {"bits per byte": f"{bits_per_byte(target, tokenizer, corpus.held_out):.3f}"}
    report(f"target: {figures}")
    save_model(options.out / "target", target, tokenizer, card("target", target, result, figures))

    torch.manual_seed(SEED)
    draft = build_model("draft", tokenizer.get_vocab_size())
    windows = Windows(*streams, seed=SEED + 2)
    checkpoint = options.work / "draft.pt"
    result = train(draft, windows, draft_budget, checkpoint, teacher=target, report=report)
    draft = as_shipped(draft)
    prompts = [str(record["prompt"]) for record in make_sample_prompts.chosen(tokenizer)]
    text_share = agreement(target, draft, tokenizer, corpus.held_out)
    greedy_share = greedy_agreement(target, draft, tokenizer, prompts)
    figures = {
        "bits per byte": f"{bits_per_byte(draft, tokenizer, corpus.held_out):.3f}",
        "first token equals the target's, along the text": f"{text_share:.1%}",
        "the same along the target's greedy continuations": f"{greedy_share:.1%}",
    }
    report(f"draft: {figures}")
    save_model(options.out / "draft", draft, tokenizer, card("draft", draft, result, figures))


if __name__ == "__main__":
    main()
