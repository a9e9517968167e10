"""What the bits of results are known of: small models of every kind, and digests of what runs of them give.

    python tests/helpers/frozen.py                # compares with what is known; says which cases differ
    python tests/helpers/frozen.py --write        # after a change of the arithmetic: what it gives now is known

A digest covers the output lines and the raw logits of each sample. Weights are made of whole numbers by exact
operations, so they are the same on every machine, and so are the digests, whichever build of the C code runs
(`DETGEN_BUILD`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers as hf

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import detgen
from detgen import Engine, Request, SamplingParams
from detgen.engine.request import Completion
from detgen.engine.score_requests import Score, ScoreRequest
from detgen.models.wrappers import auto_class
from detgen.outputs.batch_results import digested
from detgen.outputs.lines import dump, output_line
from helpers.engines import Recording
from helpers.families import DESCRIBED, LLAMA, OWN_FORWARD
from helpers.gguf_files import made, plain_tokenizer

KNOWN = Path(__file__).resolve().parents[1] / "frozen.json"
DEMO = Path(detgen.__file__).parent / "demo_models"
TEXTS = ("def add(a, b):\n", "import os\n\n\nclass Reader:\n", "for i in range(10):\n    print(")


class Case(NamedTuple):
    """A model and how it runs.

    Attributes:
        target: makes the model in a folder that is given, and returns its path.
        settings: of the engine.
        requests: what runs; scores where they are such.
    """

    target: Callable[[Path], Path]
    settings: dict[str, Any]
    requests: Callable[[], list[Any]]


def tokens() -> list[Request]:
    """Prompts of one token, of several chunks, with something to look up; greedy and sampled."""
    prompts = [[(i * i + 7 * i + n) % 58 + 2 for i in range(n)] for n in (1, 5, 37, 130)]
    prompts[2] = prompts[2][:12] * 3
    found = [Request(i, i, token_ids=tuple(p), params=SamplingParams(max_tokens=8)) for i, p in enumerate(prompts)]
    found[1] = found[1].with_params(temperature=0.8, top_p=0.9, seed=5, logprobs=2)
    return found


def texts(**params: Any) -> list[Request]:
    """Requests of texts."""
    return [Request(i, i, prompt=t, params=SamplingParams(max_tokens=16, **params)) for i, t in enumerate(TEXTS)]


def scores() -> list[ScoreRequest]:
    """Texts of which half is given."""
    return [ScoreRequest(i, i, prompt=t, completions=(t[::-1], "return 0\n")) for i, t in enumerate(TEXTS)]


def random_folder(config: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A model whose weights are the same on every machine, with the embedded tokenizer."""
    model = auto_class(config).from_config(config)
    g = np.random.Generator(np.random.Philox(11))
    with torch.no_grad():
        for parameter in model.parameters():
            # Whole numbers of 20 bits, times a power of two: exact, and about as large as trained weights are.
            whole = g.integers(-(2**19), 2**19, parameter.shape, dtype=np.int32)
            scale = 2.0 ** (-17 if parameter.dim() == 1 else round(-18 - np.log2(parameter.shape[-1]) / 2))
            noise = torch.from_numpy(whole).to(torch.float32) * (scale / (16 if parameter.dim() == 1 else 1))
            # Zeros and ones, of biases and norms, stay; what is drawn, such as rates of decays, does not.
            drawn = parameter.dim() > 1 or bool(((parameter != 0) & (parameter != 1)).any())
            parameter.copy_(noise if drawn else parameter.round() + noise)
    model.to(dtype).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "target" / name, folder / name)
    return folder


