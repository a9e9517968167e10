"""Each supported family of transformers models: equal bits under every packing, and the model's own `generate`.

The default profile tries families that together have all kinds of steps, and all that steps can be told; the bits of
every family are known in `tests/test_frozen.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from helpers.engine_inputs import adversary
from helpers.examples import thorough, usual
from helpers.families import DESCRIBED, FALCON, ROUTED, ROWS, USUAL_FAMILIES
from helpers.oracle import Passes

from detgen import Engine, EngineError, Request, SamplingParams
from detgen.models.wrappers import auto_class
from detgen.program.operands import Into
from detgen.program.program import Program
from detgen.program.steps import Linear, Score

NEW = 16

USUAL_ROWS = ("phimoe", "gemma3n_two", "mamba2", "minicpm3", "gpt_bigcode", "cohere2_moe")

# Families that must be refused, the class and what the message says of the reason.
REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "xglm": (
        lambda: hf.XGLMConfig(vocab_size=320, d_model=64, num_layers=3, attention_heads=4, ffn_dim=96),
        "XGLMForCausalLM",
        "AttentionInterface",
    ),
    "solar_open": (
        lambda: hf.SolarOpenConfig(
            **{**ROUTED, "head_dim": 18, "n_routed_experts": 6, "n_group": 3, "topk_group": 1, "n_shared_experts": 1}
        ),
        "SolarOpenForCausalLM",
        "does not know groups of 2 experts, which are too small for 3 of them",
    ),
    "bloom_without_biases": (
        lambda: hf.BloomConfig(
            vocab_size=320, hidden_size=64, n_layer=2, n_head=4, pretraining_tp=2, slow_but_exact=True
        ),
        "BloomForCausalLM",
        "does not know slow_but_exact",
    ),
    "falcon_rw": (lambda: hf.FalconConfig(**FALCON, alibi=True), "FalconForCausalLM", "AttentionInterface"),
}


def requests() -> list[Request]:
    """Prompts of one token, shorter and longer than the sliding window, and than the largest pass."""
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 320) for _ in range(n)] for n in (1, 5, 37, 60, 150, 11)]
    prompts[3] = prompts[3][:12] * 5  # something for the look-up to find
    found = [
        Request(i, f"p{i}", token_ids=tuple(p), params=SamplingParams(max_tokens=NEW)) for i, p in enumerate(prompts)
    ]
    found[2] = found[2].with_params(temperature=0.8, top_p=0.9, seed=5)
    return found


@pytest.fixture(scope="module", params=usual(USUAL_FAMILIES, DESCRIBED))
def folder(request: pytest.FixtureRequest, random_model: Callable[..., Path]) -> Path:
    return random_model(DESCRIBED[request.param]())


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(target=folder, drafter="none", batch_size=1, kv_memory=2 << 20)


@pytest.fixture(scope="module")
def reference(engine: Engine, observe: Callable[..., Any]) -> Any:
    """The family's requests one at a time, without drafts."""
    return observe(engine, requests())


def test_it_is_native(engine: Engine) -> None:
    """Its passes are those of the stated arithmetic."""
    assert engine.profile()["arithmetic"] == "detgen-2"


@pytest.fixture(scope="module")
def usual_parts() -> set[tuple[Any, ...]]:
    """What programs of usual families have; they come first."""
    return set()


def parts(program: Program) -> set[tuple[Any, ...]]:
    """Kinds of steps, each choice of theirs, and which fields say something."""
    found: set[tuple[Any, ...]] = set()
    for step in program.steps:
        of = type(step)
        found |= {(of,), (of, "wanted", step.wanted)}
        for field in fields(step):
            told = getattr(step, field.name)
            if isinstance(told, Into):
                found |= {(of, "add", told.add), (of, "factor", told.factor != 1)}
            elif isinstance(told, bool | Enum):
                found.add((of, field.name, told))
            elif told is not None and (not isinstance(told, int | float) or told != field.default):
                found.add((of, field.name))
    return found


