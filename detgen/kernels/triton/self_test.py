"""Checks whether kernels on a device have the compiled library's bits, for every kind of step and choice of tokens.

The checks are small, so that they take seconds, mostly to compile the kernels. Numbers are drawn with a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from detgen.kernels.attention import lay_out
from detgen.kernels.c.library import Runner, best_build
from detgen.kernels.c.panels import joined, stacked
from detgen.kernels.c.quantizing import PAIRED
from detgen.kernels.drawn_weights import IN_FEW_BITS, in_few_bits
from detgen.kernels.penalties import Adjuster, Adjustment, Penalties
from detgen.kernels.sampling import Choice, Choices
from detgen.kernels.triton.core_linear import rules_on
from detgen.kernels.triton.growing_lists import GrowingLists
from detgen.kernels.triton.rounds_self_test import rounds_right
from detgen.kernels.triton.runner import TritonRunner
from detgen.kernels.triton.sampling_kernels import choose_by, choose_reference
from detgen.program import steps
from detgen.program.arrays import array, bits, each, tensor
from detgen.program.experts import Combine, ExpertLinear, Route, Sort, Weigh
from detgen.program.operands import LOGIT_BLOCK, PAGE, PANEL, SCORED, Activation, Buffer, Cache, Into, Scoring, Step
from detgen.program.program import Program
from detgen.program.rows import Rows
from detgen.program.states import STATEFUL, Convolve, DeltaRule, SelectiveScan, StateSpace, Watch
from detgen.program.storage import RULES, Storage

_ROWS = 5
_MANY_ROWS = 64
_VOCABULARY = 9000  # three sections of a row
_POSITIONS = 200
_LINEAR = Activation.NONE, Activation.SILU, Activation.GELU_TANH, Activation.GELU, Activation.RELU


class Tried(NamedTuple):
    """Steps that run together.

    Attributes:
        name: in words.
        made: the steps, with arrays on the CPU.
        given: buffers that they read, or whose contents are compared; they allocate all others.
        rows: number of rows of the pass.
    """

    name: str
    made: tuple[Step, ...]
    given: tuple[Buffer, ...]
    rows: int = _ROWS


def tried(inputs: int = 1280, rules: Sequence[Storage] = tuple(RULES)) -> Iterator[Tried]:
    """Yield steps of every kind and number format; linear layers have `inputs`, a multiple of 256, in two sections.

    `rules` are the tensor-core rules to test, those that a device has; the name of a test of one ends with the rule's.
    """
    maker = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=maker)

    x, out = Buffer("x", inputs), Buffer("out", 40)
    kinds: list[tuple[str, Any, Any]] = [
        *((str(dtype)[6:], dtype, "none") for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        *(("pairs", torch.bfloat16, "pairs"), ("q8", torch.float32, "q8"), ("q4", torch.float32, "q4")),
        ("q4_k", torch.float32, "q4_k"),
        *((rule.name.lower(), torch.bfloat16, rule.name.lower()) for rule in rules),
    ]
    weights = {name: lambda seed, dtype=dtype: (drawn(40, inputs) * inputs**-0.5).to(dtype) for name, dtype, _ in kinds}
    forms = {name: form for name, _, form in kinds}
    for kind in IN_FEW_BITS:
        name = f"{kind[0].name} by {kind[1].name}{' and minima' * kind[3]}"
        weights[name] = lambda seed, kind=kind: in_few_bits(seed, 40, inputs, *kind)
    for i, (name, weight) in enumerate(weights.items()):
        form = forms.get(name, "none")
        plain = joined([weight(i)], [drawn(40)], form)
        how: dict[str, Any] = {"activation": _LINEAR[i % len(_LINEAR)]}
        yield _of(steps.Linear(name=f"linear, {name}", x=x, to=Into(out, add=True, factor=0.3), weight=plain, **how))
        if name in ("float32", *PAIRED, "q4"):
            both = joined([weight(i), weight(i)], [], form, gated=True)
            yield _of(steps.Linear(name=f"gated linear, {name}", x=x, to=Into(out), weight=both, gated=True))
        if plain.storage != Storage.CODE and name in ("float32", "pairs", *(n for n in weights if n not in forms)):
            column = joined([weight(i)], [], form)
            yield _of(steps.EmbedColumn(name=f"embedding, {name}", weight=column, to=Into(x)))
    for rule in rules:
        yield from _cores(drawn, inputs, rule)
    read, made = Buffer("parts of heads", 2 * (8 + inputs)), Buffer("made of heads", 2 * (8 + 40))
    for name in ("float32", "pairs", "q4"):
        both = stacked([[weights[name](seed)] for seed in range(2)], PANEL, forms[name])
        yield _of(steps.HeadLinear(name=f"heads, {name}", x=read, to=made, heads=2, passed=8, weight=both))
    head = joined([drawn(300, inputs)], [])
    scored, score = Buffer("scored", SCORED * -(-300 // LOGIT_BLOCK)), Buffer("score", SCORED)
    yield _of(
        steps.ScoredLinear(name="largest logits", x=x, to=scored, weight=head, softcap=1.5),
        steps.Score(name="scores", x=scored, to=score),
    )
    wide, to = Buffer("wide", 300), Buffer("to", 300)
    for storage in (Storage.FLOAT, Storage.BFLOAT):
        table = drawn(30, 300).to(torch.bfloat16 if storage == Storage.BFLOAT else torch.float32)
        known = 20 if storage == Storage.BFLOAT else 0
        yield _of(
            steps.Embed(name="rows of a table", table=table, storage=storage, to=Into(to, factor=0.3), known=known)
        )
        positions = drawn(_POSITIONS + 2, 300).to(table.dtype)
        yield _of(
            steps.EmbedPositions(name="positions", table=positions, storage=storage, offset=2, to=Into(to, add=True))
        )
    for size in (300, 2304):
        for centred in (False, True):
            a, b = Buffer("a", size), Buffer("b", size)
            affine: dict[str, Any] = {"weight": drawn(size), "bias": drawn(size)}
            yield _of(
                steps.Norm(
                    name="norm", x=a, to=Into(b, add=centred), size=size, epsilon=1e-5, centred=centred, **affine
                )
            )
        yield _of(steps.Norm(name="norm at least", x=a, to=Into(b), size=size, epsilon=0.0, centred=False, least=2.0))
        yield _of(steps.GaussianTopK(name="what is beyond deviations", x=a, to=b, deviations=0.5))
    ones = Buffer("ones", 1)
    yield _of(steps.Softmax(name="softmax", x=wide, to=to))
    yield _of(steps.Sum(name="sum", x=wide, to=ones))
    yield _of(steps.Copy(name="copy", x=wide, to=Into(to, add=True, factor=0.3)))
    yield _of(steps.Take(name="rows that are wanted", x=wide, to=to))
    yield _of(steps.Gate(name="gate", x=wide, gates=ones, to=Into(to)))
    yield _of(steps.Gate(name="gates of entries", x=wide, gates=Buffer("gates", 2), to=Into(to)))
    yield _of(steps.Gate(name="gates", x=wide, gates=to, to=Into(wide), function=Activation.SILU))
    part, as_it_is = Buffer("part", 200), Activation.NONE
    yield _of(steps.Gate(name="gates of a part", x=wide, at=70, gates=part, to=Into(part), function=as_it_is))
    yield _of(steps.Copy(name="copy of a part", x=wide, to=Into(part), at=70, factors=drawn(200), bound=0.5))
    yield _of(steps.Copy(name="copy into a part", x=part, to=Into(wide, add=True), at=70))
    mixing: dict[str, Any] = {"coefficients": Buffer("coefficients", 9), "size": 100}
    yield _of(steps.Mix(name="mixed vectors", x=wide, to=Into(to), **mixing))
    yield _of(steps.Mix(name="mixed vectors, in place", x=wide, to=Into(wide, add=True), **mixing))
    yield _of(steps.Xielu(name="xIELU", x=wide, to=to, rise=0.8, fall=0.7, slope=0.5, least=-1e-6))
    for function in Activation:
        yield _of(steps.Activate(name=f"activation {function.name}", x=wide, to=Into(to), function=function))
    yield from _attention(drawn)
    yield from _mixtures(drawn)
    yield from _states(drawn)


def _of(*made: Step) -> Tried:
    """Combine steps; the buffers they read first and the one written last are compared."""
    written: set[Buffer] = set()
    given: dict[Buffer, None] = {}
    for step in made:
        into = [value for f in fields(step) if isinstance(value := getattr(step, f.name), Into) and value.add]
        given |= dict.fromkeys(b for b in (*step.reads, *(i.buffer for i in into)) if b not in written)
        written.add(step.writes)
    return Tried(made[0].name if len(made) == 1 else made[-1].name, made, (*{**given, made[-1].writes: None},))


def _cores(drawn: Any, inputs: int, rule: Storage) -> Iterator[Tried]:
    """Yield what tells rules apart: magnitudes, and zeros beside large numbers, for other instructions' row counts."""
    x, mixed, out = Buffer("x", inputs), Buffer("mixed", inputs), Buffer("out", 40)
    zeros = torch.arange(inputs) % 5 == 0
    form: Any = rule.name.lower()
    wide = torch.exp2(drawn(inputs) * 20), drawn(40, inputs) * torch.exp2(drawn(40, inputs) * 20)
    small = torch.where(zeros, 2.0**59, 2.0**-45), drawn(40, inputs) * 2.0**-45
    for name, (factors, weight) in {"many magnitudes": wide, "zeros beside large numbers": small}.items():
        packed = joined([weight.where(~zeros, 0.0).bfloat16()], [], form)
        copied = steps.Copy(name="copy", x=x, to=Into(mixed), factors=factors)
        step = steps.Linear(name=f"{name}, {form}", x=mixed, to=Into(out), weight=packed)
        yield _of(copied, step)._replace(rows=_MANY_ROWS)


