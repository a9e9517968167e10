"""What steps are made of: buffers, weights, caches, and what all steps have.

Fields are of these types, of the tensors that are told apart here, or plain numbers. What does not fit together is said
when a step is added to a program. setup.py reads this module: it imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from detgen.program.storage import FORMATS, Storage

if TYPE_CHECKING:
    from torch import Tensor

ARITHMETIC = "detgen-2"  # the name of what docs/numerics.md states
PAGE = 64  # positions of a page of the KV cache, and keys of a block of attention
SECTION_BLOCKS = 16  # blocks of attention that are put together by themselves
PANEL = 32  # columns of a weight that are stored together
PART_INPUTS = 128  # inputs of a linear layer whose products are added up by themselves
SECTION_PARTS = 8  # parts of a linear layer that are added up by themselves
SUM_BLOCK = 128  # entries of a row that are added up by themselves
GROUP = 32  # inputs that share a scale, of weights in few bits
LEAST = 2.0**-100  # a group of inputs whose largest magnitude is below this counts as zeros, of whole numbers
LOGIT_BLOCK = 128  # logits of a row that are scored together
SCORED = 4  # numbers that `Score` gives of a row
MOST_PICKS = 64  # experts of a row

# What a tensor is to a step.
Floats: TypeAlias = "Tensor"  # float32 numbers
Entries: TypeAlias = "Tensor"  # float32 numbers that steps write to
Stored: TypeAlias = "Tensor"  # numbers in one of the formats of `Storage`
TENSORS = ("Floats", "Entries", "Stored")


class Activation(IntEnum):
    """Functions of an entry; a linear layer has those up to `RELU`."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2
    GELU = 3
    RELU = 4
    SIGMOID = 5
    TANH = 6
    ROOT = 7
    RECIPROCAL_ROOT = 8


@dataclass(frozen=True)
class Buffer:
    """Rows of `width` numbers. Those of other widths are other buffers, whatever their name is."""

    name: str
    width: int

    def __str__(self) -> str:
        return f"{self.name}[{self.width}]"


