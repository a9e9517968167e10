"""The structures of the C code, as ctypes and as a header; steps follow their declarations in `detgen/program`.

setup.py writes the header before it compiles (`header`), so that nothing in it is repeated by hand. A library reports
the declaration that it was compiled for (`DIGEST`). Imports neither torch nor numpy.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Iterator
from ctypes import c_double, c_int64, c_void_p
from dataclasses import is_dataclass
from enum import IntEnum
from typing import Any

from detgen.program import operands, steps
from detgen.program.program import Program as Declared
from detgen.program.storage import FORMATS, RULES, SMALLEST, Storage

CONSTANTS = (
    *("PAGE", "SECTION_BLOCKS", "PANEL", "PART_INPUTS", "SECTION_PARTS", "SUM_BLOCK", "GROUP", "UNIT", "LEAST"),
    *("LOGIT_BLOCK", "SCORED", "MOST_PICKS", "MOST_EXPERTS", "MOST_MIXED"),
)
CANDIDATES = 64  # most candidates of a sampled row
RANKED = 4  # largest entries of a row that are returned


def _pointer(to: str) -> Any:
    return type("Pointer", (c_void_p,), {"to": to})


_BYTES, _FLOATS, _ENTRIES = _pointer("const void"), _pointer("const float"), _pointer("float")
_NUMBERS, _OUT_NUMBERS, _FLAGS = _pointer("const int64_t"), _pointer("int64_t"), _pointer("uint8_t")
_DOUBLES, _OUT_DOUBLES = _pointer("const double"), _pointer("double")
_WORDS, _OUT_WORDS = _pointer("const uint64_t"), _pointer("uint64_t")
_PLAIN: dict[str, Any] = {
    **{"int": c_int64, "bool": c_int64, "float": c_double},
    **{"Floats": _FLOATS, "Entries": _pointer("void"), "Stored": _BYTES},
}


class Buffer(ctypes.Structure):
    """A buffer's number, and the number of floats in its rows."""

    _fields_ = (("number", c_int64), ("width", c_int64))


_NAMED: dict[str, Any] = {"Buffer": Buffer}


