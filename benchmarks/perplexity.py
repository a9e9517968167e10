"""Measures perplexities of a text: of a model in several number formats, and of GGUF files with llama.cpp, too.

    python benchmarks/perplexity.py MODEL [MODEL=q8 MODEL=bfloat16+bfloat16 FILE.gguf ...] [--llama-python PATH]

The text is cut into windows; the second half of each is scored after the first. Without `--text`, the text is the
source of Python's standard library.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any


def windows_of(tokenizer: Any, files: list[Path], size: int, tokens: int) -> list[list[int]]:
    """Return windows of `size` token ids, with `tokens` scored tokens in all; at most two from one file."""
    found: list[list[int]] = []
    for file in files:
        ids = tokenizer(file.read_text(encoding="utf-8", errors="replace"), add_special_tokens=False).input_ids
        found += [ids[at : at + size] for at in range(0, min(len(ids) - size + 1, 2 * size), size)]
        if len(found) * size // 2 >= tokens:
            return found
    raise SystemExit(f"the text has only {len(found) * size // 2:,} tokens to score; give more files with --text")


def perplexity(model: str, windows: list[list[int]]) -> float:
    """Return the perplexity of the second halves with detgen.

    The model may be followed by = and a number format, and by + and that of its KV cache.
    """
    from detgen import Engine

    path, _, kinds = model.partition("=")
    kind, _, kept = kinds.partition("+")
    quantized: dict[str, Any] = (
        {"target_quant": kind} if kind in ("q8", "q4", "q4_k", "nf4", "int8") else {"dtype": kind or "auto"}
    )
    engine = Engine(target=path, drafter="none", batch_size=4, kv_dtype=kept or "float32", **quantized)
    half = len(windows[0]) // 2
    scores = engine.score([(ids[:half], ids[half:]) for ids in windows])
    if error := next((score.error for score in scores if score.error), None):
        raise SystemExit(f"{model}: {error}")
    return math.exp(-math.fsum(score.logprob for score in scores) / (half * len(windows)))


def llama_perplexity(file: str, windows: list[list[int]]) -> float:
    """Return the same with llama.cpp, in its environment."""
    import llama_cpp
    import numpy as np

    size = len(windows[0])
    model = llama_cpp.Llama(file, n_ctx=size, n_batch=size, logits_all=True, verbose=False)
    total = 0.0
    for ids in windows:
        model.reset()
        model.eval(ids)
        logits = np.array(model.scores[size // 2 - 1 : size - 1], np.float64)
        logits -= logits.max(1, keepdims=True)
        chosen = logits[np.arange(len(logits)), ids[size // 2 :]]
        total += float((np.log(np.exp(logits).sum(1)) - chosen).sum())
    return math.exp(total / (size // 2 * len(windows)))


def main() -> None:
    """Print a table, one line per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="with =q8, =bfloat16, ... in that number format, +bfloat16 its KV cache",
    )
    parser.add_argument("--text", nargs="+", type=Path, help="files")
    parser.add_argument("--tokens", type=int, default=20_000, help="that are scored, at least (20000)")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window (512)")
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python")
    parser.add_argument("--windows", type=Path, help=argparse.SUPPRESS)  # for a Python that has llama-cpp-python
    args = parser.parse_args()
    if args.windows:
        print(llama_perplexity(args.models[0], json.loads(args.windows.read_text())))
        return
    from detgen.models.loading import load_tokenizer

    first = args.models[0].partition("=")[0]
    files = args.text or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    windows = windows_of(load_tokenizer(Path(first), first), files, args.window, args.tokens)
    print(f"{len(windows) * (args.window // 2):,} tokens, each after {args.window // 2} others\n")
    print("| model | detgen | to the first | llama.cpp | detgen to it |\n| --- | --- | --- | --- | --- |")
    base = 0.0
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(windows, file)
        file.flush()
        for model in args.models:
            found = perplexity(model, windows)
            base = base or found
            theirs, ratio = "", ""
            if args.llama_python and model.endswith(".gguf"):
                command = [args.llama_python, __file__, model, "--windows", file.name]
                peer = float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
                theirs, ratio = f"{peer:.4f}", f"{found / peer - 1:+.2%}"
            print(f"| {Path(model).name} | {found:.4f} | {found / base - 1:+.2%} | {theirs} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
