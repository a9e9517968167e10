"""What `detgen models` says, held against the models when they are loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf
from helpers.families import DESCRIBED, ROWS
from helpers.gguf_files import made, plain_tokenizer
from typer.testing import CliRunner

from detgen.cli import app
from detgen.engine import Engine
from detgen.models.description import describe
from detgen.models.known import known, known_models, kv_of
from detgen.models.parts import Attention
from detgen.models.stored import held, without_weights
from detgen.models.wrappers import without_towers
from detgen.program.arrays import FLOAT32
from detgen.program.operands import address


def arrays(value: Any) -> Iterator[np.ndarray]:
    """All arrays of a weight."""
    if isinstance(value, np.ndarray):
        yield value
    elif is_dataclass(value):
        for each in fields(value):
            yield from arrays(getattr(value, each.name))


def taken(engine: Engine) -> int:
    """Bytes of the weights of an engine's program, and of its table of embeddings."""
    decoder: Any = engine.canonical.decoder
    steps = decoder.program().steps
    weights = [getattr(step, name) for step in steps for name in ("weight", "table") if hasattr(step, name)]
    return sum({address(each): each.nbytes for weight in weights for each in arrays(weight)}.values())


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("float32", {"dtype": "float32"}),
        ("bfloat16", {"dtype": "bfloat16", "kv_dtype": "float32"}),
        ("q8", {"target_quant": "q8", "dtype": "float32"}),
        ("q4_k", {"target_quant": "q4_k", "dtype": "float32"}),
    ],
)
def test_a_folder_takes_what_its_program_has(demo_models: Any, kind: str, settings: dict[str, Any]) -> None:
    """Weights within a tenth, the KV cache to the byte."""
    engine = Engine(target=demo_models.target, drafter="none", kv_memory=8 << 20, **settings)
    found = known(str(demo_models.target))
    assert found.kv == engine.position_bytes
    assert found.whole
    assert found.weights[kind] == pytest.approx(taken(engine), rel=0.1)


def test_latent_attention_keeps_what_all_heads_share(random_model: Callable[..., Path]) -> None:
    """As the settings say it, and as a cache has it."""
    config = DESCRIBED["deepseek_v3"]()
    folder = random_model(config)
    engine = Engine(target=folder, drafter="none", kv_memory=8 << 20, kv_dtype="float32")
    kept = config.kv_lora_rank + config.qk_rope_head_dim
    assert known(str(folder)).kv == engine.position_bytes == 4 * config.num_hidden_layers * kept


OLDER = {
    "falcon": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    "falcon_11b": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "num_kv_heads": "n_head_kv"},
}


@pytest.mark.parametrize("family", [*DESCRIBED, "gpt_neo", "mistral4"])
def test_what_the_settings_say_is_what_layers_keep(family: str) -> None:
    """To the byte, by older names of settings too."""
    config = (DESCRIBED | ROWS)[family]()
    model = without_weights(config, FLOAT32)
    without_towers(model)
    found = describe(model)
    assert found is not None
    found.read = held
    mixers = [mixer for i in range(len(found.layers)) for mixer in found.layer(i).mixers]
    keeping = [mixer for mixer in mixers if isinstance(mixer, Attention) and mixer.source is None]
    kept = sum(4 * heads * (size + values) for heads, size, values in (each.kept for each in keeping))
    settings = json.loads(config.to_json_string())
    older = {OLDER.get(family, {}).get(name, name): value for name, value in settings.items()}
    assert kv_of(settings) == kv_of(older) == kept


@pytest.mark.parametrize("given", [{}, {"full_attention_interval": 2}])
def test_layers_that_settings_do_not_list(given: dict[str, int]) -> None:
    """Of Qwen3-Next, as transformers lists them."""
    config = hf.Qwen3NextConfig(num_hidden_layers=9, **given)
    settings = json.loads(config.to_json_string())
    listed = settings.pop("layer_types")
    assert kv_of({**settings, **given}) == kv_of({**settings, "layer_types": listed})


def test_settings_that_do_not_say() -> None:
    assert kv_of({"model_type": "x"}) is None
    assert kv_of({"num_hidden_layers": 2, "hidden_size": 64}) is None


def test_a_file_takes_what_it_is(demo_models: Any, tmp_path: Path) -> None:
    folder = plain_tokenizer(Path(shutil.copytree(demo_models.target, tmp_path / "model")))
    path = made(folder, tmp_path / "model.gguf", lambda _: "Q8_0")
    found = known(str(path))
    engine = Engine(target=path, drafter="none", kv_memory=8 << 20)
    assert found.kv == engine.position_bytes
    assert found.stored == pytest.approx(taken(engine), rel=0.1)
    assert [each.name for each in known_models([str(tmp_path)])] == [str(folder), str(path)]


def test_what_is_shown_and_what_is_wrong(demo_models: Any, tmp_path: Path) -> None:
    runner = CliRunner(env={"COLUMNS": "160", "NO_COLOR": "1", "HF_HUB_CACHE": str(tmp_path)})
    done = runner.invoke(app, ["models"])
    assert done.exit_code == 0, done.output
    assert "embedded:target  LlamaForCausalLM" in done.output
    assert "demo-thinking" in done.output
    wrong = runner.invoke(app, ["models", str(tmp_path / "nothing"), "owner/name"])
    assert wrong.exit_code == 1
    assert "there is no such folder" in wrong.output
    assert "owner/name: it is not on this machine yet" in wrong.output
