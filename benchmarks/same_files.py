"""Whether two checkouts of detgen write the same files, byte for byte: what a change to its structure must not alter.

    git worktree add ../old 2c3e586 && make -C ../old demo    # a checkout to compare with
    .venv/bin/python benchmarks/same_files.py ../old          # with this one: about ten minutes on two cores
    .venv/bin/python benchmarks/same_files.py ../old ../new --only fuzzed

Each case is a `python -m detgen run` or `score` in both checkouts, on the same prompts: all files of `sample_prompts/`,
35 settings, and 1,500 fuzzed lines between good ones. Some runs are exported, too. What is compared: exit codes,
`outputs.jsonl`, `results.jsonl`, the exports, and what `acceptance.jsonl` says, whose lines were longer once. Where the
drafter follows the clock, the acceptance log may name other drafters, and only its tokens, log-probabilities and
margins are compared.

What one checkout adds on purpose is declared below and left out of the comparison. A line that is an error in both may
have another text, and a line that ran may be refused for a reason declared below; such lines are listed, grouped by
what they say, and all of them are written to `--report`. Anything else that differs is a fault. The exit status is 1 if
there are any.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE / "tests"))

from helpers.fuzzed_lines import TEMPLATE, mixed  # noqa: E402

from detgen.outputs.records import log_entry  # noqa: E402

# Fields that the newer checkout adds to a file's lines, by dotted names; `*` is every element of a list, a number those
# from there on. They stand last, so what is left of a line without them is the older line.
ADDED: dict[str, tuple[str, ...]] = {"outputs.jsonl": ("stop_reason", "logprobs.*.text", "logprobs.*.top.*.2")}
# Columns that it adds to exported tables.
ADDED_COLUMNS: tuple[str, ...] = ("stop_reason",)
# What it says of lines that the older one ran: regular expressions.
REFUSED_NOW: tuple[str, ...] = (
    "is given twice",
    r"\b(suffix|echo|prefix|assistant_prefix|system|beam_search|smoothing_factor|tfs) is not supported",
)
# What changed on purpose since 2c3e586: drafters by their former names, and cases that had another arithmetic.
RENAMED = {"fast": "none"}
ANOTHER_ARITHMETIC = ("bfloat16",)

FUZZED, TOGETHER = 1500, 125  # lines, and how many of them are in a file
FORMS = ("jsonl", "json", "jsonl", "csv", "jsonl", "tsv")  # of the files, in turn
ANY_CLOCK = ("position", "token", "logprob", "margin")  # of a token's record, where the drafter follows the clock
EXPORTS = {"csv": "table.csv", "parquet": "table.parquet", "openai": "results.jsonl", "hf": "dataset"}
COMPARED = ("outputs.jsonl", "acceptance.jsonl", "results.jsonl")

# Of the file of settings; `--drafter none` and `--max-tokens 12` unless they say something else.
SETTINGS = {
    "greedy": "",
    "warm": "--temperature 0.8 --seed 3",
    "nucleus": "--temperature 1.3 --top-p 0.9",
    "top-k": "--temperature 1 --top-k 20 --seed 5",
    "min-p": "--temperature 1.2 --min-p 0.05",
    "all filters": "--temperature 1.1 --top-p 0.95 --top-k 40 --min-p 0.01 --seed 9",
    "repetition penalty": "--repetition-penalty 1.3",
    "frequency and presence": "--frequency-penalty 0.6 --presence-penalty 0.4",
    "penalties and filters": "--temperature 0.9 --top-p 0.9 --repetition-penalty 1.1 --presence-penalty -0.5",
    "stop": "--stop return --stop $'\\n\\n' --max-tokens 40",
    "stop tokens": "--stop-token-id 199 --stop-token-id 26 --max-tokens 24",
    "least tokens": "--min-tokens 10 --stop-token-id 199 --max-tokens 24",
    "ignore-eos": "--ignore-eos --max-tokens 60",
    "one token": "--max-tokens 1",
    "logprobs": "--logprobs 0",
    "five logprobs": "--logprobs 5 --temperature 0.7",
    "three samples": "--n 3 --temperature 1",
    "a seed per line": "--n 2 --temperature 1 --seed 4 --seed-per-line",
    "echo": "--echo",
    "unverified": "--no-deterministic --temperature 0.5",
    "batch of 1": "--batch-size 1 --n 2 --temperature 0.6",
    "batch of 3": "--batch-size 3 --kv-memory 64MiB",
    "no prefix cache": "--prefix-cache off",
    "n-grams": "--drafter ngram --draft-tokens 4 --max-tokens 32",
    "draft model": "--drafter model --draft-tokens 3 --max-tokens 32",
    "sampled drafts": "--drafter model --draft-tokens 3 --temperature 0.8 --top-p 0.9",
    "any drafter": "--drafter auto --max-tokens 32",
    "adaptive drafts": "--drafter ngram --max-tokens 32",
    "q8": "--target-quant q8",
    "q4": "--target-quant q4 --temperature 0.4",
    "bfloat16": "--dtype bfloat16",
    "limit": "--limit 3",
    "two threads": "--threads 2",
    "OpenAI": "--output-format openai --logprobs 2 --n 2 --temperature 0.9",
    "two workers": "--workers 2",
}
SCORES = {
    "scores.jsonl": "",
    "scores.jsonl, echo": "--echo",
    "scores.jsonl, q8": "--target-quant q8 --batch-size 2",
    "scores.jsonl, first two": "--limit 2 --prefix-cache off",
    "prompts.txt as texts": "",
    "prompts.csv, a column": "--prompt-column module",
    "mistakes.jsonl": "",
}


@dataclass(frozen=True)
class Case:
    """A run, or several into one folder.

    Attributes:
        name: what is special about it.
        prompts: what is given as PROMPTS, in the folder of inputs; None is standard input.
        options: of the run.
        command: run or score.
        before: options of an earlier run of the same prompts into the same folder.
        exports: the forms in which it is exported.
        clocked: whether its acceptance log depends on how fast the machine is.
    """

    name: str
    prompts: str | None
    options: str = ""
    command: str = "run"
    before: str | None = None
    exports: tuple[str, ...] = ()
    clocked: bool = False


@dataclass
class Findings:
    """What the comparison found.

    Attributes:
        files: how many were compared.
        lines: how many lines they have.
        faults: what differs and must not.
        reworded: errors of lines, as they were and as they are, with the case and the line.
        refused: lines that ran and are refused, likewise.
    """

    files: int = 0
    lines: int = 0
    faults: list[str] = field(default_factory=list)
    reworded: list[tuple[str, str, str]] = field(default_factory=list)
    refused: list[tuple[str, str, str]] = field(default_factory=list)


def write_inputs(inputs: Path, fuzzed: int) -> list[str]:
    """Write what the runs read; the names of the files of fuzzed lines."""
    shutil.copytree(HERE / "sample_prompts", inputs, dirs_exist_ok=True)
    records = [
        {"id": "text", "prompt": "def add(a, b):\n", "task": {"k": [1, None]}},
        {"id": "chat", "messages": [{"role": "user", "content": "Sort a list."}]},
        {"prompt": "class Stack:\n    def __init__(self):\n        self.items = []\n", "metadata": {"temperature": -1}},
        {"id": "ids", "prompt_token_ids": [5, 6, 7]},
        {"id": "own", "prompt": "x = é\U0001f600\n", "temperature": 0.9, "seed": 11, "n": 2, "logprobs": 1},
        {"id": "bias", "prompt": "for i in range(", "logit_bias": {"26": -5, "8": 2.5}, "stop": ["\n"]},
        {"id": "refused", "prompt": "a", "temperature": -1},
        {"id": "again", "prompt": "def add(a, b):\n"},
    ]
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    (inputs / "settings.jsonl").write_text(lines)
    (inputs / "settings.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    questions = [{"question": f"import {name}\n", "prompt": "no", "answer": name} for name in ("os", "re", "csv")]
    (inputs / "questions.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in questions))
    with (inputs / "questions.tsv").open("w", newline="") as file:
        table = csv.DictWriter(file, questions[0], delimiter="\t")
        table.writeheader()
        table.writerows(questions)
    import datasets

    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_list(questions)
    dataset.to_parquet(str(inputs / "questions.parquet"))
    dataset.save_to_disk(str(inputs / "dataset"))
    # A chat template that knows what chats may have, so that not all fuzzed ones are refused.
    shutil.copytree(HERE / "detgen" / "demo_models" / "target", inputs / "model")
    (inputs / "model" / "chat_template.jinja").write_text(TEMPLATE)
    draw, names = random.Random(34), []
    while (done := len(names) * TOGETHER) < fuzzed:
        form = FORMS[len(names) % len(FORMS)]
        names.append(f"fuzzed{len(names)}.{form}")
        (inputs / names[-1]).write_bytes(mixed(draw, form, min(TOGETHER, fuzzed - done))[0])
    return names


def cases(fuzzed: list[str]) -> Iterator[Case]:
    """All cases, the longest first."""
    tables = ("csv", "parquet", "hf")
    yield Case("coin_flips.jsonl", "coin_flips.jsonl", "--target demo-thinking --max-tokens 4")
    for name, options in SETTINGS.items():
        clocked = name in ("any drafter", "adaptive drafts")
        exports = (*tables, "openai") if name == "five logprobs" else ("csv",) if name == "echo" else ()
        yield Case(name, "settings.jsonl", options, exports=exports, clocked=clocked)
    for name in ("code.jsonl", "chat.jsonl", "parameters.jsonl", "prompts.csv", "prompts.json", "prompts.txt"):
        exports = (*tables, "openai") if name in ("parameters.jsonl", "chat.jsonl") else ()
        yield Case(name, name, "--max-tokens 24", exports=exports)
    yield Case("batch.jsonl", "batch.jsonl", "--output-format openai --max-tokens 24", exports=("parquet", "openai"))
    yield Case("mistakes.jsonl", "mistakes.jsonl", "--output-format openai", exports=("csv", "openai"))
    yield Case("mistakes.jsonl, strict", "mistakes.jsonl", "--strict")
    yield Case("coin_flips.jsonl, read ahead", "coin_flips.jsonl", "--target demo-thinking --speculative-prefill 2")
    yield Case("coin_flips.jsonl, logprobs", "coin_flips.jsonl", "--target demo-thinking --limit 9 --logprobs 1")
    yield Case("resumed", "parameters.jsonl", "--max-tokens 24", before="--max-tokens 24 --limit 4")
    yield Case("from a cache", "settings.jsonl", "--cache {cache} --overwrite", before="--cache {cache} --limit 5")
    yield Case("standard input", None)
    yield Case("gzip", "settings.jsonl.gz")
    yield Case("a key", "questions.jsonl", "--prompt-column question")
    yield Case("a column", "questions.tsv", "--prompt-column question --n 2 --temperature 1 --seed-per-line")
    yield Case("Parquet", "questions.parquet", "--prompt-column question")
    yield Case("a dataset", "./dataset?column=question", exports=("csv",))
    for name, options in SCORES.items():
        yield Case(f"score {name}", re.split("[, ]", name)[0], options, "score")
    for name in fuzzed:
        yield Case(name, name, "--target model --max-tokens 4")


def run_case(case: Case, tree: Path, inputs: Path, folder: Path) -> list[tuple[int, str]]:
    """Run a case in a checkout, into `folder / "out"`, and export it; exit codes and what was said."""
    own = tree / ".venv" / "bin" / "python"
    python = [str(own) if own.exists() else sys.executable, "-m", "detgen"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    folder.mkdir()
    out = folder / "out"

    def command(*arguments: str) -> tuple[int, str]:
        stdin = None if case.prompts else (inputs / "settings.jsonl").read_bytes()
        done = subprocess.run(
            [*python, *arguments], cwd=inputs, env=environment, input=stdin, capture_output=True, check=False
        )
        return done.returncode, done.stderr.decode(errors="replace").replace(str(folder), "DIR")

    found = []
    for options in [case.before, case.options]:
        if options is not None:
            given = shlex.split(options.replace("$'\\n\\n'", "'\n\n'").format(cache=folder / "cache"))
            usual = {"--max-tokens": "12", "--drafter": "none"} if case.command == "run" else {}
            usual["--threads"] = "1"
            given += [word for name, value in usual.items() if name not in given for word in (name, value)]
            found.append(command(case.command, case.prompts or "-", "-o", str(out), "--quiet", *given))
    for form in case.exports:
        found.append(command("export", str(out), "--to", form, "-o", str(folder / EXPORTS[form]), "--quiet"))
    return found


def acceptance_records(data: bytes) -> list[dict[str, Any]]:
    """The records of an acceptance log, in any of the forms that the two checkouts write.

    A longer form has ids, says what there is not, and has doubles, which are rounded to float32 as they are now.
    """
    records = [log_entry(json.loads(line)) for line in data.splitlines()]
    for record in records:
        record.pop("id", None)
        record["drafter"] = RENAMED.get(record["drafter"], record["drafter"])
    return [dict(sorted(record.items())) for record in records]


def without(record: Any, name: str) -> None:
    """Remove a field of a record, by its dotted name."""
    first, _, rest = name.partition(".")
    if first == "*":
        for part in record:
            without(part, rest)
    elif first.isdigit():
        del record[int(first) :]
    elif isinstance(record, dict) and first in record:
        if rest:
            without(record[first], rest)
        else:
            del record[first]


def plain(name: str, data: bytes) -> list[bytes]:
    """The lines of a file without the fields that were added."""
    lines = data.splitlines(keepends=True)
    if not ADDED.get(name):
        return lines
    made = []
    for line in lines:
        record = json.loads(line)
        for each in ADDED[name]:
            without(record, each)
        made.append(json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass"))
    return made


def by_index(name: str, lines: list[bytes]) -> dict[int, list[bytes]]:
    """Lines by the prompt that they are of; results have one for each."""
    found: dict[int, list[bytes]] = {}
    for number, line in enumerate(lines):
        found.setdefault(number if name == "results.jsonl" else json.loads(line)["index"], []).append(line)
    return found


def error_of(lines: list[bytes]) -> tuple[str | None, bytes]:
    """The error of a prompt's lines, or None, and what its line is without the text of it."""
    record = json.loads(lines[0]) if lines else {}
    error = record.pop("error", None)
    return error, json.dumps(record).encode()


