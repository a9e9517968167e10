"""Makes the gguf package quick enough for transformers, which asks it for the same things again and again.

Its reader makes two numpy arrays of each string of a list, and vocabularies have hundreds of thousands; its table of
tensors' names is built anew for each module of a model. What transformers receives stays the same.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import gguf
from gguf import GGUFReader, GGUFValueType

_LENGTH, _LIST = struct.Struct("<Q"), struct.Struct("<IQ")  # the latter begins with the type of the entries


class QuickReader(GGUFReader):
    """A reader whose lists have texts and numbers for entries instead of arrays of numpy.

    Transformers, which learns that such a value is a list but not of what, takes the entries as they are.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        """Bytes that a value takes, its parts, which of them are entries, and its types; as of the base class."""
        if raw_type != GGUFValueType.ARRAY:
            found: tuple[int, list[Any], list[int], list[GGUFValueType]] = super()._get_field_parts(orig_offs, raw_type)
            return found
        content = self.data.data
        number, count = _LIST.unpack_from(content, orig_offs)
        kind, at = GGUFValueType(number), orig_offs + _LIST.size
        entries: list[Any]
        if kind == GGUFValueType.STRING:
            entries = []
            for _ in range(count):
                first = at + _LENGTH.size
                at = first + _LENGTH.unpack_from(content, at)[0]
                entries.append(str(content[first:at], "utf-8"))
        else:
            numbers = self._get(at, self.gguf_scalar_to_np[kind], count)
            at += numbers.nbytes
            entries = numbers.tolist()
        return at - orig_offs, entries, list(range(count)), [GGUFValueType.ARRAY]


@contextmanager
def quick_gguf() -> Iterator[None]:
    """While inside, transformers gets the quick reader, and has a file and a table of names read once."""
    quick = {"GGUFReader": cache(QuickReader), "get_tensor_name_map": cache(gguf.get_tensor_name_map)}
    former = {name: getattr(gguf, name) for name in quick}
    vars(gguf).update(quick)
    try:
        yield
    finally:
        vars(gguf).update(former)
