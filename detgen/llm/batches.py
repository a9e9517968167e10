"""Batches of a dataset, as its `map` gives and takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from detgen.engine.request import Completion, Request
from detgen.errors import PromptsError, RequestError
from detgen.params import SamplingParams
from detgen.prompts import BadLine
from detgen.prompts.columns import check_columns, read_row
from detgen.prompts.record import parse_record


def requests_of_batch(batch: Mapping[str, list[Any]], params: SamplingParams) -> list[Request | BadLine]:
    """A request for each row.

    Raises:
        PromptsError: there is no column of prompts, or the batch is a single row.
        RequestError: a row asks for several samples.
    """
    check_columns("the dataset", batch, None, 'name one so: ds.rename_column("question", "prompt")')
    chats = batch.get("messages")
    if not all(isinstance(cells, list) for cells in batch.values()) or (chats and isinstance(chats[0], Mapping)):
        raise PromptsError("this is a single row, and many are run together: ds.map(llm, batched=True)")
    rows = [dict(zip(batch, cells, strict=True)) for cells in zip(*batch.values(), strict=True)]
    found = [parse_record(read_row(row), index=i, line=i + 1, number=i, defaults=params) for i, row in enumerate(rows)]
    for each in found:
        if isinstance(each, Request) and each.samples > 1:
            raise RequestError("a row of a dataset has one text: n must be 1; repeat the rows, each with a seed")
    return found


def columns_of(rows: Sequence[Request | BadLine], done: Iterable[Completion]) -> dict[str, list[Any]]:
    """The columns of what the rows gave. No cell is empty, so that all batches have the same types."""
    completions = {each.request.index: each for each in done}
    found: dict[str, list[Any]] = {"text": [], "finish_reason": [], "completion_tokens": [], "error": []}
    for i, row in enumerate(rows):
        each = completions.get(i)
        error = row.error if isinstance(row, BadLine) else each.error if each is not None else None
        found["text"].append(each.text if each is not None and error is None else "")
        found["finish_reason"].append((each.finish_reason if each is not None else None) or "error")
        found["completion_tokens"].append(len(each.token_ids) if each is not None else 0)
        found["error"].append(error or "")
    return found
