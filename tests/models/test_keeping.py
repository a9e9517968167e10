"""What transformers has told of a model is kept between runs: the same bits without it, and never another model's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.commands import invoke, written
from helpers.examples import usual
from helpers.families import DESCRIBED, ROWS
from helpers.frozen import CASES, KNOWN, digest
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from detgen import Engine, EngineError, Request, SamplingParams
from detgen.engine import model_pair
from detgen.kernels.c.c_decoder import CDecoder
from detgen.models import keeping
from detgen.models.description import Description, describe
from detgen.models.gguf.loading import asking
from detgen.models.loaded import LoadedModel
from detgen.models.parts import Norm
from detgen.models.skeleton import model_of, skeleton_of
from detgen.models.stored import held, without_weights
from detgen.program.arrays import FLOAT32
from detgen.runner import comparing


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[LoadedModel]:
    """The models that engines load, which are kept in a folder of the test's."""
    found: list[LoadedModel] = []
    load = model_pair.load_model

    def noting(*args: Any, **named: Any) -> LoadedModel:
        found.append(load(*args, **named))
        return found[-1]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_pair, "load_model", noting)
    return found


@pytest.fixture
def folder(demo_models: Any, tmp_path: Path) -> Path:
    """A copy of the embedded draft model."""
    return Path(shutil.copytree(demo_models.draft, tmp_path / "model"))


def engine(folder: Path) -> Engine:
    return Engine(target=folder, drafter="none", kv_memory=4 << 20)


def kept(loaded: list[LoadedModel]) -> bool:
    """Whether the last model that was loaded had been kept."""
    return loaded[-1].own is not None


