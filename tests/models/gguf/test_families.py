"""GGUF files of families that are no Llamas: what transformers makes of them, and what it leaves out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers as hf
from helpers.examples import usual
from helpers.gguf_files import drawn, plain_model
from helpers.small_models import STORED

from detgen import Engine, Request, SamplingParams
from detgen.models.gguf.header import Header
from detgen.models.gguf.models import _complete

CONVOLVED = ["conv", "full_attention"]
# Configurations, and settings of files that they do not say.
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma2": (hf.Gemma2Config(**STORED, head_dim=256, sliding_window=40), {}),
    "gemma3": (hf.Gemma3TextConfig(**STORED | {"num_hidden_layers": 7}, head_dim=256, sliding_window=40), {}),
    "gpt2": (hf.GPT2Config(vocab_size=4096, n_embd=64, n_layer=2, n_head=4, n_ctx=1024), {}),
    "lfm2": (
        hf.Lfm2Config(**STORED, layer_types=CONVOLVED, conv_L_cache=3, block_auto_adjust_ff_dim=False),
        {"attention.head_count_kv": [0, 2], "attention.layer_norm_rms_epsilon": 1e-5},
    ),
    "nemotron": (hf.NemotronConfig(**STORED), {}),
    "stablelm": (hf.StableLmConfig(**STORED), {}),
    "starcoder2": (hf.Starcoder2Config(**STORED), {}),
}
SAID: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "gemma3": (
        {"rope.freq_base_swa": 500.0},
        lambda config: config.rope_parameters["sliding_attention"].update(rope_theta=500.0),
    ),
    "starcoder2": (
        {"rope.freq_base": 500.0, "attention.sliding_window": 0},
        lambda config: (config.rope_parameters.update(rope_theta=500.0), setattr(config, "sliding_window", None)),
    ),
    "stablelm": ({"use_parallel_residual": False}, lambda config: setattr(config, "use_parallel_residual", False)),
    "nemotron": ({"attention.layer_norm_epsilon": 0.5}, lambda config: setattr(config, "norm_eps", 0.5)),
}
PROMPT = tuple(range(2, 60))


@pytest.fixture(scope="module", autouse=True)
def _names_once() -> Iterator[None]:
    """Have transformers make a map of names once a file, not for each module, which takes it most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        yield


@pytest.fixture(scope="module")
def folder(demo_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain_model(demo_models.target, tmp_path_factory.mktemp("plain") / "model")


def by_transformers(path: Path) -> Any:
    """The model as transformers reads the file."""
    how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    return hf.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **how).eval()


def check(path: Path, model: Any) -> None:
    """Compare greedy tokens and their log-probabilities with those of a model."""
    params = SamplingParams(max_tokens=12, logprobs=1, ignore_eos=True)
    (found,) = Engine(target=path, drafter="none", kv_memory=16 << 20).generate(
        [Request(0, 0, token_ids=PROMPT, params=params)]
    )
    with torch.inference_mode():
        own = model(input_ids=torch.tensor([[*PROMPT, *found.token_ids]])).logits[0, len(PROMPT) - 1 :].log_softmax(-1)
    for row, token, record in zip(own, found.token_ids, found.records, strict=False):
        assert row.max() - row[token] < 1e-4
        assert abs(row[token] - record.logprob) < 1e-4


@pytest.mark.parametrize("family", usual((family for family in FAMILIES if family not in SAID), FAMILIES))
def test_what_transformers_makes_of_it(family: str, folder: Path, tmp_path: Path) -> None:
    config, settings = FAMILIES[family]
    path = drawn(config, tmp_path / "model.gguf", folder, settings)
    check(path, by_transformers(path))


@pytest.mark.parametrize(
    ("family", "layers", "scalar"), usual([("gemma2", 3, 32), ("gemma3", 7, 32)], [("gemma2", 46, 16)])
)
def test_what_transformers_leaves_out_of_gemma(
    family: str, layers: int, scalar: int, folder: Path, tmp_path: Path
) -> None:
    """What queries are divided by, and by what frequencies of Gemma 3 are, but for those of windows."""
    config, _ = FAMILIES[family]
    config = type(config)(**STORED | {"num_hidden_layers": layers, "hidden_size": 64}, head_dim=32, sliding_window=40)
    stretched = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0} if family == "gemma3" else {}
    path = drawn(config, tmp_path / "model.gguf", folder, stretched)
    read = by_transformers(path)
    right = read.config
    right.query_pre_attn_scalar = scalar
    if stretched:
        right.rope_parameters["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    model = type(read)(right).eval()
    model.load_state_dict(read.state_dict())
    check(path, model)


@pytest.mark.parametrize("family", SAID)
def test_what_llama_cpp_writes_and_transformers_leaves_out(family: str, folder: Path, tmp_path: Path) -> None:
    config, settings = FAMILIES[family]
    said, change = SAID[family]
    path = drawn(config, tmp_path / "model.gguf", folder, settings | said)
    read = by_transformers(path)
    change(read.config)
    model = type(read)(read.config).eval()
    model.load_state_dict(read.state_dict())
    check(path, model)


def test_a_phi_3_that_is_not_stretched() -> None:
    """Its files have the length before it all the same."""
    config = hf.Phi3Config()
    _complete(config, Header("phi3", {"phi3.rope.scaling.original_context_length": 2048}, {}, {}))
    assert config.original_max_position_embeddings == 2048


def test_a_gpt_2_of_few_positions(folder: Path, tmp_path: Path) -> None:
    config = hf.GPT2Config(vocab_size=4096, n_embd=64, n_layer=2, n_head=4, n_ctx=96, n_positions=96)
    assert Engine(target=drawn(config, tmp_path / "model.gguf", folder, {})).context == 96
