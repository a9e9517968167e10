"""Tokens per second with a schema of ten fields and without one, in turns on the same models.

Requests without a schema have the prompts of the others, and generate as many tokens as each of them did.

    python benchmarks/structured.py TARGET [--draft MODEL] [--threads 2] [--turns 5] [--requests 48]

With `--openvino FOLDER`, the same model in OpenVINO's format, OpenVINO GenAI runs in each turn, too, in float32, in the
environment of `--openvino-python PATH`; with `--vllm-python PATH`, vLLM runs in that environment. Their texts differ;
without a schema, they generate as many tokens as they did with one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from detgen import Engine, EngineConfig, Request, SamplingParams

_STRING = {"type": "string", "minLength": 1, "maxLength": 24}
_MOST = 300  # tokens of a text
SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": _STRING,
        "last_name": _STRING,
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email_address": {"type": "string", "format": "email", "maxLength": 40},
        "employed": {"type": "boolean"},
        "department": {"enum": ["engineering", "marketing", "finance", "operations", "people"]},
        "date_of_birth": {"type": "string", "format": "date"},
        "skills": {"type": "array", "items": _STRING, "minItems": 1, "maxItems": 3},
        "salary_in_euro": {"type": ["integer", "null"], "minimum": 0, "maximum": 1000000},
        "address": {
            "type": "object",
            "properties": {"street": _STRING, "city": _STRING, "code": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "city", "code"],
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}  # fmt: skip
SCHEMA["required"] = list(SCHEMA["properties"])  # type: ignore[call-overload]
_PEOPLE = ("a nurse", "a baker", "an engineer", "a student", "a pilot", "a teacher", "a farmer", "a lawyer")
_PLACES = ("Lisbon", "Oslo", "Kyoto", "Quito", "Turin", "Leeds")
# Batch size and drafters, with a schema and without.
_COMPARED = ((16, "none", "none"), (16, "auto", "auto"), (1, "none", "none"), (1, "auto", "none"), (1, "auto", "auto"))


def requests(count: int) -> list[Request]:
    """Return requests with different prompts for the same form."""
    params = SamplingParams(guided_json=SCHEMA, max_tokens=_MOST)
    found = []
    for i in range(count):
        person, place = _PEOPLE[i % len(_PEOPLE)], _PLACES[i % len(_PLACES)]
        prompt = f"The record number {i} of our staff, {person} from {place}, as JSON:\n"
        found.append(Request(prompt=prompt, params=params.model_copy(update={"seed": i})))
    return found


def free(requests: list[Request], tokens: list[int]) -> list[Request]:
    """Return the same prompts without a form, each with a number of tokens."""
    return [
        replace(r, params=r.params.model_copy(update={"guided_json": None, "max_tokens": n, "ignore_eos": True}))
        for r, n in zip(requests, tokens, strict=True)
    ]


def timed(engine: Engine, requests: list[Request]) -> tuple[float, list[int]]:
    """Return tokens per second, and the number of tokens of each request."""
    engine.reset_prefix_cache()
    started = time.perf_counter()
    done = engine.generate(requests)
    seconds = time.perf_counter() - started
    assert not [c.error for c in done if c.error]
    counts = [len(c.token_ids) for c in done]
    return sum(counts) / seconds, counts


def peer_of(name: str, python: str, model: str, threads: int) -> Callable[[int, list[Request]], tuple[float, float]]:
    """Return a function that runs requests in batches: tokens per second with the schema, and without it."""
    script = Path(__file__).with_name("structured_peer.py")
    process = subprocess.Popen([python, script, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    to, answers = process.stdin, process.stdout

    def tell(line: dict[str, Any]) -> None:
        to.write(json.dumps(line) + "\n")
        to.flush()

    def run(batch: int, requests: list[Request]) -> tuple[float, float]:
        speeds, counts = [], None
        for _ in range(2):
            tell({"batch": batch, "counts": counts, "prompts": [request.prompt for request in requests]})
            answer = json.loads(answers.readline())
            counts = answer["tokens"]
            speeds.append(sum(counts) / answer["seconds"])
        return speeds[0], speeds[1]

    tell({"model": model, "threads": threads, "schema": SCHEMA, "limit": _MOST})
    return run


def main() -> None:
    """Print a line for each comparison, with medians over its turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--draft")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--openvino", metavar="FOLDER")
    parser.add_argument("--openvino-python", metavar="PATH", default="python")
    parser.add_argument("--vllm-python", metavar="PATH")
    args = parser.parse_args()
    base = Engine(EngineConfig(target=args.target, draft=args.draft, threads=args.threads, batch_size=16))
    peers = {}
    if args.openvino:
        peers["OpenVINO GenAI"] = peer_of("openvino", args.openvino_python, args.openvino, args.threads)
    if args.vllm_python:
        peers["vLLM"] = peer_of("vllm", args.vllm_python, args.target, args.threads)
    for batch, drafter, other in _COMPARED:
        asked = requests(args.requests if batch > 1 else max(args.requests // 8, 1))
        own = f"{drafter} with the schema, {other} without"
        found: dict[str, list[tuple[float, float]]] = {own: []}
        for _ in range(args.turns):
            fresh = [base.with_settings(drafter=name, batch_size=batch) for name in (drafter, other)]
            speed, counts = timed(fresh[0], asked)
            found[own].append((speed, timed(fresh[1], free(asked, counts))[0]))
            for name in peers if drafter == "none" else ():
                found.setdefault(name, []).append(peers[name](batch, asked))
        for name, speeds in found.items():
            speed, plain = (median(column) for column in zip(*speeds, strict=True))
            ratio = median(a / b for a, b in speeds)
            print(f"batch {batch:2}: {name}: {speed:7.1f} and {plain:7.1f} tokens/s; ratio {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
