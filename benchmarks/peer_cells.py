"""detgen beside every peer in every cell: a model, a number of threads, a workload and a batch size.

    .venv/bin/python benchmarks/peer_cells.py                        # all of it: some hours
    .venv/bin/python benchmarks/peer_cells.py --models embedded,29m --batches 1,16 --threads 1 --seconds 30

Within a cell all rows take turns, so that disturbances hit all alike. Rows: detgen's drafters, its weights in 16 and in
8 bits, OpenVINO in float32 and as it comes, llama.cpp in float32 and q8_0, transformers. Workloads:

- `code`: `sample_prompts/code.jsonl`, greedily;
- `code@0.8`, `code@1.2`: the same at these temperatures, where little repeats; detgen's drafters alone;
- `reading`: 4 prompts of 512 random tokens, one token each; what counts is prompt tokens per second.

Random models have a draft model that is never right, so `model` is at its worst and `auto` has to see it. Their texts
repeat nothing. A row's tokens are compared with those of drafter `none`.

`--seconds` is the time of a cell, a round that warms up included; it has one measured round in any case, and seven at
most. Loading comes on top. After each cell its ratios are printed, and OUT/MODEL-N-threads.json is written, which
`detgen bench --compare` reads too; cells that are there already are not measured again. A ratio is the median of those
of the rounds, with the lowest and highest; the best of several peers is the one with the lowest ratio. `SHORT` marks a
ratio below what is wanted.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from detgen.bench.bench_results import Results, Row, describe, load, save
from detgen.bench.busy import busy_cells
from detgen.bench.cells import Cell, contenders_at, find_peers
from detgen.bench.config import BenchConfig
from detgen.bench.correctness import Outputs, judge
from detgen.bench.measuring import Measuring
from detgen.bench.model_source import Target, resolve
from detgen.bench.peer_interface import Contender, Job, ModelSource, Prompt, Workload
from detgen.bench.peers import versions
from detgen.bench.peers.detgen_engine import DetgenPeer, keeping
from detgen.bench.processes import Processes
from detgen.bench.workloads import make_workload
from detgen.engine.config import EngineConfig
from detgen.progress import Unobserved
from detgen.show.progress_view import open_display
from detgen.worker import WorkerError

CODE = Path(__file__).resolve().parent.parent / "sample_prompts" / "code.jsonl"
# Names of random weights, and the tokens that each prompt is continued by: large models are slow.
MODELS = {
    "embedded": (None, 64),
    "29m": ("llama-29m", 64),
    "89m": ("llama-89m", 32),
    "135m": ("llama-135m", 32),
    "0.5b": ("qwen2.5-0.5b", 16),
    "tiny": ("tiny", 16),  # to try this script
}
READING = "reading"
WORKLOADS = ("code", "code@0.8", "code@1.2", READING)
PROMPTS, PROMPT_TOKENS = 4, 512  # of `reading`
LEAST_REQUESTS = 4

DRAFTERS = ("detgen none", "detgen ngram", "detgen model", "detgen auto")
NONE, AUTO, HALF, Q8, Q8_AUTO = (*DRAFTERS[::3], "detgen none, bfloat16", "detgen none, q8", "detgen auto, q8")
FLOAT32 = ("openvino f32", "llama.cpp f32", "transformers generate")
FEWER = ("openvino default", "llama.cpp q8_0")
LABELS = {
    "code": (*DRAFTERS, HALF, Q8, Q8_AUTO, *FLOAT32, *FEWER),
    READING: (NONE, HALF, Q8, *FLOAT32, *FEWER),
    "": DRAFTERS,  # all others
}


class Wanted(NamedTuple):
    """A ratio of speeds, and the least that is wanted of it; 0 asks for nothing."""

    row: str
    over: tuple[str, ...]
    least: float


def wanted(model: str, workload: str, batch: int) -> list[Wanted]:
    """What is asked of a cell."""
    found = []
    if workload in ("code", READING):
        found += [Wanted(NONE, FLOAT32, 1.0), Wanted(NONE, ("openvino default",), 0.0)]
        small = model in ("embedded", "29m", "tiny")
        found += [Wanted(HALF, (NONE,), 1.6 if workload == "code" and batch == 1 and not small else 0.0)]
        found += [Wanted(Q8, ("llama.cpp q8_0",), 1.0)]
    if workload == "code":
        found += [Wanted(AUTO, FLOAT32, 1.3 if model == "embedded" and batch in (1, 4) else 0.0)]
        found += [Wanted(Q8_AUTO, ("llama.cpp q8_0",), 0.0)]
    if workload != READING:
        found += [Wanted(AUTO, DRAFTERS[:3], 0.97)]
    return found


def ratio_line(rows: dict[str, Row], ask: Wanted) -> str | None:
    """A ratio in words; None if one of its sides was not measured."""
    row = rows.get(ask.row)
    if row is None or not row.seconds:
        return None
    ratios = {
        other: [theirs / own for own, theirs in zip(row.seconds, rows[other].seconds, strict=True)]
        for other in ask.over
        if other in rows and rows[other].seconds
    }
    if not ratios:
        return None
    best = min(ratios, key=lambda other: median(ratios[other]))
    values = ratios[best]
    short = "  SHORT" if median(values) < ask.least else ""
    wish = f"  wanted {ask.least:.2f}" if ask.least else ""
    return f"    {median(values):5.2f} [{min(values):.2f}, {max(values):.2f}]  {ask.row} / {best}{wish}{short}"


def report(model: str, threads: int, rows: list[Row]) -> Iterator[str]:
    """A cell's speeds and ratios."""
    first = rows[0]
    reading = first.workload == READING
    unit = "prompt tokens/s" if reading else "tokens/s"
    yield f"{model}, {threads} thread{'s' if threads > 1 else ''}, {first.workload}, batch {first.batch_size}, {unit}:"
    for row in rows:
        if row.seconds:
            speed = (row.prompt_tokens if reading else row.output_tokens) / median(row.seconds)
            cpu = median(row.cpu_seconds) / median(row.seconds) if row.cpu_seconds else 0.0
            notes = f"{' (fewer bits)' if row.fewer_bits else ''}{f' WRONG: {row.wrong}' if row.wrong else ''}"
            yield f"    {speed:9,.1f}  {row.label}{notes}, {cpu:.2f} CPU s/s, rounds: {len(row.seconds)}"
        else:
            yield f"       FAILED  {row.label}: {row.error}"
    by_label = {row.label: row for row in rows}
    yield from filter(None, (ratio_line(by_label, ask) for ask in wanted(model, first.workload, first.batch_size)))
    yield from (f"    {line}" for line in busy_cells(rows))


