"""Real JSON schemas: which are refused, whether texts that end fit, and whether masks allow values that do not fit.

Each file is an object with a `schema` and optional `tests`: objects with `data` and whether it is `valid`, as in the
folder `maskbench/data` of JSONSchemaBench (https://github.com/guidance-ai/jsonschemabench). The judge is the library
jsonschema, including formats that it checks by itself (dates, emails, addresses, UUIDs, ...).

    python benchmarks/schemas.py FOLDER [--limit 500] [--target MODEL] [--max-tokens 400]
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema

from detgen import Engine, EngineConfig, Request, SamplingParams
from detgen.engine.structure import Masks, Structures
from detgen.errors import RequestError


def judged(schema: Any, value: Any) -> str:
    """Return "fits" if a value fits a schema, otherwise where it does not; "unknown" if the library cannot tell."""
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
        error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    except Exception:  # references to nowhere, expressions of another dialect
        return "unknown"
    return "fits" if error is None else f"{error.json_path}: {error.message[:80]} ({error.validator})"


def lets_through(structures: Structures, tokenizer: Any, schema: Any, value: Any) -> bool:
    """Return whether a model could write a value, spelled as by Python's json."""
    structure = structures.of(SamplingParams(guided_json=schema))
    assert structure is not None
    tokens = tokenizer.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False)
    mask = Masks(structure).after(tokens)
    return mask is not None and not mask.error and any(mask.allows(token) for token in structure.eos)


def main() -> None:
    """Print the counts, each text that ended and does not fit, and each value that was wrongly allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=int, default=500)
    parser.add_argument("--target", default=EngineConfig().target)
    parser.add_argument("--max-tokens", type=int, default=400)
    args = parser.parse_args()
    paths = sorted(path for path in args.folder.iterdir() if path.suffix == ".json")
    paths = paths[:: max(len(paths) // args.limit, 1)][: args.limit]
    engine = Engine(EngineConfig(target=args.target, batch_size=16))
    eos = frozenset({engine.tokenizer.eos_token_id})
    structures = Structures(engine.tokenizer, "the model", engine.vocabulary, eos)
    found, refused = Counter[str](), Counter[str]()
    schemas: dict[str, Any] = {}
    for path in paths:
        read = json.loads(path.read_text(encoding="utf-8"))
        schema = read["schema"]
        try:
            structures.of(SamplingParams(guided_json=schema))
        except RequestError as error:
            refused[str(error)[:70]] += 1
            continue
        schemas[path.name] = schema
        for test in read.get("tests", ()):
            through = lets_through(structures, engine.tokenizer, schema, test["data"])
            found[f"{'valid' if test['valid'] else 'invalid'} values {'let through' if through else 'ruled out'}"] += 1
            if through and not test["valid"] and judged(schema, test["data"]) != "fits":
                print(f"{path.name}: lets through {json.dumps(test['data'])[:200]}: {judged(schema, test['data'])}")
    requests = [
        Request(name, name, prompt="data = ", params=SamplingParams(
            guided_json=schema, temperature=1.0, seed=i, max_tokens=args.max_tokens
        ))
        for i, (name, schema) in enumerate(schemas.items())
    ]  # fmt: skip
    for done in engine.generate(requests):
        name = str(done.request.id)
        found[f"texts: {done.finish_reason}"] += 1
        if done.error:
            print(f"{name}: {done.error}")
        elif done.finish_reason == "stop":
            verdict = judged(schemas[name], json.loads(done.text))
            found[f"texts that ended: {verdict if verdict in ('fits', 'unknown') else 'do not fit'}"] += 1
            if verdict not in ("fits", "unknown"):
                print(f"{name}: {verdict}: {done.text[:200]}")
    print(f"{len(paths)} schemas, {refused.total()} refused")
    for reason, count in refused.most_common(12):
        print(f"  {count:5} {reason}")
    for what, count in sorted(found.items()):
        print(f"{count:7} {what}")


if __name__ == "__main__":
    main()
