"""Programs of each kind of step with all their fields, to compare what runs them, on raw bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from detgen.kernels.attention import lay_out
from detgen.kernels.c.panels import joined, stacked
from detgen.kernels.c.quantizing import MADE, PAIRED, STORAGE, Form
from detgen.kernels.drawn_weights import IN_FEW_BITS, InFewBits, in_few_bits
from detgen.program import steps
from detgen.program.arrays import BFLOAT16, Array, array, bits, same_bits
from detgen.program.experts import Combine, ExpertLinear, Route, Sort, Weigh
from detgen.program.operands import (
    GROUP,
    LOGIT_BLOCK,
    MOST_PICKS,
    PAGE,
    PANEL,
    SCORED,
    UNIT,
    Activation,
    Buffer,
    Cache,
    Into,
    Scoring,
    Step,
    Weight,
    address,
)
from detgen.program.program import Program
from detgen.program.rows import Rows
from detgen.program.states import STATEFUL, Convolve, DeltaRule, SelectiveScan, StateSpace, Watch
from detgen.program.storage import Storage

# What weights become whose columns are put in another order: several groups share a unit no longer.
PUT_IN_ORDER: list[InFewBits] = [(kind[0], Storage.FLOAT, *kind[2:]) for kind in IN_FEW_BITS if kind[1] == Storage.BYTE]
Run = Callable[[Rows, dict[Buffer, np.ndarray]], Array]


class Case(NamedTuple):
    """A program, what is in all of its buffers before, and the rows that it runs on."""

    program: Program
    given: dict[Buffer, np.ndarray]
    rows: Rows

    def __repr__(self) -> str:
        return f"{len(self.rows.ids)} rows, wanted {self.rows.wanted.tolist()}:\n{self.program}"

    def after(self, run: Run) -> dict[str, np.ndarray]:
        """Everything that a pass leaves: buffers, caches, broken rows. The case itself stays as it is."""
        caches = caches_of(self.program)
        before, buffers = [x.copy() for x in caches], {b: x.copy() for b, x in self.given.items()}
        found = {"broken": array(run(self.rows, buffers))} | {str(b): x for b, x in buffers.items()}
        for i, (cache, kept) in enumerate(zip(caches, before, strict=True)):
            found[f"cache {i}"] = cache.copy()
            np.copyto(cache, kept)
        return found


def caches_of(program: Program) -> list[Any]:
    """The arrays of all caches and states that steps write to."""
    caches = [step.cache for step in program.steps if isinstance(step, steps.Rotate | steps.Attend)]
    kept = [x for cache in caches for x in (cache.keys, cache.kept) if x is not None]
    names = ("kept", "state")
    kept += [
        getattr(step, n) for step in program.steps if isinstance(step, STATEFUL) for n in names if hasattr(step, n)
    ]
    return list({address(x): x for x in kept}.values())


def differences(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> list[str]:
    """Where bits differ, the first place of each; whichever NaN is as good as another."""
    told = []
    for name in wanted:
        have, want = array(found[name]), array(wanted[name])
        if same_bits(have, want):
            continue
        same = (bits(have) == bits(want)) | (np.isnan(have) & np.isnan(want))
        if not same.all():
            at = tuple(np.argwhere(~same)[0].tolist())
            told.append(f"{name}{list(at)} is {have[at].item()!r}, not {want[at].item()!r}")
    return told


def numbers(seed: int, *shape: int) -> np.ndarray:
    """Of several magnitudes."""
    g = torch.Generator().manual_seed(seed)
    return array(torch.randn(*shape, generator=g) * torch.exp(torch.randn(*shape, generator=g)))


ODD = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-38, 3e38, -3e38, 88.5, -87.5, 1.0], np.float32)
COUNTS = st.integers(1, 9)
WIDTHS = st.integers(1, 40) | st.sampled_from([64, 70])
LONG = st.integers(1, 40) | st.sampled_from([64, 127, 130, 2049, 2200])  # of rows that are added up, in blocks or lanes


class Making:
    """A case in the making: buffers that steps read, then the steps; `wanted` says whether they see wanted rows alone.

    Args:
        draw: that of hypothesis.
        counts: how many rows.
        odd: whether what is read may have entries that are no numbers, or hardly any.
    """

    def __init__(self, draw: st.DrawFn, counts: st.SearchStrategy[int] = COUNTS, *, odd: bool = True) -> None:
        self.draw, self.count, self.wanted = draw, draw(counts), draw(st.booleans())
        self._seed, self._odd = draw(st.integers(0, 9999)), odd and draw(st.booleans())
        self._given: dict[Buffer, np.ndarray] = {}
        self._steps: list[Step] = []

    def numbers(self, *shape: int) -> np.ndarray:
        """Others each time."""
        self._seed += 1
        return numbers(self._seed, *shape)

    def read(self, name: str, width: int, x: np.ndarray | None = None) -> Buffer:
        """A buffer that holds something: x, or any numbers; of wanted rows, which are taken out of others, if so."""
        buffer = Buffer(name, width)
        if x is None:
            x = self.numbers(self.count, width)
            if self._odd:
                g = np.random.default_rng(self._seed)
                x = np.where(g.random(x.shape) > 0.1, x, g.choice(ODD, x.shape))
        self._given[buffer] = x
        if not self.wanted:
            return buffer
        to = Buffer(f"wanted {name}", width)
        self._steps.append(steps.Take(name=f"{name} taken", x=buffer, to=to))
        return to

    def into(self, width: int) -> Into:
        """Where results go, added to something or not."""
        add, factor = self.draw(st.booleans()), self.draw(st.sampled_from([1.0, 0.3, -2.0]))
        return Into(self.read("to", width) if add else Buffer("to", width), add=add, factor=factor)

    def add(self, kind: type[Step], **fields: Any) -> None:
        """Append a step."""
        self._steps.append(kind(name=kind.__name__, wanted=self.wanted, **fields))

    def case(self, **rows: np.ndarray) -> Case:
        """The case; of its rows, ids are of a vocabulary of 20, unless they are given."""
        program = Program(*self._given)
        for step in self._steps:
            program.add(step)
        chosen = self.draw(st.lists(st.integers(0, self.count - 1), max_size=self.count, unique=True))
        along, none = np.arange(self.count), np.zeros((0, 4), np.int64)
        usual = {"ids": along, "positions": along, "places": along, "tables": none, "pieces": none}
        found = Rows(**usual | {"wanted": np.array(chosen, np.int64)} | rows)
        given = {b: self.numbers(self.count, b.width) for b in program.buffers} | self._given
        return Case(program, given, found)


def weight(
    made: Making, outputs: int, inputs: int, *, gated: bool = False, experts: int = 0, biased: bool | None = None
) -> Weight:
    """The weight of a linear layer, or of experts, in any storage; with a bias if `biased`, or perhaps."""
    few = [n for n in (*MADE, *IN_FEW_BITS) if n in MADE or inputs % (UNIT if n[1] == Storage.BYTE else GROUP) == 0]
    kind = made.draw(st.sampled_from([*STORAGE, *PAIRED, *(few if inputs % GROUP == 0 else [])]))
    form: Any = "none" if isinstance(kind, tuple) or kind in STORAGE else kind

    def one(seed: int) -> list[Any]:
        if isinstance(kind, tuple):
            found = in_few_bits(seed, outputs, inputs, *kind)
            return [found.rows(np.roll(np.arange(outputs), n)) for n in range(1 + gated)]
        dtype = kind if form == "none" else "bfloat16" if form in PAIRED else "float32"
        return [(made.numbers(outputs, inputs) * inputs**-0.5).astype(dtype) for _ in range(1 + gated)]

    if experts:
        seeds = [0] * experts if isinstance(kind, tuple) and kind[0] == Storage.CODE else range(experts)
        some = made.draw(st.booleans()) if biased is None else biased
        each = [[made.numbers(outputs) for _ in range(1 + gated)] for _ in seeds] if some else []
        return stacked([one(seed) for seed in seeds], PANEL // (1 + gated), form, each)
    biases = [made.numbers(outputs) for _ in range(1 + gated)] if made.draw(st.booleans()) else []
    return joined(one(1), biases, form, gated=gated)


OF_LAYERS = st.sampled_from([a for a in Activation if a <= Activation.RELU_SQUARED])
INPUTS = st.one_of(
    *(st.integers(1, 40), st.sampled_from([127, 128, 129, 390]), st.sampled_from([32, 64, 160, 256, 384, 512])),
    st.sampled_from([1023, 1025, 1152, 1280, 2080]),  # several sections
)


@st.composite
def _embedded(draw: st.DrawFn) -> Case:
    made, width = Making(draw), draw(WIDTHS)
    made.wanted = False
    dtype = draw(st.sampled_from(list(STORAGE)))
    table = made.numbers(20, width).astype(dtype)
    known = draw(st.sampled_from([0, 0, 1, 13, 20]))
    made.add(steps.Embed, table=table, storage=STORAGE[dtype], to=made.into(width), known=known)
    ids = draw(st.lists(st.integers(-2, 19), min_size=made.count, max_size=made.count))
    return made.case(ids=np.array(ids))


@st.composite
def _from_columns(draw: st.DrawFn) -> Case:
    made, kind = Making(draw), draw(st.sampled_from([None, *(kind for kind in IN_FEW_BITS if kind[0].whole)]))
    made.wanted = False
    vocabulary = draw(st.sampled_from([20, 33, 70]))
    if kind is None:
        width, dtype = draw(WIDTHS), draw(st.sampled_from(list(STORAGE)))
        weight = joined([made.numbers(vocabulary, width).astype(dtype)], [], draw(st.sampled_from(["none", *PAIRED])))
    else:
        width = draw(st.sampled_from([256, 512, 1280] if kind[1] == Storage.BYTE else [32, 96, 1056]))
        weight = joined([in_few_bits(1, vocabulary, width, *kind)], [])
    made.add(steps.EmbedColumn, weight=weight, to=made.into(width))
    ids = draw(st.lists(st.integers(-2, vocabulary - 1), min_size=made.count, max_size=made.count))
    return made.case(ids=np.array(ids))


@st.composite
def _placed(draw: st.DrawFn) -> Case:
    made, width, offset = Making(draw), draw(WIDTHS), draw(st.integers(0, 3))
    made.wanted = False
    dtype = draw(st.sampled_from(list(STORAGE)))
    table = made.numbers(20, width).astype(dtype)
    made.add(steps.EmbedPositions, table=table, storage=STORAGE[dtype], offset=offset, to=made.into(width))
    positions = draw(st.lists(st.integers(0, 16), min_size=made.count, max_size=made.count))
    return made.case(positions=np.array(positions))


@st.composite
def _normed(draw: st.DrawFn) -> Case:
    made, size, vectors, own = Making(draw), draw(LONG), draw(st.integers(1, 3)), draw(st.booleans())
    weighted = own or draw(st.booleans())
    shape = (vectors, size) if own else (size,)
    fields = {
        **{"size": size, "vectors": vectors, "own": own, "weight": made.numbers(*shape) if weighted else None},
        **{"bias": made.numbers(*shape) if weighted and draw(st.booleans()) else None},
        **{"epsilon": draw(st.sampled_from([1e-6, 1e-5, 0.5])), "centred": draw(st.booleans())},
        "least": draw(st.sampled_from([0.0, 0.0, 1.5])),
    }
    if draw(st.booleans()):  # some of a row, in place
        before, behind = draw(st.integers(0, 20)), draw(st.integers(0, 20))
        x = made.read("x", before + vectors * size + behind)
        made.add(steps.Norm, x=x, to=Into(x, add=draw(st.booleans()), factor=0.3), at=before, **fields)
    else:
        made.add(steps.Norm, x=made.read("x", vectors * size), to=made.into(vectors * size), **fields)
    return made.case()


@st.composite
def _linear(draw: st.DrawFn) -> Case:
    made = Making(draw, st.integers(1, 30) | st.sampled_from([96, 97, 131]))
    inputs, outputs, gated = draw(INPUTS), draw(st.integers(1, 70)), draw(st.booleans())
    beside = [draw(st.integers(1, 40)) for _ in range(draw(st.integers(0, 2)))]  # outputs of those to its right
    untouched = draw(st.sampled_from([0, 0, 3, 30]))
    softcap, to = draw(st.sampled_from([0.0, 0.0, 30.0])), made.into(outputs + sum(beside) + untouched)
    x, at = made.read("x", inputs), 0
    for some in (outputs, *beside):
        made.add(
            steps.Linear,
            x=x,
            to=Into(Buffer("to", to.buffer.width), factor=to.factor) if softcap else to,
            at=at,
            weight=weight(made, some, inputs, gated=gated),
            activation=draw(OF_LAYERS),
            gated=gated,
            softcap=softcap,
        )
        at += some
    return made.case()


@st.composite
def _by_head(draw: st.DrawFn) -> Case:
    """Into a part of wider rows, which another layer fills."""
    made = Making(draw, st.integers(1, 12) | st.sampled_from([97, 131]))
    heads, passed, behind = draw(st.integers(1, 5)), draw(st.sampled_from([0, 3, 8, 64])), draw(st.integers(0, 9))
    inputs, outputs = draw(st.sampled_from([14, 32, 64, 129, 256, 1056])), draw(st.integers(1, 70))
    of = weight(made, outputs, inputs, experts=heads, biased=False)
    x, to = made.read("x", heads * (passed + inputs)), Buffer("to", heads * (passed + outputs) + behind)
    made.add(steps.HeadLinear, x=x, to=to, heads=heads, passed=passed, weight=of)
    if behind:
        kept = joined([made.numbers(behind, x.width)], [])
        made.add(steps.Linear, x=x, to=Into(to), at=to.width - behind, weight=kept)
    return made.case()


def odd_groups(form: Form) -> Case:
    """A layer of whole numbers, 8 rows to 34, whose inputs have groups that do not just become whole numbers.

    Some are of hardly any magnitude, or zeros, in row 2 all; some have ties; rows 4 and 5 have numbers that are not
    finite.
    """
    x, to = Buffer("x", 96), Buffer("to", 34)
    given = numbers(1, 8, 96)
    given[0, :32], given[1, 32:64], given[2] = 2.0**-101, 0.0, 1e-40
    given[3, :32] = np.arange(32) + 0.5
    given[3, 0] = 127  # a factor of 1
    given[4, 40], given[5, 40], given[6, 0] = np.nan, -np.inf, 3e38
    given[7, :32] = np.linspace(-1, 1, 32) * 2.0**-100
    program = Program(x)
    program.add(steps.Linear(name="step", x=x, to=Into(to), weight=joined([numbers(2, 34, 96)], [], form)))
    along, none = np.arange(8), np.zeros((0, 4), np.int64)
    return Case(program, {x: given, to: np.zeros((8, 34), np.float32)}, Rows(*[along] * 4, *[none] * 2))


def odd_pairs(form: Form) -> Case:
    """A layer of bf16, 12 rows to 34, whose inputs and weights do not just become numbers of bf16.

    Rows 0 to 3 are of hardly any magnitude, about where zero begins, or below what a float32 number has in full; row 4
    has ties; rows 5 and 6 grow beyond what a sum can hold; rows 8 and 9 have numbers that are not finite, row 10 one
    that becomes infinite when it is rounded. The others have all magnitudes. Of the weights, those of column 2 are
    nearly as large as numbers get.
    """
    rows, inputs, outputs = 12, 1200, 34
    x, to, g = Buffer("x", inputs), Buffer("to", outputs), torch.Generator().manual_seed(5)

    def any_size(count: int, least: int, most: int) -> np.ndarray:
        sizes = torch.randint(least, most, (count, inputs), generator=g)
        return array(torch.ldexp(torch.randn(count, inputs, generator=g), sizes))

    given = any_size(rows, -70, 20)
    given[:3], given[3] = any_size(3, -58, -53), array(torch.randn(inputs, generator=g) * 1e-39)
    given[0, :6] = np.array([1.0, -1.0, 1 - 2**-9, 1 - 2**-9 - 2**-20, -1 + 2**-8, -0.0]) * 2.0**-55
    given[4] = array(torch.randint(-999, 999, (inputs,), generator=g)) * 2.0**-8 + 1
    given[5], given[6] = 3e38, any_size(1, 110, 127)[0]
    given.view(np.int32)[8, 700] = 2**31 - 1  # NaN, to which nothing can be added
    given[9, 3], given[9, 1100], given[10, 5] = np.inf, -np.inf, 3.4e38
    of = any_size(outputs, -8, 3)
    of[::5], of[1::5], of[2] = any_size(len(of[::5]), -58, -53), any_size(len(of[1::5]), -80, 60), 3e38
    program = Program(x)
    program.add(steps.Linear(name="step", x=x, to=Into(to), weight=joined([of.astype(BFLOAT16)], [], form)))
    along, none = np.arange(rows), np.zeros((0, 4), np.int64)
    return Case(program, {x: given, to: np.zeros((rows, outputs), np.float32)}, Rows(*[along] * 4, *[none] * 2))


@st.composite
def scored(draw: st.DrawFn, special: float = -np.inf) -> Case:
    """Logits, some of which may be `special`."""
    made = Making(draw, st.integers(1, 9) | st.sampled_from([96, 97]), odd=False)
    inputs, outputs = draw(st.integers(1, 20)), draw(WIDTHS | st.sampled_from([127, 128, 129, 300, 2100]))
    x = made.numbers(made.count, inputs) * draw(st.sampled_from([0.0, 0.01, 1.0, 20.0]))
    of = weight(made, outputs, inputs)
    if of.bias is not None:
        of.bias[np.random.default_rng(outputs).random(of.bias.shape) < 0.1] = special
    blocks = Buffer("blocks", SCORED * -(-outputs // LOGIT_BLOCK))
    factor, softcap = draw(st.sampled_from([1.0, 0.5])), draw(st.sampled_from([0.0, 30.0]))
    made.add(steps.ScoredLinear, x=made.read("x", inputs, x), to=blocks, weight=of, factor=factor, softcap=softcap)
    made.add(steps.Score, x=blocks, to=Buffer("to", SCORED))
    return made.case()


def _slots(made: Making, group: int) -> dict[str, np.ndarray]:
    """Windows of several slots, whose pages are anywhere; the rows are as many as these have."""
    starts = st.integers(0, 150) | st.sampled_from([1015, 1020, 1100, 2045])  # sections of attention have 1,024 keys
    spans = made.draw(st.lists(st.tuples(starts, st.integers(1, 9)), min_size=1, max_size=3))
    slots, lengths, starts = np.arange(len(spans)), np.array([n for _, n in spans]), np.array([s for s, _ in spans])
    pages = max(start + n for start, n in spans) // PAGE + 1
    tables = np.random.default_rng(1).permutation(len(spans) * pages).reshape(-1, pages)
    positions = np.array([p for start, n in spans for p in range(start, start + n)])
    places = tables[np.repeat(slots, lengths), positions // PAGE] * PAGE + positions % PAGE
    made.count, pieces = len(positions), lay_out(slots, starts, lengths, group)
    return {"positions": positions, "places": places, "tables": tables, "pieces": pieces}


def _cache(made: Making, heads: int, kv_heads: int, pages: int) -> Cache:
    """What others left is in it; values may be the last entries of keys."""
    size, values = made.draw(st.sampled_from([8, 16, 20, 48])), made.draw(st.sampled_from([8, 16, 36, 80]))
    kept: np.ndarray | None = made.numbers(pages, kv_heads, PAGE, values)
    if made.draw(st.booleans()):
        size, kept = values + made.draw(st.sampled_from([0, 8, 10])), None
    keys = made.numbers(pages, kv_heads, size, PAGE)
    storage = made.draw(st.sampled_from([Storage.FLOAT, Storage.BFLOAT]))
    if storage == Storage.BFLOAT:
        keys, kept = keys.astype(BFLOAT16), None if kept is None else kept.astype(BFLOAT16)
    sizes = {"heads": heads, "kv_heads": kv_heads, "size": size, "values": values}
    return Cache(**sizes, keys=keys, kept=kept, storage=storage)


def _qkv(made: Making, cache: Cache) -> Buffer:
    """Queries, keys and values, or queries alone."""
    return made.read("qkv", made.draw(st.sampled_from([cache.row, cache.row, cache.heads * cache.size])))


@st.composite
def _rotated(draw: st.DrawFn) -> Case:
    made, kv_heads, group = Making(draw), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    made.wanted = False
    rows, turned = _slots(made, group), draw(st.sampled_from([0, 4, 6, 8]))
    cache = _cache(made, kv_heads * group, kv_heads, rows["tables"].size)
    angles = {name: made.numbers(2100, turned // 2) for name in ("cosines", "sines")} if turned else {}
    if draw(st.booleans()):
        angles["factors"] = made.numbers(2100)
    flags = {name: draw(st.booleans()) for name in ("interleaved", "last")}
    made.add(steps.Rotate, qkv=_qkv(made, cache), cache=cache, turned=turned, **angles, **flags)
    return made.case(**rows)


@st.composite
def _attended(draw: st.DrawFn) -> Case:
    made, kv_heads = Making(draw), draw(st.integers(1, 2))
    group = draw(st.integers(1, 3) | st.sampled_from([5, 20, 70]))
    made.wanted = False
    rows = _slots(made, group)
    cache = _cache(made, kv_heads * group, kv_heads, rows["tables"].size)
    made.add(
        steps.Attend,
        qkv=_qkv(made, cache),
        cache=cache,
        to=Buffer("to", cache.heads * cache.values),
        scale=0.2,
        window=draw(st.sampled_from([0, 1, 30, 100, 1030])),
        chunk=draw(st.sampled_from([0, 1, 24, 100, 1000])),
        softcap=draw(st.sampled_from([0.0, 20.0])),
        slopes=np.abs(made.numbers(cache.heads)) if draw(st.booleans()) else None,
        sinks=made.numbers(cache.heads) if draw(st.booleans()) else None,
    )
    return made.case(**rows)


def _rowwise(
    kind: type[Step], widths: st.SearchStrategy[int] = WIDTHS, *, into: bool = True, **fields: st.SearchStrategy[Any]
) -> st.SearchStrategy[Case]:
    """Steps that make a row from the same row, as wide as it."""

    @st.composite
    def make(draw: st.DrawFn) -> Case:
        made, width = Making(draw), draw(widths)
        to = made.into(width) if into else Buffer("to", width)
        made.add(kind, x=made.read("x", width), to=to, **{name: draw(each) for name, each in fields.items()})
        return made.case()

    return make()


@st.composite
def _taken(draw: st.DrawFn) -> Case:
    made = Making(draw)
    made.wanted = True
    made.read("x", draw(WIDTHS))
    return made.case()


@st.composite
def _gated(draw: st.DrawFn) -> Case:
    made, width = Making(draw), draw(WIDTHS)
    gates, at = (
        made.read("gates", draw(st.sampled_from([n for n in range(1, width + 1) if width % n == 0]))),
        draw(st.integers(0, 20)),
    )
    function = draw(OF_LAYERS | st.just(Activation.SIGMOID))
    x = made.read("x", width + at + draw(st.integers(0, 3)))
    made.add(steps.Gate, x=x, at=at, gates=gates, to=made.into(width), function=function)
    return made.case()


@st.composite
def _copied(draw: st.DrawFn) -> Case:
    made, size = Making(draw), draw(WIDTHS)
    wide, part = size + draw(st.integers(0, 30)), draw(st.booleans())
    at, factors = draw(st.integers(0, wide - size)), made.numbers(size) if draw(st.booleans()) else None
    x, to = made.read("x", wide if part else size), made.into(size if part else wide)
    if at and not part and not to.add:
        made.add(steps.Copy, x=made.read("before", at), to=to)
    made.add(steps.Copy, x=x, to=to, at=at, factors=factors, bound=draw(st.sampled_from([0.0, 0.7, 6.1])))
    return made.case()


@st.composite
def _mixed(draw: st.DrawFn) -> Case:
    made, size, vectors = Making(draw), draw(WIDTHS), draw(st.sampled_from([1, 2, 4, 16]))
    x, sums = made.read("x", vectors * size), draw(st.sampled_from([1, 3, 4]))
    to = made.into(sums * size)
    if draw(st.booleans()):  # in place
        to, sums = Into(x, add=to.add, factor=to.factor), vectors
    coefficients = made.read("coefficients", sums * vectors)
    made.add(steps.Mix, x=x, coefficients=coefficients, to=to, size=size)
    return made.case()


@st.composite
def _watched(draw: st.DrawFn) -> Case:
    made = Making(draw)
    made.wanted = False
    made.add(Watch, x=made.read("x", draw(WIDTHS)))
    return made.case()


@st.composite
def _summed(draw: st.DrawFn) -> Case:
    made = Making(draw)
    made.add(steps.Sum, x=made.read("x", draw(LONG)), to=Buffer("to", 1))
    return made.case()


RING = 8


def _spans(made: Making, uncertain: int) -> np.ndarray:
    """Of slots 2, 1 and 0, or some of them; the rows are as many as these have. At most so many are not certain."""
    spans, row = [], 0
    for slot in made.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)):
        start, tokens = made.draw(st.sampled_from([0, 1, 2, 7, 30])), made.draw(st.integers(1, 6) | st.just(20))
        unsure = made.draw(st.integers(0, tokens)) if tokens <= uncertain else 0
        most = min(start, max(uncertain - tokens, 0) if unsure else uncertain)
        base = start - made.draw(st.integers(0, most))
        spans.append([slot, row, start, tokens, base, start + tokens - unsure])
        row += tokens
    made.count = row
    return np.array(spans)


@st.composite
def _convolved(draw: st.DrawFn) -> Case:
    made, width, taps = Making(draw), draw(WIDTHS | st.just(300)), draw(st.integers(1, 4))
    made.wanted = False
    spans = _spans(made, RING - taps)
    made.add(
        Convolve,
        x=made.read("x", width),
        to=Buffer("to", width),
        weight=made.numbers(taps, width),
        bias=made.numbers(width) if draw(st.booleans()) else None,
        activation=draw(OF_LAYERS),
        taps=taps,
        ring=RING,
        kept=made.numbers(3, RING, width),
    )
    return made.case(spans=spans)


@st.composite
def _recurrent(draw: st.DrawFn, kind: type[DeltaRule | StateSpace]) -> Case:
    made, keys, share = Making(draw), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    made.wanted = False
    spans, heads = _spans(made, RING), keys * share
    size, values = draw(st.sampled_from([1, 8, 20])), draw(st.sampled_from([1, 8, 16, 70, 130]))
    width = keys * size + heads * values + 2 * heads
    if kind is DeltaRule:
        own: dict[str, Any] = {"strength": made.read("strength", heads)}
    else:
        own = {"skip": made.numbers(heads), **draw(st.sampled_from([{}, {"least": 0.5, "most": 1.5}]))}
    made.add(
        kind,
        qkv=made.read("qkv", 2 * keys * size + heads * values),
        decay=made.read("decay", heads),
        to=Buffer("to", heads * values),
        rates=-np.abs(made.numbers(heads)),
        bias=made.numbers(heads),
        **{"heads": heads, "key_heads": keys, "size": size, "values": values},
        ring=RING,
        state=made.numbers(3, heads, size, values),
        kept=made.numbers(3, RING, width),
        **own,
    )
    return made.case(spans=spans)


@st.composite
def _scanned(draw: st.DrawFn) -> Case:
    made = Making(draw)
    made.wanted = False
    spans = _spans(made, RING)
    size, values = draw(st.sampled_from([1, 8, 16, 20])), draw(st.sampled_from([1, 8, 16, 70, 130]))
    made.add(
        SelectiveScan,
        x=made.read("x", values),
        times=made.read("times", values),
        kq=made.read("kq", 2 * size),
        to=Buffer("to", values),
        rates=-np.abs(made.numbers(size, values)),
        bias=made.numbers(values),
        skip=made.numbers(values),
        **{"size": size, "values": values},
        ring=RING,
        state=made.numbers(3, 1, size, values),
        kept=made.numbers(3, RING, size + 2 * values),
    )
    return made.case(spans=spans)


def _router(made: Making, experts: int, picks: int) -> Buffer:
    """Routes, of which there may be ties."""
    logits = made.numbers(made.count, experts)
    if made.draw(st.booleans()):
        logits = logits.round()
    routes = Buffer("routes", 2 * picks)
    x, scoring = made.read("router", experts, logits), made.draw(st.sampled_from(Scoring))
    fields: dict[str, Any] = {
        "scoring": scoring,
        "normalized": scoring == Scoring.OVER_PICKS or (scoring != Scoring.SPARSE and made.draw(st.booleans())),
        "factors": made.numbers(experts) if made.draw(st.booleans()) else None,
    }
    if scoring == Scoring.SPARSE:
        made.add(Route, x=x, to=routes, spread=made.draw(st.sampled_from([0.0, 0.02, 0.6, 1.7])), **fields)
        return routes
    if made.draw(st.booleans()):
        fields |= {"correction": made.numbers(experts).round(), "factor": made.draw(st.sampled_from([1.0, 2.5]))}
        fields |= {"added": made.draw(st.sampled_from([1e-20, 1e-6, 0.25]))}
    groups = made.draw(st.sampled_from([n for n in range(1, experts + 1) if experts % n == 0]))
    best = [n for n in range(1, groups + 1) if n * (experts // groups) >= picks]
    fields |= {"groups": groups, "best_groups": made.draw(st.sampled_from(best))}
    fields["of_group"] = made.draw(st.sampled_from([1, 2])) if experts // groups > 1 else 1
    made.add(Route, x=x, to=routes, **fields)
    return routes


@st.composite
def _routed(draw: st.DrawFn) -> Case:
    made, experts = Making(draw), draw(st.integers(1, 20) | st.just(100))
    _router(made, experts, draw(st.integers(1, min(experts, MOST_PICKS))))
    return made.case()


@st.composite
def _experts(draw: st.DrawFn) -> Case:
    """Two layers of experts and the sum of what they give."""
    made = Making(draw, st.integers(1, 12) | st.just(110))
    experts = draw(st.integers(2, 3 if made.count > 12 else 6))
    width, inner = draw(st.sampled_from([8, 21, 32, 160])), draw(st.integers(1, 20) | st.just(32))
    picks, gated = draw(st.integers(1, min(3, experts))), draw(st.booleans())
    routes = _router(made, experts, picks)
    up = weight(made, inner, width, experts=experts, gated=gated)
    down = weight(made, width, inner, experts=experts)
    opened, each = Buffer("opened", picks * inner), Buffer("each", picks * width)
    activation = draw(OF_LAYERS)
    made.add(Sort, routes=routes, experts=experts)
    x, weighed = made.read("x", width), draw(st.booleans())
    if not weighed:  # by their inputs instead
        segments = Buffer("segments", picks * width)
        made.add(Weigh, x=x, routes=routes, to=segments)
        x = segments
    made.add(
        ExpertLinear,
        **{"x": x, "routes": routes, "to": opened, "weight": up},
        **{"activation": activation, "gated": gated},
        **({"limit": 0.7, "slope": 1.702, "shift": 1.0} if gated and draw(st.booleans()) else {}),
    )
    made.add(ExpertLinear, x=opened, routes=routes, to=each, weight=down)
    made.add(Combine, x=each, routes=routes, to=made.into(width), weighed=weighed)
    return made.case()


# By kind of step, programs with it, and how many of them are tried.
CASES: dict[type[Step], tuple[st.SearchStrategy[Case], int]] = {
    steps.Embed: (_embedded(), 25),
    steps.EmbedColumn: (_from_columns(), 40),
    steps.EmbedPositions: (_placed(), 15),
    steps.Norm: (_normed(), 100),
    steps.Linear: (_linear(), 80),
    steps.HeadLinear: (_by_head(), 60),
    steps.ScoredLinear: (scored(), 60),
    steps.Score: (scored(), 10),
    steps.Rotate: (_rotated(), 100),
    steps.Attend: (_attended(), 100),
    steps.Copy: (_copied(), 60),
    steps.Take: (_taken(), 10),
    steps.Gate: (_gated(), 20),
    Route: (_routed(), 40),
    Sort: (_experts(), 10),
    ExpertLinear: (_experts(), 40),
    Combine: (_experts(), 20),
    Weigh: (_experts(), 10),
    steps.Activate: (_rowwise(steps.Activate, function=st.sampled_from(Activation)), 120),
    steps.Softmax: (_rowwise(steps.Softmax, LONG, into=False), 40),
    steps.Sum: (_summed(), 30),
    Convolve: (_convolved(), 40),
    DeltaRule: (_recurrent(DeltaRule), 40),
    StateSpace: (_recurrent(StateSpace), 40),
    SelectiveScan: (_scanned(), 40),
    Watch: (_watched(), 20),
    steps.GaussianTopK: (
        _rowwise(steps.GaussianTopK, LONG, into=False, deviations=st.sampled_from([0.0, 0.3, 1.7, -1.0])),
        40,
    ),
    steps.Mix: (_mixed(), 40),
    steps.Xielu: (
        _rowwise(
            steps.Xielu,
            into=False,
            rise=st.sampled_from([0.8, 0.0, 3.5]),
            fall=st.sampled_from([0.7, -0.3, 2.0]),
            slope=st.sampled_from([0.5, 0.0]),
            least=st.sampled_from([-1e-6, 0.0, -0.25]),
        ),
        60,
    ),
}
