"""The header of a GGUF file, llama.cpp's format of a model in one file: its settings, and the places of its tensors.

A file may come from a stranger: errors are reported in one line. Only the header is read here, and neither torch nor
another library is imported.
"""

from __future__ import annotations

import math
import mmap
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from detgen.errors import EngineError, QuantName
from detgen.models.gguf.kinds import KINDS

MAGIC = b"GGUF"

_VERSIONS = (2, 3)
_PLAIN = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_LENGTH = struct.Struct("<Q")  # precedes a string
_LIST = struct.Struct("<IQ")  # type and number of a list's entries, which precede them
_STRING, _ARRAY = 8, 9
_LAYERS = 1024  # longest list that may have an entry per layer; vocabularies have more
_LARGEST = 2**31 - 1  # of any dimension of a tensor: fits the int32 of kernels


class Entry(NamedTuple):
    """A tensor.

    Attributes:
        kind: name of its type.
        shape: its sizes; entries along the last axis are adjacent.
        at: offset of its first byte in the file.
        size: number of bytes.
    """

    kind: str
    shape: tuple[int, ...]
    at: int
    size: int


class Header(NamedTuple):
    """The header of a file.

    Attributes:
        architecture: llama.cpp's name of the model's family.
        settings: numbers and texts by name, and short lists of numbers, such as one per layer, as tuples; of other
            lists only the length, as a range.
        tensors: tensors by name.
        lists: offset of each list of the settings.
    """

    architecture: str
    settings: dict[str, Any]
    tensors: dict[str, Entry]
    lists: dict[str, int]


def check_gguf(path: Path, name: str, quant: QuantName) -> Header:
    """Return the header of a file whose weights stay as stored; arguments and errors as for `read_header`.

    Args:
        quant: quantization that is asked for; there must be none.
    """
    if quant != "none":
        raise EngineError(
            f"cannot load the model {name}: a GGUF file's weights stay as they are stored and cannot be quantized to"
            f" {quant}; leave out that option"
        )
    return read_header(path, name)