@thorough
def test_usual_families_have_all_that_it_has(
    request: pytest.FixtureRequest, engine: Engine, usual_parts: set[tuple[Any, ...]]
) -> None:
    """So a family that has something new is a usual one."""
    found = parts(engine.canonical.decoder.program())
    if request.node.callspec.params["folder"] in USUAL_FAMILIES:
        usual_parts |= found
    elif not usual_parts:
        pytest.skip("no usual family was asked for")
    assert found <= usual_parts, found - usual_parts


SETTINGS: dict[str, tuple[dict[str, Any], bool]] = {  # and whether requests come backwards
    "none": ({"drafter": "none", "batch_size": 4}, True),
    "ngram": ({"drafter": "ngram", "batch_size": 3, "draft_tokens": 5}, True),
    "self": ({"drafter": "self", "batch_size": 3, "draft_tokens": 4}, False),
    "adversary": ({"drafter": adversary, "batch_size": 6, "draft_tokens": 4}, False),
}


@pytest.mark.parametrize("name", usual(["ngram", "adversary"], SETTINGS))
def test_packing_does_not_change_a_bit(engine: Engine, reference: Any, observe: Callable[..., Any], name: str) -> None:
    """Neighbours, chunks, slots and drafts leave tokens, log-probabilities, logits and KV entries as they are."""
    settings, backwards = SETTINGS[name]
    some = requests()
    unverified = Request(
        99, "unverified", token_ids=tuple(range(3, 90)), params=SamplingParams(max_tokens=9, deterministic=False)
    )
    order = [unverified, *some[::-1]] if backwards else [*some[3:], unverified, *some[:3]]
    found = observe(engine.with_settings(**settings), order)
    assert len(found) == len(order)
    for key, one in reference.items():
        assert found[key].differs(one) is None, key


def test_its_passes_are_those_of_the_interpreter(engine: Engine, compared: Passes) -> None:
    """Logits and scores, keys and values: of chunks, windows and single rows, below the window and behind it."""
    prompts = [[11, *range(7, 7 + n)] for n in (5, 37, 60)]  # of which nothing is known yet
    some = [Request(i, i, token_ids=tuple(p), params=SamplingParams(max_tokens=3)) for i, p in enumerate(prompts)]
    some[1] = some[1].with_params(temperature=0.8, seed=5)
    list(engine.with_settings(drafter="ngram", draft_tokens=4, batch_size=2).stream(some))
    assert {kind for kind, _ in compared} == {Linear, Score}
    assert len({rows for _, rows in compared}) > 3


def test_a_broken_token_stays_with_its_request(engine: Engine, reference: Any, observe: Callable[..., Any]) -> None:
    """A request with a token whose embedding is NaN ends there; the others keep every bit."""
    used = {t for one in reference.values() for t in one.completion.token_ids}
    used |= {t for r in requests() for t in r.token_ids or ()}
    token = next(t for t in range(319, 0, -1) if t not in used)
    words = (requests()[4].token_ids or ())[:100]
    broken = [
        Request(50 + at, f"broken {at}", token_ids=(*words[:at], token, *words), params=SamplingParams(max_tokens=3))
        for at in (0, 30, 90)
    ]
    for settings in ({"drafter": "none", "batch_size": 1}, {"drafter": adversary, "batch_size": 3, "draft_tokens": 4}):
        packed = engine.with_settings(**settings)
        with packed.canonical.decoder.breaking(token):
            found = observe(
                packed, [r for pair in zip(broken, requests(), strict=False) for r in pair] + requests()[3:]
            )
        for key, one in reference.items():
            assert found[key].differs(one) is None, key
        for at in (0, 30, 90):
            error = found[f"broken {at}", 0].completion.error
            assert error is not None
            assert error.endswith(f"at position {at} (token {at} of the prompt)")


def test_agrees_with_generate(folder: Path, engine: Engine, reference: Any) -> None:
    """Greedy tokens are those of transformers' float32 `generate`; logits agree to rounding.

    Of layers with states, transformers reads prompts in chunks, by which its own error is up to 2.2e-4 here.
    """
    check_agreement(folder, reference, *_bounds(engine))