def _attention(drawn: Any) -> Iterator[Tried]:
    pages = -(-_POSITIONS // PAGE)
    for storage, interleaved in ((Storage.FLOAT, False), (Storage.BFLOAT, True)):
        dtype = torch.bfloat16 if storage == Storage.BFLOAT else torch.float32
        keys, kept = drawn(pages, 2, 16, PAGE).to(dtype), drawn(pages, 2, PAGE, 16).to(dtype)
        cache = Cache(heads=6, kv_heads=2, size=16, values=16, keys=keys, kept=kept, storage=storage)
        qkv, to, angles = Buffer("qkv", 10 * 16), Buffer("attended", 6 * 16), drawn(_POSITIONS, 6)
        turned: dict[str, Any] = {"turned": 12, "cosines": angles.cos(), "sines": angles.sin(), "last": interleaved}
        factors = drawn(_POSITIONS) if interleaved else None
        name = f"rotation and cache, {str(dtype)[6:]}"
        yield _of(steps.Rotate(name=name, qkv=qkv, cache=cache, interleaved=interleaved, factors=factors, **turned))
        alone, turned["last"] = Buffer("queries", 6 * 16), False
        yield _of(steps.Rotate(name=f"{name}, queries alone", qkv=alone, cache=cache, **turned))
        bounds: list[dict[str, Any]] = [
            {},
            {"window": 100, "softcap": 30.0, "slopes": drawn(6).abs()},
            {"chunk": 96, "sinks": drawn(6)},
        ]
        for how in bounds[: 1 if interleaved else None]:
            name = ", ".join(("attention", *how, str(dtype)[6:]))
            yield _of(steps.Attend(name=name, qkv=qkv, cache=cache, to=to, scale=0.25, **how))


def _mixtures(drawn: Any) -> Iterator[Tried]:
    logits, kept, routes = Buffer("logits", 40), Buffer("kept", 40), Buffer("routes", 6)
    for scoring in Scoring:
        how: dict[str, Any] = {"scoring": scoring, "normalized": True, "factor": 2.5, "correction": drawn(40)}
        how["factors"] = drawn(40)
        grouped: dict[str, Any] = {"groups": 8, "best_groups": 4, "of_group": 2}
        if scoring == Scoring.SPARSE:
            how, grouped = {"scoring": scoring, "normalized": False, "spread": 0.6}, {}
        copied = steps.Copy(name="copy", x=logits, to=Into(kept))
        yield _of(copied, Route(name=f"routes by {scoring.name}", x=kept, to=routes, **how, **grouped))
    x, up, down, to = Buffer("x", 64), Buffer("up", 3 * 64), Buffer("down", 3 * 64), Buffer("to", 64)
    for form in ("none", "q4"):
        first = stacked([[drawn(64, 64), drawn(64, 64)] for _ in range(40)], PANEL // 2, form)
        second = stacked([[drawn(64, 64)] for _ in range(40)], PANEL, form)
        weighed = Buffer("weighed", 3 * 64)
        yield _of(
            steps.Copy(name="copy", x=logits, to=Into(kept)),
            Route(name="routes", x=kept, to=routes, normalized=True),
            Sort(name="sorted", routes=routes, experts=40),
            Weigh(name="weighed", x=x, routes=routes, to=weighed),
            ExpertLinear(
                name="up", x=weighed, routes=routes, to=up, weight=first, gated=True, limit=7.0, slope=1.702, shift=1.0
            ),
            ExpertLinear(name="down", x=up, routes=routes, to=down, weight=second),
            Combine(name=f"experts, {form}", x=down, routes=routes, to=Into(to)),
        )


def _states(drawn: Any) -> Iterator[Tried]:
    x, mixed, qkv, ruled = Buffer("x", 70), Buffer("mixed", 70), Buffer("qkv", 2 * 16 + 2 * 40), Buffer("ruled", 80)
    how: dict[str, Any] = {"taps": 3, "ring": 8, "kept": drawn(1, 8, 70), "activation": Activation.SILU}
    yield _of(Convolve(name="convolution", x=x, to=mixed, weight=drawn(3, 70), bias=drawn(70), **how))
    decay, strength, ring = Buffer("decay", 2), Buffer("strength", 2), _ROWS + 3
    sizes: dict[str, Any] = {"heads": 2, "key_heads": 1, "size": 16, "values": 40, "ring": ring}
    gates: dict[str, Any] = {"decay": decay, "rates": -drawn(2).abs(), "bias": drawn(2)}
    kept: dict[str, Any] = {"state": drawn(1, 2, 16, 40), "kept": drawn(1, ring, 16 + 80 + 4)}
    yield _of(DeltaRule(name="delta rule", qkv=qkv, to=ruled, strength=strength, **gates, **sizes, **kept))
    limits: dict[str, Any] = {"skip": drawn(2), "least": 0.5, "most": 1.5}
    yield _of(StateSpace(name="state space", qkv=qkv, to=ruled, **limits, **gates, **sizes, **kept))
    scanned: dict[str, Any] = {"x": x, "times": Buffer("times", 70), "kq": Buffer("kq", 32), "to": mixed}
    sizes = {"size": 16, "values": 70, "ring": ring}
    kept = {"state": drawn(1, 1, 16, 70), "kept": drawn(1, ring, 16 + 140)}
    fixed: dict[str, Any] = {"rates": -drawn(16, 70).abs(), "bias": drawn(70), "skip": drawn(70)}
    yield _of(SelectiveScan(name="selective scan", **scanned, **sizes, **fixed, **kept))
    large = steps.Copy(name="copy", x=decay, to=Into(strength, factor=3e38))  # partly infinite
    yield _of(large, Watch(name="rows that are watched", x=strength))


def rows_of(count: int, positions: int) -> Rows:
    """Return the last `count` rows of a sequence of `positions` positions; half of them are certain."""
    at = np.arange(positions - count, positions)
    pieces = lay_out(np.array([0]), np.array([positions - count]), np.array([count]), 8)
    table = np.arange(-(-positions // PAGE))[None]
    first = positions - count
    spans = np.array([[0, 0, first, count, first - 2, first + count // 2]])
    return Rows(at % 30, at, at, np.arange(count)[::-1].copy(), table, pieces, spans)


def differing(
    made: tuple[Step, ...], rows: Rows, given: Mapping[Buffer, torch.Tensor], device: torch.device | str
) -> tuple[int, int]:
    """Count the numbers whose bits on a device differ from the compiled library's, and all numbers compared.

    Args:
        made: steps that run together, with arrays on the CPU; their caches and states are written to.
        rows: the rows of the pass.
        given: as in `Tried`, float32 [rows, width] each, on the CPU; left unchanged.
        device: where the kernels run.
    """
    there = tuple(each(step, lambda x: tensor(x).to(device, copy=True)) for step in made)
    mine, theirs = ({b: x.to(where, copy=True) for b, x in given.items()} for where in ("cpu", device))
    broken = TritonRunner(_program(there, theirs)).run(rows.to(device), theirs)
    named = Runner(best_build(), _program(made, mine)).run(rows, mine)
    pairs: list[tuple[Any, Any]] = [(broken.bool(), named)] + [(theirs[b], x) for b, x in mine.items()]
    for step, other in zip(made, there, strict=True):
        if isinstance(step, steps.Rotate):
            pairs += [(other.cache.keys, step.cache.keys), (other.cache.kept, step.cache.kept)]
        names = ("kept", "state") if isinstance(step, STATEFUL) else ()
        pairs += [(getattr(other, name), getattr(step, name)) for name in names if hasattr(step, name)]
    return sum(int((bits(a) != bits(b)).sum()) for a, b in pairs), sum(array(a).size for a, _ in pairs)


def _program(made: tuple[Step, ...], given: Mapping[Buffer, torch.Tensor]) -> Program:
    program = Program(*given)
    for step in made:
        program.add(step)
    return program


def checks(
    device: torch.device | str, inputs: int = 1280, vocabulary: int = _VOCABULARY
) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield the checks: a name, and a function that returns whether the bits are those of the compiled library.

    Args:
        device: where the kernels run: a CUDA device, or the CPU, for Triton's interpreter.
        inputs: of linear layers, as for `tried`.
        vocabulary: number of logits of a row.
    """
    maker = torch.Generator().manual_seed(1)
    for one in tried(inputs, rules_on(device)):
        given = {b: torch.randn(one.rows, b.width, generator=maker).abs() for b in one.given}
        yield one.name, partial(_steps_right, one, rows_of(one.rows, _POSITIONS), given, device)
    logits = torch.randn(_ROWS, vocabulary, generator=maker) * 4
    for name, choices in _choices(vocabulary).items():
        yield name, partial(_choice_right, logits, choices, device)
    yield "counted tokens", partial(_counts_right, device)
    yield "rounds that a model drafts", partial(rounds_right, device, looked_up=False)
    yield "rounds that are looked up", partial(rounds_right, device, looked_up=True)


def _steps_right(one: Tried, rows: Rows, given: Mapping[Buffer, torch.Tensor], device: torch.device | str) -> bool:
    return not differing(one.made, rows, given, device)[0]


def _choice_right(logits: torch.Tensor, choices: Choices | None, device: torch.device | str) -> bool:
    most = 0 if choices is None else choices.most
    return choose_by(logits.to(device), choices, most).cpu().equal(choose_reference(logits, choices, most))


def _counts_right(device: torch.device | str) -> bool:
    """Of a token of the prompt, a new one, this once more, and one with a bias, while one cannot come at first."""
    penalties = Penalties(1.3, 0.1, 0.2, ((7, 0.5),), frozenset({3}), 2)
    adjuster, chosen, right = Adjuster(penalties, [3, 4]), [4, 9, 9, 7], True
    made = GrowingLists.of([adjuster.growing([])], np.array([1 + len(chosen)]), torch.device(device))
    for n in range(1 + len(chosen)):
        last = torch.tensor(chosen[max(n - 1, 0) : n], dtype=torch.int64, device=device)
        _, ids, terms = made.after(np.zeros(1, np.int64), np.array([n]), last)
        wanted = adjuster.after(chosen[:n])
        assert wanted is not None, "there is a bias"
        known = terms[:, : len(wanted.ids)].cpu().contiguous().numpy()
        right &= ids[: len(wanted.ids)].tolist() == wanted.ids.tolist() and known.tobytes() == wanted.terms.tobytes()
    return right


def different(device: torch.device | str, inputs: int = 1280, vocabulary: int = _VOCABULARY) -> list[str]:
    """The names of `checks` that find other bits; none if all is right."""
    with torch.inference_mode():
        return [name for name, right in checks(device, inputs, vocabulary) if not right()]


def _choices(vocabulary: int) -> dict[str, Choices | None]:
    """How tokens of the rows are chosen, by what that is called."""
    ids = np.arange(0, vocabulary, 97)
    terms = np.stack([ids % 3, 1 + ids % 2, ids % 5, ids % 7, np.full(len(ids), np.inf)]).astype(np.float32)
    how: dict[str, dict[str, Any]] = {
        "sampling": {},
        "top_k and top_p": {"top_k": 50, "top_p": 0.9},
        "min_p": {"min_p": 0.01},
        "penalties": {"adjustment": Adjustment(ids, terms)},
    }
    drawn = {
        name: Choices.of([Choice(0.4 * (i + 1), seed=i, position=3 * i, **of) for i in range(_ROWS)])
        for name, of in how.items()
    }
    likely = replace(drawn["sampling"], likely=np.arange(_ROWS))
    given = Choices.largest(np.arange(_ROWS) * 7)
    return {"the largest logit": None, **drawn, "the most likely tokens": likely, "log-probabilities": given}
