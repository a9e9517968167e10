"""Plain decoders in GGUF files are what transformers makes of them; what is not understood is left to it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import invoke
from helpers.examples import examples, usual
from helpers.gguf_files import bits_of, loaded
from helpers.plain_gguf import CONTROL, KINDS, NAMES, NORMAL, ROWS, file_of, made_of, pieces, vocabulary
from hypothesis import given
from hypothesis import strategies as st

from detgen import Engine
from detgen.errors import EngineError
from detgen.models import keeping
from detgen.models.byte_letters import byte_letters
from detgen.models.gguf import models as gguf_models
from detgen.models.gguf.header import list_of, read_header
from detgen.models.gguf.loading import asking
from detgen.models.gguf.places import kept_places
from detgen.models.gguf.plain import Plain
from detgen.models.kept_tokenizer import facts_of
from detgen.models.loaded import LoadedModel
from detgen.models.loading import load_model
from detgen.models.settings import context_of
from detgen.models.skeleton import model_of, skeleton_of
from detgen.program.arrays import same_bits
from detgen.runner.own_forward import ask

FORMATS = (
    *(("F32",), ("F16",), ("BF16",), ("Q8_0",), ("Q4_0",), ("Q4_1",), ("Q5_0",), ("Q5_1",)),
    ("Q8_0", "Q4_1", "F32", "F16", "Q4_0"),
)


def check_within(found: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Each thing that a module has, transformers' has, too, and each part."""
    assert (found["class"], found["torch"]) == (theirs["class"], theirs["torch"])
    assert found.get("config", 0) == theirs.get("config", 0)
    assert found["settings"].items() <= theirs["settings"].items()
    given = [{name: index is None for name, index in one["parameters"].items()} for one in (found, theirs)]
    assert given[0] == given[1]
    lasting = {name for name in theirs["buffers"] if "original" not in name}  # others are for lengths that change it
    assert found["buffers"].keys() == lasting
    for name, numbers in found["buffers"].items():
        np.testing.assert_allclose(numbers, theirs["buffers"][name], rtol=4e-7, atol=0)
    assert found["modules"].keys() == theirs["modules"].keys()
    for name, part in found["modules"].items():
        check_within(part, theirs["modules"][name])


def check_same(path: Path) -> Plain:
    """What is made of a file is what transformers makes of it."""
    header, found = read_header(path, "x"), made_of(path)
    assert found is not None
    config, tokenizer = gguf_models.settings(path, header)
    model, read = gguf_models.empty_model(config, header, path)
    theirs = skeleton_of(model)
    assert theirs is not None
    check_within(found.skeleton["modules"], theirs["modules"])
    (mine,), (of,) = found.skeleton["configs"], theirs["configs"]
    assert mine == {name: of[name] for name in mine}
    shapes = [{n: p.shape for n, p in model_of(one).named_parameters()} for one in (found.skeleton, theirs)]
    assert shapes[0] == shapes[1]
    assert found.skeleton["unread"] == theirs["unread"]
    kept = kept_places(read)
    assert kept is not None
    assert (found.places, found.orders.keys()) == (kept[0], kept[1].keys())
    assert all(np.array_equal(order, kept[1][name]) for name, order in found.orders.items())
    assert context_of(model_of(found.skeleton).config) == context_of(config)
    state = found.tokenizer["state"].to_str()
    assert {**found.tokenizer, "state": state} == facts_of(tokenizer, path)
    return found


VARIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "tied": ("llama", {"tied": True}),
    "one key head": ("llama", {"attention__head_count_kv": 1}),
    "a stretched rotary embedding": ("llama", {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}),
    "no stretched one": ("llama", {"rope__scaling__type": "none"}),
    "factors": ("llama", {"more": [("rope_freqs.weight", np.linspace(1, 8, 16, dtype=np.float32))]}),
    "wide heads": (
        "llama",
        dict.fromkeys(("attention__key_length", "attention__value_length", "rope__dimension_count"), 48),
    ),
    "tiny heads": ("llama", {"attention__head_count": 64, "attention__head_count_kv": 64}),
    "sizes of heads are not said": (
        "llama",
        dict.fromkeys(("attention__key_length", "attention__value_length", "rope__dimension_count", "vocab_size")),
    ),
    "Qwen2": ("qwen2", {"rope__freq_base": 1e6}),
    "Qwen2, tied": ("qwen2", {"tied": True}),
    "Qwen2, stretched": ("qwen2", {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0}),
    "Qwen3": ("qwen3", {}),
    "Qwen3, wide heads": (
        "qwen3",
        {
            "tied": True,
            **dict.fromkeys(("attention__key_length", "attention__value_length", "rope__dimension_count"), 64),
        },
    ),
    "pieces with a space": ("llama", {"tokenizer": pieces(ggml__add_space_prefix=True)}),
    "Phi-3": ("phi3", {}),
    "Phi-3 with a window": ("phi3", {"attention__sliding_window": 63, "tied": True}),
    "Gemma 2": ("gemma2", {"tokenizer": pieces(ggml__add_space_prefix=False, ggml__pre="default")}),
    "Gemma 2, other bounds of logits": ("gemma2", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "the largest Gemma 2": (
        "gemma2",
        {
            **{"block_count": 46, "attention__head_count_kv": 1},
            **dict.fromkeys(("attention__key_length", "attention__value_length", "rope__dimension_count"), 48),
        },
    ),
    "Gemma 3": ("gemma3", {"block_count": 7}),
    "Gemma 3, stretched": (
        "gemma3",
        {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0, "rope__freq_base_swa": 500.0, "block_count": 6},
    ),
    "the largest Gemma 3": ("gemma3", {"block_count": 62, "attention__head_count_kv": 1}),
    "Mixtral": ("mixtral", {}),
    "Qwen2's mixture": ("qwen2moe", {}),
    "Qwen3's mixture": ("qwen3moe", {"expert_used_count": 3}),
}


REST = ("tied", "one key head", "no stretched one", "Qwen2, stretched", "Qwen3, wide heads", "Phi-3")
REST += ("the largest Gemma 2", "the largest Gemma 3")


@pytest.mark.parametrize("name", usual((name for name in VARIATIONS if name not in REST), VARIATIONS))
def test_modules_and_bits_are_those_of_transformers(
    name: str, tmp_path: Path, quickly: Callable[..., LoadedModel]
) -> None:
    """Preparing what transformers made compares it with its own forward."""
    kind, said = VARIATIONS[name]
    path = file_of(tmp_path / "model.gguf", kind, **said)
    check_same(path)
    quick, asked = quickly(path), loaded(path)
    assert quick.own is not None
    assert (quick.own.reference, asked.own) == (None, None)
    found = [(one.context, one.vocabulary, one.eos, one.digest, one.packed_bytes) for one in (quick, asked)]
    assert found[0] == found[1]
    assert same_bits(bits_of(quick), bits_of(asked))
    layout = ask(loaded(path), loaded(path).model, compared=False).layout
    assert (quick.own.layout.cached, quick.own.layout.traits) == (layout.cached, layout.traits)
    assert (quick.own.layout.group, quick.own.layout.states) == (layout.group, layout.states)