@pytest.mark.parametrize("family", usual(USUAL_ROWS, ROWS))
def test_a_family_of_one_row(family: str, random_model: Callable[..., Path], observe: Callable[..., Any]) -> None:
    """The same, and equal bits in windows beside others."""
    folder = random_model(ROWS[family]())
    engine = Engine(target=folder, drafter="none", batch_size=1, kv_memory=2 << 20)
    assert engine.profile()["arithmetic"] == "detgen-2"
    alone = observe(engine, requests())
    beside = observe(engine.with_settings(drafter=adversary, batch_size=6, draft_tokens=4), requests())
    assert [key for key, one in alone.items() if beside[key].differs(one) is not None] == []
    check_agreement(folder, alone, *_bounds(engine))


@pytest.mark.parametrize("family", ["afmoe", "hunyuan_moe", "gemma4_experts", "nemotron_h_short"])
def test_linear_layers_of_experts_in_few_bits(family: str, random_model: Callable[..., Path]) -> None:
    """Loading compares them with the model's own forward, in which the same layers are in few bits: not routers."""
    folder = random_model((DESCRIBED | ROWS)[family]())
    assert Engine(target=folder, drafter="none", kv_memory=2 << 20, target_quant="q4_k").profile()["target"]


@pytest.mark.parametrize("rope", ["default", "dynamic"])
def test_experts_of_an_odd_size(rope: str, random_model: Callable[..., Path]) -> None:
    """transformers' faster ways to compute experts refuse them; its eager way is asked, in loaded weights, too."""
    settings = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    config = DESCRIBED["qwen3_moe"]()
    config.moe_intermediate_size, config.rope_parameters = 21, settings
    assert Engine(target=random_model(config), drafter="none", kv_memory=2 << 20).profile()["arithmetic"] == "detgen-2"


def _bounds(engine: Engine) -> tuple[float, float]:
    """See `check_agreement`."""
    return (2e-5, 1e-4) if engine.canonical.cache.states is None else (3e-4, 3e-3)


def check_agreement(folder: Path, reference: Any, error: float, tie: float) -> None:
    """Compare what was generated with what transformers generates.

    Logits may differ by `error` of the largest one, and tokens where the two best differ by less than `tie`.
    """
    plain: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = auto_class(hf.AutoConfig.from_pretrained(folder)).from_pretrained(folder, **plain).eval()
    compared = 0
    for (name, _), one in reference.items():
        completion = one.completion
        if completion.request.params.temperature:
            continue
        ids = torch.tensor([completion.request.token_ids])
        own = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=0,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        theirs = own.sequences[0, ids.shape[1] :].tolist()
        ours = torch.cat(one.logits)
        for i, (a, b) in enumerate(zip(completion.token_ids, theirs, strict=False)):
            row = own.logits[i][0].float()
            assert (ours[i] - row).abs().max() <= error * row.abs().max(), (name, i)
            compared += 1
            if a != b:
                top = row.topk(2).values
                assert top[0] - top[1] < tie, (name, i)
                break
        else:
            assert len(completion.token_ids) == len(theirs)
    assert compared >= 3 * NEW


@pytest.mark.parametrize("family", REFUSED)
def test_refused_by_name(family: str, random_model: Callable[..., Path]) -> None:
    """A model that does not go through transformers' attention interface throughout is refused, and why is said.

    So is what keeps it from running by its family's row.
    """
    config, kind, reason = REFUSED[family]
    with pytest.raises(EngineError, match=rf"{kind}.*not supported.*{reason}"):
        Engine(target=random_model(config()), drafter="none", kv_memory=16 << 20)


def test_settings_that_transformers_does_not_read_are_refused(random_model: Callable[..., Path]) -> None:
    """No comparison with its forward can tell what they change."""
    config = hf.MptConfig(vocab_size=320, d_model=64, n_layers=2, n_heads=4, attn_config={"alibi_bias_max": 16})
    with pytest.raises(EngineError, match=r"transformers does not read its attn_config.alibi_bias_max \(16\)"):
        Engine(target=random_model(config), drafter="none", kv_memory=2 << 20)
