"""Writes rows as a table, with the datasets library: CSV, Parquet, or a dataset on the disk."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from detgen.errors import OutputError, PromptsError
from detgen.export.placing import placed
from detgen.export.table_rows import COLUMNS
from detgen.outputs.lines import dump


def write_table(rows: Iterable[dict[str, Any]], form: str, path: Path, digest: str) -> int:
    """Write a table; whoever reads it finds all of it, or none. Memory holds a thousand rows.

    Args:
        rows: as `row_of` makes them.
        form: "csv", "parquet" or "hf", a folder for `datasets.load_from_disk`.
        path: where to.
        digest: of the rows, by which the dataset is known.

    Returns:
        How many rows there are.

    Raises:
        OutputError, PromptsError: as the rows raise them.
        OSError: it cannot be written.
    """
    import datasets

    datasets.disable_progress_bars()
    flat = form == "csv"  # it has no lists
    features = datasets.Features({name: _feature(datasets, type_, flat) for name, type_ in COLUMNS.items()})

    def generate() -> Iterator[dict[str, Any]]:
        for row in rows:
            yield {name: dump(cell) if flat and isinstance(cell, list) else cell for name, cell in row.items()}

    with placed(path) as made:
        try:
            table = datasets.Dataset.from_generator(
                generate, features=features, cache_dir=str(made.parent / "rows"), fingerprint=digest
            )
        except datasets.exceptions.DatasetGenerationError as error:
            if isinstance(error.__cause__, OutputError | PromptsError | OSError):
                raise error.__cause__ from None
            raise
        if form == "csv":
            # Else a text with a carriage return, and no other reason for quotes, would end its row for many readers.
            table.to_csv(made, quoting=csv.QUOTE_NONNUMERIC)
        elif form == "parquet":
            table.to_parquet(made)
        else:
            table.save_to_disk(made)
        return len(table)


def _feature(datasets: Any, type_: str | list[str], flat: bool) -> Any:
    if isinstance(type_, list):
        return datasets.Value("string") if flat else datasets.List(datasets.Value(type_[0]))
    return datasets.Value(type_)
