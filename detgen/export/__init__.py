"""A finished run as a table, or as results of the OpenAI batch API. Reads the output folder and never changes it."""

from __future__ import annotations

from typing import Literal

Form = Literal["csv", "parquet", "openai", "hf"]
# The forms, and how files are named that are given no name: the folder's name and this.
FORMS: dict[Form, str] = {"csv": ".csv", "parquet": ".parquet", "openai": "-results.jsonl", "hf": "-hf"}
