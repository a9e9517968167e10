"""The probe: models whose rows depend on their neighbours are found out, whatever of it they depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import small_models
from helpers.torch_passes import decoders
from transformers import Gemma2Config, LlamaConfig, MixtralConfig

from detgen import Engine, EngineError, Request, SamplingParams
from detgen.kernels.attention import AttentionTraits
from detgen.passes.lean_decoder import LeanDecoderLayer
from detgen.passes.probing import reference_logits

SIZES = small_models.SIZES | {"vocab_size": 320, "eos_token_id": 0}


@pytest.fixture(autouse=True, scope="module")
def _by_torch() -> Iterator[None]:
    """What is probed are decoders of torch's operators."""
    with decoders("lean"):
        yield


Twist = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def llama(random_model: Callable[..., Path]) -> Path:
    """A model whose products keep one class of row counts here, so that any other one is a test's own doing."""
    folder = random_model(LlamaConfig(**SIZES))
    if Engine(target=folder, kv_memory=8 << 20, drafter="none").probe_report()["other_rows"]:
        pytest.skip("the products of this machine's libraries have several classes of row counts")
    return folder


@pytest.fixture
def twisted(llama: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Makes engines of a model whose layers' output goes through a function of all rows."""

    def make(twist: Twist, **settings: Any) -> Engine:
        plain = LeanDecoderLayer.forward
        monkeypatch.setattr(LeanDecoderLayer, "forward", lambda self, x, *more: twist(plain(self, x, *more)[None])[0])
        return Engine(target=llama, kv_memory=8 << 20, **{"drafter": "none", **settings})

    return make


ULP = 2.0**-22


def by_count(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + ULP * x.shape[1])


def by_place(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + ULP * torch.arange(x.shape[1])[:, None])


def by_neighbours(x: torch.Tensor) -> torch.Tensor:
    """As a quantization with one scale for all rows would."""
    step = x.abs().amax() / 2**15
    return torch.round(x / step) * step


def by_threads(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + ULP * torch.get_num_threads())


@pytest.mark.parametrize(
    ("twist", "threads"),
    [(by_place, 1), (by_neighbours, 1), (by_neighbours, 2), (by_threads, 2)],
)
def test_variant_models_are_refused(twisted: Callable[..., Engine], twist: Twist, threads: int) -> None:
    """Place, neighbours, threads: a difference in the last bits is enough."""
    torch.set_num_threads(threads)
    with pytest.raises(EngineError, match=r"not row-invariant.*--allow-nondeterministic"):
        twisted(twist)
    assert torch.get_num_threads() == threads


def test_allowed_without_the_guarantee(twisted: Callable[..., Engine], llama: Path) -> None:
    """Where it is asked for, such a model runs, and says that nothing is guaranteed."""
    engine = twisted(by_neighbours, allow_nondeterministic=True, drafter="ngram")
    assert not engine.deterministic
    assert engine.probe_report()["row_invariant"] is False
    requests = [
        Request(i, i, token_ids=(5, 6 + i), params=SamplingParams(max_tokens=8, deterministic=i != 1)) for i in range(5)
    ]
    done = engine.generate(requests)
    assert [c.error for c in done] == [None] * 5
    assert all(len(c.token_ids) == 8 or c.finish_reason == "stop" for c in done)


def test_another_kernel_above_64_rows(twisted: Callable[..., Engine], observe: Callable[..., Any]) -> None:
    """A model with two classes of row counts runs in one of them: passes keep to it, and no bit depends on packing."""
    engine = twisted(lambda x: x * (1 + ULP * (x.shape[1] > 64)), batch_size=4)
    report = engine.probe_report()
    assert report["row_invariant"]
    assert report["rows"][-1] == 64
    assert {97, 128} <= set(report["other_rows"])
    some = [
        Request(i, i, token_ids=tuple(3 + (7 * i + 3 * j) % 300 for j in range(n)), params=SamplingParams(max_tokens=6))
        for i, n in enumerate((150, 1, 70, 12))
    ]
    together = observe(engine, some)
    for request in some:
        for key, one in observe(engine, [request]).items():
            assert together[key].differs(one) is None


def test_another_kernel_below_8_rows(twisted: Callable[..., Engine], observe: Callable[..., Any]) -> None:
    """Passes of few rows are padded into the class."""
    engine = twisted(lambda x: x * (1 + ULP * (x.shape[1] < 8)), batch_size=6)
    assert engine.probe_report()["rows"][0] == 8
    some = [Request(i, i, token_ids=(9, 10 + i), params=SamplingParams(max_tokens=5)) for i in range(6)]
    together = observe(engine, some)
    for request in some:
        for key, one in observe(engine, [request]).items():
            assert together[key].differs(one) is None
    stats = engine.stats
    assert stats.rows >= 8 * stats.target_passes
    assert stats.padding_rows > 0


@pytest.mark.parametrize("drafter", ["none", "ngram", "auto"])
def test_one_row_count_is_a_class(twisted: Callable[..., Engine], observe: Callable[..., Any], drafter: str) -> None:
    """Where each row count has a kernel of its own, all passes are padded to one, and no bit depends on packing."""
    engine = twisted(by_count, batch_size=4, drafter=drafter)
    assert engine.probe_report()["rows"] == (64,)
    some = [
        Request(
            i, i, token_ids=tuple(3 + (7 * i + 3 * j) % 300 for j in range(n)), params=SamplingParams(max_tokens=12)
        )
        for i, n in enumerate((150, 1, 70, 12, 64, 65))
    ]
    together = observe(engine, some)
    assert engine.stats.rows == 64 * engine.stats.target_passes
    alone = engine.with_settings(batch_size=1, drafter="none")
    for request in some:
        for key, one in observe(alone, [request]).items():
            assert together[key].differs(one) is None


@pytest.mark.parametrize("many", [0.0, 1e9])
def test_the_reference_does_not_depend_on_what_is_tried(
    twisted: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, many: float
) -> None:
    """However few row counts are: 97 agrees with 128, but 64 comes first, even if it stays alone."""
    monkeypatch.setattr("detgen.passes.probing._MANY", many)
    engine = twisted(lambda x: x * (1 + ULP * (x.shape[1] if x.shape[1] < 90 else 0)))
    assert engine.probe_report()["rows"] == (64,)


def test_the_reference_does_not_depend_on_the_threads(twisted: Callable[..., Engine]) -> None:
    """Where 64 rows have other bits by two threads, passes of fewer rows keep those that they have by one."""

    def twist(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + ULP * (torch.get_num_threads() == 2 and x.shape[1] > 32))

    found = []
    for threads, most in ((1, 511), (2, 32)):
        torch.set_num_threads(threads)
        engine = twisted(twist)
        assert engine.probe_report()["rows"][-1] == most
        assert engine.profile()["reference_rows"] == engine.probe_report()["reference_rows"] == 64
        found.append(engine.generate(["def"], max_tokens=4)[0].token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize("place", [20, 40, 62])
def test_a_place_that_is_computed_otherwise_is_found(twisted: Callable[..., Engine], place: int) -> None:
    """In passes of 64 rows only: that row count is no class then, though its bits are its own."""

    def twist(x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[1])[:, None]
        return x * (1 + ULP * (x.shape[1] + (x.shape[1] == 64) * (at == place)))

    assert twisted(twist).probe_report()["rows"] == (128,)


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, traits: AttentionTraits
) -> torch.Tensor:
    """Attention in float64, rounded to 16 binary places: no order of summation shows, whatever the processor."""
    keys = int((mask == 0).nonzero()[:, -1].max()) + 1
    k, v, mask = k[:, :keys], v[:, :keys], mask[..., :keys]
    scores = torch.einsum("shrd,skhd->shrk", q.double(), k.double()) * traits.scale
    if traits.softcap is not None:
        scores = traits.softcap * torch.tanh(scores / traits.softcap)
    out = torch.einsum("shrk,skhd->shrd", torch.softmax(scores + mask, -1), v.double())
    return (out * 2**16).round().div(2**16).float()


@pytest.mark.parametrize(("twist", "tile_rows"), [(lambda rows: rows < 16, 16), (lambda rows: rows, 128)])
def test_attention_by_the_rows_of_its_tiles(
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    observe: Callable[..., Any],
    twist: Callable[[int], int],
    tile_rows: int,
) -> None:
    """Where few query rows have another kernel, tiles have more; where each number has its own, all have one."""

    def attend(q: torch.Tensor, *others: Any) -> torch.Tensor:
        return exact(q, *others) * (1 + ULP * twist(q.shape[2]))

    monkeypatch.setattr("detgen.passes.probing._ATTENTIONS", {"fused": attend})
    monkeypatch.setattr("detgen.passes.probing._LARGE", ())  # it is slow
    engine = Engine(target=llama, kv_memory=8 << 20, drafter="ngram", batch_size=4)
    assert engine.probe_report()["tile_rows"] == tile_rows
    some = [
        Request(i, i, token_ids=tuple(3 + (7 * i + 3 * j) % 300 for j in range(n)), params=SamplingParams(max_tokens=9))
        for i, n in enumerate((150, 1, 70, 12))
    ]
    together = observe(engine, some)
    for request in some:
        for key, one in observe(engine.with_settings(batch_size=1, drafter="none"), [request]).items():
            assert together[key].differs(one) is None


def test_the_class_of_large_passes_is_taken(twisted: Callable[..., Engine]) -> None:
    """Of two classes, the one that reads prompts 128 tokens at a time or more, not the one that ends at 11."""
    engine = twisted(lambda x: x * (1 + ULP * (x.shape[1] < 16)))
    assert engine.probe_report()["rows"][-1] >= 128


@pytest.mark.parametrize(("limits", "most"), [((9e9, 9e9), 511), ((0, 9e9), 256), ((0, 0), 128)])
def test_large_passes_are_tried_with_small_models(
    twisted: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], most: int
) -> None:
    """The largest row count below whose limit a model stays, and no smaller one beside it."""
    monkeypatch.setattr("detgen.passes.probing._LARGE", ((limits[0], 511), (limits[1], 256)))
    rows = twisted(lambda x: x).probe_report()["rows"]
    assert rows[-1] == most
    assert (256 in rows) == (most == 256)


