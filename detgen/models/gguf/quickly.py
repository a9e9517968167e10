"""Makes transformers and the gguf package faster at GGUF files, where they do the same work again and again.

The package's reader makes two numpy arrays of each string of a list, and vocabularies have hundreds of thousands; that
of transformers makes a view of a mapped file of each. The table of tensor names is built anew for each module of a
model, and a file is interpreted twice, for the configuration and for the tokenizer. What transformers receives stays
the same.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import cache
from typing import Any

import gguf
import numpy as np
from gguf import GGUFReader, GGUFValueType

_LENGTH, _LIST = struct.Struct("<Q"), struct.Struct("<IQ")  # the latter begins with the type of the entries


class QuickReader(GGUFReader):
    """A reader that returns the entries of lists as texts and numbers instead of numpy arrays.

    Transformers learns that such a value is a list, but not of what, and takes the entries as they are.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        """Return the bytes of a value, its parts, which of them are entries, and its types, as the base class does."""
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
    """Inside the block, give transformers the quick reader, and have it read a file and a table of names once."""
    from transformers import modeling_gguf_pytorch_utils as by_package

    found: list[tuple[Any, str, Any]] = [
        (gguf, "GGUFReader", cache(QuickReader)),
        (gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
        (by_package, "load_gguf_checkpoint", _once(by_package.load_gguf_checkpoint)),
    ]
    with suppress(ImportError, AttributeError):  # older versions read with the package only
        from transformers.integrations.gguf import reader

        mapped = reader._mapped
        found.append((reader, "_mapped", lambda path: np.asarray(mapped(path))))
    former = [(module, name, getattr(module, name)) for module, name, _ in found]
    for module, name, quick in found:
        setattr(module, name, quick)
    try:
        yield
    finally:
        for module, name, slow in former:
            setattr(module, name, slow)


def _once(load: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a loader that reads each file once; each caller gets its own configuration, since it may change it."""
    made = cache(load)

    def again(path: str, **asked: Any) -> dict[str, Any]:
        found = made(path, **asked)
        return {**found, "config": deepcopy(found["config"])}

    return again
