"""Decoders that no native decoder knows: their own forward on native functions, and the census of what else it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from helpers.examples import examples, usual
from helpers.families import OWN_FORWARD
from helpers.threads import using
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer

from detgen import Engine, EngineError
from detgen.kernels.generic.generic_decoder import GenericDecoder
from detgen.kernels.input_batch import Window
from detgen.program.arrays import same_bits, tensor
from detgen.runner import reference

MOST = 512


def make(folder: Path, **settings: Any) -> Engine:
    return Engine(target=folder, drafter="none", kv_memory=32 << 20, **settings)


@pytest.fixture(scope="module", params=usual(["gemma", "olmo", "nemotron", "biogpt", "axk1"], OWN_FORWARD))
def folder(request: pytest.FixtureRequest, random_model: Callable[..., Path]) -> Path:
    return random_model(OWN_FORWARD[request.param]())


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return make(folder)


@pytest.fixture(scope="module")
def alone(engine: Engine) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Logits and cache entries of a sequence read one token at a time by one thread."""
    forward = engine.canonical
    forward.cache.pages.lay_out(1, 128)
    with using(1):
        logits = [forward.run([Window(0, at, [token], 1)]) for at, token in enumerate(SEQUENCE)]
    return np.concatenate(logits), forward.cache.entries(0, 0, len(SEQUENCE))


@pytest.fixture(scope="module", autouse=True)
def _close() -> Iterator[None]:
    """Logits are transformers' own up to a hundredth of what loading allows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_EXACT", 1e-5)
        yield


SEQUENCE = [(7 * i + i * i) % 60 + 2 for i in range(90)]


def test_its_bits_rest_on_nothing_else(engine: Engine) -> None:
    """Whatever else these forwards run only moves entries or rounds once, and the logits are transformers' own."""
    assert isinstance(engine.canonical.decoder, GenericDecoder)
    profile = engine.profile()
    assert profile["arithmetic"] == "detgen-2"
    assert profile.keys() == {"target", "dtype", "kv_dtype", "arithmetic", "versions"}
    assert profile["versions"] == {"transformers": hf.__version__}


@torch.no_grad()
def test_logits_are_those_of_transformers(folder: Path, alone: Any) -> None:
    """But for rounding, beyond sliding windows too."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    own = model(torch.tensor([SEQUENCE])).logits[0]
    assert (tensor(alone[0]) - own).abs().max() <= 1e-5 * own.abs().max()


@examples(12)
@given(
    rows=st.integers(2, MOST) | st.sampled_from([85, 110, 123, 511, 512]),
    tokens=st.integers(1, 60),
    start=st.integers(0, 29),
    place=st.floats(0, 1),
    threads=st.integers(1, 3),
)
def test_a_row_is_the_same_among_any(
    engine: Engine, alone: Any, rows: int, tokens: int, start: int, place: float, threads: int
) -> None:
    """Logits and cache entries have the bits that they have alone, at any row count, place and number of threads."""
    forward = engine.canonical
    forward.cache.pages.lay_out(3, 640)
    logits, cached = alone
    tokens = min(tokens, rows)
    before = int(place * (rows - tokens))
    windows = [Window(1, 3, [5] * before, 1)] if before else []
    if start:
        forward.run([Window(0, 0, SEQUENCE[:start], 0)])
    windows.append(Window(0, start, SEQUENCE[start : start + tokens], tokens))
    if rows - tokens - before:
        windows.append(Window(2, 9, [6] * (rows - tokens - before), 1))
    with using(threads):
        found = forward.run(windows)
    first = 1 if before else 0
    assert same_bits(found[first : first + tokens], logits[start : start + tokens])
    for a, b in zip(forward.cache.entries(0, 0, start + tokens), cached, strict=True):
        assert same_bits(a, np.ascontiguousarray(b[:, : start + tokens]))


def test_weights_in_16_bits_give_the_bits_of_wide_ones(random_model: Callable[..., Path], tmp_path: Path) -> None:
    """They are kept as they are in linear layers and experts, and widened when they are read."""
    folder = random_model(OWN_FORWARD["axk1"]())
    model = hf.AutoModelForCausalLM.from_pretrained(folder).bfloat16()
    for part, dtype in (("narrow", torch.bfloat16), ("wide", torch.float32)):
        model.to(dtype).save_pretrained(tmp_path / part)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / part / file).write_bytes((folder / file).read_bytes())
    found = []
    for part in ("narrow", "wide"):
        engine = make(tmp_path / part)
        forward = engine.canonical
        forward.cache.pages.lay_out(1, 128)
        found.append(forward.run([Window(0, 0, SEQUENCE, 9)]))
        assert engine.profile()["dtype"] == "float32"
    assert same_bits(*found)


@pytest.fixture(scope="module")
def gemma(random_model: Callable[..., Path]) -> Path:
    return random_model(OWN_FORWARD["gemma"]())


@pytest.fixture
def twisted(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Makes engines of a model whose layers' results, [1, rows, hidden], go through a function."""

    def twist(function: Callable[[torch.Tensor], torch.Tensor], **settings: Any) -> Engine:
        plain = GemmaDecoderLayer.forward
        monkeypatch.setattr(GemmaDecoderLayer, "forward", lambda *a, **k: function(plain(*a, **k)))
        return make(gemma, **settings)

    return twist