def test_wrong_logits_are_refused(twisted: Callable[..., Engine]) -> None:
    """A model that mixes rows outside of attention computes something else when rows are packed."""
    with pytest.raises(EngineError):
        twisted(lambda x: x + 0.2 * x.roll(1, dims=1))


@pytest.fixture(scope="module")
def mixtral(random_model: Callable[..., Path]) -> Path:
    return random_model(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))


@pytest.mark.parametrize(
    ("family", "dtype", "rows", "refused"),
    [
        ("mixtral", "bfloat16", 3, False),
        ("mixtral", "bfloat16", 8, True),
        ("mixtral", "float32", 1, True),
        ("llama", "bfloat16", 1, True),
    ],
)
def test_a_row_that_went_to_another_expert_is_no_other_model(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str, rows: int, refused: bool
) -> None:
    """In 16 bits a few rows of a mixture of experts may be far off; no other row may."""

    def disturbed(*args: Any) -> torch.Tensor:
        logits = reference_logits(*args).clone()
        logits[:rows] += logits.abs().max()
        return logits

    monkeypatch.setattr("detgen.passes.preparing.reference_logits", disturbed)
    make = partial(Engine, target=request.getfixturevalue(family), drafter="none", dtype=dtype, kv_memory=8 << 20)
    if refused:
        with pytest.raises(EngineError, match="other logits than the model's own"):
            make()
    else:
        assert make().deterministic


