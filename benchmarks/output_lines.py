"""What the lines of a finished request cost, beside which a step of decoding takes milliseconds.

python benchmarks/output_lines.py
"""

from __future__ import annotations

import timeit

from detgen.engine.pieces import pieces_of
from detgen.engine.request import Completion, Request, TokenLogprobs, TokenRecord
from detgen.outputs.lines import acceptance_lines, output_line

TOKENS = 64
CALLS, REPEATS = 200, 5


def completion() -> Completion:
    """One of 64 tokens, half of them drafted and wrong, with three log-probabilities each."""
    records = tuple(TokenRecord(p, p // 2, 100 + p, "model", 7, "corrected", -0.5 * p, 1.25) for p in range(TOKENS))
    logprobs = tuple(TokenLogprobs(-0.5 * p, ((p, -0.5 * p), (7, -20.0), (8, -21.5))) for p in range(TOKENS))
    tokens = tuple(100 + p for p in range(TOKENS))
    return Completion(Request(0, 0, prompt="x"), 0, "    return x\n" * 16, tokens, "length", 3, logprobs, records)


if __name__ == "__main__":
    done, pieces = completion(), pieces_of(None)
    made = {"output_line": lambda: output_line(done, pieces), "acceptance_lines": lambda: acceptance_lines(done)}
    for name, function in made.items():
        seconds = min(timeit.repeat(function, number=CALLS, repeat=REPEATS)) / CALLS
        print(f"{name}: {seconds * 1e6:.0f} us for {TOKENS} tokens")
