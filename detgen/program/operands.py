"""What steps are made of: buffers, weights and caches, and the base class of all steps.

Fields have these types, or are arrays or plain numbers. Whether they fit together is checked when a step is added to
a program. setup.py reads this module: it imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import addressof, c_char
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from detgen.program.storage import FORMATS, Storage

if TYPE_CHECKING:
    from detgen.program.arrays import Array

ARITHMETIC = "detgen-2"  # the name of what docs/numerics.md states
PAGE = 64  # positions of a page of the KV cache, and keys of a block of attention
SECTION_BLOCKS = 16  # blocks of attention that are put together by themselves
PANEL = 32  # columns of a weight that are stored together
PART_INPUTS = 128  # inputs of a linear layer whose products are added up by themselves
SECTION_PARTS = 8  # parts of a linear layer that are added up by themselves
SUM_BLOCK = 128  # entries of a row that are added up by themselves
GROUP = 32  # inputs that become whole numbers together; scales are shared by as many weights, or by half
UNIT = 256  # inputs whose scales share a unit
LEAST = 2.0**-100  # a group of inputs whose largest magnitude is below this counts as zeros, of whole numbers
LOGIT_BLOCK = 128  # logits of a row that are scored together
SCORED = 4  # numbers that `Score` gives of a row
MOST_PICKS = 64  # experts of a row
MOST_EXPERTS = 4096  # of a mixture
MOST_MIXED = 16  # vectors of a row that are mixed

# What an array is to a step.
Floats: TypeAlias = "Array"  # float32 numbers
Entries: TypeAlias = "Array"  # numbers that steps write to, in a format of `Storage`
Stored: TypeAlias = "Array"  # numbers in one of the formats of `Storage`
ARRAYS = ("Floats", "Entries", "Stored")


def address(x: Any) -> int:
    """Return the address of the first number of an array or tensor."""
    try:
        return addressof(c_char.from_buffer(x))  # in a quarter of the time that `x.ctypes.data` takes
    except (TypeError, ValueError):  # a tensor; an array that is read-only, empty, not contiguous or in bfloat16
        found: int = x.data_ptr() if hasattr(x, "data_ptr") else x.ctypes.data
        return found


def name_of(dtype: Any) -> str:
    """Return the name of a numpy or torch dtype."""
    return str(dtype).removeprefix("torch.")


def is_contiguous(x: Any) -> bool:
    """Return whether an array or tensor is contiguous."""
    return bool(x.flags.c_contiguous if hasattr(x, "flags") else x.is_contiguous())


class Activation(IntEnum):
    """Functions of an entry; linear layers apply only those up to `RELU_SQUARED`."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2
    GELU = 3
    RELU = 4
    RELU_SQUARED = 5
    SIGMOID = 6
    TANH = 7
    ROOT = 8
    RECIPROCAL_ROOT = 9


class Scoring(IntEnum):
    """How logits of experts become scores: by softmax over all experts or over those that a row takes, or by sigmoids.

    `SPARSE` (SparseMixer, Liu et al., arXiv 2409.12136) takes the softmax of each expert that a row takes over those
    that are close below it, without those taken before. Experts are ranked by their scores, but with `OVER_PICKS`,
    `SIGMOIDS_OF_PICKS` and `SPARSE` by their logits.
    """

    OVER_ALL = 0
    OVER_PICKS = 1
    SIGMOIDS = 2
    SIGMOIDS_OF_PICKS = 3
    SPARSE = 4


@dataclass(frozen=True)
class Buffer:
    """Rows of `width` numbers. Buffers of the same name but different widths are different buffers."""

    name: str
    width: int

    def __str__(self) -> str:
        return f"{self.name}[{self.width}]"