def workload_of(name: str, requests: int, config: BenchConfig, target: Target) -> Workload:
    """A workload by its name."""
    if name == READING:
        made = make_workload("1024x256", PROMPTS, PROMPT_TOKENS / 1024, config, target)
        return replace(made, name=READING, prompts=tuple(replace(p, output=1) for p in made.prompts))
    temperature = float(name.partition("@")[2] or 0)
    made = make_workload(f"file:{CODE}", requests, 1.0, config, target)
    return replace(made, name=name, temperature=temperature)


def cells_of(
    names: Iterable[str], batches: Iterable[int], config: BenchConfig, target: Target, source: ModelSource
) -> list[Cell]:
    """The cells of a model; `reading` is one of its own, whatever the batch sizes are."""
    peers = find_peers(config, source)[0]
    found = []
    for name in names:
        for batch in (PROMPTS,) if name == READING else batches:
            there = {c.label: c for c in contenders_at(config, peers, batch)}
            there[HALF] = keeping(there[NONE], "bfloat16")
            chosen = [there[label] for label in LABELS.get(name, LABELS[""]) if label in there]
            contenders = tuple(replace(c, self_checked=False) for c in chosen)
            found.append(Cell(workload_of(name, max(batch, LEAST_REQUESTS), config, target), batch, contenders))
    return found


