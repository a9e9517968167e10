"""Places of weights in a GGUF file, also as data that is kept between runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from detgen.models.gguf.configs import ELSE
from detgen.models.gguf.header import Header
from detgen.models.stored import Below, Heads, Lying, Place, Reader, SideBySide

_COLUMNS = "columns"  # follows a tensor's name if an order is that of its columns


def place_of(
    path: Path,
    header: Header,
    tensor: str,
    order: np.ndarray | None = None,
    columns: np.ndarray | None = None,
    change: str | None = None,
) -> Place:
    """Return the place of a tensor, or of the part of it named after a slash; see `Names.tensors`."""
    name, _, part = tensor.partition("/")
    entry = header.tensors[name]
    place = Place(path, entry.kind, entry.shape, entry.at, tensor, order, columns, change)
    if not part:
        return place
    if part.isdecimal():
        one = place._replace(shape=entry.shape[1:])
        return one._replace(at=entry.at + int(part) * one.size)
    first, count = _rows_of(header, entry.shape[0], part)
    row = place.size // entry.shape[0]
    return place._replace(shape=(count, *entry.shape[1:]), at=entry.at + first * row)


def _rows_of(header: Header, rows: int, part: str) -> tuple[int, int]:
    """Return the first row and the number of rows of queries, keys or values among those of all heads.

    Raises:
        ValueError: if the rows are not those of whole heads.
    """
    keys = ("head_count", "head_count_kv")
    heads, kept = (header.settings.get(f"{header.architecture}.attention.{key}") for key in keys)
    kept = heads if kept is None else kept
    if type(heads) is not int or type(kept) is not int or heads < 1 or kept < 1 or rows % (heads + 2 * kept):
        raise ValueError(f"{rows} rows of queries, keys and values are not understood here; {ELSE}")
    size = rows // (heads + 2 * kept)
    first, count = {"q": (0, heads), "k": (heads, kept), "v": (heads + kept, kept)}[part]
    return first * size, count * size


def kept_places(reader: Reader) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the places of weights found by `empty_model` as data for JSON, and the orders of rows by name."""
    places: dict[str, Any] = {}
    orders: dict[str, np.ndarray] = {}
    for name, lying in reader.places.items():
        parts = [part for part in getattr(lying, "parts", [lying]) if isinstance(part, Place)]
        made = places[name] = {"tensors": [part.name for part in parts], "joined": None}
        for part in parts:
            if part.change is not None:
                made["change"] = part.change
            for key, order in ((part.name, part.order), (f"{part.name} {_COLUMNS}", part.columns)):
                if order is not None:
                    orders[key] = order
        if isinstance(lying, SideBySide):
            made["joined"] = [lying.in_turns, lying.turned]
        if isinstance(lying, Heads):
            made["joined"] = "heads"
        if isinstance(lying, Below):
            made["joined"] = []
            if lying.order is not None:
                orders[name] = lying.order
    return places, orders


def reader_of(
    model: Any,
    places: dict[str, Any],
    orders: Mapping[str, np.ndarray],
    header: Header,
    path: Path,
    dtype: np.dtype[Any] | None,
) -> Reader:
    """Return a reader of the weights of a model without memory, from the places of `kept_places`."""

    def lying(name: str) -> Lying:
        found, change = [], places[name].get("change")
        for tensor in places[name]["tensors"]:
            columns = orders.get(f"{tensor} {_COLUMNS}")
            found.append(place_of(path, header, tensor, orders.get(tensor), columns, change))
        if (joined := places[name]["joined"]) is None:
            return found[0]
        if joined == "heads":
            return Heads((found[0], found[1]))
        return SideBySide(tuple(found), *joined) if joined else Below(tuple(found), orders.get(name))

    return Reader(model, {name: lying(name) for name in places}, dtype)
