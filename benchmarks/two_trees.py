"""Two checkouts of detgen against each other: the same generations in turns, each checkout in a process of its own.

    .venv/bin/python benchmarks/two_trees.py ../before
    .venv/bin/python benchmarks/two_trees.py ../before --target FOLDER --quant q8 --only equal
    .venv/bin/python benchmarks/two_trees.py --only shared    # this checkout alone

The other checkout must have its compiled library (`make demo` there), and an environment of its own if it needs one. A
ratio above 1 says that this one is faster; a quarter of the rounds lie below and above the range. Token ids are
compared, too. Three kinds of jobs:

- equal: the first prompts of `sample_prompts/code.jsonl`, as many tokens for each; wanted is a ratio of 1.0;
- mixed: prompts and outputs of log-normal lengths (`lengths.py`, a tenth of them, which suits the embedded model's
  context of 1,024), cut from the same file at random places, `max_tokens` set to the output's length and the
  end-of-sequence token ignored; other prompts in each round; wanted is 1.15;
- shared: 64 prompts that begin with the same 512 tokens, other ones in each round, go on with 16 to 64 of their own and
  generate 16 tokens, in this checkout with its prefix cache and without; the ratio is that of the times, wanted is at
  most 0.4.

Without a target it is the embedded pair; another target has no draft model. Memory is what each checkout takes by
default. Only `shared` shares prefixes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from lengths import draw_lengths

HERE = Path(__file__).resolve().parent.parent
SCALE, MOST = 0.1, 410  # of mixed lengths, against a context of 1,024
PROMPTS, SHARED = 64, 512  # of the shared job


class Job(NamedTuple):
    """A generation.

    Attributes:
        kind: equal, mixed or shared.
        drafter: its name.
        batch: batch size.
        prompts: how many.
        tokens: of each output; not for mixed.
        prefixes: whether prompts share what they begin with.
    """

    kind: str
    drafter: str
    batch: int
    prompts: int
    tokens: int = 0
    prefixes: bool = False


JOBS = (
    Job("equal", "none", 1, 3, 48),
    Job("equal", "ngram", 1, 4, 64),
    Job("equal", "auto", 1, 4, 64),
    Job("equal", "none", 16, 16, 48),
    Job("equal", "ngram", 16, 16, 64),
    Job("equal", "auto", 16, 16, 64),
    Job("mixed", "none", 16, 96),
    Job("mixed", "auto", 16, 96),
    Job("shared", "none", 16, PROMPTS, 16, prefixes=True),
)


class Answer(NamedTuple):
    """What came of a job: seconds, prompt tokens that passes read, token ids of the outputs."""

    seconds: float
    read: int
    outputs: list[list[int]]


def serve(target: str | None, quant: str) -> None:
    """Generate what standard input asks for, a line a job and turn."""
    from detgen import Engine, EngineConfig

    setting = "prefix_cache" if "prefix_cache" in EngineConfig.__slots__ else "prefix_reuse"
    base = Engine(target=target, target_quant=quant, drafter="auto", batch_size=16)
    lines = (HERE / "sample_prompts" / "code.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [base.tokenizer(json.loads(line)["prompt"]).input_ids for line in lines]
    for line in sys.stdin:
        asked, turn = json.loads(line)
        job = Job(*asked)
        engine = base.with_settings(**{"drafter": job.drafter, "batch_size": job.batch, setting: job.prefixes})
        requests = make_requests(job, turn, prompts)
        started = time.perf_counter()
        done = engine.generate(requests)
        seconds = time.perf_counter() - started
        print(json.dumps(Answer(seconds, engine.stats.prompt_tokens, [list(c.token_ids) for c in done])), flush=True)


def make_requests(job: Job, turn: int, prompts: list[list[int]]) -> list[Any]:
    """The requests of a job, the same ones in both checkouts."""
    from detgen import Request, SamplingParams

    text = [token for ids in prompts for token in ids]
    draw = random.Random(turn)

    def cut(size: int) -> list[int]:
        at = draw.randrange(len(text) - size)
        return text[at : at + size]

    if job.kind == "equal":
        wanted = [(ids, job.tokens) for ids in prompts[: job.prompts]]
    elif job.kind == "mixed":
        lengths = draw_lengths(job.prompts, MOST, turn, scale=SCALE)
        wanted = [(cut(each.prompt), each.output) for each in lengths]
    else:
        shared = cut(SHARED)
        wanted = [(shared + cut(draw.randint(16, 64)), job.tokens) for _ in range(job.prompts)]
    return [
        Request(i, i, token_ids=tuple(ids), params=SamplingParams(max_tokens=tokens, ignore_eos=job.kind == "mixed"))
        for i, (ids, tokens) in enumerate(wanted)
    ]


class Tree:
    """A checkout, served by its own interpreter."""

    def __init__(self, folder: Path, asked: list[str]) -> None:
        own = folder / ".venv" / "bin" / "python"
        self._process = subprocess.Popen(
            [own if own.exists() else sys.executable, __file__, "--serve", *asked],
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, job: Job, turn: int) -> Answer:
        """Run a job with the prompts of a turn."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps((job, turn)), file=self._process.stdin, flush=True)
        return Answer(*json.loads(self._process.stdout.readline()))