def load_models(cells: list[Cell], processes: Processes) -> None:
    """Have every process load its model, which is no part of a cell's time; what fails here fails in its cell again."""
    job = Job((Prompt((1, 2, 3), 2),), 1, (True,))
    first: dict[str, Contender] = {}
    for contender in (c for cell in cells for c in cell.contenders):
        first.setdefault(contender.process, contender)
    for contender in first.values():
        try:
            processes.run(contender, job)
        except WorkerError as error:
            print(f"{contender.label}: {error}", flush=True)


def measure(model: str, threads: int, args: argparse.Namespace) -> None:
    """The cells of a model at a number of threads."""
    weights, tokens = MODELS[model]
    engine = EngineConfig(device="cpu", dtype="float32", threads=threads)
    config = BenchConfig(engine, weights, full=True, fractions=(100.0,), max_tokens=args.tokens or tokens)
    target = resolve(config, Unobserved())
    path = args.output / f"{model}-{threads}-threads.json"
    kept = load(path) if path.exists() else None
    rows = kept.rows if kept else []
    done = {(row.workload, row.batch_size) for row in rows}
    outputs: Outputs = defaultdict(dict)
    with tempfile.TemporaryDirectory(prefix="detgen-bench-") as scratch, open_display(quiet=False) as display:
        positions = PROMPT_TOKENS + 2 * max(MODELS[name][1] for name in MODELS) + (args.tokens or 0)
        source = ModelSource(
            target.engine, weights, 0, positions, Path(scratch), target.native, random_draft=weights is not None
        )
        cells = cells_of(args.workloads, args.batches, config, target, source)
        cells = [cell for cell in cells if (cell.workload.name, cell.batch_size) not in done]
        sizes = tuple(sorted({cell.batch_size for cell in cells}))
        with closing(Processes(source, sizes, args.output / "logs")) as processes:
            load_models(cells, processes)
            for cell in cells:
                new, made = Measuring([cell], processes, display, None, args.seconds, least=1).run()
                for key, by_size in made.items():
                    outputs[key].update(by_size)
                judge(new, outputs)
                rows = [*rows, *new]
                environment = describe(config, source, versions(DetgenPeer))
                origins = {row.workload: "see benchmarks/peer_cells.py" for row in rows}
                save(Results(environment, {}, origins, rows, []), path)
                print("\n".join(report(model, threads, new)), flush=True)


def some(kind: type, allowed: Iterable[object] = ()) -> object:
    """Reads a list with commas between its entries."""

    def read(text: str) -> list[object]:
        found = [kind(part) for part in text.split(",")]
        if wrong := [x for x in found if allowed and x not in allowed]:
            raise argparse.ArgumentTypeError(f"{wrong[0]} is not among {', '.join(map(str, allowed))}")
        return found

    return read


def main() -> None:
    """Measure what is asked for, a cell after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=some(str, MODELS), default=[name for name in MODELS if name != "tiny"])
    parser.add_argument("--threads", type=some(int), default=[1, 2])
    parser.add_argument("--batches", type=some(int), default=[1, 4, 16, 32])
    parser.add_argument("--workloads", type=some(str, WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of a cell, 60 by default")
    parser.add_argument(
        "--tokens", type=int, help="that continue each prompt; by default the larger the model, the fewer"
    )
    parser.add_argument("--output", "-o", type=Path, default=Path("peer-cells-out"))
    args = parser.parse_args()
    (args.output / "logs").mkdir(parents=True, exist_ok=True)
    for model in args.models:
        for threads in args.threads:
            measure(model, threads, args)


if __name__ == "__main__":
    main()
