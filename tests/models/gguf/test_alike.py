"""GGUF files of families that are read in one way: the bits of their folders, at once and of what is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.examples import usual
from helpers.gguf_alike import MODELS, TABLES, made
from helpers.gguf_files import check_same
from helpers.gguf_models import check_kept, check_stored

SOME = (
    *("gemma3n", "granitemoeshared", "olmo3", "glm4moe", "deepseek_v2", "hunyuan", "llama4"),
    *("phi2", "phi3_long", "phi4_mini", "phimoe", "minicpm", "minicpm3_long"),
    *("falcon_7b", "falcon_40b", "bloom", "mpt", "gptneox", "starcoder"),
)
KINDS = "Q8_0", "Q5_1", "BF16"


def test_names_are_of_one_model() -> None:
    assert len(MODELS) == sum(map(len, TABLES))


@pytest.mark.parametrize("name", usual(SOME, MODELS))
def test_float32_gives_the_bits_of_the_folder(name: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folders(name)
    check_same(made(name, folder, tmp_path / "model.gguf"), folder)


@pytest.mark.parametrize("name", usual(["granite", "glm4moe", "phi3_long", "phimoe", "falcon_40b", "bloom"], MODELS))
def test_the_second_start_gives_the_same(
    name: str, folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept has where parts of a weight lie, orders of rows, and corrections of scores."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check_kept(made(name, folders(name), tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("name", "kinds"),
    usual(
        [
            *[("granitemoeshared", ("Q8_0", "Q4_0")), ("deepseek_v3", ("Q8_0",))],
            *[("phi4_mini", KINDS), ("falcon_7b", KINDS)],
        ],
        [(name, KINDS) for name in MODELS],
    ),
)
def test_stored_weights_stand_for_their_numbers(
    name: str, kinds: tuple[str, ...], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    check_stored(MODELS[name], folders(name), tmp_path, kinds)