@dataclass(frozen=True)
class Into:
    """Where results go: `buffer` takes results * factor, or has them added."""

    buffer: Buffer
    add: bool = False
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Scales:
    """Scales of whole numbers, one for each output and each group of inputs.

    Attributes:
        steps: [outputs, groups], or [panels, groups, PANEL]. In float32, float16 or bfloat16 they are the scales; in
            int8, the scales divided by their units.
        units: float16, laid out like `steps`, one for each UNIT inputs; None for none.
        minima: like `steps`, added to the products; None for none, in which case numbers are signed.
        minimum_units: units of the minima.
        storage: number format of steps and minima: FLOAT, HALF, BFLOAT or BYTE.
        group: inputs that share a scale, GROUP or half as many.
    """

    steps: Stored
    units: Stored | None = None
    minima: Stored | None = None
    minimum_units: Stored | None = None
    storage: Storage = Storage.FLOAT
    group: int = GROUP

    @property
    def kind(self) -> tuple[Storage, int, bool]:
        """Return what all scales of one weight must have in common."""
        return self.storage, self.group, self.minima is not None

    def each(self, made: Callable[..., Array], *others: Scales) -> Scales:
        """With other arrays: what is made of each of them, and of those of other scales of the same kind."""
        names = ("steps", "units", "minima", "minimum_units")
        arrays = {name: [getattr(each, name) for each in (self, *others)] for name in names}
        changed: dict[str, Any] = {name: made(*found) for name, found in arrays.items() if found[0] is not None}
        return replace(self, **changed)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self.steps, self.units, self.minima, self.minimum_units)
        return sum(array.nbytes for array in arrays if array is not None)

    def floats(self, dim: int = -1) -> tuple[Array, Array | None]:
        """Return scales and minima (if any) in float32; dimension `dim` counts the groups."""
        minima = None if self.minima is None else _times(self.minima, self.minimum_units, dim)
        return _times(self.steps, self.units, dim), minima

    def faults(self, storage: Storage, panels: tuple[int, ...], inputs: int) -> Iterator[str]:
        """Return what does not fit weights in a number format."""
        if self.storage not in _SCALES:
            yield f"scales in {self.storage.name}"
            return
        whole = self.storage == Storage.BYTE
        if storage == Storage.CODE and self.storage != Storage.FLOAT:
            yield f"scales of CODE in {self.storage.name}"
        if (GROUP / self.group, self.minima is not None) not in FORMATS[storage].grouped:
            yield f"scales of {self.group} inputs, minima: {self.minima is not None}, of weights in {storage.name}"
        if whole != (self.units is not None) or (whole and self.minima is not None) != (self.minimum_units is not None):
            yield f"scales in {self.storage.name} have {'units' if whole else 'no units'}"
        for name, dtype in (("steps", _SCALES[self.storage]), ("minima", _SCALES[self.storage])):
            yield from _typed(name, getattr(self, name), dtype, (*panels, inputs // self.group, PANEL))
        for name in ("units", "minimum_units"):
            yield from _typed(name, getattr(self, name), "float16", (*panels, inputs // UNIT, PANEL))


_SCALES = {Storage.FLOAT: "float32", Storage.HALF: "float16", Storage.BFLOAT: "bfloat16", Storage.BYTE: "int8"}


def _times(steps: Any, units: Any, dim: int) -> Any:
    if units is None:
        return _floats(steps)
    times = steps.shape[dim] // units.shape[dim]
    if hasattr(units, "repeat_interleave"):
        return steps * units.float().repeat_interleave(times, dim)
    return steps * _floats(units).repeat(times, dim)


def _floats(x: Any) -> Any:
    return x.float() if hasattr(x, "float") else x.astype("float32")


@dataclass(frozen=True, kw_only=True, eq=False)
class Weight:
    """The weight of a linear layer, cut into panels of PANEL columns, padded with zeros.

    Attributes:
        data: [panels, inputs, PANEL], as `FORMATS` stores them; in 4 bits, [panels, inputs, PANEL / 2]. Where inputs
            stand together, [panels, inputs / together, together * as many]. Experts come one after another.
        scales: of weights in few bits.
        codes: [16], of CODE.
        bias: [columns], of experts [experts, columns]; None for none.
        outputs: entries of a row of results.
        columns: of all panels. In a gated layer, the first half of each panel holds gates for the other half.
        inputs: entries of a row of inputs.
        storage: number format.
    """

    data: Stored
    scales: Scales | None = None
    codes: Floats | None = None
    bias: Floats | None = None
    outputs: int
    columns: int
    inputs: int
    storage: Storage

    @property
    def least(self) -> int:
        """Smallest whole number allowed."""
        return FORMATS[self.storage].least if self.scales is None or self.scales.minima is None else 0

    def faults(self, *experts: int, gated: bool = False) -> Iterator[str]:
        """Return what does not fit a layer, or that many experts."""
        panels = -(-self.outputs // (PANEL // 2 if gated else PANEL))
        if self.columns != panels * PANEL:
            yield f"{self.outputs} outputs, gated: {gated}, take {panels * PANEL} columns, not {self.columns}"
        made = FORMATS[self.storage]
        if self.inputs % made.together:
            yield f"weights in {self.storage.name} take {made.together} inputs together, which {self.inputs} are not"
        width = made.together * PANEL * made.bits // (8 * self.data.itemsize)
        yield from _stored(self.data, self.storage, (*experts, panels, self.inputs // made.together, width))
        few, coded = self.storage >= Storage.BYTE, self.storage == Storage.CODE
        if few != (self.scales is not None):
            yield f"weights in {self.storage.name} have {'scales' if few else 'no scales'}"
        if coded != (self.codes is not None):
            yield f"weights in {self.storage.name} have {'codes' if coded else 'no codes'}"
        if self.scales is not None:
            yield from self.scales.faults(self.storage, (*experts, panels), self.inputs)
        yield from shaped("codes", self.codes, (16,))
        yield from shaped("bias", self.bias, (*experts, self.columns))


@dataclass(frozen=True, kw_only=True, eq=False)
class Cache:
    """The heads of a layer, and where their keys and values are stored.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads.
        size: entries of a query or a key.
        values: entries of a value.
        keys: [pages, kv_heads, size, PAGE].
        kept: values, [pages, kv_heads, PAGE, values]; None where they are the last entries of keys.
        storage: number format of keys and values, FLOAT or BFLOAT.
    """

    heads: int
    kv_heads: int
    size: int
    values: int
    keys: Entries
    kept: Entries | None
    storage: Storage = Storage.FLOAT

    @property
    def row(self) -> int:
        """Entries of a row of queries, keys and values."""
        values = 0 if self.kept is None else self.kv_heads * self.values
        return (self.heads + self.kv_heads) * self.size + values

    def faults(self, qkv: Buffer) -> Iterator[str]:
        """Return what does not fit a buffer of queries, keys and values, or of queries alone."""
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            yield f"{self.heads} query heads cannot share {self.kv_heads} key heads"
        if qkv.width != self.heads * self.size:
            yield from wide(qkv, self.row)
        if self.kept is None and self.values > self.size:
            yield f"values of {self.values} entries in keys of {self.size}"
        if self.storage not in (Storage.FLOAT, Storage.BFLOAT):
            yield f"keys and values in {self.storage.name}"
            return
        dtype = FORMATS[self.storage].dtype
        yield from _typed("keys", self.keys, dtype, (None, self.kv_heads, self.size, PAGE))
        yield from _typed("kept", self.kept, dtype, (None, self.kv_heads, PAGE, self.values))


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """A step.

    Attributes:
        name: shown to observers of passes.
        wanted: whether the step computes only the rows whose logits are wanted, instead of all rows of the pass.
    """

    name: str
    wanted: bool = False
    _written = "to"  # the field with what is written

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """Buffers that are read, except one that results are added to."""
        found = ((f.name, getattr(self, f.name)) for f in fields(self))
        return tuple(value for name, value in found if isinstance(value, Buffer) and name != "to")

    @property
    def writes(self) -> Buffer:
        """The buffer that is written."""
        to: Buffer | Into = getattr(self, self._written)
        return to.buffer if isinstance(to, Into) else to

    @property
    def columns(self) -> tuple[int, int]:
        """Range of entries of a row that are written: the first, and the one after the last."""
        return 0, self.writes.width

    def faults(self) -> Iterator[str]:
        """Return what does not fit together: types of fields, widths, shapes, number formats."""
        yield from ill_typed(self)
        yield from self._faults()

    def _faults(self) -> Iterator[str]:
        yield from ()


@cache
def declared(kind: Any) -> dict[str, tuple[str, bool]]:
    """Return the declared types of the fields of a step or operand, by name, and whether each may be None."""
    types = {f.name: str(f.type) for f in fields(kind)}
    return {name: (text.removesuffix(" | None"), text.endswith(" | None")) for name, text in types.items()}


def ill_typed(value: Step | Into | Weight | Scales | Cache, of: str = "") -> Iterator[str]:
    """Return the fields of a step or operand whose values are not of their declared types."""
    whose: Any = type(value)
    for name, (kind, optional) in declared(whose).items():
        found = getattr(value, name)
        if found is None:
            fits = optional
        elif kind in ARRAYS:
            fits = is_array(found) and is_contiguous(found)
        elif kind == "float":
            fits = isinstance(found, float | int) and not isinstance(found, bool)
        else:
            fits = type(found) is ({"int": int, "bool": bool, "str": str}.get(kind) or globals()[kind])
        if not fits:
            yield f"{of}{name} is {_shown(found)}, no {kind}"
        elif isinstance(found, Into | Weight | Scales | Cache):
            yield from ill_typed(found, f"{name}.")


def is_array(value: Any) -> bool:
    """Return whether a value is an array or a tensor."""
    return hasattr(value, "data_ptr") or hasattr(value, "ctypes")


def _shown(value: Any) -> str:
    return f"of the shape {list(value.shape)}, not contiguous" if is_array(value) else repr(value)


def _stored(data: Array, storage: Storage, shape: tuple[int | None, ...]) -> Iterator[str]:
    dtype = FORMATS[storage].dtype
    if name_of(data.dtype) != dtype:
        yield f"weights in {storage.name} are {dtype}, not {name_of(data.dtype)}"
    yield from _sized("the weight", data, shape)


def tabled(table: Array, storage: Storage, width: int) -> Iterator[str]:
    """Return what is wrong with a table whose entries should have a width."""
    if storage > Storage.HALF:
        yield f"tables are not in {storage.name}"
    yield from _stored(table, storage, (None, width))


def shaped(name: str, array: Array | None, shape: tuple[int | None, ...] | None) -> Iterator[str]:
    """Return what is wrong with float32 numbers of a shape (None fits any size); without a shape, their presence."""
    if array is None:
        return
    if shape is None:
        yield f"{name} that nothing reads"
        return
    yield from _typed(name, array, "float32", shape)


def _typed(name: str, array: Array | None, dtype: str, shape: tuple[int | None, ...]) -> Iterator[str]:
    if array is None:
        return
    if name_of(array.dtype) != dtype:
        yield f"{name} in {name_of(array.dtype)}"
    yield from _sized(name, array, shape)


def _sized(name: str, array: Array, shape: tuple[int | None, ...]) -> Iterator[str]:
    found = tuple(array.shape)
    if len(found) != len(shape) or any(wanted not in (None, size) for size, wanted in zip(found, shape, strict=True)):
        yield f"{name} has the shape {list(found)}, not [{', '.join('any' if n is None else str(n) for n in shape)}]"


def wide(buffer: Buffer, width: int) -> Iterator[str]:
    """That a buffer has another width."""
    if buffer.width != width:
        yield f"{buffer} has not the width {width}"


def of_linear(activation: Activation) -> Iterator[str]:
    """That a linear layer has no such activation."""
    if activation > Activation.RELU_SQUARED:
        yield f"a linear layer has no {activation.name}"
