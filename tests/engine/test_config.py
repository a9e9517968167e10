"""The settings of an engine: what a text of one means, and what is said where one is wrong."""

from __future__ import annotations

import pytest

from detgen.engine.config import EngineConfig, parse_size
from detgen.errors import EngineError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1073741824", 2**30),
        ("4GiB", 4 * 2**30),
        ("4gib", 4 * 2**30),
        ("4G", 4 * 2**30),
        ("500MB", 500_000_000),
        ("1.5 KiB", 1536),
        ("2TB", 2 * 10**12),
        ("100b", 100),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "0", "-1", "4 PiB", "4Gi", "1e9", "0.1b", "inf"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="amount of memory"):
        parse_size(text)


def test_what_is_no_setting_is_named() -> None:
    with pytest.raises(TypeError, match="there is no engine setting 'batchsize'"):
        EngineConfig(batchsize=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"batch_size": "16"}, "batch_size must be a whole number of at least 1, got '16'"),
        ({"kv_memory": "lots"}, "kv_memory: 'lots' is not an amount of memory such as 4GiB, 500MB or 1073741824"),
        ({"threads": 0}, "threads must be a whole number of at least 1, got 0"),
        (
            {"dtype": "bf16"},
            "dtype must be one of auto, float32, bfloat16, bfloat16-tc25, bfloat16-tc24, float16, got 'bf16'",
        ),
        ({"trust_remote_code": 1}, "trust_remote_code must be True or False, got 1"),
        ({"device": None}, "device must be a string, got None"),
        ({"speculative_prefill": 0}, "speculative_prefill must be auto, off or a whole number of at least 1, got 0"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(setting: dict[str, object], said: str) -> None:
    with pytest.raises(EngineError) as raised:
        EngineConfig(**setting)  # type: ignore[arg-type]
    assert str(raised.value) == said
