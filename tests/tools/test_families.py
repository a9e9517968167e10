"""Every family that transformers maps to causal language models: the page about them, and what becomes of each."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers.commands import invoke
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import families
import tiny_families

ROOT = Path(__file__).parents[2]
PAGE = families.DOC.read_text(encoding="utf-8")


def listed(page: str) -> dict[str, str]:
    """The class of each model type of a page."""
    return dict(re.findall(r"^\| ([\w-]+) \| (\w+) \| .*\|$", page, re.MULTILINE))


def test_the_page_lists_all_of_the_newest_version() -> None:
    version = re.search(r"that transformers (\S+) maps", PAGE)
    assert version is not None
    assert f"\ntransformers=={version[1]}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    if transformers.__version__ == version[1]:
        assert listed(PAGE) == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def test_the_command_shows_what_the_page_says() -> None:
    assert families.document(PAGE, json.loads(families.TABLE.read_text(encoding="utf-8"))) == PAGE
    done = invoke("models", "--families")
    lines = [line.split() for line in done.output.splitlines()]
    assert ["llama", "LlamaForCausalLM", "whole"] in lines
    assert done.output.splitlines()[-1].startswith(f"{len(listed(PAGE))} model types of transformers ")
    assert invoke("models", "--families", "some").exit_code == 2


def test_the_page_tells_of_no_faults() -> None:
    found: dict[str, Any] = {
        "llama": {"status": families.WHOLE},
        "apertus": {"status": families.OWN, "proved": ["aten.expm1.default"]},
        "bloom": {"status": families.REFUSED, "says": "MODEL (Bloom) is not supported: no | of `x` (at `y`)"},
        "gptj": {"status": families.FAULT, "says": "exit 70"},
    }
    page = families.document(PAGE, families.table(found))
    assert r"| bloom | BloomForCausalLM | no \| of x |" in page
    assert "| apertus | ApertusForCausalLM | aten.expm1.default |" in page
    assert listed(page).keys() == found.keys()
    assert "## Faults" in page
    assert "## Faults" not in PAGE


def test_layers_of_each_kind_are_there() -> None:
    """Sizes are small, windows are shorter than prompts, and a setting may be another."""
    config = tiny_families.tiny_config("gemma3_text", final_logit_softcapping=3.0)
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert config.sliding_window == tiny_families.WINDOW < min(families.LENGTHS[2:])
    assert (config.hidden_size, config.final_logit_softcapping) == (64, 3.0)


@pytest.mark.slow
@pytest.mark.parametrize("family", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_it_runs_equal_or_is_refused(family: str) -> None:
    found = families.apart(family)
    assert found["status"] != families.FAULT, found["says"]
