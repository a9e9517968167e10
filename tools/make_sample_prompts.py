"""Write sample_prompts/code.jsonl: prefixes of functions in the held-out modules."""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path

from demo_corpus import read_corpus
from tokenizers import Tokenizer

MODELS = Path(__file__).parent.parent / "detgen" / "demo_models"
SAMPLES = Path(__file__).parent.parent / "sample_prompts"
COUNT = 64
SHORTEST, AIM, LONGEST = 40, 64, 100  # tokens in a prompt


def prefixes(source: str, tokenizer: Tokenizer) -> list[tuple[int, str]]:
    """Return a prefix of each function that is long enough: its line, and text cut at a line's end.

    A prefix ends at a line that opens a block or ends a statement of the body;
    of these, the one nearest to the wanted length is taken.
    """
    lines = source.split("\n")
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef):
            continue
        starts = [node.lineno, *(decorator.lineno for decorator in node.decorator_list)]
        start = min(starts) - 1
        best: tuple[int, str] | None = None
        for statement in node.body:
            end = statement.end_lineno or statement.lineno
            if isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.Try):
                end = statement.body[0].lineno - 1
            if end >= (node.end_lineno or end):
                break
            text = "\n".join(lines[start:end]) + "\n"
            length = len(tokenizer.encode(text).ids)
            if SHORTEST <= length <= LONGEST and (best is None or abs(length - AIM) < best[0]):
                best = (abs(length - AIM), text)
        if best is not None:
            found.append((start + 1, best[1]))
    return sorted(found)


def chosen(tokenizer: Tokenizer, count: int = COUNT) -> list[dict[str, str | int]]:
    """Choose prefixes as evenly over the held-out modules as their numbers allow."""
    modules = {name: text for name, text in read_corpus().held_out.items() if "/" not in name}
    by_module = {Path(name).stem: prefixes(modules[name], tokenizer) for name in sorted(modules)}
    taken = dict.fromkeys(by_module, 0)
    while sum(taken.values()) < count:
        open_modules = [name for name in taken if taken[name] < len(by_module[name])]
        if not open_modules:
            break
        taken[min(open_modules, key=lambda name: (taken[name], name))] += 1
    records: list[dict[str, str | int]] = []
    for name, number in taken.items():
        every = by_module[name]
        for index in range(number):
            line, text = every[index * len(every) // number]
            record: dict[str, str | int] = {"id": f"{name}-{index + 1}", "prompt": text, "module": name, "line": line}
            records.append(record)
    return records


def main() -> None:
    """Write the prompts, also into the package for runs without a file, and print their number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, default=MODELS / "target" / "tokenizer.json")
    parser.add_argument("--out", type=Path, default=SAMPLES / "code.jsonl")
    options = parser.parse_args()
    records = chosen(Tokenizer.from_file(str(options.tokenizer)))
    text = "".join(json.dumps(record) + "\n" for record in records)
    for path in (options.out, MODELS / "prompts.jsonl"):
        path.write_text(text, encoding="utf-8")
    print(f"{len(records)} prompts")


if __name__ == "__main__":
    main()