def compare_lines(case: Case, old: Path, new: Path, found: Findings) -> None:
    """Compare two output folders."""
    excused: set[int] = set()  # prompts whose errors differ, as they may
    for name in COMPARED:
        read = [(folder / name).read_bytes() if (folder / name).exists() else None for folder in (old, new)]
        if read == [None, None]:
            continue
        found.files += 1
        before, after = (data or b"" for data in read)
        found.lines += before.count(b"\n")
        if before == after and read[0] is not None:
            continue
        where = f"{case.name}: {name}"
        if read[0] is None or read[1] is None:
            found.faults.append(f"{where} is in one of the two folders only")
            continue
        if name == "acceptance.jsonl":
            logs = [_by_prompt(acceptance_records(data), case.clocked) for data in (before, after)]
            differing = [index for index in logs[0].keys() | logs[1].keys() if logs[0].get(index) != logs[1].get(index)]
        else:
            sides = [by_index(name, plain(name, data)) for data in (before, after)]
            indexes = sorted(sides[0].keys() | sides[1].keys())
            differing = [index for index in indexes if sides[0].get(index, []) != sides[1].get(index, [])]
            if name == "outputs.jsonl":
                excused = {i for i in differing if _excuse(where, i, *(side.get(i, []) for side in sides), found)}
        if left := sorted(set(differing) - excused):
            found.faults.append(f"{where} differs in {len(left)} prompts, the first is number {left[0] + 1}")