def _named(kind: str) -> Any:
    """Return the type of a field, making structures for the classes of fields on first use."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    declared: type[Any] = getattr(operands, kind)
    if not is_dataclass(declared):
        assert issubclass(declared, IntEnum)
        return c_int64
    if kind not in _NAMED:
        _NAMED[kind] = _structure(declared, ())
    return _NAMED[kind]


def _structure(declared: Any, without: tuple[str, ...]) -> Any:
    types = {name: kind for name, (kind, _) in operands.declared(declared).items() if name not in without}
    return type(declared.__name__, (ctypes.Structure,), {"_fields_": [(n, _named(k)) for n, k in types.items()]})


_HEAD = ("name", "wanted")  # left out: C knows no names, and has `wanted` in `Step`
_KINDS = {kind: _structure(kind, _HEAD) for kind in steps.STEPS}
MEMBERS = {kind: re.sub("(?<!^)(?=[A-Z])", "_", kind.__name__).lower() for kind in steps.STEPS}


_members = tuple((MEMBERS[kind], made) for kind, made in _KINDS.items())


class _Any(ctypes.Union):
    _fields_ = _members


class Step(ctypes.Structure):
    """A step of any kind."""

    _anonymous_ = ("any",)
    _fields_ = (("kind", c_int64), ("wanted", c_int64), ("any", _Any))


class Program(ctypes.Structure):
    """The steps of a pass; `widths`: the floats of a row of each buffer; `out`: the buffer that is written last."""

    kept: Any  # objects to keep alive
    _fields_ = (
        *(("steps", _pointer("const Step")), ("count", c_int64), ("buffers", c_int64)),
        *(("out", c_int64), ("widths", _NUMBERS)),
    )


class Piece(ctypes.Structure):
    """Consecutive tokens of a slot, from position `start` and row `row` of the pass."""

    _fields_ = tuple((name, c_int64) for name in ("slot", "start", "tokens", "row"))


class Span(ctypes.Structure):
    """All rows of a slot, which are consecutive; see `Rows.spans`."""

    _fields_ = tuple((name, c_int64) for name in ("slot", "row", "start", "tokens", "base", "certain"))


class Pass(ctypes.Structure):
    """The rows of a pass.

    `ids`, `positions`, `places` are [rows]; a place is where the row's entries are stored. `want`: the [wanted] rows
    whose logits are wanted. `piece`: [pieces], the longest first. `tables`: [slots, blocks] pages. `given`: [buffers],
    null for buffers that the pass allocates. `broken`: [rows]. `most`: bound of the cache's entries. `span`: [spans].
    """

    _fields_ = (
        *((name, c_int64) for name in ("threads", "rows", "wanted", "pieces", "blocks")),
        *((name, _NUMBERS) for name in ("ids", "positions", "places", "want")),
        *(("piece", _pointer("const Piece")), ("tables", _NUMBERS), ("given", _pointer("float *const"))),
        *(("broken", _FLAGS), ("most", c_double), ("spans", c_int64), ("span", _pointer("const Span"))),
    )


class Rows(ctypes.Structure):
    """Rows of logits: those with indices `rows`, or the first `count` if that is null.

    Strides are in entries; the stride of the last axis is 1.
    """

    _fields_ = (
        *(("logits", _FLOATS), ("rows", _NUMBERS)),
        *((name, c_int64) for name in ("stride", "count", "vocabulary", "threads")),
    )


class Best(ctypes.Structure):
    """Takes the largest entry of each row and its lead, [count] each."""

    _fields_ = (("of", Rows), ("tokens", _OUT_NUMBERS), ("leads", _OUT_DOUBLES))


class Masked(ctypes.Structure):
    """Takes copies of rows with masks applied.

    `masks`: [count], bits of each row, the lowest bit of a byte first; null where all entries are allowed. `sizes`:
    [count], bytes of each; entries beyond are not allowed. `to`: [count, vocabulary].
    """

    _fields_ = (("of", Rows), ("masks", _pointer("const uint8_t *const")), ("sizes", _NUMBERS), ("to", _ENTRIES))


class Judged(ctypes.Structure):
    """Takes log-probabilities of rows.

    `tokens`: by row, not by index in `rows`. `chosen`: [count], of the tokens; null if not wanted. `every`: [count,
    vocabulary], of all entries; null if not wanted.
    """

    _fields_ = (("of", Rows), ("tokens", _NUMBERS), ("chosen", _ENTRIES), ("every", _ENTRIES))


class Ranked(ctypes.Structure):
    """Takes the largest entries of each row, descending, the first of ties first, and their log-probabilities.

    `ids`, `values`, `logprobs`: [count, RANKED]; -1 and -inf where no more are above -inf. If an entry of the row is
    NaN, so are all log-probabilities.
    """

    _fields_ = (("of", Rows), ("ids", _OUT_NUMBERS), ("values", _ENTRIES), ("logprobs", _ENTRIES))


class Draws(ctypes.Structure):
    """How rows are sampled, by index in `rows`, and the entries that can be chosen.

    `floor`: the logarithm of min_p, -inf for none. `ids`, `words`: [count, CANDIDATES], in order of the ids. `found`:
    their number, 0 if the largest logit is not finite, -1 if the caller must do without. `peaks`: the largest logits.
    In a chain, only the parameters of sampling are set.
    """

    kept: Any  # objects to keep alive
    _fields_ = (
        *(("of", Rows), ("temperature", _DOUBLES), ("top_p", _DOUBLES), ("floor", _DOUBLES), ("top_k", _NUMBERS)),
        *((name, _WORDS) for name in ("seed", "sample", "position")),
        *(("ids", _OUT_NUMBERS), ("words", _OUT_WORDS), ("found", _OUT_NUMBERS), ("peaks", _ENTRIES)),
    )


class Chain(ctypes.Structure):
    """Consecutive passes.

    By sequence, one per wanted row of the first pass: its slot, and the number of passes that it takes part in, at
    least 1, lowered where a result is not finite, and, if `to_end` is set for it, where a token is one of the `ending`
    tokens of `ends`. By sequence and pass: the results of `Score`, and whether a key of the last layer is not finite,
    which for the first pass is in `Pass.broken`.

    Where sequences are sampled, according to `draws`, the results are logits instead, kept unless `results` is null,
    and `tokens` takes, by sequence and pass, what is likely to be chosen, -1 where that cannot be known.
    """

    _fields_ = (
        *(("steps", c_int64), ("ending", c_int64), ("ends", _NUMBERS), ("to_end", _pointer("const uint8_t"))),
        *(("slots", _NUMBERS), ("lengths", _OUT_NUMBERS), ("results", _ENTRIES), ("broken", _FLAGS)),
        *(("draws", _pointer("const Draws")), ("tokens", _OUT_NUMBERS)),
    )


class Quantization(ctypes.Structure):
    """The quantization of weights, to panels or, if `data` is null, back to the floats that they then stand for.

    `stored`: number format of the weights; `storage`: of the whole numbers. `rows`: [panels, PANEL], the weights of
    each column; null after the last one. `packed`: panels of the weights instead, if not null. `data`, `steps`,
    `units`, `minima`, `minimum_units`: as in `Weight` and `Scales`; if data is null, they only say what exists.
    `floats`: [rows, inputs].
    """

    _fields_ = (
        *((name, c_int64) for name in ("threads", "stored", "storage", "panels", "inputs")),
        *(("rows", _pointer("const void *const")), ("packed", _BYTES)),
        *(("data", _pointer("void")), ("floats", _ENTRIES)),
        *((name, _pointer("void")) for name in ("steps", "units", "minima", "minimum_units")),
    )


class Arrangement(ctypes.Structure):
    """The arrangement of weights, or scales, in panels, with values unchanged.

    `width`: bytes of a number. `together`: inputs whose numbers of a column are stored together. `low`, `high`: bits of
    the planes into which bytes go, minus `least`, or by a `table` of 256 if it is not null; 0 for bytes that stay
    bytes. `rows`: as in `Quantization`. `data`: as in `Weight`, or in a member of `Scales`.
    """

    _fields_ = (
        *((name, c_int64) for name in ("threads", "panels", "inputs", "width", "together", "low", "high", "least")),
        *(("rows", _pointer("const void *const")), ("table", _pointer("const uint8_t")), ("data", _pointer("void"))),
    )


_STRUCTURES: tuple[Any, ...] = (
    *_NAMED.values(),
    *_KINDS.values(),
    Step,
    Program,
    Piece,
    Span,
    Pass,
    Rows,
    Best,
    Masked,
    Judged,
    Ranked,
    Draws,
    Chain,
    Quantization,
    Arrangement,
)


def _c_type(kind: Any) -> str:
    if issubclass(kind, c_void_p):
        return f"{kind.to} *"
    return {c_int64: "int64_t ", c_double: "double "}.get(kind, f"{kind.__name__} ")


def _struct(made: Any) -> Iterator[str]:
    yield "typedef struct {"
    found: list[tuple[str, Any]] = list(made._fields_)
    for name, kind in found:
        if kind is _Any:
            yield "    union {"
            yield from (f"        {_c_type(member)}{name};" for name, member in _members)
            yield "    };"
        else:
            yield f"    {_c_type(kind)}{name};"
    yield f"}} {made.__name__};"
    yield f"_Static_assert(sizeof({made.__name__}) == {ctypes.sizeof(made)}, {_AS_HERE});"
    for name, _ in found:
        if name != "any":
            place = f"offsetof({made.__name__}, {name}) == {getattr(made, name).offset}"
            yield f"_Static_assert({place}, {_AS_HERE});"


_AS_HERE = '"laid out as ctypes does"'


def _enum(values: dict[str, int]) -> str:
    return f"enum {{ {', '.join(f'{name} = {value}' for name, value in values.items())} }};"


def _whole_kinds() -> Iterator[str]:
    """Yield a Kind of few_bits.h for each format in few bits that is multiplied as whole numbers."""
    for storage, made in FORMATS.items():
        low, high = (*made.planes, 0, 0)[:2]
        for halves, minima in made.grouped if storage.whole else ():
            number = f"KIND_NUMBER({storage.name}, {halves}, {int(minima)})"
            wide, levels = int(made.least == -128), int(bool(made.levels))
            largest = max(made.levels) - made.least if levels else 2**made.bits - 1
            joint = max(2**15 // (2 * 127 * largest), 1)
            yield f"X({number}, {low}, {high}, {levels}, {wide}, {halves}, {int(minima)}, {joint})"


def _body() -> str:
    kinds = {name.upper(): i for i, name in enumerate(MEMBERS.values())}
    lines = [f"#define {name} {getattr(operands, name)}" for name in CONSTANTS] + [
        f"#define CANDIDATES {CANDIDATES}",
        f"#define RANKED {RANKED}",
    ]
    lines += [f"#define SMALLEST {SMALLEST}"]
    lines += [_enum(dict(of.__members__)) for of in (Storage, operands.Activation, operands.Scoring)] + [_enum(kinds)]
    widened = (each for each in Storage if not each.whole and each not in RULES)
    lines += [f"#define WIDENED_STORAGES(X) {' '.join(f'X({each.name})' for each in widened)}"]
    cores = (f"X({each.name}, {rule.bits}, {rule.inputs})" for each, rule in RULES.items())
    lines += [f"#define CORE_STORAGES(X) {' '.join(cores)}"]
    lines += ["#define KIND_NUMBER(STORAGE, HALVES, MINIMA) (((STORAGE) * 2 + (HALVES) - 1) * 2 + (MINIMA))"]
    lines += [f"#define WHOLE_KINDS(X) {' '.join(_whole_kinds())}"]
    formats = [FORMATS[storage] for storage in Storage]
    levels = (f"{{{', '.join(str(x - made.least) for x in made.levels) or 0}}}" for made in formats)
    lines += [f"#define STORED_LEVELS {{{', '.join(levels)}}}"]
    lines += [f"#define STORED_LEAST {{{', '.join(str(made.least) for made in formats)}}}"]
    lines += [f"#define STORED_BITS {{{', '.join(str(made.bits) for made in formats)}}}"]
    for made in _STRUCTURES:
        lines += ["", *_struct(made)]
    return "\n".join(lines)


DIGEST = int.from_bytes(hashlib.sha256(_body().encode()).digest()[:4], "big") >> 1  # a C int


def header() -> str:
    """Return the text of `layout.h`."""
    return f"""/* Made by setup.py; detgen/program/steps.py and detgen/kernels/c/layout.py say what things mean. */

