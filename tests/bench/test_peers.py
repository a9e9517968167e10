from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
import torch
import transformers

from detgen.bench.peer_interface import Contender, Job, ModelSource, Outcome
from detgen.bench.peers import NAMES, peer_class
from detgen.bench.peers.clock import Clock, run_stepwise
from detgen.bench.peers.detgen_engine import DetgenPeer, best_draft_tokens
from detgen.kernels.pass_cost import PassCost

Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def reference() -> list[list[list[int]]]:
    """The tokens of the first peer that has run, to be equal to all others."""
    return []


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        ("transformers", "generate"),
        ("transformers-continuous", "generate_batch"),
        ("detgen", "none"),
        ("detgen", "ngram"),
        ("detgen", "auto"),
        ("detgen", "synthetic"),
    ],
)
def test_all_peers_give_the_same_tokens_as_many_as_asked_for(
    peer: str, name: str, source: ModelSource, job: Job, reference: list[list[list[int]]], run_peer: Run
) -> None:
    synthetic = name == "synthetic"
    outcome = run_peer(peer, name, source, job, acceptance=0.5 if synthetic else None)
    assert [len(t) for t in outcome.tokens] == [p.output for p in job.prompts]
    reference.append(outcome.tokens)
    assert outcome.tokens == reference[0]
    assert all(0 < first <= last <= outcome.seconds for first, last in zip(outcome.first, outcome.last, strict=True))
    if peer == "detgen":
        assert outcome.passes == outcome.counts["target_passes"]
    if synthetic:
        assert outcome.counts["draft_passes"] > 0
        assert 0 < outcome.counts["accepted"] < outcome.counts["drafted"]


def test_counts_are_those_of_the_job_alone(source: ModelSource, job: Job, run_peer: Run) -> None:
    first, second = (run_peer("detgen", "none", source, job) for _ in range(2))
    assert first.counts == second.counts
    assert second.counts["target_passes"] > 0


def test_partly_verified_jobs_mix(source: ModelSource, job: Job, run_peer: Run) -> None:
    mixed = replace(job, deterministic=(True, False, True, False, True), batch_size=4)
    outcome = run_peer("detgen", "none", source, mixed)
    assert outcome.passes == run_peer("detgen", "none", source, replace(job, batch_size=4)).passes > 0


def test_assisted_generation_runs_the_embedded_pair_alone(source: ModelSource, job: Job, run_peer: Run) -> None:
    assert peer_class("transformers-assisted").contenders(source) == []
    embedded = replace(source, random_weights=None)
    assisted = run_peer("transformers-assisted", "generate", embedded, replace(job, batch_size=1))
    plain = run_peer("transformers", "generate", embedded, replace(job, batch_size=1))
    assert assisted.tokens == plain.tokens
    assert plain.passes == sum(map(len, plain.tokens))
    # Older versions of transformers draft so far ahead that some passes are for nothing; none counted is the draft's.
    newer = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
    assert 0 < (assisted.passes or 0) < (plain.passes if newer else 2 * plain.passes)


def test_peers_tell_where_they_do_not_run(source: ModelSource) -> None:
    gpu = replace(source, engine=replace(source.engine, device="cuda", dtype="bfloat16"))
    for name in NAMES:
        contenders = peer_class(name).contenders(source)
        assert (not contenders) == (name in ("transformers-assisted", "ctranslate2", "onnxruntime", "sglang")), name
        if name in ("vllm", "sglang"):
            there = peer_class(name).contenders(gpu)
            assert [c.precision for c in there] == ["bfloat16"] * 2
            assert there[0].process != there[1].process
    invariant = peer_class("vllm").contenders(gpu)[1]
    assert dict(invariant.environment)["VLLM_BATCH_INVARIANT"] == "1"


def test_the_clock_times_tokens_up_to_their_number(job: Job) -> None:
    clock = Clock(job)
    for index, prompt in enumerate(job.prompts):
        clock.tokens(index, prompt.output, at=clock._started + 1.0)
        clock.tokens(index, 1, at=clock._started + 9.0)
    outcome = clock.outcome([[0] * p.output for p in job.prompts], 3)
    assert outcome.first == outcome.last == pytest.approx([1.0] * 5)
    with pytest.raises(RuntimeError, match="prompt 0 got 0 tokens instead of 6"):
        clock.outcome([[] for _ in job.prompts], 3)


def test_a_library_that_runs_pass_by_pass_has_no_more_than_a_batch_under_way(job: Job) -> None:
    """It continues each prompt by its last token, two tokens a pass: one more than was asked for at times."""
    begun: list[int] = []

    def step(live: Collection[int]) -> dict[int, list[int]]:
        assert len(live) <= job.batch_size
        assert live <= set(begun)
        steps.append(len(live))
        return {index: [job.prompts[index].tokens[-1]] * 2 for index in live}

    steps: list[int] = []
    outcome = run_stepwise(job, begun.append, step)
    assert begun == [0, 1, 2, 3, 4], "in order"
    assert outcome.tokens == [[p.tokens[-1]] * p.output for p in job.prompts]
    assert outcome.passes == len(steps)
    assert steps.count(2) > steps.count(1), "a free place is taken at once"


