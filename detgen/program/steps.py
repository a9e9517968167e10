"""The steps of a pass: the one declaration of what each kind of step has.

The structures that C takes are made of these classes (`detgen/kernels/native/layout.py`), so a field is added here and
nowhere else. setup.py reads this module: it imports neither torch nor numpy.

A step makes rows of one buffer from rows of others. All numbers in buffers are float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

PAGE = 64  # positions of a page of the KV cache, and keys of a block of attention
PANEL = 32  # columns of a weight that are stored together
PART_INPUTS = 128  # inputs of a linear layer whose products are added up by themselves
GROUP = 32  # inputs that share a scale, of weights in few bits
LOGIT_BLOCK = 128  # logits of a row that are scored together
SCORED = 4  # numbers that `Score` gives of a row
MOST_PICKS = 64  # experts of a row

# What a tensor is to a step.
Floats: TypeAlias = "Tensor"  # float32 numbers
Entries: TypeAlias = "Tensor"  # float32 numbers that steps write to
Stored: TypeAlias = "Tensor"  # numbers in one of the formats of `Storage`
TENSORS = ("Floats", "Entries", "Stored")


class Storage(IntEnum):
    """Number formats of weights, which are widened to float32 when they are read.

    Of BYTE, a weight is a whole number from -128 to 127 times the scale of its group, rounded to float32; of NIBBLE it
    is one from -8 to 7, plus 8 in half a byte: byte c of an input has column c below and column c + 16 above. Of CODE,
    such a half of a byte is the number of one of sixteen codes, which is multiplied by the scale, likewise.
    """

    FLOAT = 0
    BFLOAT = 1
    HALF = 2
    BYTE = 3
    NIBBLE = 4
    CODE = 5


_DTYPES = dict(zip(Storage, ("float32", "bfloat16", "float16", "int8", "uint8", "uint8"), strict=True))


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
        data: [panels, inputs, PANEL]; of NIBBLE and CODE, [panels, inputs, PANEL / 2]. Of experts, one behind the
            other.
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
        width = PANEL // 2 if self.storage in (Storage.NIBBLE, Storage.CODE) else PANEL
        yield from _stored(self.data, self.storage, (*experts, panels, self.inputs, width))
        few, coded = self.storage >= Storage.BYTE, self.storage == Storage.CODE
        if few != (self.scales is not None):
            yield f"weights in {self.storage.name} have {'scales' if few else 'no scales'}"
        if coded != (self.codes is not None):
            yield f"weights in {self.storage.name} have {'codes' if coded else 'no codes'}"
        yield from _shaped("scales", self.scales, (*experts, panels, self.inputs // GROUP, PANEL))
        yield from _shaped("codes", self.codes, (16,))
        yield from _shaped("bias", self.bias, (self.columns,))


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
        yield from _wide(qkv, (self.heads + self.kv_heads) * self.size + self.kv_heads * self.values)
        yield from _shaped("keys", self.keys, (None, self.kv_heads, self.size, PAGE))
        yield from _shaped("kept", self.kept, (None, self.kv_heads, self.values))


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Embed(Step):
    """The entry of a table for each token; zeros for token -1, NaN for those below.

    Attributes:
        table: [tokens, width].
        storage: its number format.
        to: takes them.
    """

    table: Stored
    storage: Storage
    to: Into

    def _faults(self) -> Iterator[str]:
        yield from _table(self.table, self.storage, self.to.buffer.width)


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbedPositions(Step):
    """The entry of a table for each position.

    Attributes:
        table: [positions, width].
        storage: its number format.
        offset: is added to a position to find it there.
        to: takes them.
    """

    table: Stored
    storage: Storage
    offset: int
    to: Into

    def _faults(self) -> Iterator[str]:
        yield from _table(self.table, self.storage, self.to.buffer.width)


@dataclass(frozen=True, kw_only=True, eq=False)
class Norm(Step):
    """A root-mean-square norm, or a layer norm, of vectors that follow each other in a row.

    Attributes:
        x: is read.
        to: takes the results, at the same place in its rows.
        at: where in a row the first vector begins.
        vectors: how many there are.
        size: entries of a vector.
        weight: [size], or [vectors, size] if each has its own; None for none.
        bias: like it; only with a weight.
        own: whether each vector has its own weight.
        epsilon: is added to the mean square.
        centred: whether it is a layer norm.
    """

    x: Buffer
    to: Into
    at: int = 0
    vectors: int = 1
    size: int
    weight: Floats | None = None
    bias: Floats | None = None
    own: bool = False
    epsilon: float
    centred: bool

    def _faults(self) -> Iterator[str]:
        if self.at + self.vectors * self.size > min(self.x.width, self.to.buffer.width):
            yield f"{self.vectors} vectors of {self.size} from {self.at} on go beyond {self.x} or {self.to.buffer}"
        elif self.x != self.to.buffer and self.vectors * self.size != self.to.buffer.width:
            yield f"{self.to.buffer} is written in part"
        if self.weight is None and (self.bias is not None or self.own):
            yield "a bias, or weights of each vector, without a weight"
        shape = (self.vectors, self.size) if self.own else (self.size,)
        yield from _shaped("weight", self.weight, shape)
        yield from _shaped("bias", self.bias, shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class Linear(Step):
    """A linear layer.

    Attributes:
        x: is read.
        to: takes the results; with a softcap they are not added.
        weight: of the layer.
        activation: of the results, or of the gates.
        gated: whether half of the columns, activated, are factors of the others.
        softcap: results become softcap * tanh(result / softcap); 0 for none.
    """

    x: Buffer
    to: Into
    weight: Weight
    activation: Activation = Activation.NONE
    gated: bool = False
    softcap: float = 0.0

    def _faults(self) -> Iterator[str]:
        yield from self.weight.faults(gated=self.gated)
        yield from _wide(self.x, self.weight.inputs)
        yield from _wide(self.to.buffer, self.weight.outputs)
        yield from _of_linear(self.activation)
        if self.softcap and self.to.add:
            yield "results with a softcap cannot be added"


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredLinear(Step):
    """A linear layer of whose results, logits, only what `Score` reads is stored.

    Attributes:
        x: is read.
        to: takes SCORED numbers for each block of LOGIT_BLOCK logits: the largest, the next, the sums, the places.
        weight: of the layer.
        factor: logits are multiplied by it.
        softcap: then they become softcap * tanh(logit / softcap); 0 for none.
    """

    x: Buffer
    to: Buffer
    weight: Weight
    factor: float = 1.0
    softcap: float = 0.0

    def _faults(self) -> Iterator[str]:
        yield from self.weight.faults()
        yield from _wide(self.x, self.weight.inputs)
        yield from _wide(self.to, SCORED * -(-self.weight.outputs // LOGIT_BLOCK))


@dataclass(frozen=True, kw_only=True, eq=False)
class Score(Step):
    """The largest logit of a row, the next, the logarithm of the sum of e^(logit - largest), the largest one's place.

    Attributes:
        x: what `ScoredLinear` wrote.
        to: takes the SCORED numbers; the place is the bits of an int32.
    """

    x: Buffer
    to: Buffer

    def _faults(self) -> Iterator[str]:
        if self.x.width % SCORED:
            yield f"{self.x} has no {SCORED} numbers a block"
        yield from _wide(self.to, SCORED)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotate(Step):
    """Rotates queries and keys in place, and stores keys and values, bounded.

    Attributes:
        qkv: queries, keys and values of a row, one behind the other.
        cache: where keys and values are stored.
        turned: entries of a head that are rotated; 0 for none.
        interleaved: whether entries 2 i and 2 i + 1 are rotated together, instead of i and turned / 2 + i.
        cosines: [positions, turned / 2].
        sines: likewise.
        last: whether rows whose keys are not finite are noted.
    """

    _written = "qkv"
    qkv: Buffer
    cache: Cache
    turned: int = 0
    interleaved: bool = False
    cosines: Floats | None = None
    sines: Floats | None = None
    last: bool = False

    def _faults(self) -> Iterator[str]:
        yield from self.cache.faults(self.qkv)
        if not 0 <= self.turned <= self.cache.size or self.turned % 2:
            yield f"{self.turned} of {self.cache.size} entries cannot be rotated"
        if bool(self.turned) > (self.cosines is not None and self.sines is not None):
            yield "no cosines or sines to rotate by"
        yield from _shaped("cosines", self.cosines, (None, self.turned // 2) if self.turned else None)
        yield from _shaped("sines", self.sines, (None, self.turned // 2) if self.turned else None)


@dataclass(frozen=True, kw_only=True, eq=False)
class Attend(Step):
    """Attention over the KV cache.

    Attributes:
        qkv: what `Rotate` left.
        cache: where it stored keys and values.
        to: takes the results, [heads, values] of a row.
        scale: of the scores.
        window: positions that a row sees, its own included; 0 for all.
        chunk: positions of a chunk, before whose first a row sees nothing; 0 for no chunks.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.
    """

    qkv: Buffer
    cache: Cache
    to: Buffer
    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0

    def _faults(self) -> Iterator[str]:
        yield from self.cache.faults(self.qkv)
        yield from _wide(self.to, self.cache.heads * self.cache.values)


@dataclass(frozen=True, kw_only=True, eq=False)
class Copy(Step):
    """Rows as they are.

    Attributes:
        x: is read.
        to: takes them.
    """

    x: Buffer
    to: Into

    def _faults(self) -> Iterator[str]:
        yield from _wide(self.to.buffer, self.x.width)


@dataclass(frozen=True, kw_only=True, eq=False)
class Take(Step):
    """The wanted rows out of all.

    Attributes:
        x: has all rows.
        to: takes those.
    """

    x: Buffer
    to: Buffer
    wanted: bool = field(default=True, init=False)

    def _faults(self) -> Iterator[str]:
        yield from _wide(self.to, self.x.width)


@dataclass(frozen=True, kw_only=True, eq=False)
class Gate(Step):
    """Rows times the sigmoid of a factor of their own.

    Attributes:
        x: is read.
        factors: [1], the factors.
        to: takes the products.
    """

    x: Buffer
    factors: Buffer
    to: Into

    def _faults(self) -> Iterator[str]:
        yield from _wide(self.factors, 1)
        yield from _wide(self.to.buffer, self.x.width)


@dataclass(frozen=True, kw_only=True, eq=False)
class Route(Step):
    """Which experts of a mixture a row takes: the most probable ones.

    Attributes:
        x: logits of the experts, which become probabilities.
        to: takes a row's routes, pairs of an expert's number and its weight, in order of the numbers.
        normalized: whether the weights are made to add up to 1.
    """

    x: Buffer
    to: Buffer
    normalized: bool

    def _faults(self) -> Iterator[str]:
        picks = self.to.width // 2
        if self.to.width % 2 or not 1 <= picks <= min(self.x.width, MOST_PICKS):
            yield f"{self.to} holds no routes to some of {self.x.width} experts, {MOST_PICKS} at most"


@dataclass(frozen=True, kw_only=True, eq=False)
class Sort(Step):
    """Lists the rows of each expert, for the steps behind it.

    Attributes:
        routes: what `Route` wrote.
        experts: how many there are.
    """

    _written = "routes"
    routes: Buffer
    experts: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertLinear(Step):
    """A linear layer of each expert, for the rows that `Sort` listed.

    Attributes:
        x: rows of inputs, or of a segment of inputs for each of the row's routes.
        routes: what was sorted.
        to: takes a segment of results for each route.
        weight: of all experts, one behind the other.
        activation: of the results, or of the gates.
        gated: whether half of the columns, activated, are factors of the others.
    """

    x: Buffer
    routes: Buffer
    to: Buffer
    weight: Weight
    activation: Activation = Activation.NONE
    gated: bool = False

    def _faults(self) -> Iterator[str]:
        picks = self.routes.width // 2
        yield from self.weight.faults(self.weight.data.shape[0], gated=self.gated)
        if self.weight.bias is not None:
            yield "experts have no bias"
        if self.x.width != self.weight.inputs:
            yield from _wide(self.x, picks * self.weight.inputs)
        yield from _wide(self.to, picks * self.weight.outputs)
        yield from _of_linear(self.activation)


@dataclass(frozen=True, kw_only=True, eq=False)
class Combine(Step):
    """The sum of what a row's experts gave, times their weights, in order of their numbers.

    Attributes:
        x: a segment for each route.
        routes: with the weights.
        to: takes the sums.
    """

    x: Buffer
    routes: Buffer
    to: Into

    def _faults(self) -> Iterator[str]:
        yield from _wide(self.x, self.routes.width // 2 * self.to.buffer.width)


@dataclass(frozen=True, kw_only=True, eq=False)
class Activate(Step):
    """A function of each entry.

    Attributes:
        x: is read.
        to: takes the results.
        function: of the entries.
    """

    x: Buffer
    to: Into
    function: Activation

    def _faults(self) -> Iterator[str]:
        yield from _wide(self.to.buffer, self.x.width)


@dataclass(frozen=True, kw_only=True, eq=False)
class Softmax(Step):
    """The softmax of each row.

    Attributes:
        x: is read.
        to: takes the results.
    """

    x: Buffer
    to: Buffer

    def _faults(self) -> Iterator[str]:
        yield from _wide(self.to, self.x.width)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sum(Step):
    """The sum of each row.

    Attributes:
        x: is read.
        to: [1], takes the sums.
    """

    x: Buffer
    to: Buffer

    def _faults(self) -> Iterator[str]:
        yield from _wide(self.to, 1)


# All kinds, in the order of their numbers.
STEPS: tuple[type[Step], ...] = (
    *(Embed, EmbedPositions, Norm, Linear, ScoredLinear, Score, Rotate, Attend, Copy, Take, Gate),
    *(Route, Sort, ExpertLinear, Combine, Activate, Softmax, Sum),
)


@cache
def declared(kind: str) -> dict[str, tuple[str, bool]]:
    """The types of the fields of a class of this module, as they are written, by their names; whether None may be."""
    types = {f.name: str(f.type) for f in fields(globals()[kind])}
    return {name: (text.removesuffix(" | None"), text.endswith(" | None")) for name, text in types.items()}


def ill_typed(value: Any, of: str = "") -> Iterator[str]:
    """The fields of a step, or of what it has, whose values are not of the types that are declared."""
    for name, (kind, optional) in declared(type(value).__name__).items():
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
    if str(data.dtype) != f"torch.{_DTYPES[storage]}":
        yield f"weights in {storage.name} are {_DTYPES[storage]}, not {data.dtype}"
    yield from _sized("the weight", data, shape)


def _table(table: Tensor, storage: Storage, width: int) -> Iterator[str]:
    if storage >= Storage.BYTE:
        yield "tables have no scales"
    yield from _stored(table, storage, (None, width))


def _shaped(name: str, tensor: Tensor | None, shape: tuple[int | None, ...] | None) -> Iterator[str]:
    """Float32 numbers of a shape, in which None stands for any number; without a shape there is to be no tensor."""
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


def _wide(buffer: Buffer, width: int) -> Iterator[str]:
    if buffer.width != width:
        yield f"{buffer} has not the width {width}"


def _of_linear(activation: Activation) -> Iterator[str]:
    if activation > Activation.RELU:
        yield f"a linear layer has no {activation.name}"
