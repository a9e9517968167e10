"""The result of a call: a list of completions or scores that notebooks show and that converts to a table."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from detgen.engine.pieces import Pieces
from detgen.engine.request import Completion
from detgen.engine.score_requests import Score
from detgen.export.tables import COLUMNS, SCORE_COLUMNS, features_of, row_of
from detgen.outputs.lines import output_line

if TYPE_CHECKING:
    import datasets
    import pandas

_Done = TypeVar("_Done", bound=Completion | Score)
_SHOWN = 20  # rows in a notebook
_LONGEST = 300  # characters per cell in a notebook


class Results(list[_Done]):
    """Completions or scores, in the order of the prompts or items.

    A notebook shows the first rows as a table. `to_pandas` and `to_dataset` convert all of them, with the columns that
    `detgen export` writes.
    """

    def __init__(self, done: Iterable[_Done], pieces: Pieces) -> None:
        super().__init__(done)
        self._pieces = pieces

    @property
    def texts(self) -> list[str]:
        """The texts of the completions, in order; empty for an error."""
        done: list[Any] = self
        return [each.text for each in done if isinstance(each, Completion)]

    def to_dataset(self) -> datasets.Dataset:
        """Return a dataset of the datasets library, with a row for each result."""
        import datasets

        columns = SCORE_COLUMNS if any(isinstance(each, Score) for each in self) else COLUMNS
        return datasets.Dataset.from_list(list(self._rows(columns)), features=features_of(columns))

    def to_pandas(self) -> pandas.DataFrame:
        """Return a data frame of pandas, with a row for each result."""
        return self.to_dataset().to_pandas()

    def _rows(self, columns: Mapping[str, str | list[str]]) -> Iterator[dict[str, Any]]:
        done: list[Any] = self
        for each in done:
            request = replace(each.request, echo=True)
            yield row_of(json.loads(output_line(replace(each, request=request), self._pieces)), request, columns)

    def _repr_html_(self) -> str:
        rows = [_cells(each) for each in self[:_SHOWN]]
        head = "".join(f"<th>{name}</th>" for name in (rows[0] if rows else {}))
        body = "".join(f"<tr>{''.join(map(_cell, row.values()))}</tr>" for row in rows)
        more = f", {_SHOWN} of them shown" if len(self) > _SHOWN else ""
        tokens = sum(len(each.token_ids) for each in self)
        what = f"{len(self):,} result{'s' * (len(self) != 1)}, {tokens:,} tokens{more}"
        return f"<table><caption>{what}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(done: Completion | Score) -> dict[str, Any]:
    """Return the cells of a result's row in a notebook."""
    request = done.request
    asked: Any = request.prompt if request.prompt is not None else request.messages or request.token_ids
    cells: dict[str, Any] = {"id": request.id, "sample": done.sample, "prompt": asked}
    if isinstance(done, Score):
        completions = getattr(request, "completions", None)
        given = completions[done.sample] if completions is not None else ""
        cells |= {"completion": given, "log-probability": f"{done.logprob:.3f}", "tokens": len(done.token_ids)}
        cells["greedy"] = "yes" if done.is_greedy else "no"
    else:
        cells |= {"text": done.text, "tokens": len(done.token_ids), "finish": done.finish_reason}
    return cells | {"error": done.error or ""}


def _cell(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
    return f'<td style="text-align:left;vertical-align:top;white-space:pre-wrap">{html.escape(text)}</td>'
