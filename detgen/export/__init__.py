"""A finished run as a table, or as results of the OpenAI batch API. Reads the output folder and never changes it."""

from __future__ import annotations

# The forms, and how files are named that are given no name: the folder's name and this.
FORMS = {"csv": ".csv", "parquet": ".parquet", "openai": "-results.jsonl", "hf": "-hf"}
