"""`detgen bench`: what determinism costs here, beside what people would use instead.

What is measured is in `detgen.bench`, how it looks in `detgen.show`; both are imported inside the command, since they
bring torch and rich, and `--help` answers without them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from detgen.cli import options

EPILOG = "\n".join(
    (
        "Workloads: sample (the embedded prompts), file:PATH (prompts or chats), and random prompts of the shapes"
        " 1024x256, 1024x1024, 4096x1024 (tokens in x out), sharegpt and arxiv (mixed lengths).",
        "",
        "Examples:",
        "  [bold]detgen bench[/]",
        "  [bold]detgen bench --workload file:prompts.jsonl --target models/large --draft models/small[/]",
        "  [bold]detgen bench --random-weights llama-3.2-1b --synthetic-acceptance 0.6,0.8 --batch-size 4[/]",
        "  [bold]detgen bench -o after --compare before/bench.json[/]",
        "",
        "Exit status: 0 measured (rows may have failed), 2 refused, 70 internal error, 130 interrupted.",
    )
)


_workload_option = partial(typer.Option, rich_help_panel="Workload")
_Number = TypeVar("_Number", int, float)


def _list(text: str | None, kind: Callable[[str], _Number], option: str) -> tuple[_Number, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(kind(part) for part in text.split(",")) if text else ()
    except ValueError:
        example = "whole numbers such as 1,4" if kind is int else "numbers such as 0.5,20"
        raise typer.BadParameter(f"{text!r} is not a list of {example}", param_hint=option) from None


def bench_command(
    target: options.Target = None,
    draft: options.Draft = None,
    random_weights: Annotated[
        str | None,
        options.model_option(
            metavar="CONFIG",
            show_default=False,
            help="Random weights instead of models: llama-3.1-8b, llama-3.2-1b, qwen3-0.6b, qwen2.5-0.5b, llama-135m,"
            " llama-89m, llama-29m, tiny, or the path of a config.json.",
        ),
    ] = None,
    synthetic_acceptance: Annotated[
        str | None,
        options.drafting_option(
            metavar="RATES",
            show_default="none",
            help="Also measure a drafter that is right at these rates, such as 0.5,0.7,0.9, at the cost of a draft"
            " model. Its rows are labelled synthetic.",
        ),
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    target_quant: options.TargetQuant = "none",
    draft_quant: options.DraftQuant = "none",
    trust_remote_code: options.TrustRemoteCode = False,
    threads: options.Threads = None,
    workload: Annotated[
        list[str] | None,
        _workload_option(
            metavar="NAME",
            show_default="sample; all with --full",
            help="What is generated; may be given several times.",
        ),
    ] = None,
    requests: Annotated[
        int | None, _workload_option(metavar="N", show_default="two batches", help="Requests at each batch size.")
    ] = None,
    batch_size: Annotated[
        str | None,
        _workload_option(metavar="LIST", show_default="16,1; 1,4,16,32 with --full", help="Most requests at a time."),
    ] = None,
    deterministic_fraction: Annotated[
        str | None,
        _workload_option(
            metavar="LIST",
            show_default="100; 2,5,10,20,50,100 with --full",
            help="Percentages of requests that are verified, for none and auto; the rest run unverified.",
        ),
    ] = None,
    max_tokens: Annotated[int, _workload_option(metavar="N", help="Tokens per request of sample and file:.")] = 64,
    scale: Annotated[
        float | None,
        _workload_option(
            metavar="F",
            show_default="1 on CUDA, else 1/16; less for a short context",
            help="Factor of the lengths of random prompts.",
        ),
    ] = None,
    seed: Annotated[int, _workload_option(metavar="N", help="Of random prompts, lengths and weights.")] = 0,
    full: Annotated[
        bool, options.run_option("--full/--quick", help="The whole grid, or what fits in three minutes.")
    ] = False,
    peer: Annotated[
        list[str] | None,
        options.run_option(
            metavar="NAME",
            show_default="all that are installed",
            help="Measure only this peer, in each of its precisions: detgen, transformers, transformers-assisted,"
            " transformers-continuous, openvino, llama.cpp, vllm, sglang; may be given several times.",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        options.run_option(
            metavar="N",
            show_default="3 to 7, as time allows",
            help="Measured runs of each row; more runs give a better estimate of the spread, which --compare uses.",
        ),
    ] = None,
    figures: Annotated[
        bool, options.run_option("--figures", help="Also measure and draw the figures (detgen\\[plots]).")
    ] = False,
    compare: Annotated[
        Path | None,
        options.run_option(
            metavar="OLD.json", show_default=False, help="Report what has changed beyond noise since this bench.json."
        ),
    ] = None,
    output: Annotated[
        Path,
        options.run_option(
            "--output", "-o", callback=options.named, metavar="DIR", help="Folder for bench.json and bench.md."
        ),
    ] = Path("bench-out"),
    quiet: options.Quiet = False,
) -> None:
    """Measure detgen on this machine, beside transformers and whatever else is installed.

    Peers take turns on the same prompts; outputs are compared while they run. After each round, what was measured so
    far is in bench.json; Ctrl-C ends the benchmark and shows it.
    """
    from detgen.bench.bench_results import Results, Stopped
    from detgen.bench.peer_interface import BenchConfig
    from detgen.engine.config import EngineConfig
    from detgen.errors import BenchError, EngineError
    from detgen.show.progress_view import open_display

    sizes = _list(batch_size, int, "--batch-size")
    fractions = _list(deterministic_fraction, float, "--deterministic-fraction")
    acceptances = _list(synthetic_acceptance, float, "--synthetic-acceptance")
    display = open_display(quiet=quiet)
    old: Results | None = None
    status = 0
    try:
        config = BenchConfig(
            engine=EngineConfig(
                target=target,
                draft=draft,
                device=device,
                dtype=dtype,
                target_quant=target_quant,
                draft_quant=draft_quant,
                threads=threads,
                trust_remote_code=trust_remote_code,
            ),
            random_weights=random_weights,
            output=output,
            full=full,
            workloads=tuple(workload or ()),
            requests=requests,
            batch_sizes=sizes,
            fractions=fractions,
            scale=scale,
            max_tokens=max_tokens,
            acceptances=acceptances,
            peers=tuple(peer or ()),
            rounds=rounds,
            seed=seed,
            figures=figures,
        )
        with display:
            from detgen.bench.bench_results import load
            from detgen.bench.benchmark import bench

            old = load(compare) if compare else None
            results = bench(config, display)
    except (BenchError, EngineError) as error:
        display.error(options.as_typed(error))
        raise typer.Exit(options.REFUSED) from None
    except Stopped as stopped:
        results, status = stopped.results, options.INTERRUPTED
        display.notice("interrupted; what was measured so far is kept")
    except KeyboardInterrupt:
        display.notice("interrupted before anything was measured; nothing was kept")
        raise typer.Exit(options.INTERRUPTED) from None
    from detgen.show.bench_view import show

    show(results, old, config.output)
    raise typer.Exit(status)
