"""Two checkouts of detgen against each other: how fast they read and check prompt lines.

    .venv/bin/python benchmarks/reading.py ../before

Each reads the same files of 100,000 lines in turns, in a process of its own, as a run does: it inspects a file, then
makes a request of each line. A ratio above 1 says that this checkout is faster; wanted is at least 1.0. A quarter of
the rounds lie below and above the range. How many requests and errors there are is compared, too. The files:

- plain: a prompt and an id;
- settings: with parameters of their own, some under another name;
- chats: of three messages;
- tokens: of 200 token ids;
- batch: requests of the OpenAI batch API.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles
from typing import Any

HERE = Path(__file__).resolve().parent.parent
TEXT = "def area(width, height):\n    return width * height\n\n\ndef test_area():\n"
READ = """
import json, sys, time
from detgen import SamplingParams
from detgen.prompts import open_prompts

for path in sys.stdin:
    at = time.process_time()
    prompts = open_prompts(path.strip())
    prompts.inspect()
    counts = {}
    for found in prompts.read(SamplingParams(), say=lambda line: None):
        counts[type(found).__name__] = counts.get(type(found).__name__, 0) + 1
    print(json.dumps([time.process_time() - at, counts]), flush=True)
"""


def record(kind: str, i: int) -> dict[str, Any]:
    """Line i of a file."""
    if kind == "plain":
        return {"id": f"line {i}", "prompt": f"{TEXT}# {i}", "source": "made up"}
    if kind == "settings":
        name = ("max_tokens", "max_new_tokens")[i % 2]
        own = {name: 100 + i % 50, "temperature": 0.8, "top_p": 0.95, "seed": i, "stop": ["\n\n", "def "]}
        return {"id": i, "prompt": f"{TEXT}# {i}", **own}
    if kind == "chats":
        roles = ("system", "user", "assistant")
        return {"messages": [{"role": role, "content": f"{TEXT}# {i}"} for role in roles], "max_tokens": 64}
    if kind == "tokens":
        return {"prompt_token_ids": [(i + place) % 4000 for place in range(200)]}
    body = {"model": "m", "messages": [{"role": "user", "content": f"{TEXT}# {i}"}], "max_tokens": 64}
    return {"custom_id": f"line {i}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def start(tree: Path) -> subprocess.Popen[str]:
    """A reader of a checkout."""
    python = tree / ".venv" / "bin" / "python"
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.Popen(
        [str(python if python.exists() else sys.executable), "-c", READ],
        **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": tree, "env": environment},  # type: ignore[call-overload]
    )


def read(reader: subprocess.Popen[str], path: Path) -> tuple[float, dict[str, int]]:
    """Seconds of processor time that reading a file takes, and what came of its lines."""
    assert reader.stdin is not None
    assert reader.stdout is not None
    reader.stdin.write(f"{path}\n")
    reader.stdin.flush()
    seconds, counts = json.loads(reader.stdout.readline())
    return seconds, counts


def main() -> None:
    """Parse the command line and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--lines", type=int, default=100_000, help="of each file")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    readers = [start(asked.before.resolve()), start(HERE)]
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("plain", "settings", "chats", "tokens", "batch"):
            path = Path(folder) / f"{kind}.jsonl"
            path.write_text("".join(json.dumps(record(kind, i)) + "\n" for i in range(asked.lines)))
            rounds = [[read(reader, path) for reader in readers] for _ in range(asked.rounds + 1)][1:]  # one to warm up
            assert all(before[1] == after[1] for before, after in rounds), f"{kind}: {rounds[0]}"
            low, ratio, high = quantiles([before[0] / after[0] for before, after in rounds], n=4)
            times = (median(pair[side][0] for pair in rounds) / asked.lines * 1e6 for side in (0, 1))
            print(
                kind, *(f"{time:.1f} us" for time in times), f"ratio {ratio:.2f} ({low:.2f} to {high:.2f})", flush=True
            )
    for reader in readers:
        reader.communicate()


if __name__ == "__main__":
    main()
