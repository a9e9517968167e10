"""Generation from Python: models, prompts and results for notebooks and scripts. Writes no files."""

from __future__ import annotations

from detgen.llm.llm import LLM
from detgen.llm.results import Results

__all__ = ["LLM", "Results"]