@examples(80)
@given(
    kind=st.sampled_from([*KINDS]),
    tied=st.booleans(),
    kept=st.integers(1, 3),
    group=st.integers(1, 3),
    size=st.integers(1, 5).map(lambda n: 2 * n),
    inner=st.integers(1, 40),
    base=st.floats(2, 1e7, width=32),
    epsilon=st.floats(2**-20, 0.5, width=32),
    factor=st.none() | st.floats(1, 64, width=32),
    context=st.integers(1, 2**20),
    window=st.integers(1, 300),
    experts=st.integers(1, 6),
    layers=st.integers(1, 7),
)
def test_whatever_the_settings_are(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    tied: bool,
    kept: int,
    group: int,
    size: int,
    inner: int,
    base: float,
    epsilon: float,
    factor: float | None,
    context: int,
    window: int,
    experts: int,
    layers: int,
) -> None:
    said: dict[str, Any] = {}
    if factor is not None and kind != "phi3":
        said = {"rope__scaling__type": "linear", "rope__scaling__factor": factor}
    if kind.startswith(("phi", "gemma")):
        said["attention__sliding_window"] = window
    if kind == "phi3":
        said["rope__scaling__original_context_length"] = context
    if "expert_count" in KINDS[kind]:
        said |= {"expert_count": experts, "expert_used_count": -(-experts // 2)}
    path = file_of(
        tmp_path_factory.mktemp("drawn") / "model.gguf",
        kind,
        tied=tied,
        attention__head_count=kept * group,
        attention__head_count_kv=kept,
        embedding_length=kept * group * size,
        feed_forward_length=inner,
        rope__freq_base=base,
        attention__layer_norm_rms_epsilon=epsilon,
        context_length=context,
        block_count=layers,
        **said,
    )
    check_same(path)


@pytest.mark.parametrize("types", FORMATS, ids=" ".join)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_bits_in_each_format(
    types: tuple[str, ...], dtype: Any, tmp_path: Path, quickly: Callable[..., LoadedModel]
) -> None:
    path = file_of(tmp_path / "model.gguf", types=types, tied=True)
    quick, asked = quickly(path, dtype), load_model(path, path.name, dtype, "none")
    assert quick.packed_bytes == asked.packed_bytes
    assert same_bits(bits_of(quick, exactly=False), bits_of(asked, exactly=False))


def test_lists_of_a_header(tmp_path: Path) -> None:
    path = file_of(tmp_path / "model.gguf")
    header = read_header(path, "x")
    tokens = list_of(path, header, "tokenizer.ggml.tokens")
    assert (tokens[:256], tokens[258:]) == (byte_letters(), list(NAMES))
    assert list_of(path, header, "tokenizer.ggml.token_type")[257:260] == [NORMAL, CONTROL, CONTROL]
    with pytest.raises(ValueError, match="no list"):
        list_of(path, header, "tokenizer.ggml.scores")


def bad_merges(writer: Any) -> None:
    """A tokenizer that there cannot be."""
    vocabulary()(writer)
    writer.kv_data[0]["tokenizer.ggml.merges"].value[0] = "a nothing"


OTHERS: dict[str, dict[str, Any]] = {
    "a setting that no one knows": {"rope__nonsense": 3},
    "a setting of another kind": {"context_length": 256.0},
    "a window": {"attention__sliding_window": 128},
    "YaRN": {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0},
    "a factor of nothing": {"rope__scaling__factor": 4.0},
    "a factor that shrinks": {"rope__scaling__type": "linear", "rope__scaling__factor": 0.5},
    "experts": {"expert_count": 4},
    "heads of several sizes": {"attention__value_length": 16},
    "part of a head is rotated": {"rope__dimension_count": 16},
    "no base": {"rope__freq_base": None},
    "a base of 1": {"rope__freq_base": 1.0},
    "no epsilon": {"attention__layer_norm_rms_epsilon": None},
    "key heads that do not fit": {"attention__head_count_kv": 3},
    "a width that is not one of heads": {
        "embedding_length": 130,
        **dict.fromkeys(("attention__key_length", "attention__value_length", "rope__dimension_count"), 32),
    },
    "no key heads": {"attention__head_count_kv": None},
    "no context": {"context_length": 0},
    "another number of tokens": {"vocab_size": ROWS + 1},
    "another architecture": {"architecture": "mistral"},
    "a tensor is missing": {"without": "blk.1.ffn_up.weight"},
    "no embedding": {"without": "token_embd.weight"},
    "a tensor too many": {"more": [("blk.0.attn_q.bias", np.zeros(128, np.float32))]},
    "a tensor of another layer": {"more": [("blk.2.attn_norm.weight", np.zeros(128, np.float32))]},
    "another shape": {"without": "output_norm.weight", "more": [("output_norm.weight", np.ones(64, np.float32))]},
    "factors of another size": {"more": [("rope_freqs.weight", np.ones(8, np.float32))]},
    "factors that are none": {"more": [("rope_freqs.weight", np.zeros(16, np.float32))]},
    "Qwen2 with wide heads": {
        "kind": "qwen2",
        **dict.fromkeys(("attention__key_length", "attention__value_length", "rope__dimension_count"), 48),
    },
    "Qwen3 whose heads have no size": {
        "kind": "qwen3",
        **dict.fromkeys(("attention__key_length", "attention__value_length", "rope__dimension_count")),
    },
    "a tokenizer of another kind": {"tokenizer": vocabulary(model="t5")},
    "pieces that are split": {"tokenizer": pieces(ggml__pre="qwen2")},
    "pieces without a space": {"tokenizer": pieces(ggml__add_space_prefix=False)},
    "Gemma's pieces with a space": {"kind": "gemma3", "tokenizer": pieces(ggml__add_space_prefix=True)},
    "scores that are none": {"tokenizer": pieces(scores=lambda _: math.nan)},
    "merges of three": {"tokenizer": pieces(ggml__merges=["a b c"])},
    "a key of the tokenizer": {"tokenizer": vocabulary(ggml__remove_extra_whitespaces=True)},
    "a flag that is a number": {"tokenizer": vocabulary(ggml__add_bos_token=1)},
    "a token that is not there": {"tokenizer": vocabulary(ggml__eos_token_id=ROWS)},
    "several templates": {"tokenizer": vocabulary(chat_template__rag="x")},
    "bytes where Gemma has pieces": {"kind": "gemma3", "tokenizer": vocabulary()},
    "a Gemma without a window": {"kind": "gemma2", "attention__sliding_window": None},
    "a window of nothing": {"kind": "gemma3", "attention__sliding_window": 0},
    "a Gemma whose heads have no size": {
        "kind": "gemma3",
        **dict.fromkeys(("attention__key_length", "attention__value_length", "rope__dimension_count")),
    },
    "a Gemma with an output layer": {"kind": "gemma2", "more": [("output.weight", np.zeros((128, 128), np.float32))]},
    "a bound of logits that is none": {"kind": "gemma2", "attn_logit_softcapping": 0.0},
    "windows of another order": {"kind": "gemma3", "attention__sliding_window_pattern": 4},
    "a base of windows of 1": {"kind": "gemma3", "rope__freq_base_swa": 1.0},
    "factors of kinds of layers": {
        "kind": "gemma3",
        "more": [("rope_freqs.weight", np.ones(16, np.float32))],
    },
    "a Phi-3 with few tokens": {"kind": "phi3", "tokenizer": vocabulary()},
    "a Phi-3 that is stretched": {"kind": "phi3", "rope__scaling__original_context_length": 128},
    "a Phi-3 stretched evenly": {"kind": "phi3", "rope__scaling__type": "linear", "rope__scaling__factor": 2.0},
    "a Phi-3 with long factors": {"kind": "phi3", "more": [("rope_factors_long.weight", np.ones(16, np.float32))]},
    "more experts than there are": {"kind": "qwen3moe", "expert_used_count": 6},
    "no experts": {"kind": "qwen3moe", "expert_count": 0},
    "a mixture of no size": {"kind": "qwen3moe", "expert_feed_forward_length": None},
    "a mixture with a factor": {"kind": "mixtral", "expert_weights_scale": 2.0},
    "fewer experts than are said": {"kind": "mixtral", "without": "blk.1.ffn_up_exps.weight"},
    "a shared expert too many": {"kind": "qwen3moe", "more": [("blk.0.ffn_gate_inp_shexp.weight", np.ones(128, "f4"))]},
    "types of fewer tokens": {"tokenizer": vocabulary(types=[NORMAL] * 4)},
    "merges of nothing": {"tokenizer": bad_merges},
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_understood_is_left_to_transformers(name: str, tmp_path: Path) -> None:
    assert made_of(file_of(tmp_path / "model.gguf", **OTHERS[name])) is None


def test_a_name_by_which_transformers_takes_a_file_for_another_family(tmp_path: Path) -> None:
    def named(name: str) -> Callable[[Any], None]:
        return lambda writer: (vocabulary()(writer), writer.add_name(name))[0]

    for kind in ("llama", "mixtral"):
        assert made_of(file_of(tmp_path / "model.gguf", kind, named("mistral"))) is None
    check_same(file_of(tmp_path / "model.gguf", tokenizer=named("Mistral 7B")))


def test_what_is_wrong_is_said_by_transformers(tmp_path: Path, quickly: Callable[..., LoadedModel]) -> None:
    path = file_of(tmp_path / "model.gguf", without="blk.1.ffn_up.weight")
    with pytest.raises(EngineError, match=r"weights are missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        quickly(path)


@pytest.mark.parametrize("place", ["blk.1.ffn_norm.weight", "blk.0.attn_q.weight"])
def test_a_weight_that_is_no_number(
    place: str, tmp_path: Path, quickly: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(tmp_path / "model.gguf")
    content, at = bytearray(path.read_bytes()), read_header(path, "x").tensors[place].at
    content[at + 40 : at + 44] = np.float32(np.nan).tobytes()
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(content)
    quickly(bad)
    with pytest.raises(EngineError, match=f"its tensor {place} has an entry that is infinite or not a number"):
        Engine(bad, drafter="none", kv_memory=4 << 20)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_first_run_imports_no_transformers(kind: str, tmp_path: Path) -> None:
    """Nor PyTorch; it keeps nothing, and writes what a run writes that asks."""
    path = file_of(tmp_path / "model.gguf", kind, types=("Q8_0",), tied=True)
    arguments = ["run", "--prompt", "def f(", "--max-tokens", "4", "--target", str(path), "-q", "-o"]
    code = "import sys; from detgen.__main__ import main\n"
    code += "try: main()\nfinally: print(bool({'torch', 'transformers'} & sys.modules.keys()))"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code, *arguments, str(tmp_path / "quick")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split()[-1] == "False"
    assert not (tmp_path / "cache").exists()
    with asking():
        assert invoke(*arguments, str(tmp_path / "asked")).exit_code == 0
    found, want = (json.loads((tmp_path / of / "outputs.jsonl").read_text()) for of in ("quick", "asked"))
    assert found == want


@pytest.mark.parametrize("command", [("verify-determinism", "--axis", "draft-tokens", "--limit", "1"), ("audit",)])
def test_what_is_asked_is_kept_and_compared_with(
    command: tuple[str, ...], tmp_path: Path, quickly: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, place = file_of(tmp_path / "model.gguf"), []

    def noting(*asked: Any) -> keeping.Place:
        place.append(keeping.Place(*asked))
        return place[-1]

    monkeypatch.setattr("detgen.models.loading.Place", noting)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text('{"prompt": "abc", "max_tokens": 4}\n')
    target = "--target", str(path)
    assert invoke("run", str(prompts), "-o", str(out), *target, "--drafter", "none").exit_code == 0
    assert place[-1].read() is None
    given = [str(out)] if command[0] == "audit" else [str(prompts), *target]
    checked = invoke(*command, *given)
    assert checked.exit_code == 0, checked.output
    kept = place[-1].read()
    assert kept is not None
    own = quickly(path, "float32" if command[0] == "audit" else "auto").own  # which an audit names
    assert own is not None
    assert own.agreed == kept.own.agreed is not None
    assert own.reference is not None