def test_report() -> None:
    """What the probe says of the embedded model goes into the manifest: plain data, quickly found."""
    engine = Engine(drafter="none", batch_size=1, kv_memory=16 << 20)
    report = engine.probe_report()
    assert engine.deterministic
    assert report["row_invariant"] is True
    assert report["attention"] in ("fused", "blocks")
    assert len(report["rows"]) >= 2
    assert set(report["rows"]).isdisjoint(report["other_rows"])
    assert 0 < report["reference_error"] < 1e-5
    assert report["threads"] == tuple(sorted({1, torch.get_num_threads()}))
    assert report["positions"] > 0
    assert report["passes"] > 0


def test_soft_capped_tiles_are_probed_as_such(
    llama: Path, random_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attention that takes another way for them must keep its promise there, too."""

    def attend(q: torch.Tensor, *others: Any) -> torch.Tensor:
        return exact(q, *others) * (1 + ULP * (others[-1].softcap is not None and q.shape[2] < 16))

    monkeypatch.setattr("detgen.passes.probing._ATTENTIONS", {"fused": attend})
    monkeypatch.setattr("detgen.passes.probing._LARGE", ())  # it is slow
    gemma = random_model(Gemma2Config(**SIZES, head_dim=16, attn_logit_softcapping=2.0))
    plain, capped = (Engine(target=t, kv_memory=8 << 20, drafter="none").probe_report() for t in (llama, gemma))
    assert plain["tile_rows"] < 16
    assert capped["tile_rows"] == 16