def cost(fixed: float, each: float) -> PassCost:
    found = PassCost()
    for rows in (1, 8, 32):
        for _ in range(4):
            found.update(rows, fixed + each * rows)
    return found


def test_the_best_number_of_draft_tokens_grows_with_acceptance_and_shrinks_with_cost() -> None:
    target, cheap, slow = cost(10.0, 0.1), cost(0.1, 0.0), cost(20.0, 0.0)
    assert best_draft_tokens(0.9, 4, target, cheap) == 8
    assert best_draft_tokens(0.3, 4, target, cheap) < 4
    assert best_draft_tokens(0.9, 4, target, slow) == 1


@pytest.mark.parametrize(("peer", "module"), [("openvino", "openvino_genai"), ("llama.cpp", "llama_cpp")])
def test_peers_beside_torch_give_the_same_tokens_in_float32(
    peer: str, module: str, source: ModelSource, job: Job, run_peer: Run
) -> None:
    pytest.importorskip(module)
    expected = run_peer("transformers", "generate", source, job)
    assert run_peer(peer, "f32", source, job).tokens == expected.tokens


def test_llama_cpp_gets_weights_in_fewer_bits(source: ModelSource, job: Job, run_peer: Run) -> None:
    pytest.importorskip("llama_cpp")
    for name in ("f32", "q8_0", "q4_k_m"):
        assert [len(t) for t in run_peer("llama.cpp", name, source, job).tokens] == [p.output for p in job.prompts]
    full, less, least = ((source.scratch / f"target-{name}.gguf").stat().st_size for name in ("f32", "q8_0", "q4_k_m"))
    assert least < less < 0.4 * full


def test_openvino_tells_the_precision_that_it_chose(source: ModelSource, job: Job, run_peer: Run) -> None:
    pytest.importorskip("openvino_genai")
    assert run_peer("openvino", "f32", source, job).precision is None
    chosen = run_peer("openvino", "default", source, job).precision
    assert chosen is not None
    assert chosen.endswith(" cache")


def detgen_row(source: ModelSource, name: str, weights: str | None) -> tuple[DetgenPeer, Contender]:
    """A peer that keeps weights in this way, and the contender."""
    found = {(c.name, c.weights): c for c in DetgenPeer.contenders(source)}
    contender = found[name, weights]
    return DetgenPeer(source, contender, (2,)), contender


def test_detgens_rows_in_8_bits_quantize_the_target(source: ModelSource, job: Job, run_peer: Run) -> None:
    peer, contender = detgen_row(replace(source, native=True), "none", "q8")
    assert (contender.label, contender.precision, contender.fewer_bits) == ("detgen none, q8", "q8", True)
    assert peer.engine.config.target.form == "q8"
    outcome = peer.run(contender, job)
    assert [len(t) for t in outcome.tokens] == [p.output for p in job.prompts]
    assert outcome.tokens == peer.run(replace(contender, name="auto"), job).tokens
    as_asked = replace(source, engine=replace(source.engine, target_quant="q8"))
    assert outcome.tokens == detgen_row(as_asked, "none", None)[0].run(contender, job).tokens
    assert not any(c.weights for c in DetgenPeer.contenders(source)), "no native pass, no such rows"
    assert not any(c.weights for c in DetgenPeer.contenders(replace(as_asked, native=True)))


def test_weights_that_are_stored_in_16_bits_are_kept_in_them(source: ModelSource, job: Job, run_peer: Run) -> None:
    embedded = replace(source, random_weights=None, native=True)
    plain = run_peer("detgen", "none", embedded, job)
    assert plain.weights is None
    peer, contender = detgen_row(replace(embedded, as_stored=True), "none", None)
    outcome = peer.run(contender, job)
    assert peer.engine.config.target.model.dtype == torch.bfloat16
    assert (outcome.weights, outcome.tokens) == ("bfloat16", plain.tokens), "the same results"
    assert not contender.fewer_bits


def test_a_temperature_is_that_of_all_drafters(source: ModelSource, job: Job, run_peer: Run) -> None:
    hot = replace(job, temperature=1.2)
    tokens = run_peer("detgen", "none", source, hot).tokens
    assert tokens != run_peer("detgen", "none", source, job).tokens
    assert tokens == run_peer("detgen", "ngram", source, hot).tokens


def test_processor_time_is_taken_with_the_wall_time(source: ModelSource, job: Job, run_peer: Run) -> None:
    for peer, name in (("detgen", "none"), ("transformers", "generate")):
        outcome = run_peer(peer, name, source, job)
        assert outcome.cpu_seconds is not None
        assert 0.01 * outcome.seconds < outcome.cpu_seconds < (2 + 1) * outcome.seconds + 0.1