def compare(sides: dict[str, tuple[Tree, Job]], turn: int) -> dict[str, Answer]:
    """The answers of both sides in one turn, the first of which is another one each time."""
    found = {name: sides[name][0].run(sides[name][1], turn) for name in sorted(sides, reverse=turn % 2 == 1)}
    if len({json.dumps(answer.outputs) for answer in found.values()}) > 1:
        sys.exit(f"{sides}: turn {turn}: the two generate other tokens")
    return found


def spread(ratios: list[float]) -> str:
    """The median, and what a half of the rounds lie between."""
    low, middle, high = quantiles(ratios, n=4)
    return f"ratio {middle:.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    """Print a line per job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", help="the other checkout")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="equal, mixed or shared")
    parser.add_argument("--target", help="a model's folder")
    parser.add_argument("--quant", default="none", help="of the target")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.target, args.quant)
        return
    jobs = [job for job in JOBS if args.only in job.kind]
    asked = [*(["--target", args.target] if args.target else []), "--quant", args.quant]
    this = Tree(HERE, asked)
    other = Tree(args.other.resolve(), asked) if args.other else None
    answers: dict[Job, list[dict[str, Answer]]] = {job: [] for job in jobs}
    for turn in range(args.rounds + 1):
        for job in jobs:
            if job.kind == "shared":
                sides = {"on": (this, job), "off": (this, job._replace(prefixes=False))}
            elif other is not None:
                sides = {"other": (other, job), "this": (this, job)}
            else:
                parser.error("name the other checkout")
            found = compare(sides, turn)
            if turn:  # the first round warms up
                answers[job].append(found)
    for job, pairs in answers.items():
        report = shared_line if job.kind == "shared" else speed_line
        print(f"{job.kind:>6} {job.drafter:>5}, batch {job.batch:>2}: {report(pairs)}")


def speed_line(pairs: list[dict[str, Answer]]) -> str:
    """Speeds of the two checkouts."""
    other, this = ([sum(map(len, p[name].outputs)) / p[name].seconds for p in pairs] for name in ("other", "this"))
    ratios = [a / b for a, b in zip(this, other, strict=True)]
    return f"{median(other):6,.0f} and {median(this):6,.0f} tokens per second, {spread(ratios)}"


def shared_line(pairs: list[dict[str, Answer]]) -> str:
    """Times with and without the prefix cache."""
    on, off = ([p[name] for p in pairs] for name in ("on", "off"))
    seconds, read = [[a.seconds for a in side] for side in (on, off)], [[a.read for a in side] for side in (on, off)]
    ratios = [a / b for a, b in zip(*seconds, strict=True)]
    return (
        f"{median(seconds[0]):.2f} and {median(seconds[1]):.2f} s, {spread(ratios)}; "
        + f"{median(read[0]):,.0f} and {median(read[1]):,.0f} prompt tokens read, "
        + f"of which {median(read[1]) - PROMPTS * SHARED:,.0f} no other has"
    )


if __name__ == "__main__":
    main()
