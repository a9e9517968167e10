"""Training and measurement of the demo models: batches, optimisers, the loop, the figures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demo_tokenizer import CONTEXT
from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

EOS = 0
LIBRARY_SHARE = 0.7
BATCH_TOKENS = 4096
SHORT_WINDOW = 512
SHORT_UNTIL = 0.75  # share of the run trained on short windows, which are cheaper
WARMUP = 0.02
CONSTANT_UNTIL = 0.3  # share of the run after which the learning rate falls to zero
SAVE_SECONDS = 180.0

SIZES = {
    "target": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "draft": {
        "hidden_size": 160,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
    },
}


@dataclass(frozen=True)
class Budget:
    """How long to train: a number of steps, or minutes of training."""

    steps: int | None = None
    minutes: float | None = None

    def progress(self, step: int, seconds: float) -> float:
        """Return the share of the run that is done, from 0 to 1."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        if self.minutes is None:
            raise ValueError("a budget needs steps or minutes")
        return min(1.0, seconds / (60 * self.minutes))


@dataclass(frozen=True)
class Result:
    """The extent of a training run."""

    steps: int
    tokens: int
    seconds: float


def build_model(size: str, vocabulary: int) -> nn.Module:
    """Return an untrained model of one of the two sizes."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=EOS,
        **SIZES[size],
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def token_stream(tokenizer: Tokenizer, texts: Sequence[str]) -> torch.Tensor:
    """Return all texts as one row of token ids, with the end-of-text token before each and at the end."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(texts)):
        ids.append(EOS)
        ids.extend(encoding.ids)
    ids.append(EOS)
    return torch.tensor(ids)


class Windows:
    """Random windows of the library and test streams, drawn from a seed."""

    def __init__(self, library: torch.Tensor, tests: torch.Tensor, seed: int) -> None:
        """Take the two streams, and the seed for drawing."""
        self.streams = (library, tests)
        self.random = torch.Generator().manual_seed(seed)

    def batch(self, rows: int, width: int) -> torch.Tensor:
        """Return a batch of token ids, with one more than the width in each row."""
        picked = []
        for _ in range(rows):
            from_library = torch.rand(1, generator=self.random).item() < LIBRARY_SHARE
            stream = self.streams[0 if from_library or len(self.streams[1]) <= width + 1 else 1]
            high = max(1, len(stream) - width)
            start = int(torch.randint(high, (1,), generator=self.random))
            picked.append(stream[start : start + width + 1])
        return torch.stack(picked)


def optimisers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, and AdamW for embeddings and norms."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        inside = parameter.ndim == 2 and "embed" not in name
        (matrices if inside else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.05),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_factor(progress: float) -> float:
    """Return the factor of the learning rate: a short rise, a plateau, a line down to zero."""
    rise = min(1.0, (progress + 1e-3) / WARMUP)
    fall = min(1.0, (1.0 - progress) / (1.0 - CONSTANT_UNTIL))
    return rise * fall


def loss_of(model: nn.Module, batch: torch.Tensor, teacher: nn.Module | None) -> torch.Tensor:
    """Return cross-entropy with the text; with a teacher, mostly divergence from its logits."""
    inputs, labels = batch[:, :-1], batch[:, 1:].reshape(-1)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(inputs, use_cache=False).logits
    logits = logits.float().flatten(0, 1)
    if teacher is None:
        return F.cross_entropy(logits, labels)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = teacher(inputs, use_cache=False).logits
    own = F.log_softmax(logits, dim=-1)
    aim = F.log_softmax(wanted.float().flatten(0, 1), dim=-1)
    divergence = F.kl_div(own, aim, reduction="batchmean", log_target=True)
    return 0.9 * divergence + 0.1 * F.nll_loss(own, labels)


