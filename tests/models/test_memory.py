"""KV buffers take the memory that was written to, whatever their size; limits are kept or named."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from helpers.examples import thorough
from transformers import LlamaConfig

from detgen.errors import EngineError
from detgen.machine import CPU
from detgen.models.memory import free_memory, zeros
from detgen.program.arrays import BFLOAT16, FLOAT32
from detgen.program.operands import address
from detgen.runner.block_manager import BlockManager
from detgen.runner.kv_cache import KVCache


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems promise memory in other ways")
def test_the_process_can_be_copied_beside_several_engines() -> None:
    """Chats are rendered in a copy: it does not need the room of buffers that nobody has written."""
    half = psutil.virtual_memory().total // 2
    held = [zeros((half,), np.dtype(np.uint8), CPU) for _ in range(3)]
    child = os.fork()
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert all(int(x[-1]) == 0 for x in held)


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="copies of a process have all of its memory here")
def test_copies_of_the_process_do_not_have_the_buffers() -> None:
    """Pages that both have are copied, one by one, when a pass writes to them."""
    buffer = zeros((1 << 20,), np.dtype(np.uint8), CPU)
    buffer[:] = 1
    assert there(buffer)
    child = os.fork()
    if not child:
        os._exit(there(buffer))
    assert os.waitpid(child, 0)[1] == 0


def there(buffer: np.ndarray) -> bool:
    """Whether the memory of a buffer belongs to this process."""
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(first, 16) <= address(buffer) < int(end, 16) for first, end in spans)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_what_is_not_written_costs_nothing(dtype: np.dtype[Any]) -> None:
    before = resident()
    cache = KVCache([(8, 128, 128)] * 4, BlockManager(1_600), dtype, CPU)
    cache.write(3, np.array([0, 63_999, cache.scratch]), np.ones((3, 8, 128)), np.ones((3, 8, 128)))
    assert resident() - before < 20 << 20
    assert all(address(x) % 64 == 0 for x in (*cache.keys, *cache.values))
    assert (cache.keys[0][77] == 0).all()
    assert (cache.values[3][999, :, 63] == 1).all()


def test_memory_goes_back() -> None:
    before = resident()
    for _ in range(5):
        zeros((100 << 18,), FLOAT32, CPU).fill(1)
    assert resident() - before < 60 << 20


def test_no_memory() -> None:
    with pytest.raises(EngineError, match="--kv-memory"):
        zeros((1 << 50,), FLOAT32, CPU)


def test_a_limited_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on the address space counts, where it is lower than what is free."""
    free = free_memory(CPU)
    used = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + (100 << 20), used + (100 << 20)))
    assert 0 < free_memory(CPU, 50) < free_memory(CPU) <= 100 << 20 < free
    assert free_memory(CPU, 200) == 0


@thorough
def test_a_model_with_a_long_context(random_model: Callable[..., Path], tmp_path: Path) -> None:
    """A run of short prompts stays small, with all free memory for the cache and a context of 131,072."""
    folder = random_model(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=256,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=131_072,
        )
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a b", "max_tokens": 3}\n' * 6)
    program = (
        "import sys; from detgen.cli import app; from detgen.machine import peak_memory\n"
        "try: app(sys.argv[1:])\n"
        "finally: print(peak_memory() >> 20)"
    )
    command = [sys.executable, "-c", program, "run", str(prompts), "--target", str(folder), "--drafter", "none"]
    done = subprocess.run(
        [*command, "-q", "--batch-size", "1000000"], cwd=tmp_path, env=os.environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 1024
