"""Files, standard input and datasets in; requests out.

Everything is streamed: no reader holds more than one record (or one batch of a columnar file). A record that cannot
run becomes a `BadLine`; only an input that cannot be read at all raises an exception. Tokenizing is left to the engine.
"""

from __future__ import annotations

from detgen.errors import PromptsError
from detgen.prompts.formats import open_prompts, spooled_prompts
from detgen.prompts.record import BadLine
from detgen.prompts.source import Inspection, Prompts, read_scores

__all__ = ["BadLine", "Inspection", "Prompts", "PromptsError", "open_prompts", "read_scores", "spooled_prompts"]