@dataclass(frozen=True)
class Into:
    """Where results go: `buffer` takes results * factor, or adds them to what is there."""

    buffer: Buffer
    add: bool = False
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Weight:
    """The weight of a linear layer, cut into panels of PANEL columns, zeros behind the last one.

    Attributes:
        data: [panels, inputs, PANEL], as `FORMATS` stores them; of 4 bits, [panels, inputs, PANEL / 2]. Where inputs
            stand together, [panels, inputs / together, together * as many]. Of experts, one behind the other.
        scales: [panels, inputs / GROUP, PANEL], of weights in few bits.
        codes: [16], of CODE.
        bias: [columns]; None for none.
        outputs: entries of a row of results.
        columns: those of all panels. Of a gated layer, the first half of each panel are gates of the other half.
        inputs: entries of a row that is read.
        storage: number format.
    """

    data: Stored
    scales: Floats | None = None
    codes: Floats | None = None
    bias: Floats | None = None
    outputs: int
    columns: int
    inputs: int
    storage: Storage

    def faults(self, *experts: int, gated: bool = False) -> Iterator[str]:
        """What does not fit, of a layer or of so many experts."""
        panels = -(-self.outputs // (PANEL // 2 if gated else PANEL))
        if self.columns != panels * PANEL:
            yield f"{self.outputs} outputs, gated: {gated}, take {panels * PANEL} columns, not {self.columns}"
        made = FORMATS[self.storage]
        if self.inputs % made.together:
            yield f"weights in {self.storage.name} take {made.together} inputs together, which {self.inputs} are not"
        width = made.together * PANEL * made.bits // (8 * self.data.element_size())
        yield from _stored(self.data, self.storage, (*experts, panels, self.inputs // made.together, width))
        few, coded = self.storage >= Storage.BYTE, made.coded
        if few != (self.scales is not None):
            yield f"weights in {self.storage.name} have {'scales' if few else 'no scales'}"
        if coded != (self.codes is not None):
            yield f"weights in {self.storage.name} have {'codes' if coded else 'no codes'}"
        yield from shaped("scales", self.scales, (*experts, panels, self.inputs // GROUP, PANEL))
        yield from shaped("codes", self.codes, (16,))
        yield from shaped("bias", self.bias, (self.columns,))


@dataclass(frozen=True, kw_only=True, eq=False)
class Cache:
    """The heads of a layer, and where their keys and values are stored.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads.
        size: entries of a query or a key.
        values: entries of a value.
        keys: [pages, kv_heads, size, PAGE].
        kept: values, [pages * PAGE, kv_heads, values].
    """

    heads: int
    kv_heads: int
    size: int
    values: int
    keys: Entries
    kept: Entries

    def faults(self, qkv: Buffer) -> Iterator[str]:
        """What does not fit, with a buffer of queries, keys and values."""
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            yield f"{self.heads} query heads cannot share {self.kv_heads} key heads"
        yield from wide(qkv, (self.heads + self.kv_heads) * self.size + self.kv_heads * self.values)
        yield from shaped("keys", self.keys, (None, self.kv_heads, self.size, PAGE))
        yield from shaped("kept", self.kept, (None, self.kv_heads, self.values))


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """A step.

    Attributes:
        name: for those who look into passes.
        wanted: whether the rows are those of which logits are wanted, instead of all rows of the pass.
    """

    name: str
    wanted: bool = False
    _written = "to"  # the field with what is written

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """The buffers that are read, but for what results are added to."""
        found = ((f.name, getattr(self, f.name)) for f in fields(self))
        return tuple(value for name, value in found if isinstance(value, Buffer) and name != "to")

    @property
    def writes(self) -> Buffer:
        """The buffer that is written."""
        to: Buffer | Into = getattr(self, self._written)
        return to.buffer if isinstance(to, Into) else to

    def faults(self) -> Iterator[str]:
        """What does not fit together: types of fields, widths, shapes, number formats."""
        yield from ill_typed(self)
        yield from self._faults()

    def _faults(self) -> Iterator[str]:
        yield from ()


@cache
def declared(kind: Any) -> dict[str, tuple[str, bool]]:
    """The types of the fields of a step, or of what it has, as they are written, by name; whether None may be."""
    types = {f.name: str(f.type) for f in fields(kind)}
    return {name: (text.removesuffix(" | None"), text.endswith(" | None")) for name, text in types.items()}


def ill_typed(value: Step | Into | Weight | Cache, of: str = "") -> Iterator[str]:
    """The fields of a step, or of what it has, whose values are not of the types that are declared."""
    whose: Any = type(value)
    for name, (kind, optional) in declared(whose).items():
        found = getattr(value, name)
        if found is None:
            fits = optional
        elif kind in TENSORS:
            fits = hasattr(found, "data_ptr") and found.is_contiguous()
        elif kind == "float":
            fits = isinstance(found, float | int) and not isinstance(found, bool)
        else:
            fits = type(found) is ({"int": int, "bool": bool, "str": str}.get(kind) or globals()[kind])
        if not fits:
            yield f"{of}{name} is {_shown(found)}, no {kind}"
        elif isinstance(found, Into | Weight | Cache):
            yield from ill_typed(found, f"{name}.")


def _shown(value: Any) -> str:
    return f"of the shape {list(value.shape)}, not contiguous" if hasattr(value, "data_ptr") else repr(value)


def _stored(data: Tensor, storage: Storage, shape: tuple[int | None, ...]) -> Iterator[str]:
    dtype = FORMATS[storage].dtype
    if str(data.dtype) != f"torch.{dtype}":
        yield f"weights in {storage.name} are {dtype}, not {data.dtype}"
    yield from _sized("the weight", data, shape)


def tabled(table: Tensor, storage: Storage, width: int) -> Iterator[str]:
    """What does not fit of a table with entries of a width."""
    if storage > Storage.HALF:
        yield f"tables are not in {storage.name}"
    yield from _stored(table, storage, (None, width))


def shaped(name: str, tensor: Tensor | None, shape: tuple[int | None, ...] | None) -> Iterator[str]:
    """What does not fit of float32 numbers of a shape, in which None is any number; of no shape, that there are any."""
    if tensor is None:
        return
    if shape is None:
        yield f"{name} that nothing reads"
        return
    if str(tensor.dtype) != "torch.float32":
        yield f"{name} in {tensor.dtype}"
    yield from _sized(name, tensor, shape)


def _sized(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> Iterator[str]:
    found = tuple(tensor.shape)
    if len(found) != len(shape) or any(wanted not in (None, size) for size, wanted in zip(found, shape, strict=True)):
        yield f"{name} has the shape {list(found)}, not [{', '.join('any' if n is None else str(n) for n in shape)}]"


def wide(buffer: Buffer, width: int) -> Iterator[str]:
    """That a buffer has another width."""
    if buffer.width != width:
        yield f"{buffer} has not the width {width}"


def of_linear(activation: Activation) -> Iterator[str]:
    """That a linear layer has no such activation."""
    if activation > Activation.RELU:
        yield f"a linear layer has no {activation.name}"