KEPT = torch.zeros(48)
MIXTURES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "mean over rows": (lambda x: x + x.mean(1, keepdim=True) * 1e-9, "aten.mean.dim mixes rows"),
    "sum of all": (lambda x: x + x.sum() * 0, "aten.sum.default mixes rows"),
    "sum along rows": (lambda x: x + x.cumsum(1) * 0, "aten.cumsum.default mixes rows"),
    "largest of rows": (lambda x: x + x.amax(1, keepdim=True) * 0, "aten.amax.default mixes rows"),
    "next row": (lambda x: x + x.roll(1, 1) * 0, "aten.add.Tensor mixes rows"),
    "product of rows": (lambda x: x + x @ (x.transpose(1, 2) @ x) * 0, "aten.bmm.default mixes rows"),
    "number of rows": (lambda x: x * (1 + 0 * x.shape[1]) + 1e-9 * x.shape[1], "aten.add.Tensor mixes rows"),
    "place": (lambda x: x + 1e-9 * torch.arange(x.shape[1])[None, :, None], "aten.arange.default mixes rows"),
    "what a row holds": (lambda x: x * 2 if x[0, 0, 0] > 1e9 else x, "aten._local_scalar_dense.default tells"),
    "a list of it": (lambda x: x * (2 if x[0, 0, 0].tolist() > 1e9 else 1), "tolist tells"),
    "another way": (lambda x: x if x.shape[1] == 1 else x.neg().neg(), "aten.neg.default is not called in passes"),
    "chance": (lambda x: x + 0 * torch.rand(48), "aten.rand.default is random"),
    "what stays": (lambda x: x + KEPT.add_(0), "aten.add_.Tensor changes what outlives a pass"),
    "a scan": (
        lambda x: torch.nn.functional.conv1d(x.transpose(1, 2), torch.eye(48)[..., None]).transpose(1, 2),
        "conv",
    ),
    "the end of a vector": (
        lambda x: x * torch.special.expit(x[..., :1].contiguous()),
        "aten.sigmoid.default gives a row other bits beside others",
    ),
}


# Others are found as these are.
ALIKE = {"sum of all", "sum along rows", "largest of rows", "a list of it"}


@pytest.mark.parametrize("name", usual([name for name in MIXTURES if name not in ALIKE], MIXTURES))
def test_a_planted_operator_is_refused_by_its_name(twisted: Callable[..., Engine], name: str) -> None:
    """By what it is, though most of these change no bit, or hardly any."""
    function, reason = MIXTURES[name]
    with pytest.raises(EngineError, match=r"not row-invariant by its own forward: .*depend on the batch") as caught:
        twisted(function)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_profile_names_what_was_proved(twisted: Callable[..., Engine]) -> None:
    """And what its bits rest on: torch and the processor."""
    profile = twisted(lambda x: x + 1e-6 * torch.exp(x.clamp(max=9.0))).profile()
    assert profile["arithmetic"] == "detgen-2 and torch"
    assert profile["operators"] == ["aten.exp.default"]
    assert profile["versions"].keys() == {"torch", "transformers"}
    assert profile["capability"] == torch.backends.cpu.get_cpu_capability()


def test_functions_of_torch_are_replaced(twisted: Callable[..., Engine]) -> None:
    """Wherever a forward calls them: the bits rest on detgen's own then."""

    def function(x: torch.Tensor) -> torch.Tensor:
        size = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + 0.01 * (torch.sigmoid(x[..., :1]) * torch.tanh(x) * size + x.softmax(-1))

    engine = twisted(function)
    assert engine.profile()["arithmetic"] == "detgen-2"
