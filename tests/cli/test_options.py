"""Values of options: what they may be, and what is said where they are not."""

from __future__ import annotations

from typing import get_args

import pytest
from helpers.commands import invoke

from detgen.cli.declared import as_typed
from detgen.drafters.registry import DRAFTERS
from detgen.errors import DTypeName, EngineError, KVDtypeName, QuantName


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--drafter", "best", DRAFTERS),
        ("--dtype", "float8", get_args(DTypeName)),
        ("--kv-dtype", "f16", get_args(KVDtypeName)),
        ("--target-quant", "int4", get_args(QuantName)),
        ("--draft-quant", "int4", get_args(QuantName)),
        ("--device", "tpu", ("auto", "cpu", "cuda", "cuda:N")),
        ("--draft-tokens", "many", ("auto", "whole number")),
        ("--draft-tokens", "0", ("auto", "whole number")),
        ("--kv-memory", "much", ("4GiB",)),
        ("--prefix-cache", "yes", ("on", "off")),
        ("--speculative-prefill", "on", ("auto", "off", "CHUNKS")),
        ("--speculative-prefill", "0", ("auto", "off", "CHUNKS")),
        ("--limit", "0", ("--limit",)),
        ("--stop-token-id", "-1", ("--stop-token-id",)),
        ("--seed", "x", ("--seed",)),
    ],
)
def test_wrong_values_are_refused_with_what_is_allowed(option: str, value: str, said: tuple[str, ...]) -> None:
    result = invoke("run", "prompts.jsonl", option, value)
    assert result.exit_code == 2
    for word in (option, *said):
        assert word in result.stderr


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--top-p", "2", "must be a number from 0 to 1, got 2.0"),
        ("--top-p", "0", "must be above 0 (1 turns it off), got 0.0"),
        ("--n", "0", "must be a whole number of at least 1, got 0"),
        ("--n", "1000001", "must be at most 1000000, got 1000001"),
        ("--min-tokens", "129", "must be at most max_tokens (128), got 129"),
        ("--repetition-penalty", "0", "must be a number from 0.01 to 100, got 0.0"),
        ("--logprobs", "101", "must be a whole number from 0 to 100, got 101"),
        ("--batch-size", "0", "must be a whole number of at least 1, got 0"),
        ("--threads", "5000", "must be at most 1024, got 5000"),
    ],
)
def test_settings_out_of_range_are_refused_in_one_line_that_names_the_option(
    option: str, value: str, said: str
) -> None:
    result = invoke("run", "prompts.jsonl", "--quiet", option, value)
    assert (result.exit_code, result.stderr) == (2, f"detgen: error: {option} {said}\n")


def test_only_the_range_of_a_setting_is_told_in_other_words() -> None:
    for said in ("p.jsonl:3: max_tokens must be at least 1", "device 'x' is not supported", "no model must be"):
        assert as_typed(EngineError(said)) == said
