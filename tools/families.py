"""Runs every family in transformers' mapping of causal language models, and records the result for each.

    python tools/families.py                       # all, into docs/models.md and the package; some minutes
    python tools/families.py llama gemma2          # some, printed
    python tools/families.py --json found.json     # the results as JSON, in addition to the table

A family is a tiny model with random weights in a folder of its own (`tiny_families`). detgen generates from it in a
process of its own, within limits of time and memory: prompts of 5 to 200 tokens, one and four at a time. Both must give
the same bits. Then transformers' own eager forward reads prompts and texts in float32: logits must agree to within
`CLOSE` of the largest, and tokens must be the same wherever the two best differ by more.

The exit status is 1 if a family was neither equal nor refused.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

SECONDS, MEMORY = 300, 12 << 30
CLOSE = 1e-4  # of the largest logit
LENGTHS = (5, 17, 40, 77, 130, 200)
NEW = 8
WHOLE, OWN, REFUSED, FAULT = "whole", "own forward", "refused", "fault"
SECTIONS = (
    (WHOLE, "Whole in one call", "proved operators"),
    (OWN, "By transformers' forward", "proved operators"),
    (REFUSED, "Refused", "reason"),
    (FAULT, "Faults", "what happens"),
)
COUNTS = """Of the {total} model types that transformers {version} maps to causal language models, {whole} run whole in one call of
detgen's own pass, {own} run by transformers' forward on detgen's functions, and {refused} are refused"""  # noqa: E501
ROOT = Path(__file__).parent.parent
DOC, TABLE = ROOT / "docs" / "models.md", ROOT / "detgen" / "models" / "tried.json"


class Trace:
    """Keeps the logits that follow committed tokens."""

    chains = False

    def __init__(self) -> None:
        self.logits: dict[Any, list[Any]] = {}

    def committed(self, seq: Any, first: int, logits: Any) -> None:
        """Record the logits of a round."""
        from detgen.program.arrays import array

        self.logits.setdefault(seq.request.id, []).append(array(logits).copy())

    def finished(self, seq: Any, keys: Any, values: Any) -> None:
        """Do nothing at the end of a sequence."""


def generated(engine: Any, prompts: list[list[int]]) -> dict[int, tuple[list[int], Any]]:
    """Return tokens and their logits by prompt."""
    import numpy as np

    from detgen import Request, SamplingParams
    from detgen.program.arrays import tensor

    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    requests = [Request(i, str(i), token_ids=tuple(p), params=params) for i, p in enumerate(prompts)]
    trace = Trace()
    found = {}
    for batch in engine.stream(requests, trace=trace):
        for one in batch:
            if one.error:
                raise RuntimeError(f"prompt of {one.prompt_tokens} tokens: {one.error}")
            found[int(one.request.id)] = list(one.token_ids), tensor(np.concatenate(trace.logits[one.request.id]))
    return found


def compared(folder: Path, prompts: list[list[int]], found: dict[int, tuple[list[int], Any]]) -> float:
    """Return the largest difference from transformers' logits, relative to the largest logit.

    Raises:
        RuntimeError: if a token differs although the two best are clearly apart, or logits are not close.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from detgen.models.wrappers import settings_of_text

    how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    config = settings_of_text(AutoConfig.from_pretrained(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, **how).eval()
    worst = 0.0
    for i, prompt in enumerate(prompts):
        tokens, logits = found[i]
        with torch.inference_mode():
            own = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0].float()
        own = own[len(prompt) - 1 : -1]
        largest = own.abs().max()
        error = float((own[:, : logits.shape[1]] - logits).abs().max() / largest)
        best = own.topk(2).values
        clear = best[:, 0] - best[:, 1] > CLOSE * largest
        other = clear & (own.argmax(-1) != torch.tensor(tokens))
        worst = max(worst, error)
        if other.any() or not error <= CLOSE:
            what = f"logits differ by {error:.1e} of the largest" + (", and so do tokens" if other.any() else "")
            raise RuntimeError(f"after {len(prompt)} tokens of prompt {what}")
    return worst


def run(folder: Path) -> dict[str, Any]:
    """Run the model in a folder and return the result."""
    import torch

    from detgen import Engine, EngineError
    from detgen.failing import limit_reached

    torch.set_num_threads(2)
    try:
        engine = Engine(target=folder, drafter="none", batch_size=1, kv_memory=32 << 20)
    except EngineError as error:
        return {"status": REFUSED, "says": str(error).replace(str(folder), "MODEL")}
    except Exception as error:
        limit = limit_reached(error)
        return {"status": FAULT, "says": limit or f"exit 70: {error!r}", "trace": traceback.format_exc()}
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(64, 2000, (n,), generator=random).tolist() for n in LENGTHS]
    try:
        found = generated(engine, prompts)
        beside = generated(engine.with_settings(batch_size=4), prompts)
        for i in found:
            same = found[i][1].view(torch.int32).equal(beside[i][1].view(torch.int32))
            if found[i][0] != beside[i][0] or not same:
                raise RuntimeError(f"prompt of {LENGTHS[i]} tokens: other bits in a batch of 4")
        profile = engine.profile()
        distance = compared(folder, prompts, found)
    except Exception as fault:
        return {"status": FAULT, "says": str(fault), "trace": traceback.format_exc()}
    if "versions" not in profile:
        return {"status": WHOLE, "error": distance}
    return {"status": OWN, "error": distance, "proved": profile.get("operators", [])}


def one(family: str, folder: Path) -> dict[str, Any]:
    """Make a family's tiny model in a folder, and run it."""
    from tiny_families import UNMADE, save, save_config, tiny_config

    try:
        save(tiny_config(family), folder)
    except Exception as error:
        if family not in UNMADE:
            return {"status": FAULT, "says": f"no tiny model: {error!r}", "trace": traceback.format_exc()}
        save_config(family, folder)  # detgen is to say why there is no such model
    return run(folder)


