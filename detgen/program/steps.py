"""The steps of a pass: the only declaration of their fields (experts and states have modules of their own).

The structures of the C code are generated from these classes (`detgen/kernels/c/layout.py`), so a field is added only
here. setup.py reads this module: it imports neither torch nor numpy.

A step computes rows of one buffer from rows of others. All numbers in buffers are float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from detgen.program.experts import Combine, ExpertLinear, Route, Sort, Weigh
from detgen.program.operands import (
    LOGIT_BLOCK,
    MOST_MIXED,
    SCORED,
    Activation,
    Buffer,
    Cache,
    Floats,
    Into,
    Step,
    Stored,
    Weight,
    of_linear,
    shaped,
    tabled,
    wide,
)
from detgen.program.states import Convolve, DeltaRule, SelectiveScan, StateSpace, Watch
from detgen.program.storage import Storage


@dataclass(frozen=True, kw_only=True, eq=False)
class Embed(Step):
    """Look up each token in a table; zeros for token -1, NaN for lower ones.

    Attributes:
        table: [tokens, width].
        storage: its number format.
        to: takes them.
        known: tokens from this one on get the entry of token 0; 0 for none.
    """

    table: Stored
    storage: Storage
    to: Into
    known: int = 0

    def _faults(self) -> Iterator[str]:
        yield from tabled(self.table, self.storage, self.to.buffer.width)
        if not 0 <= self.known <= self.table.shape[0]:
            yield f"a table of {self.table.shape[0]} entries, not {self.known}"


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbedColumn(Step):
    """Look up each token among the columns of a linear layer's weight, floats or whole numbers; otherwise as `Embed`.

    Attributes:
        weight: its column for a token's output is the token's entry.
        to: takes them.
    """

    weight: Weight
    to: Into

    def _faults(self) -> Iterator[str]:
        yield from self.weight.faults()
        yield from wide(self.to.buffer, self.weight.inputs)
        if self.weight.storage == Storage.CODE:
            yield f"a column of weights in {self.weight.storage.name}"


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbedPositions(Step):
    """Look up each position in a table.

    Attributes:
        table: [positions, width].
        storage: its number format.
        offset: added to a position to find its entry.
        to: takes them.
    """

    table: Stored
    storage: Storage
    offset: int
    to: Into

    def _faults(self) -> Iterator[str]:
        yield from tabled(self.table, self.storage, self.to.buffer.width)


@dataclass(frozen=True, kw_only=True, eq=False)
class Norm(Step):
    """A root-mean-square norm or layer norm of consecutive vectors in a row.

    Attributes:
        x: is read.
        to: takes the results, at the same place in its rows.
        at: where in a row the first vector begins.
        vectors: how many there are.
        size: entries of a vector.
        weight: [size], or [vectors, size] if each has its own; None for none.
        bias: shaped like `weight`; only with a weight.
        own: whether each vector has its own weight.
        epsilon: added to the mean square.
        centred: whether it is a layer norm.
        least: lower bound of the mean square.
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
    least: float = 0.0

    def _faults(self) -> Iterator[str]:
        if self.at + self.vectors * self.size > min(self.x.width, self.to.buffer.width):
            yield f"{self.vectors} vectors of {self.size} from {self.at} on go beyond {self.x} or {self.to.buffer}"
        elif self.x != self.to.buffer and self.vectors * self.size != self.to.buffer.width:
            yield f"{self.to.buffer} is written in part"
        if self.weight is None and (self.bias is not None or self.own):
            yield "a bias, or weights of each vector, without a weight"
        shape = (self.vectors, self.size) if self.own else (self.size,)
        yield from shaped("weight", self.weight, shape)
        yield from shaped("bias", self.bias, shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class Linear(Step):
    """A linear layer.

    Attributes:
        x: is read.
        to: takes the results; with a softcap they are not added.
        weight: of the layer.
        activation: applied to the results, or to the gates.
        at: where in a row of `to` the results begin; steps in order of their places fill a row together.
        gated: whether half of the columns, once activated, multiply the others.
        softcap: results become softcap * tanh(result / softcap); 0 for none.
    """

    x: Buffer
    to: Into
    weight: Weight
    at: int = 0
    activation: Activation = Activation.NONE
    gated: bool = False
    softcap: float = 0.0

    def _faults(self) -> Iterator[str]:
        yield from self.weight.faults(gated=self.gated)
        yield from wide(self.x, self.weight.inputs)
        first, behind = self.columns
        if first < 0 or behind > self.to.buffer.width:
            yield f"{self.weight.outputs} results from {first} on go beyond {self.to.buffer}"
        yield from of_linear(self.activation)
        if self.softcap and self.to.add:
            yield "results with a softcap cannot be added"

    @property
    def columns(self) -> tuple[int, int]:
        """See `Step`."""
        return self.at, self.at + self.weight.outputs


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadLinear(Step):
    """A linear layer of each head, without a bias.

    Attributes:
        x: a part of a row for each head: entries that are passed on, then inputs.
        to: takes, in its first entries, a part for each head: what is passed on, then the results.
        heads: their number.
        passed: entries of a part that are passed on.
        weight: of all heads, one after another.
    """

    x: Buffer
    to: Buffer
    heads: int
    passed: int = 0
    weight: Weight

    def _faults(self) -> Iterator[str]:
        yield from self.weight.faults(self.heads)
        yield from wide(self.x, self.heads * (self.passed + self.weight.inputs))
        if self.columns[1] > self.to.width:
            yield f"{self.columns[1]} results go beyond {self.to}"
        if self.weight.bias is not None:
            yield "a bias of heads"

    @property
    def columns(self) -> tuple[int, int]:
        """See `Step`."""
        return 0, self.heads * (self.passed + self.weight.outputs)


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredLinear(Step):
    """A linear layer that gives logits, of which it stores only what `Score` reads.

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
        yield from wide(self.x, self.weight.inputs)
        yield from wide(self.to, SCORED * -(-self.weight.outputs // LOGIT_BLOCK))


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
        yield from wide(self.to, SCORED)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotate(Step):
    """Rotate queries and keys in place, and store keys and values, bounded.

    Attributes:
        qkv: queries, keys and values of a row, one after the other; queries and keys, if values are in these; or
            queries alone, if an earlier layer has stored their keys and values.
        cache: where keys and values are stored.
        turned: entries of a head that are rotated; 0 for none.
        interleaved: whether entries 2 i and 2 i + 1 are rotated together, instead of i and turned / 2 + i.
        cosines: [positions, turned / 2].
        sines: [positions, turned / 2].
        factors: [positions], multiply queries once they are rotated; None for none.
        last: whether rows whose keys are not finite are noted; not with queries alone.
    """

    _written = "qkv"
    qkv: Buffer
    cache: Cache
    turned: int = 0
    interleaved: bool = False
    cosines: Floats | None = None
    sines: Floats | None = None
    factors: Floats | None = None
    last: bool = False

    def _faults(self) -> Iterator[str]:
        yield from self.cache.faults(self.qkv)
        if not 0 <= self.turned <= self.cache.size or self.turned % 2:
            yield f"{self.turned} of {self.cache.size} entries cannot be rotated"
        if bool(self.turned) > (self.cosines is not None and self.sines is not None):
            yield "no cosines or sines to rotate by"
        yield from shaped("cosines", self.cosines, (None, self.turned // 2) if self.turned else None)
        yield from shaped("sines", self.sines, (None, self.turned // 2) if self.turned else None)
        yield from shaped("factors", self.factors, (None,))


@dataclass(frozen=True, kw_only=True, eq=False)
class Attend(Step):
    """Attention over the KV cache.

    Attributes:
        qkv: what `Rotate` left.
        cache: where it stored keys and values.
        to: takes the results, [heads, values] of a row.
        scale: factor of the scores.
        window: number of positions that a row sees, its own included; 0 for all.
        chunk: number of positions in a chunk; a row sees nothing before its own chunk. 0 for no chunks.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.
        slopes: [heads], subtracted from a score for each position between key and row; None for none.
        sinks: [heads], a score of each that takes its share of the softmax and has no value; None for none.
    """

    qkv: Buffer
    cache: Cache
    to: Buffer
    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    slopes: Floats | None = None
    sinks: Floats | None = None

    def _faults(self) -> Iterator[str]:
        yield from self.cache.faults(self.qkv)
        yield from wide(self.to, self.cache.heads * self.cache.values)
        yield from shaped("slopes", self.slopes, (self.cache.heads,))
        yield from shaped("sinks", self.sinks, (self.cache.heads,))


@dataclass(frozen=True, kw_only=True, eq=False)
class Copy(Step):
    """Copy rows whole, from a part of wider rows, or into a part of wider rows.

    Attributes:
        x: is read.
        to: takes it.
        at: where the narrower of both begins in rows of the wider one; steps in order of their places fill a row
            together.
        factors: of each entry; None for none.
        bound: entries are then clamped to [-bound, bound]; 0 for none.
    """

    x: Buffer
    to: Into
    at: int = 0
    factors: Floats | None = None
    bound: float = 0.0

    def _faults(self) -> Iterator[str]:
        widest = max(self.x.width, self.to.buffer.width)
        if not 0 <= self.at <= widest - self.size:
            yield f"{self.size} entries from {self.at} on go beyond {widest}"
        if not 0 <= self.bound < math.inf:
            yield f"entries cannot be clamped to {self.bound}"
        yield from shaped("factors", self.factors, (self.size,))

    @property
    def size(self) -> int:
        """Number of entries that are copied."""
        return min(self.x.width, self.to.buffer.width)

    @property
    def columns(self) -> tuple[int, int]:
        """See `Step`."""
        first = self.at if self.to.buffer.width > self.size else 0
        return first, first + self.size


@dataclass(frozen=True, kw_only=True, eq=False)
class Take(Step):
    """Copy the wanted rows out of all rows.

    Attributes:
        x: has all rows.
        to: takes the wanted rows.
    """

    x: Buffer
    to: Buffer
    wanted: bool = field(default=True, init=False)

    def _faults(self) -> Iterator[str]:
        yield from wide(self.to, self.x.width)


@dataclass(frozen=True, kw_only=True, eq=False)
class Gate(Step):
    """Multiply entries of rows by a function of their gates.

    Attributes:
        x: is read.
        at: the first entry that is read.
        gates: their number divides that of the entries: each gate is for equally many consecutive entries.
        to: takes the products.
        function: applied to the gates.
    """

    x: Buffer
    at: int = 0
    gates: Buffer
    to: Into
    function: Activation = Activation.SIGMOID

    def _faults(self) -> Iterator[str]:
        width = self.to.buffer.width
        if width % self.gates.width:
            yield f"{self.gates} does not divide {width} entries"
        if not 0 <= self.at <= self.x.width - width:
            yield f"{width} entries from {self.at} on go beyond {self.x}"
        if self.function > Activation.SIGMOID:
            yield f"a gate by {self.function.name}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Activate(Step):
    """Apply a function to each entry.

    Attributes:
        x: is read.
        to: takes the results.
        function: applied to the entries.
    """

    x: Buffer
    to: Into
    function: Activation

    def _faults(self) -> Iterator[str]:
        yield from wide(self.to.buffer, self.x.width)


@dataclass(frozen=True, kw_only=True, eq=False)
class Xielu(Step):
    """The activation xIELU of each entry (Huang and Schlag, arXiv 2411.13010, section 3).

    That is slope * x + rise * x^2 if x > 0, else slope * x + fall * (e^min(x, least) - 1 - x).

    Attributes:
        x: is read.
        to: takes the results; it may be x.
        rise: factor of the square.
        fall: factor of the exponential part.
        slope: the slope at 0.
        least: what exponents are at most; at most 0.
    """

    x: Buffer
    to: Buffer
    rise: float
    fall: float
    slope: float
    least: float

    def _faults(self) -> Iterator[str]:
        yield from wide(self.to, self.x.width)
        if not self.least <= 0:
            yield f"exponents of at most {self.least}"


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
        yield from wide(self.to, self.x.width)


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
        yield from wide(self.to, 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class GaussianTopK(Step):
    """max(0, x - mean - deviations * standard deviation) of each row.

    Attributes:
        x: is read.
        to: takes the results; it may be x.
        deviations: number of standard deviations.
    """

    x: Buffer
    to: Buffer
    deviations: float

    def _faults(self) -> Iterator[str]:
        yield from wide(self.to, self.x.width)


@dataclass(frozen=True, kw_only=True, eq=False)
class Mix(Step):
    """Linear combinations of a row's vectors.

    Attributes:
        x: [vectors, size] of a row, at most MOST_MIXED vectors.
        coefficients: [sums, vectors] of a row.
        to: takes the sums, [sums, size] of a row; it may be x.
        size: entries of a vector.
    """

    x: Buffer
    coefficients: Buffer
    to: Into
    size: int

    def _faults(self) -> Iterator[str]:
        vectors, sums = self.x.width // self.size, self.to.buffer.width // self.size
        yield from wide(self.x, vectors * self.size)
        yield from wide(self.to.buffer, sums * self.size)
        yield from wide(self.coefficients, sums * vectors)
        if vectors > MOST_MIXED:
            yield f"more than {MOST_MIXED} vectors are mixed"


# All kinds, in the order of their numbers.
STEPS: tuple[type[Step], ...] = (
    *(Embed, EmbedColumn, EmbedPositions, Norm, Linear, ScoredLinear, Score, Rotate, Attend, Copy, Take, Gate),
    *(Route, Sort, ExpertLinear, Combine, Activate, Softmax, Sum),
    *(Convolve, DeltaRule, Weigh, StateSpace, Watch, GaussianTopK, Mix, SelectiveScan, Xielu, HeadLinear),
)
