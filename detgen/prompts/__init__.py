"""Files, standard input and datasets in; requests out.

Everything is streamed: no reader holds more than one record (or one batch of a columnar file). A record that cannot run
becomes a `BadLine`; only an input that cannot be read at all raises an exception. This package knows no tokens: the
engine tokenizes.
"""

from __future__ import annotations

from detgen.errors import PromptsError
from detgen.prompts.record import BadLine
from detgen.prompts.record_source import Inspection, Prompts
from detgen.prompts.score_records import read_scores
from detgen.prompts.source import open_prompts, spooled_prompts

__all__ = ["BadLine", "Inspection", "Prompts", "PromptsError", "open_prompts", "read_scores", "spooled_prompts"]