def _in_child(family: str, folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    sys.stderr = (folder / "stderr").open("w", buffering=1)
    (folder / "model").mkdir()
    (folder / "result.json").write_text(json.dumps(one(family, folder / "model")))


def apart(family: str) -> dict[str, Any]:
    """Run `one` in a process of its own."""
    context = multiprocessing.get_context("forkserver")  # imports what is slow to load once
    context.set_forkserver_preload(["detgen.engine.engine", "detgen.kernels.c.c_decoder", "tiny_families"])
    with tempfile.TemporaryDirectory() as place:
        folder, started = Path(place), time.monotonic()
        child = context.Process(target=_in_child, args=(family, folder))
        child.start()
        child.join(SECONDS)
        if child.is_alive():
            child.kill()
            child.join()
            found: dict[str, Any] = {"status": FAULT, "says": f"not done in {SECONDS} seconds"}
        elif (folder / "result.json").exists():
            found = json.loads((folder / "result.json").read_text())
        else:
            said = (folder / "stderr").read_text()[-300:]
            found = {"status": FAULT, "says": f"exit {child.exitcode}: {said}"}
        return {**found, "seconds": round(time.monotonic() - started, 1)}


def reason(found: dict[str, Any]) -> str:
    """Return why a family is refused, without the words that all refusals share."""
    says = re.sub(r"^(cannot load the model )?MODEL( \(\w+\))?(: | is )(config\.json: )?", "", found["says"])
    says = re.sub(r"^(\w+ is )?not supported: ", "", says)
    says = re.sub(r"( \((at|in its) .*`.*\)|\. Its outputs would depend.*)$", "", says)
    return says.replace("`", "")


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def table(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what `detgen models --families` shows: transformers' version, and each family's class, how it runs,
    and the proved operators or the reason."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    rows = {}
    for family, one in found.items():
        last = ", ".join(one.get("proved", ())) if one["status"] in (WHOLE, OWN) else reason(one)
        rows[family] = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family], one["status"], last)
    return {"transformers": transformers.__version__, "families": rows}


def document(page: str, shown: dict[str, Any]) -> str:
    """Return docs/models.md with the counts and tables of `table`; its prose stays as it is."""
    families = shown["families"]
    counts = Counter(status for _, status, _ in families.values())
    numbers = {"whole": counts[WHOLE], "own": counts[OWN], "refused": counts[REFUSED], "total": len(families)}
    said = COUNTS.format(version=shown["transformers"], **numbers)
    parts = [re.sub(r"Of the \d+ model types .*? are refused", said, page.partition("\n## ")[0], flags=re.DOTALL)]
    for status, title, column in SECTIONS:
        rows = [(family, made, last) for family, (made, of, last) in families.items() if of == status]
        if rows:
            parts.append(f"\n## {title}\n\n| model type | class | {column} |\n| --- | --- | --- |\n")
            parts += (f"| {family} | {made} | {_cell(last)} |\n" for family, made, last in rows)
    return "".join(parts)


def main() -> None:
    """Run some families, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = {}
    for family in args.families or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        found[family] = apart(family)
        says = found[family].get("says") or f"error {found[family]['error']:.1e} {found[family].get('proved', '')}"
        print(f"{family:28} {found[family]['status']:12} {found[family]['seconds']:6} s  {says}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
    if not args.families:
        shown = table(found)
        rows = ",\n".join(f"{json.dumps(family)}: {json.dumps(row)}" for family, row in shown["families"].items())
        version = json.dumps(shown["transformers"])
        TABLE.write_text(f'{{"transformers": {version}, "families": {{\n{rows}\n}}}}\n', encoding="utf-8")
        DOC.write_text(document(DOC.read_text(encoding="utf-8"), shown), encoding="utf-8")
    print(dict(Counter(one["status"] for one in found.values())))
    sys.exit(any(one["status"] == FAULT for one in found.values()))


if __name__ == "__main__":
    main()
