"""Export a finished run as a table, or as results of the OpenAI batch API. The output folder is never changed."""

from __future__ import annotations

from typing import Literal

Form = Literal["csv", "parquet", "openai", "hf"]
# The forms, and what follows the folder's name in the default name of the exported file.
FORMS: dict[Form, str] = {"csv": ".csv", "parquet": ".parquet", "openai": "-results.jsonl", "hf": "-hf"}