def _by_prompt(records: list[dict[str, Any]], clocked: bool) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for record in records:
        for name in ADDED.get("acceptance.jsonl", ()):
            without(record, name)
        if not clocked:
            found.setdefault(record["index"], []).append(list(record.items()))
        elif record["token"] is not None:  # not one that was drafted in vain
            found.setdefault(record["index"], []).append([record["sample"], *(record[name] for name in ANY_CLOCK)])
    return found


def _excuse(where: str, index: int, old: list[bytes], new: list[bytes], found: Findings) -> bool:
    """Whether what differs of a prompt is an error, in a way that is allowed; it is listed then."""
    (was, rest), (now, other) = error_of(old), error_of(new)
    at = f"{where}, number {index + 1}"
    if was is not None and now is not None and rest == other and len(old) == len(new) == 1:
        found.reworded.append((at, was, now))
        return True
    if was is None and now is not None and any(re.search(reason, now) for reason in REFUSED_NOW):
        found.refused.append((at, old[0].decode(errors="replace").strip(), now))
        return True
    return False


def compare_exports(case: Case, old: Path, new: Path, found: Findings) -> None:
    """Compare the exports of two runs."""
    for form in case.exports:
        paths = [folder / EXPORTS[form] for folder in (old, new)]
        if form == "hf":
            paths = [next(path.glob("*.arrow"), path) for path in paths]
        found.files += 1
        read = [path.read_bytes() if path.is_file() else None for path in paths]
        if None in read:
            found.faults.append(f"{case.name}: exported as {form}, there is nothing to compare")
        elif read[0] != read[1] and not (ADDED_COLUMNS and form != "openai" and _tables_agree(form, paths)):
            found.faults.append(f"{case.name}: exported as {form}, it differs")


