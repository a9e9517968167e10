from __future__ import annotations

from dataclasses import replace

import pytest

from detgen.bench.interface import Job, ModelSource, Outcome
from detgen.bench.peers import NAMES, make_peer
from detgen.bench.peers.clock import Clock


def run(name: str, variant: str, source: ModelSource, job: Job) -> Outcome:
    peer = make_peer(name)
    chosen = next(v for v in peer.variants(source) if v.name == variant)
    peer.load(source, chosen, (1, 2, 4))
    return peer.run(chosen, job)


@pytest.fixture(scope="module")
def reference() -> list[list[list[int]]]:
    """The tokens of the first peer that has run, to be equal to all others."""
    return []


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("transformers", "generate"),
        ("transformers-continuous", "generate_batch"),
        ("detgen", "fast path"),
        ("detgen", "none"),
        ("detgen", "self"),
        ("detgen", "auto"),
        ("detgen", "synthetic"),
    ],
)
def test_all_peers_give_the_same_tokens_as_many_as_asked_for(
    name: str, variant: str, source: ModelSource, job: Job, reference: list[list[list[int]]]
) -> None:
    if variant == "synthetic":
        job = replace(job, acceptance=0.5)
    outcome = run(name, variant, source, job)
    assert [len(t) for t in outcome.tokens] == [p.output for p in job.prompts]
    reference.append(outcome.tokens)
    assert outcome.tokens == reference[0]
    assert all(0 < first <= last <= outcome.seconds for first, last in zip(outcome.first, outcome.last, strict=True))
    if name == "detgen":
        assert outcome.passes == outcome.counts["target_passes"] + outcome.counts["fast_passes"]
        assert (outcome.counts["fast_passes"] > 0) == (variant in ("fast path", "self"))
    if variant == "synthetic":
        assert outcome.counts["draft_passes"] > 0
        assert 0 < outcome.counts["accepted"] < outcome.counts["drafted"]


def test_counts_are_those_of_the_job_alone(source: ModelSource, job: Job) -> None:
    peer = make_peer("detgen")
    none = next(v for v in peer.variants(source) if v.name == "none")
    peer.load(source, none, (2,))
    first, second = (peer.run(none, job) for _ in range(2))
    assert first.counts == second.counts
    assert second.counts["target_passes"] > 0


def test_partly_verified_jobs_mix(source: ModelSource, job: Job) -> None:
    mixed = replace(job, deterministic=(True, False, True, False, True), batch_size=4)
    outcome = run("detgen", "none", source, mixed)
    assert outcome.counts["target_passes"] > 0
    assert outcome.passes < run("detgen", "none", source, replace(mixed, deterministic=(False,) * 5)).passes


def test_assisted_generation_runs_the_embedded_pair_alone(source: ModelSource, job: Job) -> None:
    assert make_peer("transformers-assisted").variants(source) == []
    embedded = replace(source, random_weights=None)
    assisted = run("transformers-assisted", "generate", embedded, replace(job, batch_size=1))
    plain = run("transformers", "generate", embedded, replace(job, batch_size=1))
    assert assisted.tokens == plain.tokens
    assert assisted.passes is not None
    assert plain.passes is not None
    assert assisted.passes < plain.passes


def test_peers_tell_where_they_do_not_run(source: ModelSource) -> None:
    for name in NAMES:
        variants = make_peer(name).variants(source)
        assert (not variants) == (name in ("transformers-assisted", "vllm", "sglang")), name
        if name in ("vllm", "sglang"):
            there = make_peer(name).variants(replace(source, device="cuda", dtype="bfloat16"))
            assert [v.precision for v in there] == ["bfloat16"] * 2
            assert there[0].process != there[1].process
    invariant = make_peer("vllm").variants(replace(source, device="cuda"))[1]
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


@pytest.mark.parametrize(("name", "module"), [("openvino", "openvino_genai"), ("llama.cpp", "llama_cpp")])
def test_peers_beside_torch_give_the_same_tokens_in_float32(
    name: str, module: str, source: ModelSource, job: Job
) -> None:
    pytest.importorskip(module)
    assert run(name, "f32", source, job).tokens == run("transformers", "generate", source, job).tokens


def test_openvino_tells_the_precision_that_it_chose(source: ModelSource, job: Job) -> None:
    pytest.importorskip("openvino_genai")
    assert run("openvino", "f32", source, job).precision is None
    chosen = run("openvino", "default", source, job).precision
    assert chosen is not None
    assert chosen.endswith(" cache")