def train(
    model: nn.Module,
    windows: Windows,
    budget: Budget,
    checkpoint: Path,
    teacher: nn.Module | None = None,
    report: Callable[[str], None] = print,
    batch_tokens: int = BATCH_TOKENS,
    short_window: int = SHORT_WINDOW,
    long_window: int = CONTEXT,
) -> Result:
    """Train until the budget is spent, starting from the checkpoint if there is one."""
    steppers = optimisers(model)
    base_rates = [stepper.param_groups[0]["lr"] for stepper in steppers]
    step, seconds, tokens = 0, 0.0, 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for stepper, saved in zip(steppers, state["optimisers"], strict=True):
            stepper.load_state_dict(saved)
        windows.random.set_state(state["random"])
        step, seconds, tokens = state["step"], state["seconds"], state["tokens"]

    def save() -> None:
        state = {
            "model": model.state_dict(),
            "optimisers": [stepper.state_dict() for stepper in steppers],
            "random": windows.random.get_state(),
            "step": step,
            "seconds": seconds,
            "tokens": tokens,
        }
        partial = checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(checkpoint)

    model.train()
    saved_at, mean = seconds, 0.0
    while (progress := budget.progress(step, seconds)) < 1.0:
        started = time.monotonic()
        width = short_window if progress < SHORT_UNTIL else long_window
        batch = windows.batch(max(1, batch_tokens // width), width)
        for stepper, rate in zip(steppers, base_rates, strict=True):
            stepper.param_groups[0]["lr"] = rate * rate_factor(progress)
            stepper.zero_grad()
        loss = loss_of(model, batch, teacher)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
        step += 1
        tokens += batch[:, 1:].numel()
        seconds += time.monotonic() - started
        mean = loss.item() if step == 1 else 0.98 * mean + 0.02 * loss.item()
        if step % 50 == 0:
            report(f"step {step} done {progress:.3f} loss {mean:.4f} seconds {seconds:.0f}")
        if seconds - saved_at > SAVE_SECONDS:
            save()
            saved_at = seconds
    save()
    model.eval()
    return Result(step, tokens, seconds)


def as_shipped(model: nn.Module) -> nn.Module:
    """Round the weights to bfloat16, as stored; computing stays in float32."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return model.eval()


@torch.no_grad()
def document_windows(tokenizer: Tokenizer, text: str) -> list[torch.Tensor]:
    """Return a document's tokens in windows of the context; every token but the first counts once."""
    ids = token_stream(tokenizer, [text])
    return [ids[start : start + CONTEXT + 1] for start in range(0, len(ids) - 1, CONTEXT)]


@torch.no_grad()
def bits_per_byte(model: nn.Module, tokenizer: Tokenizer, texts: dict[str, str]) -> float:
    """Return the loss on whole documents, in bits per byte of UTF-8."""
    nats = 0.0
    for text in texts.values():
        for window in document_windows(tokenizer, text):
            logits = model(window[None, :-1]).logits[0]
            nats += F.cross_entropy(logits.float(), window[1:], reduction="sum").item()
    size = sum(len(text.encode()) for text in texts.values())
    return nats / math.log(2) / size


@torch.no_grad()
def agreement(target: nn.Module, draft: nn.Module, tokenizer: Tokenizer, texts: dict[str, str]) -> float:
    """Return the share of positions in the texts at which both models rank the same token first."""
    same = total = 0
    for text in texts.values():
        for window in document_windows(tokenizer, text):
            inputs = window[None, :-1]
            first = target(inputs).logits.argmax(-1) == draft(inputs).logits.argmax(-1)
            same += int(first.sum())
            total += first.numel()
    return same / total


@torch.no_grad()
def greedy_agreement(
    target: Any,  # no transformers class satisfies the type of its `generate`
    draft: nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    new_tokens: int = 64,
) -> float:
    """Return the share of tokens in the target's greedy continuations that the draft predicts."""
    same = total = 0
    for prompt in prompts:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        mask = torch.ones_like(ids)
        out = target.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
        start = ids.shape[1]
        guesses = draft(out[:, :-1]).logits.argmax(-1)[:, start - 1 :]
        same += int((guesses == out[:, start:]).sum())
        total += out.shape[1] - start
    return same / total