def gguf_file(kind: str) -> Callable[[Path], Path]:
    """Makes a GGUF file whose matrices have a type."""

    def make(folder: Path) -> Path:
        config = hf.LlamaConfig(**{**LLAMA, "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 256})
        return made(plain_tokenizer(random_folder(config, folder / "model")), folder / "model.gguf", lambda _: kind)

    return make


def _cases() -> Iterator[tuple[str, Case]]:
    def embedded(name: str) -> Callable[[Path], Path]:
        return lambda _: DEMO / name

    target = embedded("target")
    yield "embedded", Case(target, {"drafter": "ngram"}, texts)
    yield "embedded, draft model", Case(target, {"drafter": "model", "draft": DEMO / "draft"}, texts)
    sampled = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "n": 2, "logprobs": 3}
    yield "embedded, sampled", Case(target, {}, lambda: texts(**sampled))
    adjusted = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "min_tokens": 9, "logit_bias": {7: 2.5}}
    yield "embedded, adjusted", Case(target, {}, lambda: texts(**adjusted))
    yield "embedded, scored", Case(target, {}, scores)
    for quant in ("q8", "q4", "nf4", "int8"):
        yield f"embedded, {quant}", Case(target, {"target_quant": quant}, texts)
    yield "thinking", Case(embedded("thinking"), {}, texts)
    for name in ("embedded", "thinking"):
        of = target if name == "embedded" else embedded(name)
        yield f"{name}, pairs", Case(of, {"dtype": "bfloat16"}, texts)
        yield f"{name}, tc25", Case(of, {"dtype": "bfloat16-tc25"}, texts)
    for name, config in (DESCRIBED | {f"{name}, own forward": config for name, config in OWN_FORWARD.items()}).items():
        yield name, Case(lambda folder, config=config: random_folder(config(), folder), {}, tokens)  # type: ignore[misc]
    for name in ("llama", "qwen2_moe", "gpt2"):
        for dtype in (torch.bfloat16, torch.float16):
            stored = f"{name}, {str(dtype).removeprefix('torch.')}"
            make = lambda folder, config=DESCRIBED[name], dtype=dtype: random_folder(config(), folder, dtype)  # noqa: E731
            yield stored, Case(make, {}, tokens)
            if dtype == torch.bfloat16:
                yield f"{name}, pairs", Case(make, {"dtype": "bfloat16"}, tokens)
                yield f"{name}, tc24", Case(make, {"dtype": "bfloat16-tc24"}, tokens)
        for quant in ("q8", "nf4", "int8"):
            make = lambda folder, config=DESCRIBED[name]: random_folder(config(), folder)  # noqa: E731
            yield f"{name}, {quant}", Case(make, {"target_quant": quant}, tokens)
    for kind in ("F16", "Q8_0", "Q4_0"):
        yield f"GGUF {kind}", Case(gguf_file(kind), {}, tokens)


CASES = dict(_cases())
CASES |= {
    f"{name}, KV cache in bfloat16": CASES[name]._replace(settings=CASES[name].settings | {"kv_dtype": "bfloat16"})
    for name in ("embedded, draft model", "thinking", "llama", "gemma, own forward")
}


def _line(sample: Completion | Score, engine: Engine) -> bytes:
    """An output line as it was when the digests were taken."""
    return dump(digested(json.loads(output_line(sample, engine.pieces)))).encode() + b"\n"


def digest(case: Case, folder: Path) -> str:
    """SHA-256 of a case's output lines and raw logits."""
    settings = {"drafter": "none", "batch_size": 3, "kv_memory": 16 << 20, "kv_dtype": "float32", **case.settings}
    engine = Engine(target=case.target(folder), **settings)
    requests, found = case.requests(), hashlib.sha256()
    if isinstance(requests[0], ScoreRequest):
        for score in sorted(engine.score(requests), key=lambda score: (score.request.index, score.sample)):
            found.update(_line(score, engine))
        return found.hexdigest()
    trace = Recording()
    done = [completion for batch in engine.stream(requests, trace=trace) for completion in batch]
    for completion in sorted(done, key=lambda completion: (completion.request.index, completion.sample)):
        assert completion.error is None, completion.error
        found.update(_line(completion, engine))
        for rows in trace.logits[completion.request.id, completion.sample]:
            found.update(rows.float().contiguous().numpy().tobytes())
    return found.hexdigest()


def main() -> int:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="take what is found for known")
    known, found = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}, {}
    write = parser.parse_args().write
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = digest(case, Path(folder))
        print(name, "" if found[name] == known.get(name) else "DIFFERS", flush=True)  # noqa: T201
    if write:
        KNOWN.write_text(json.dumps(found, indent=1) + "\n")
    return int(found != known and not write)


if __name__ == "__main__":
    sys.exit(main())