def _tables_agree(form: str, paths: list[Path]) -> bool:
    """Whether two tables are the same without the columns that were added."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    def table(path: Path) -> Any:
        if form == "csv":
            with path.open(newline="", encoding="utf-8") as file:
                return [{k: v for k, v in row.items() if k not in ADDED_COLUMNS} for row in csv.DictReader(file)]
        read = parquet.read_table(path) if form == "parquet" else pa.ipc.open_stream(path).read_all()
        kept = read.drop_columns([name for name in ADDED_COLUMNS if name in read.column_names])
        return kept.replace_schema_metadata(None)

    old, new = map(table, paths)
    return bool(old == new)


def compare(case: Case, scratch: Path, said: dict[str, list[tuple[int, str]]], found: Findings) -> None:
    """Compare what a case left in both checkouts."""
    folders = [scratch / side / _slug(case) for side in ("old", "new")]
    codes = [[code for code, _ in said[side]] for side in ("old", "new")]
    if codes[0] != codes[1]:
        found.faults.append(f"{case.name}: exit codes {codes[0]} and {codes[1]}: {said['new'][-1][1][-300:]}")
        return
    for (code, was), (_, now) in zip(said["old"], said["new"], strict=True):
        if code not in (0, 1):
            found.faults.append(f"{case.name}: both end with {code}: {now[-300:]}")
        if "Traceback" in was + now:
            found.faults.append(f"{case.name}: a traceback: {(was + now)[-300:]}")
    if case.name in ANOTHER_ARITHMETIC:
        return
    compare_lines(case, folders[0] / "out", folders[1] / "out", found)
    compare_exports(case, *folders, found)


def _slug(case: Case) -> str:
    return re.sub(r"\W+", "-", case.name)


def kinds(listed: list[tuple[str, str, str]], key: Callable[[tuple[str, str, str]], str]) -> list[str]:
    """A line for each kind of listed lines: how many, and the first."""
    counts: Counter[str] = Counter()
    first: dict[str, tuple[str, str, str]] = {}
    for each in listed:
        kind = re.sub(r"'[^']*'|\"[^\"]*\"|[\w.]+:\d+|-?\d[\d.e+-]*", "…", key(each))
        counts[kind] += 1
        first.setdefault(kind, each)
    made = []
    for kind, count in counts.most_common():
        at, was, now = first[kind]
        made += [f"  {count:>5} x, first at {at}", f"          {was[:200]}", f"       -> {now[:200]}"]
    return made


def report(found: Findings, path: Path | None) -> None:
    """Print what was found."""
    if path is not None:
        listed = [("reworded", *each) for each in found.reworded] + [("refused", *each) for each in found.refused]
        keys = ("what", "where", "old", "new")
        path.write_text("".join(json.dumps(dict(zip(keys, each, strict=True))) + "\n" for each in listed))
    if found.reworded:
        print(f"{len(found.reworded)} errors of lines have other texts:")
        print("\n".join(kinds(found.reworded, lambda each: f"{each[1]} -> {each[2]}")))
    if found.refused:
        print(f"{len(found.refused)} lines ran and are refused:")
        print("\n".join(kinds(found.refused, lambda each: each[2])))
    for fault in found.faults:
        print(f"DIFFERS: {fault}")
    print(
        f"{found.files} files, {found.lines:,} lines: {len(found.faults)} faults, {len(found.reworded)} errors reworded"
        f", {len(found.refused)} lines refused that ran"
    )


def main() -> int:
    """Compare two checkouts; 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout")
    parser.add_argument("new", type=Path, nargs="?", default=HERE, help="another; this one if it is left out")
    parser.add_argument("--only", default="", help="cases that have this in their name")
    parser.add_argument("--fuzzed", type=int, default=FUZZED, help="how many fuzzed lines")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--report", type=Path, help="file for all lines whose errors differ, as JSON lines")
    parser.add_argument("--keep", type=Path, help="folder for everything that was written; it must not exist")
    args = parser.parse_args()
    started, found = time.monotonic(), Findings()
    trees = {"old": args.old.resolve(), "new": args.new.resolve()}
    with tempfile.TemporaryDirectory() as temporary:
        scratch = args.keep.resolve() if args.keep else Path(temporary)
        for name in ("inputs", "old", "new"):
            (scratch / name).mkdir(parents=True)
        inputs = scratch / "inputs"
        chosen = [case for case in cases(write_inputs(inputs, args.fuzzed)) if args.only in case.name]
        with ThreadPoolExecutor(args.jobs) as pool:
            running = {
                (case.name, side): pool.submit(run_case, case, tree, inputs, scratch / side / _slug(case))
                for case in chosen
                for side, tree in trees.items()
            }
            for number, case in enumerate(chosen, 1):
                said = {side: running[case.name, side].result() for side in trees}
                compare(case, scratch, said, found)
                print(f"{number} of {len(chosen)}: {case.name}", file=sys.stderr, flush=True)
    report(found, args.report)
    print(f"{len(chosen)} cases in {time.monotonic() - started:,.0f} s")
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
