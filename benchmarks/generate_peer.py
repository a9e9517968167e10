"""detgen beside transformers' `generate`: tokens a second on the same prompts, interleaved, medians.

    python benchmarks/generate_peer.py                      # the embedded pair on sample_prompts/code.jsonl
    python benchmarks/generate_peer.py --random-29m         # random weights, drafter none only
    python benchmarks/generate_peer.py --prompts FILE --tokens 64 --repeats 5 --threads 2

Loading and the first, unmeasured round are left out. `generate` runs in static batches, left-padded, greedily, on
unpatched modules in float32; tokens behind an end of sequence do not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from detgen import Engine  # isort: skip  # before torch: it settles how long OpenMP's threads spin
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from detgen.errors import DEMO

ROOT = Path(__file__).resolve().parent.parent


def random_29m(folder: Path) -> Path:
    """Random weights of 8 Llama layers, 29M parameters, with the embedded tokenizer."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    tokenizer.save_pretrained(folder)
    return folder


def generate_peer(folder: Path, prompts: list[str], tokens: int, batch: int) -> Callable[[], int]:
    """A function that completes all prompts by `generate` and returns how many tokens it made."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, dtype=torch.float32).eval()
    eos = tokenizer.eos_token_id

    def run() -> int:
        made = 0
        for i in range(0, len(prompts), batch):
            inputs = tokenizer(prompts[i : i + batch], return_tensors="pt", padding=True)
            with torch.inference_mode():
                out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=eos)
            for row in out[:, inputs.input_ids.shape[1] :].tolist():
                made += row.index(eos) + 1 if eos in row else len(row)
        return made

    return run


def detgen(folder: Path | None, prompts: list[str], tokens: int, batch: int, drafter: str) -> Callable[[], int]:
    """Likewise by detgen."""
    engine = Engine(target=folder, drafter=drafter, batch_size=batch)

    def run() -> int:
        return sum(len(c.token_ids) for c in engine.generate(prompts, max_tokens=tokens))

    return run


def measure(runners: dict[str, Callable[[], int]], repeats: int) -> dict[str, list[float]]:
    """Tokens a second of each runner, one round after the other; the first round is not kept."""
    speeds: dict[str, list[float]] = {name: [] for name in runners}
    for i in range(repeats + 1):
        for name, run in runners.items():
            started = time.perf_counter()
            made = run()
            if i:
                speeds[name].append(made / (time.perf_counter() - started))
    return speeds


def main() -> None:
    """Measure and print a table and JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=ROOT / "sample_prompts" / "code.jsonl")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--random-29m", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines() if line.strip()]
    with tempfile.TemporaryDirectory() as scratch:
        folder = random_29m(Path(scratch)) if args.random_29m else DEMO / "target"
        drafters = ["none"] if args.random_29m else ["none", "auto"]
        for batch in args.batch_size:
            some = prompts if batch > 1 else prompts[:16]
            runners = {"generate": generate_peer(folder, some, args.tokens, batch)}
            for drafter in drafters:
                target = folder if args.random_29m else None
                runners[f"detgen {drafter}"] = detgen(target, some, args.tokens, batch, drafter)
            speeds = measure(runners, args.repeats)
            base = statistics.median(speeds["generate"])
            for name, values in speeds.items():
                median = statistics.median(values)
                print(
                    f"batch {batch:3d}  {name:14s} {median:8.0f} tokens/s  {median / base:5.2f} x generate"
                    f"   ({min(values):.0f} to {max(values):.0f})"
                )
            print(json.dumps({"batch": batch, "tokens_per_second": speeds}))


if __name__ == "__main__":
    main()
