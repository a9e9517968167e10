"""What the tests of workers share: an input with lines of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Good lines of one and more samples, bad lines, and a line that the engine refuses."""
    texts = [json.dumps({"prompt": f"prompt {n}", "n": 1 + n % 5 // 4, "task": n}) for n in range(60)]
    texts[3] = '{"prompt": 3, "id": "three"}'
    texts[7] = "{broken"
    texts[9] = '{"prompt": "too long", "id": "nine", "task": "t"}'
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(texts))
    return path
