"""The settings of a benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from detgen.declaring import Option, Part
from detgen.engine.config import EngineConfig


def _whole_numbers(text: str) -> tuple[int, ...]:
    """Parse whole numbers separated by commas."""
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of whole numbers such as 1,4") from None


def _numbers(text: str) -> tuple[float, ...]:
    """Parse numbers separated by commas."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of numbers such as 0.5,20") from None


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What to measure.

    Attributes:
        engine: models, quantization, device, dtype and threads of every peer, and the number format of detgen's KV
            cache; other fields are ignored.
        random_weights: a built-in configuration or a config.json, filled with random weights in place of models.
        output: folder for the results.
        full: the whole grid instead of the quick one.
        workloads: names of workloads; empty for those of the grid.
        requests: requests per cell; None lets the grid choose.
        batch_sizes: batch sizes; empty for those of the grid.
        fractions: shares of requests that are verified, in percent; empty for those of the grid.
        scale: factor of the lengths of synthetic workloads; None is 1 on CUDA and 1/16 on a CPU, less for a short
            context.
        max_tokens: tokens generated per request of `sample` and `file:`.
        acceptances: rates at which a synthetic drafter is right, in (0, 1).
        peers: names of peers; empty for all that are installed.
        rounds: measured rounds per cell; None takes as many as the time allows, at least 3.
        seed: of prompts, lengths and random weights.
        peer_pythons: NAME=PATH, the Python of each peer that has an environment of its own.
    """

    PANEL: ClassVar = "Workload"

    engine: Annotated[
        EngineConfig,
        Part(
            *("target", "draft", "device", "dtype", "kv_dtype", "target_quant", "draft_quant", "trust_remote_code"),
            "threads",
        ),
    ] = field(default_factory=EngineConfig)
    random_weights: Annotated[
        str | None,
        Option("CONFIG", panel="Model"),
        "Random weights instead of models: llama-3.1-8b, llama-3.2-1b, qwen3-0.6b, qwen2.5-0.5b, llama-135m,"
        " llama-89m, llama-29m, tiny, or the path of a config.json.",
    ] = None
    output: Annotated[Path, Option("DIR", "--output -o", panel="Options"), "Folder for bench.json and bench.md."] = (
        Path("bench-out")
    )
    full: Annotated[
        bool, Option(None, "--full/--quick", panel="Options"), "The whole grid, or only what fits in three minutes."
    ] = False
    workloads: Annotated[
        tuple[str, ...],
        Option("NAME", "--workload", panel="Options", default="sample; all with --full"),
        "What to generate; NAME@T runs it at temperature T, by detgen alone. May be given several times.",
    ] = ()
    requests: Annotated[int | None, Option("N", default="two batches"), "Requests at each batch size."] = None
    batch_sizes: Annotated[
        tuple[int, ...],
        Option("LIST", "--batch-size", panel="Options", parser=_whole_numbers, default="16,1; 1,4,16,32 with --full"),
        "Batch sizes to measure: requests at a time, at most.",
    ] = ()
    fractions: Annotated[
        tuple[float, ...],
        Option("LIST", "--deterministic-fraction", parser=_numbers, default="100; 2,5,10,20,50,100 with --full"),
        "Percentages of requests to verify, for none and auto; the rest run unverified.",
    ] = ()
    scale: Annotated[
        float | None,
        Option("F", default="1 on CUDA, else 1/16; less for a short context"),
        "Factor by which to scale the lengths of random prompts.",
    ] = None
    max_tokens: Annotated[
        int, Option("N", panel="Options"), "Tokens per request in the workloads sample and file:."
    ] = 64
    acceptances: Annotated[
        tuple[float, ...],
        Option("RATES", "--synthetic-acceptance", parser=_numbers, default="none"),
        "Also measure a drafter that is right at these rates, such as 0.5,0.7,0.9, at the cost of a draft model. Its"
        " rows are marked as synthetic.",
    ] = ()
    peers: Annotated[
        tuple[str, ...],
        Option("NAME", "--peer", panel="Options", default="all that are installed"),
        "Measure only this peer, in each of its precisions: detgen, transformers, transformers-assisted,"
        " transformers-continuous, openvino, llama.cpp, ctranslate2, onnxruntime, vllm, sglang; may be given several"
        " times.",
    ] = ()
    rounds: Annotated[
        int | None,
        Option("N", default="3 to 7, as time allows"),
        "Measured runs of each row; more runs give a better estimate of the spread, which --compare uses.",
    ] = None
    seed: Annotated[int, Option("N"), "Seed of random prompts, lengths and weights."] = 0
    peer_pythons: Annotated[
        tuple[str, ...],
        Option("NAME=PATH", "--peer-python", default="the Python that runs detgen"),
        "The Python of the environment in which a peer is installed, such as openvino=venvs/openvino/bin/python; may"
        " be given for several peers.",
    ] = ()
