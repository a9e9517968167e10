"""What a canonical pass and its linear layers cost beside the model's ordinary ones, interleaved, medians.

    python benchmarks/canonical_pass.py                 # the embedded target
    python benchmarks/canonical_pass.py --random-29m    # random weights of 8 layers
    python benchmarks/canonical_pass.py --target DIR

Two comparisons, float32 on the CPU:

- a canonical pass over 16 rows (16 requests, one token each, behind 100 cached tokens) against the unpatched
  transformers model's forward of 16 sequences by one token behind as many, with its own cache;
- the model's linear layers at 16 and at 64 rows: packed as detgen runs them against `F.linear` as the model does.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from detgen import Engine  # isort: skip  # before torch: it settles how long OpenMP's threads spin
import torch
from generate_peer import random_29m
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from detgen.errors import DEMO
from detgen.kernels.input_batch import Window
from detgen.models.replacing import replace_modules

CONTEXT, ROWS = 100, 16


def interleaved(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each function, one call of each in turn."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(repeats + 3):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            if i >= 3:
                times[name].append((time.perf_counter() - started) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def passes(folder: Path, repeats: int) -> dict[str, float]:
    """The pass over 16 rows and the ordinary forward of 16 sequences by one token."""
    engine = Engine(target=folder, drafter="none", batch_size=ROWS)
    forward = engine.canonical
    forward.cache.pages.lay_out(ROWS, 512)
    context = torch.randint(0, 4096, (ROWS, CONTEXT))
    for slot in range(ROWS):
        forward.run([Window(slot, 0, context[slot].tolist(), 0)])
    windows = [Window(slot, CONTEXT, [7], 1) for slot in range(ROWS)]

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, dtype=torch.float32).eval()
    cache = DynamicCache(config=model.config)
    one = torch.full((ROWS, 1), 7)
    with torch.inference_mode():
        model(context, past_key_values=cache)

    def ordinary() -> None:
        with torch.inference_mode():
            model(one, past_key_values=cache)
        cache.crop(-1)

    return interleaved({"canonical": lambda: forward.run(windows), "ordinary": ordinary}, repeats)


def linears(folder: Path, rows: int, repeats: int) -> dict[str, float]:
    """All linear layers of the model one after the other, packed and plain."""
    plain = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, dtype=torch.float32).eval()
    packed = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, dtype=torch.float32).eval()
    names = [(name, m.in_features) for name, m in plain.named_modules() if isinstance(m, nn.Linear)]
    kept = [name for name, m in packed.named_modules() if name and not isinstance(m, nn.Linear)]
    replace_modules(packed, kept)
    inputs = {size: torch.randn(1, rows, size) for _, size in names}

    def run(model: nn.Module) -> Callable[[], None]:
        layers = [(model.get_submodule(name), size) for name, size in names]

        def all_layers() -> None:
            with torch.inference_mode():
                for layer, size in layers:
                    layer(inputs[size])

        return all_layers

    return interleaved({"packed": run(packed), "plain": run(plain)}, repeats)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--random-29m", action="store_true")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = random_29m(Path(scratch)) if args.random_29m else args.target
        ms = passes(folder, args.repeats)
        share = ms["canonical"] / ms["ordinary"]
        print(f"{ROWS} rows: canonical pass {ms['canonical']:.2f} ms, ordinary {ms['ordinary']:.2f} ms, {share:.2f}")
        for rows in (16, 64):
            ms = linears(folder, rows, args.repeats)
            share = ms["packed"] / ms["plain"]
            print(
                f"linear layers at {rows} rows: packed {ms['packed']:.2f} ms, plain {ms['plain']:.2f} ms, {share:.2f}"
            )


if __name__ == "__main__":
    main()