#ifndef DETGEN_LAYOUT
#define DETGEN_LAYOUT

#include <stddef.h>
#include <stdint.h>

#define LAYOUT {DIGEST}
{_body()}

#endif
"""


class LaidOut:
    """A program in the form that C takes.

    Args:
        program: complete; it keeps the arrays alive that the structures point to.

    Attributes:
        whole: all of its steps.
    """

    def __init__(self, program: Declared) -> None:
        self._program = program
        self._steps = (Step * len(program.steps))()
        self._widths = (c_int64 * len(program.buffers))(*(buffer.width for buffer in program.buffers))
        kinds = {kind: i for i, kind in enumerate(steps.STEPS)}
        for to, step in zip(self._steps, program.steps, strict=True):
            to.kind, to.wanted = kinds[type(step)], step.wanted
            _fill(getattr(to, MEMBERS[type(step)]), step, program.buffers)
        self.whole = self._made(self._steps, program.steps[-1])

    def part(self, *chosen: int) -> Program:
        """Return a program of some of the steps."""
        return self._made((Step * len(chosen))(*(self._steps[i] for i in chosen)), self._program.steps[chosen[-1]])

    def _made(self, some: ctypes.Array[Step], last: operands.Step) -> Program:
        out = self._program.buffers[last.writes]
        made = Program(ctypes.addressof(some), len(some), len(self._widths), out, ctypes.addressof(self._widths))
        made.kept = some, self._widths, self._program
        return made


def _fill(to: Any, value: Any, numbers: dict[operands.Buffer, int]) -> None:
    for name, _ in to._fields_:
        found = getattr(value, name)
        if isinstance(found, operands.Buffer):
            buffer = getattr(to, name)
            buffer.number, buffer.width = numbers[found], found.width
        elif is_dataclass(found):
            _fill(getattr(to, name), found, numbers)
        elif found is not None:
            setattr(to, name, operands.address(found) if operands.is_array(found) else found)