@pytest.mark.parametrize(
    "name",
    usual(
        ["embedded, draft model", "embedded, q8", "qwen2_moe", "gpt2, bfloat16", "GGUF Q4_0"],
        ["embedded, scored", "gpt2", "gemma3"],
    ),
)
def test_bits_are_the_same(
    name: str, tmp_path: Path, loaded: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines and logits, of embedded models as if nothing were shipped, of a GGUF file as if its header said less."""
    monkeypatch.setattr(keeping, "_SHIPPED", ())
    known = json.loads(KNOWN.read_text(encoding="utf-8"))[name]
    (tmp_path / "model").mkdir()
    for again in (False, True):
        with asking():
            assert digest(CASES[name], tmp_path / "model") == known
        assert kept(loaded) == again


@pytest.mark.parametrize("name", ["embedded, draft model", "embedded, scored"])
def test_bits_by_what_is_shipped_are_the_same(
    name: str, tmp_path: Path, loaded: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is asked, or kept, and the bits of the passes are those that were compared with logits."""
    for check in ("check_reference", "check_depth"):
        monkeypatch.delattr(comparing, check)
    assert digest(CASES[name], tmp_path) == json.loads(KNOWN.read_text(encoding="utf-8"))[name]
    assert all(model.own is not None for model in loaded)
    assert not Path(os.environ["XDG_CACHE_HOME"]).exists()


def test_what_is_shipped_is_of_these_files(
    tmp_path: Path, loaded: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another model in their place, transformers is asked, and what is kept of it then comes first."""
    shutil.copytree(keeping.DEMO / "target", tmp_path / "target")
    shutil.copy(keeping.DEMO / "target.kept", tmp_path)
    monkeypatch.setattr(keeping, "DEMO", tmp_path)
    engine(tmp_path / "target")
    assert kept(loaded)
    with (tmp_path / "target" / "config.json").open("a") as file:
        file.write("\n")
    for again in (False, True):
        engine(tmp_path / "target")
        assert kept(loaded) == again


@pytest.mark.parametrize("family", ["gemma3", "gemma3n_text", "gemma4_text"])
def test_numbers_in_16_bits(family: str, loaded: list[LoadedModel], random_model: Callable[..., Path]) -> None:
    """Factors of embeddings, and of layers, as the model's own forward has them, when they are kept as well."""
    config = DESCRIBED[family]()
    config.hidden_size = 72  # whose root has more than 8 bits
    config.dtype = torch.bfloat16
    folder = random_model(config)
    found = []
    for again in (False, True):
        made = Engine(target=folder, drafter="none", kv_memory=8 << 20)
        found.append(made.generate([Request(0, 0, token_ids=(5, 6, 7), params=SamplingParams(logprobs=1))])[0])
        assert kept(loaded) == again
        described = describe(loaded[-1].model)
        assert described is None or described.embedding_factor == 8.5
    assert found[0] == found[1]


def of_parts(described: Any, names: dict[int, str]) -> Any:
    """A description that can be compared: parameters by their names."""
    if isinstance(described, np.ndarray):
        return names.get(id(described), (described.shape, described.tolist()))
    if isinstance(described, list | tuple):
        return type(described), [of_parts(part, names) for part in described]
    if isinstance(described, dict):
        return {key: of_parts(part, names) for key, part in described.items()}
    if hasattr(described, "__dataclass_fields__"):
        return type(described), {f: of_parts(getattr(described, f), names) for f in described.__dataclass_fields__}
    return described.tolist() if hasattr(described, "tolist") else described


def all_of(model: nn.Module) -> list[Any]:
    """All that is described of a model."""
    found = describe(model)
    assert isinstance(found, Description)
    weights = {id(p): held(p) for p in model.parameters()}
    found.read = lambda parameter, rows=slice(None): weights[id(parameter)]
    names = {id(weights[id(p)]): name for name, p in model.named_parameters()}
    parts = [found.embedding, found.embedding_factor, found.positions, found.layer_inputs, found.final, found.head]
    parts += [found.head_factor, found.softcap, *(found.layer(i) for i in range(len(found.layers)))]
    return [of_parts(part, names) for part in parts]


@pytest.mark.parametrize("family", [*DESCRIBED, "minicpm3"])
def test_a_skeleton_is_described_alike(family: str) -> None:
    """Every number, shape and parameter, through JSON."""
    model = without_weights((DESCRIBED | ROWS)[family](), FLOAT32).eval()
    taken = json.loads(json.dumps(skeleton_of(model)))
    if model.config.get_text_config() is not model.config:  # a multimodal model is asked anew each time
        assert taken is None
        return
    again = model_of(taken)
    assert type(again).__name__ == type(model).__name__
    assert all_of(again) == all_of(model)
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in again.named_parameters()] == names
    norm = describe(again).final  # type: ignore[union-attr]
    norms = [Norm(norm.weight, norm.bias, 2 * norm.epsilon, norm.centred)] if norm else []
    assert all(of_parts(one, {}) != of_parts(norm, {}) for one in norms)  # a difference would be seen


def test_other_weights_are_asked_anew(folder: Path, loaded: list[LoadedModel]) -> None:
    """In a folder that has the same names and sizes."""
    before = [engine(folder).generate("def f(", max_tokens=8)[0].token_ids for _ in range(2)]
    assert kept(loaded)
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file({name: w.flip(0).contiguous() for name, w in weights.items()}, path, {"format": "pt"})
    after = [engine(folder).generate("def f(", max_tokens=8)[0].token_ids for _ in range(2)]
    assert [m.own is not None for m in loaded] == [False, True, False, True]
    assert before[0] == before[1] != after[0] == after[1]


def test_what_is_kept_is_compared_each_time(folder: Path, loaded: list[LoadedModel]) -> None:
    """A forward that gave other logits is not that of this model."""
    engine(folder)
    (path,) = (Path(os.environ["XDG_CACHE_HOME"]) / "detgen" / "models").iterdir()
    place = keeping.Place(folder, "target", "auto", "none", None)
    found = place.read()
    assert found is not None
    reference = found.arrays["reference"]
    other = reference + 0.01 * abs(reference).max()
    place.write(keeping.Kept(found.facts, {**found.arrays, "reference": other}))
    assert path.exists()
    with pytest.raises(EngineError, match="packed rows give other logits than the model's own forward"):
        engine(folder)
    deep = found.arrays["depth"]
    place.write(keeping.Kept(found.facts, {**found.arrays, "depth": deep + 0.01 * abs(deep).max()}))
    with pytest.raises(EngineError, match="packed rows at position"):
        engine(folder)


def test_bits_that_were_compared_are_not_compared_with_logits_again(
    folder: Path, loaded: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes by widened weights, which take seconds, are for other bits."""
    exact: list[bool] = []
    run = CDecoder.run

    def noting(decoder: CDecoder, *args: Any, **named: Any) -> Any:
        exact.append(decoder._exact)
        return run(decoder, *args, **named)

    monkeypatch.setattr(CDecoder, "run", noting)
    for again in (False, True):
        exact.clear()
        Engine(target=folder, drafter="none", kv_memory=4 << 20, target_quant="q8")
        assert kept(loaded) == again
        assert exact == [False, False] if again else [False, False, True, True]
    monkeypatch.setattr(CDecoder, "run", lambda *args, **named: -noting(*args, **named))
    with pytest.raises(EngineError, match="packed rows give other logits than the model's own forward"):
        Engine(target=folder, drafter="none", kv_memory=4 << 20, target_quant="q8")


@pytest.mark.parametrize("damage", [lambda c: c[:-9], lambda c: c[:99] + b"?" + c[100:], lambda c: b"", lambda c: b"x"])
def test_what_is_damaged_is_asked_anew(
    folder: Path, loaded: list[LoadedModel], damage: Callable[[bytes], bytes]
) -> None:
    """And kept again."""
    engine(folder)
    (path,) = (Path(os.environ["XDG_CACHE_HOME"]) / "detgen" / "models").iterdir()
    path.write_bytes(damage(path.read_bytes()))
    for again in (False, True):
        engine(folder)
        assert kept(loaded) == again


def test_nothing_is_kept_where_nothing_can_be(
    folder: Path, loaded: list[LoadedModel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a home that is a file, of libraries that are being worked on, of code that comes with a model."""
    (tmp_path / "file").touch()
    for _ in range(2):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        engine(folder)
        assert not kept(loaded)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        Engine(target=folder, drafter="none", kv_memory=4 << 20, trust_remote_code=True)
        assert not kept(loaded)
        with monkeypatch.context() as patch:
            keeping._versions.cache_clear()
            patch.setattr(keeping, "version", lambda package: "6.0.0.dev0")
            engine(folder)
            assert not kept(loaded)
        keeping._versions.cache_clear()


def test_the_oldest_make_room(folder: Path, loaded: list[LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of models that are kept, only so many."""
    monkeypatch.setattr(keeping, "_MOST", 2)
    for dtype in ("float32", "bfloat16", "float16"):
        Engine(target=folder, drafter="none", kv_memory=4 << 20, dtype=dtype)
    assert len(list((Path(os.environ["XDG_CACHE_HOME"]) / "detgen" / "models").iterdir())) == 2


@pytest.mark.parametrize("shipped", [False, True])
def test_a_run_imports_no_transformers(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    shipped: bool,
) -> None:
    """From the second on, of embedded models from the first, where nothing can be kept; nor PyTorch. The bytes stay."""
    arguments = ["run", "--prompt", "def f(", "--max-tokens", "4", "-o", "-"]
    if not shipped:
        arguments += ["--target", str(folder), "--drafter", "none"]
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    status, first = written(capfd, *arguments, "-q")
    assert (status, bool(first)) == (0, True)
    code = "import gc, sys; from detgen.__main__ import main; sys.argv[0] = 'detgen'\n"
    code += "try: main()\n"
    code += "finally: print(bool({'torch', 'transformers'} & sys.modules.keys()), gc.get_stats()[0]['collections'])"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    text, imported, searches = done.stdout.replace("\n", " ").rsplit(maxsplit=2)
    assert (f"{text}\n", imported) == (first, "False"), done.stderr
    assert int(searches) < 50  # for garbage


def test_the_configuration_is_that_of_the_whole_model() -> None:
    """One of parts is not taken apart."""
    model: Any = AutoModelForCausalLM.from_config(DESCRIBED["llama"]())
    model.config.get_text_config = lambda: None
    assert skeleton_of(model) is None


def test_forms_of_texts_know_a_kept_tokenizer(loaded: list[LoadedModel], folder: Path) -> None:
    """They are compiled for it, to the same texts."""
    texts = []
    for _ in range(2):
        (done,) = engine(folder).generate(["x = "], guided_regex="[0-9]{3,9}", max_tokens=8)
        assert done.error is None
        texts.append(done.text)
    assert kept(loaded)
    assert texts[0] == texts[1]
    assert texts[0].isdigit()


def test_a_chat_imports_no_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What renders chats is taken out of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    prompts = tmp_path / "chats.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "Add two numbers."}]}\n')
    code = "import sys; from detgen.__main__ import main\n"
    code += "try: main()\nfinally: print(bool({'torch', 'transformers'} & sys.modules.keys()))"
    command = ["run", str(prompts), "-q", "--max-tokens", "2", "-o"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert invoke(*command, str(first)).exit_code == 0
    done = subprocess.run(
        [sys.executable, "-c", code, *command, str(second)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
    assert (second / "outputs.jsonl").read_bytes() == (first / "outputs.jsonl").read_bytes()