def read_header(path: Path, name: str) -> Header:
    """Read the header of a file.

    Args:
        path: path of the file.
        name: name of the model in messages.

    Raises:
        EngineError: if it is not a GGUF file, is damaged, or has tensors that cannot be read.
    """
    try:
        status = path.stat()
        return _header(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise EngineError(f"cannot load the model {name}: {error.strerror}") from None
    except (struct.error, _EndError):
        raise EngineError(f"cannot load the model {name}: the file is cut short; fetch it again") from None
    except _WrongError as error:
        raise EngineError(f"cannot load the model {name}: {error}") from None


def list_of(path: Path, header: Header, key: str) -> list[Any]:
    """Return the entries of a list, texts or numbers, of a file whose header has been read.

    Raises:
        ValueError: if there is no list of that name, or a text is not UTF-8.
    """
    if key not in header.lists:
        raise ValueError(f"its header has no list {key}")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        kind, count = _LIST.unpack_from(content, at := header.lists[key])
        at += _LIST.size
        if kind in _PLAIN:
            return list(struct.unpack_from(f"<{count}{_PLAIN[kind][1:]}", content, at))
        found = []
        for _ in range(count):
            first = at + _LENGTH.size
            at = first + _LENGTH.unpack_from(content, at)[0]
            found.append(content[first:at].decode())
        return found


@lru_cache(maxsize=8)
def _header(path: Path, *of_this_file: int) -> Header:
    """Return the header of a file, read once: a run needs it before it loads anything, and a vocabulary takes time."""
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise _WrongError("it is not a GGUF file; give one, or a folder in the Hugging Face layout")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(content).header()


class _WrongError(Exception):
    """A file is wrong."""


class _EndError(Exception):
    """The file ends too early."""


class _Reader:
    """Reads a header from its beginning to its end."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._at = content, len(MAGIC)

    def header(self) -> Header:
        version = self._number("<I")
        if version not in _VERSIONS:
            raise _WrongError(f"it is GGUF {version}, and versions 2 and 3 are supported; convert the model again")
        tensors, count = self._number("<Q"), self._number("<Q")
        settings: dict[str, Any] = {}
        lists: dict[str, int] = {}
        for _ in range(count):
            key, kind = self._string(), self._number("<I")
            if kind == _ARRAY:
                lists[key] = self._at
            settings[key] = self._value(kind)
        architecture = settings.get("general.architecture")
        if not isinstance(architecture, str):
            raise _WrongError("its header has no general.architecture")
        if settings.get("split.count", 1) not in (0, 1):
            raise _WrongError("it is one of several parts; join them with llama-gguf-split --merge")
        entries = [(name := self._string(), self._entry(name)) for _ in range(tensors)]
        layers = settings.get(f"{architecture}.block_count")
        if type(layers) is not int or not 1 <= layers <= tensors:
            raise _WrongError(f"its {architecture}.block_count is {layers}, and it has {tensors:,} tensors")
        step = settings.get("general.alignment", 32)
        if type(step) is not int or not 1 <= step <= 1 << 20:
            raise _WrongError("its general.alignment makes no sense")
        first = -(-self._at // step) * step
        found = {name: entry._replace(at=first + entry.at) for name, entry in entries}
        if any(entry.at + entry.size > len(self._content) for entry in found.values()):
            raise _EndError
        return Header(architecture, settings, found, lists)

    def _take(self, count: int) -> int:
        """Skip bytes and return the offset of the first one."""
        first, self._at = self._at, self._at + count
        if self._at > len(self._content):
            raise _EndError
        return first

    def _number(self, form: str) -> Any:
        return struct.unpack_from(form, self._content, self._take(struct.calcsize(form)))[0]

    def _string(self) -> str:
        length = self._number("<Q")
        first = self._take(length)
        try:
            return self._content[first : first + length].decode()
        except UnicodeDecodeError:
            raise _WrongError("a text of its header is not UTF-8") from None

    def _value(self, kind: int) -> Any:
        """Read a value; lists of texts and long lists are skipped."""
        if kind in _PLAIN:
            return self._number(_PLAIN[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise _WrongError(f"a setting of its header has the unknown type {kind}")
        inner, count = self._number("<I"), self._number("<Q")
        if inner in _PLAIN and count <= _LAYERS:
            return tuple(self._number(_PLAIN[inner]) for _ in range(count))
        if inner in _PLAIN:
            self._take(struct.calcsize(_PLAIN[inner]) * count)
        elif inner == _STRING:
            content, at, last = self._content, self._at, len(self._content) - _LENGTH.size
            for _ in range(count):  # vocabularies have hundreds of thousands
                if at > last:
                    raise _EndError
                at += _LENGTH.size + _LENGTH.unpack_from(content, at)[0]
            self._take(at - self._at)
        else:
            raise _WrongError(f"a list of its header has the unknown type {inner}")
        return range(count)

    def _entry(self, name: str) -> Entry:
        """Read the entry of a tensor; its place is relative to the end of the header."""
        dimensions = self._number("<I")
        sizes = [self._number("<Q") for _ in range(min(dimensions, 5))]
        number, at = self._number("<I"), self._number("<Q")
        if number not in KINDS:
            *names, last = (kind.name for kind in KINDS.values())
            raise _WrongError(
                f"its tensor {name} is of type {_type_name(number)}, and {', '.join(names)} and {last} are read;"
                " make one with llama-quantize and the type Q4_K_M or Q8_0"
            )
        kind, entries, size, *_ = KINDS[number]
        count = math.prod(sizes)
        if not sizes or not all(1 <= n <= _LARGEST for n in sizes) or sizes[0] % entries or len(sizes) > 4:
            raise _WrongError(f"its tensor {name} has sizes that make no sense: {sizes[:4]}")
        return Entry(kind, tuple(reversed(sizes)), at, count // entries * size)


def _type_name(number: int) -> str:
    """Return llama.cpp's name of a tensor type."""
    from gguf import GGMLQuantizationType

    try:
        return str(GGMLQuantizationType(number).name)
    except ValueError:
        return str(number)
