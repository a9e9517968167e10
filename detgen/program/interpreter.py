"""Programs run in plain PyTorch: slow, but the reference that every back end is compared with bit by bit.

Each kind of step has one function, which does what docs/numerics.md says. A step sees the rows of a pass by the names
of buffers; nothing here knows about threads, tiles or vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import singledispatch

import torch
from torch import Tensor

from detgen.program import steps
from detgen.program.arithmetic import (
    FUNCTIONS,
    block_totals,
    by_blocks,
    capped,
    core_linear,
    exponential,
    fma,
    gaussian_top_k,
    linear,
    log_total,
    norm,
    number,
    pair_linear,
    sigmoid,
    softmax,
    softplus,
    total,
    whole_linear,
    xielu,
)
from detgen.program.arrays import Array, each, tensor
from detgen.program.attention import Attended, of_block
from detgen.program.experts import Combine, ExpertLinear, Route, Sort, Weigh
from detgen.program.finite import bounded
from detgen.program.operands import (
    GROUP,
    LOGIT_BLOCK,
    PAGE,
    PANEL,
    SCORED,
    SECTION_BLOCKS,
    Buffer,
    Into,
    Scoring,
    Step,
    Weight,
)
from detgen.program.program import Program
from detgen.program.rows import Rows, Take
from detgen.program.states import Convolve, DeltaRule, Recurrence, SelectiveScan, StateSpace, Watch
from detgen.program.storage import RULES, numbers, unpack
from detgen.program.widening import in_floats


class Interpreter:
    """Runs a program.

    Args:
        program: the steps.

    Attributes:
        program: as above.
    """

    def __init__(self, program: Program) -> None:
        self.program = program

    @torch.no_grad()
    def run(self, rows: Rows, given: Mapping[Buffer, Array], take: Take | None = None) -> Tensor:
        """Run a pass; keys and values are written to the caches that the steps name.

        Args:
            rows: the rows of the pass.
            given: contents of buffers, float32 [rows or n, width].
            take: called with what each step wrote.

        Returns:
            bool [rows], whether a key of the last layer is not finite.

        Raises:
            TypeError: if a step is of an unknown kind.
        """
        buffers = {b: torch.zeros(len(rows.ids), b.width) for b in self.program.buffers}
        at = Pass(rows.to("cpu"), buffers | {b: tensor(x) for b, x in given.items()})
        for step in self.program.steps:
            at.wanted = step.wanted
            compute(each(step, tensor), at)
            if take is not None:
                take(step.name, at[step.writes])
        return at.broken


class Pass:
    """A pass while it runs; `at[buffer]` is a view of the rows that the current step sees.

    Attributes:
        rows: those of the pass.
        buffers: [rows, width] each.
        wanted: whether the step sees only the wanted rows.
        broken: bool [rows], whether a key of the last layer is not finite.
    """

    def __init__(self, rows: Rows, buffers: dict[Buffer, Tensor]) -> None:
        self.rows, self.buffers, self.wanted = rows, buffers, False
        self.broken = torch.zeros(len(rows.ids), dtype=torch.bool)

    def __getitem__(self, buffer: Buffer) -> Tensor:
        return self.buffers[buffer][: len(self.rows.wanted if self.wanted else self.rows.ids)]

    def put(self, to: Into, x: Tensor, column: int = 0) -> None:
        """Store results, [rows, n], from a column on, or add them to the buffer."""
        there = self[to.buffer][:, column : column + x.shape[1]]
        if to.factor != 1:
            x = x * number(to.factor)
        there.copy_(there + x if to.add else x)


@singledispatch
def compute(step: Step, _: Pass) -> None:
    """Compute a step on the rows of a pass and write its results."""
    raise TypeError(f"step {step.name!r}: the interpreter knows no {type(step).__name__}")


# Rows of tables


def _entries(table: Tensor, ids: Tensor) -> Tensor:
    return _known(table[ids.clamp(min=0)].float(), ids)


def _known(found: Tensor, ids: Tensor) -> Tensor:
    return torch.where(ids[:, None] >= 0, found, torch.where(ids[:, None] == -1, 0.0, torch.nan))


@compute.register
def _embed(step: steps.Embed, at: Pass) -> None:
    ids = at.rows.ids
    at.put(step.to, _entries(step.table, ids.where(ids < step.known, 0) if step.known else ids))


@compute.register
def _embed_column(step: steps.EmbedColumn, at: Pass) -> None:
    ids, weight = at.rows.ids, in_floats(step.weight)
    panels, places = weight.data[ids.clamp(min=0) // PANEL], ids.clamp(min=0) % PANEL
    at.put(step.to, _known(panels[torch.arange(len(ids)), :, places], ids))


@compute.register
def _embed_positions(step: steps.EmbedPositions, at: Pass) -> None:
    at.put(step.to, _entries(step.table, at.rows.positions + step.offset))


# Linear layers


def sums(x: Tensor, weight: Weight, experts: Tensor | None = None) -> Tensor:
    """[..., inputs] -> [..., columns], without the bias; for experts, those with the given numbers, [...]."""
    chosen = slice(None) if experts is None else experts
    if weight.storage.paired:
        found, rule = _columns(unpack(weight.storage, weight.data))[chosen], RULES.get(weight.storage)
        return pair_linear(x, found) if rule is None else core_linear(x, found, rule)
    if weight.scales is None:
        return linear(x, _columns(weight.data)[chosen].float())
    data = _columns(unpack(weight.storage, weight.data, weight.least))[chosen]
    scales, minima = (None if found is None else _columns(found)[chosen] for found in weight.scales.floats(-2))
    assert scales is not None
    if weight.storage.whole:
        return whole_linear(x, data, scales, minima)
    return linear(x, numbers(data, weight.codes) * scales.repeat_interleave(GROUP, -2))


def _columns(x: Tensor) -> Tensor:
    """[..., panels, n, PANEL] -> [..., n, columns]."""
    return x.transpose(-3, -2).flatten(-2)


def _with_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def _results(step: steps.Linear | ExpertLinear, x: Tensor) -> Tensor:
    """[..., columns] -> [..., outputs]; in a gated layer, the first half of each panel gates the other half."""
    function = FUNCTIONS[step.activation]
    if step.gated:
        gates, opened = x.unflatten(-1, (-1, 2, PANEL // 2)).unbind(-2)
        if isinstance(step, ExpertLinear) and step.limit:
            limit = number(step.limit)
            gates, opened = gates.clamp(max=limit), opened.clamp(-limit, limit) + number(step.shift)
            gates = gates * sigmoid(gates * number(step.slope))
        else:
            gates = function(gates)
        out: Tensor = (gates * opened).flatten(-2)
    else:
        out = function(x)
    return out[..., : step.weight.outputs]


@compute.register
def _linear(step: steps.Linear, at: Pass) -> None:
    out = _results(step, _with_bias(sums(at[step.x], step.weight), step.weight.bias))
    if step.softcap:
        out = capped(out if step.to.factor == 1 else out * number(step.to.factor), step.softcap)
        at.put(Into(step.to.buffer), out, step.at)
    else:
        at.put(step.to, out, step.at)


@compute.register
def _head_linear(step: steps.HeadLinear, at: Pass) -> None:
    passed, x = at[step.x].unflatten(1, (step.heads, -1)).tensor_split([step.passed], -1)
    found = sums(x, step.weight, torch.arange(step.heads))[..., : step.weight.outputs]
    at[step.to][:, : step.columns[1]] = torch.cat([passed, found], -1).flatten(1)


@compute.register
def _scored_linear(step: steps.ScoredLinear, at: Pass) -> None:
    weight = step.weight
    logits = _with_bias(sums(at[step.x], weight), weight.bias)[:, : weight.outputs]
    if step.factor != 1:
        logits = logits * number(step.factor)
    blocks = by_blocks(capped(logits, step.softcap))
    tops, nexts = blocks.topk(2).values.unbind(-1)
    places = (blocks == tops[..., None]).int().argmax(-1).int().view(torch.float32)
    at[step.to].copy_(torch.cat([tops, nexts, block_totals(blocks), places], 1))


@compute.register
def _score(step: steps.Score, at: Pass) -> None:
    tops, nexts, totals, places = at[step.x].unflatten(1, (SCORED, -1)).unbind(1)
    top = tops.amax(1, keepdim=True)
    block = (tops == top).int().argmax(1, keepdim=True)  # the first of ties
    place = places.contiguous().view(torch.int32).gather(1, block) + (block * LOGIT_BLOCK).int()
    second = torch.cat([tops, nexts], 1).topk(2).values[:, 1:]
    at[step.to].copy_(torch.cat([top, second, log_total(tops, totals)[:, None], place.view(torch.float32)], 1))


# Attention


@compute.register
def _rotate(step: steps.Rotate, at: Pass) -> None:
    cache, rows = step.cache, at.rows
    together, values = at[step.qkv].tensor_split([(cache.heads + cache.kv_heads) * cache.size], 1)
    heads = together.unflatten(1, (-1, cache.size))  # queries and keys; what is written here is written to the buffer
    if step.cosines is not None and step.sines is not None:
        cosines, sines = step.cosines[rows.positions][:, None], step.sines[rows.positions][:, None]
        half, turned = step.turned // 2, heads[..., : step.turned]
        a, b = (turned[..., ::2], turned[..., 1::2]) if step.interleaved else turned.split(half, -1)
        first, second = fma(a, cosines, -(b * sines)), fma(b, cosines, a * sines)
        a.copy_(first)
        b.copy_(second)
    if step.factors is not None:
        heads[:, : cache.heads] *= step.factors[rows.positions][:, None, None]
    keys = heads[:, cache.heads :]
    if not keys.shape[1]:  # queries alone
        return
    cache.keys[rows.places // PAGE, :, :, rows.places % PAGE] = bounded(keys).to(cache.keys)
    if cache.kept is not None:
        values = bounded(values.unflatten(1, (-1, cache.values)))
        cache.kept[rows.places // PAGE, :, rows.places % PAGE] = values.to(cache.kept)
    if step.last:
        at.broken |= ~keys.isfinite().all(2).all(1)


@compute.register
def _attend(step: steps.Attend, at: Pass) -> None:
    cache, rows = step.cache, at.rows
    heads = cache.kv_heads, cache.heads // cache.kv_heads
    queries = at[step.qkv][:, : cache.heads * cache.size].unflatten(1, (*heads, -1))
    to = at[step.to].unflatten(1, (*heads, -1))
    for slot, start, tokens, row in rows.pieces.tolist():
        positions = torch.arange(start, start + tokens)[:, None]
        low = (positions - step.window + 1).clamp(min=0) if step.window else torch.zeros_like(positions)
        if step.chunk:
            low = low.maximum(positions // step.chunk * step.chunk)
        some = slice(row, row + tokens)
        whole = part = Attended.nothing(tokens, *heads, cache.values)
        for block in range(int(low.min()) // PAGE, (start + tokens - 1) // PAGE + 1):
            if block % SECTION_BLOCKS == 0:
                whole, part = whole.joined(part), Attended.nothing(tokens, *heads, cache.values)
            at_keys = torch.arange(block * PAGE, block * PAGE + PAGE)
            away = (at_keys - positions)[:, None, None]  # [tokens, 1, 1, keys]
            seen = ((low <= at_keys) & (at_keys <= positions))[:, None, None]
            page = int(rows.tables[slot, block])
            keys = cache.keys[page].float()
            values = keys[:, -cache.values :].mT if cache.kept is None else cache.kept[page].float()
            part = part.joined(of_block(step, keys, values, queries[some], seen, away))
        whole = whole.joined(part)
        if step.sinks is not None:
            none = Attended.nothing(tokens, *heads, cache.values)
            whole = whole.joined(
                none._replace(most=step.sinks.view(heads).expand(tokens, -1, -1), total=none.total + 1)
            )
        to[some] = whole.results / whole.total[..., None] + 0.0  # no -0


# States


def _spans(at: Pass) -> list[list[int]]:
    assert at.rows.spans is not None, "layers that keep states are told of the spans of a pass"
    found: list[list[int]] = at.rows.spans.tolist()
    return found


@compute.register
def _convolve(step: Convolve, at: Pass) -> None:
    x, to = at[step.x], at[step.to]
    for slot, row, start, tokens, _, _ in _spans(at):
        some, positions = slice(row, row + tokens), torch.arange(start, start + tokens)
        before = torch.arange(start - step.taps + 1, start)
        seen = torch.cat([step.kept[slot, before % step.ring].where(before[:, None] >= 0, 0.0), x[some]])
        out = torch.zeros(tokens, step.x.width)
        for tap, weight in enumerate(step.weight):
            out = fma(weight, seen[tap : tap + tokens], out)
        to[some] = FUNCTIONS[step.activation](out if step.bias is None else out + step.bias)
        step.kept[slot, positions[-step.ring :] % step.ring] = x[some][-step.ring :]


@compute.register
def _delta_rule(step: DeltaRule, at: Pass) -> None:
    def after(state: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
        return fma(key, ((value - _asked(state, key)) * strength)[:, None], state)

    decays = exponential(softplus(at[step.decay] + step.bias) * step.rates)
    for row, state, query, _ in _states(step, at, decays, sigmoid(at[step.strength]), after):
        at[step.to][row] = _asked(state, query).flatten()


@compute.register
def _state_space(step: StateSpace, at: Pass) -> None:
    def after(state: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
        return fma(key, (value * strength)[:, None], state)

    times = softplus(at[step.decay] + step.bias).clamp(number(step.least), number(step.most))
    for row, state, query, value in _states(step, at, exponential(times * step.rates), times, after):
        at[step.to][row] = fma(value, step.skip[:, None], _asked(state, query)).flatten()


@compute.register
def _selective_scan(step: SelectiveScan, at: Pass) -> None:
    def moved(state: Tensor, row: Tensor) -> Tensor:
        key, value, time = row.split([step.size, step.values, step.values])
        return fma(key[:, None], value * time, state * exponential(time * step.rates))

    keys, queries = at[step.kq].split(step.size, 1)
    inputs = torch.cat([keys, at[step.x], softplus(at[step.times] + step.bias)], 1)
    for row, state in _moved(step, at, inputs, moved):
        at[step.to][row] = fma(at[step.x][row], step.skip, _asked(state, queries[row, None, :, None])[0])


def _asked(state: Tensor, entries: Tensor) -> Tensor:
    """Multiply a state, [heads, size, values], by a query or key of each head, [heads, size, 1]: [heads, values]."""
    out = torch.zeros(state.shape[0], state.shape[2])
    for i in range(state.shape[1]):
        out = fma(state[:, i], entries[:, i], out)
    return out


def _states(
    step: Recurrence,
    at: Pass,
    decays: Tensor,
    strengths: Tensor,
    after: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Yield each row's place, the state after it, its queries and its values; keep the states that are certain.

    Args:
        step: the step.
        at: the pass.
        decays: [rows, heads], the share of a state that remains.
        strengths: [rows, heads].
        after: makes the next state from a decayed one and a row's keys, values and strengths.
    """
    keys, values = step.key_heads * step.size, step.heads * step.values
    queries, x = at[step.qkv].split([keys, keys + values], 1)

    def each(row: Tensor) -> Tensor:
        """[key_heads * size] -> [heads, size, 1]."""
        return row.view(step.key_heads, step.size).repeat_interleave(step.heads // step.key_heads, 0)[..., None]

    def moved(state: Tensor, row: Tensor) -> Tensor:
        key, value, decay, strength = row.split([keys, values, step.heads, step.heads])
        return after(state * decay[:, None, None], each(key), value.view(step.heads, -1), strength[:, None])

    for row, state in _moved(step, at, torch.cat([x, decays, strengths], 1), moved):
        yield row, state, each(queries[row]), x[row, keys:].view(step.heads, -1)


def _moved(
    step: Recurrence | SelectiveScan, at: Pass, inputs: Tensor, moved: Callable[[Tensor, Tensor], Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Yield each row's place and the state after it; keep the states that are certain.

    Args:
        step: the step.
        at: the pass.
        inputs: what is kept of each row, [rows, width].
        moved: makes the next state from a state and a row of the inputs.
    """
    for slot, first, start, tokens, base, certain in _spans(at):
        state = step.state[slot].clone() if base else torch.zeros_like(step.state[slot])
        for position in range(base, start):
            state = moved(state, step.kept[slot, position % step.ring])
        if certain == start:
            step.state[slot] = state
        for position in range(start, start + tokens):
            row = first + position - start
            state = moved(state, inputs[row])
            yield row, state
            if position + 1 == certain:
                step.state[slot] = state
            if position >= certain:
                step.kept[slot, position % step.ring] = inputs[row]


@compute.register
def _watch(step: Watch, at: Pass) -> None:
    at.broken |= ~at[step.x].isfinite().all(1)


# Mixtures of experts


@compute.register
def _route(step: Route, at: Pass) -> None:
    x = at[step.x]
    if step.scoring == Scoring.OVER_ALL:
        scores = ranked = softmax(x)
    elif step.scoring == Scoring.SIGMOIDS:
        scores = ranked = sigmoid(x)
    elif step.scoring == Scoring.SIGMOIDS_OF_PICKS:
        ranked, scores = x.clone(), sigmoid(x)
    elif step.scoring == Scoring.SPARSE:
        ranked, scores = x.clone(), _sparse(x, step.to.width // 2, number(step.spread))
    else:  # e^(x - largest), to be divided by the sum of those that are taken
        ranked, scores = x.clone(), exponential(x - x.where(x == x, -torch.inf).amax(-1, keepdim=True))
    at[step.x].copy_(scores)
    if step.correction is not None:
        ranked = ranked + step.correction
    ranked = ranked.where(ranked == ranked, -torch.inf)
    if step.groups > 1:
        groups = ranked.unflatten(-1, (step.groups, -1))
        best = groups.topk(step.of_group).values
        total = best[..., 0] if step.of_group == 1 else best[..., 0] + best[..., 1]
        chosen = torch.zeros(total.shape, dtype=torch.bool).scatter(-1, _largest(total, step.best_groups), True)
        ranked = groups.where(chosen[..., None], -torch.inf).flatten(-2)
    experts = _largest(ranked, step.to.width // 2).sort(-1).values
    weights = scores.gather(-1, experts)
    if step.normalized:
        together = torch.zeros(len(weights))
        for weight in weights.unbind(-1):
            together = together + weight
        if step.scoring == Scoring.SIGMOIDS:
            together = together + number(step.added)
        weights = weights / together[:, None]
    if step.factor != 1:
        weights = weights * number(step.factor)
    if step.factors is not None:
        weights = weights * step.factors[experts]
    at[step.to].copy_(torch.stack([experts.float(), weights], -1).flatten(1))


def _sparse(x: Tensor, picks: int, spread: Tensor) -> Tensor:
    """Score each of the largest logits by the softmax over those close below it; the others stay logits."""
    taken = _largest(x.where(x == x, -torch.inf), picks)
    scores, out = x.clone(), torch.zeros(x.shape, dtype=torch.bool)
    for pick in taken.unbind(-1):
        most = x.gather(-1, pick[:, None])
        close = ~out & ~((most - x) / torch.maximum(x.abs(), most) > spread)
        total = torch.zeros(len(x))
        for share in exponential(x - most).where(close, 0.0).unbind(-1):
            total = total + share
        scores.scatter_(-1, pick[:, None], (1 / total)[:, None])
        out.scatter_(-1, pick[:, None], True)
    return scores


def _largest(x: Tensor, count: int) -> Tensor:
    """Places of the largest entries of each row; ties go to the first ones."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]


@compute.register
def _sort(_step: Sort, _at: Pass) -> None:
    """Do nothing: rows are looked up by their routes here."""


@compute.register
def _weigh(step: Weigh, at: Pass) -> None:
    at[step.to].copy_((at[step.x][:, None] * at[step.routes][:, 1::2, None]).flatten(1))


@compute.register
def _expert_linear(step: ExpertLinear, at: Pass) -> None:
    experts = at[step.routes][:, ::2].long()  # [rows, routes]
    x = at[step.x].unflatten(1, (-1, step.weight.inputs))  # [rows, 1 or routes, inputs]
    bias = None if step.weight.bias is None else step.weight.bias[experts]
    at[step.to].copy_(_results(step, _with_bias(sums(x, step.weight, experts), bias)).flatten(1))


@compute.register
def _combine(step: Combine, at: Pass) -> None:
    results, weights = at[step.x].unflatten(1, (-1, step.to.buffer.width)), at[step.routes][:, 1::2]
    weights = weights if step.weighed else torch.ones_like(weights)
    out = torch.zeros(len(results), step.to.buffer.width)
    for result, weight in zip(results.unbind(1), weights.unbind(1), strict=True):
        out = fma(result, weight[:, None], out)
    at.put(step.to, out)


@compute.register
def _gate(step: steps.Gate, at: Pass) -> None:
    x = at[step.x][:, step.at : step.at + step.to.buffer.width]
    gates = FUNCTIONS[step.function](at[step.gates])
    at.put(step.to, x * gates.repeat_interleave(x.shape[1] // gates.shape[1], 1))


# Rows by themselves


@compute.register
def _norm(step: steps.Norm, at: Pass) -> None:
    x = at[step.x][:, step.at : step.at + step.vectors * step.size].unflatten(1, (step.vectors, step.size))
    found = norm(x, step.weight, step.bias, step.epsilon, centred=step.centred, least=step.least)
    at.put(step.to, found.flatten(1), step.at)


@compute.register
def _copy(step: steps.Copy, at: Pass) -> None:
    x = at[step.x] if step.to.buffer.width > step.size else at[step.x][:, step.at : step.at + step.size]
    x = x if step.factors is None else x * step.factors
    bound = number(step.bound)
    at.put(step.to, x.clamp(-bound, bound) if step.bound else x, step.columns[0])


@compute.register
def _take(step: steps.Take, at: Pass) -> None:
    at[step.to].copy_(at.buffers[step.x][at.rows.wanted])


@compute.register
def _activate(step: steps.Activate, at: Pass) -> None:
    at.put(step.to, FUNCTIONS[step.function](at[step.x]))


@compute.register
def _softmax(step: steps.Softmax, at: Pass) -> None:
    at[step.to].copy_(softmax(at[step.x]))


@compute.register
def _sum(step: steps.Sum, at: Pass) -> None:
    at[step.to].copy_(total(at[step.x])[:, None])


@compute.register
def _gaussian_top_k(step: steps.GaussianTopK, at: Pass) -> None:
    at[step.to].copy_(gaussian_top_k(at[step.x], step.deviations))


@compute.register
def _xielu(step: steps.Xielu, at: Pass) -> None:
    at[step.to].copy_(xielu(at[step.x], step.rise, step.fall, step.slope, step.least))


@compute.register
def _mix(step: steps.Mix, at: Pass) -> None:
    vectors = at[step.x].unflatten(1, (-1, step.size))
    coefficients = at[step.coefficients].unflatten(1, (-1, vectors.shape[1]))  # [rows, sums, vectors]
    out = torch.zeros(())
    for vector, coefficient in zip(vectors.unbind(1), coefficients.unbind(2), strict=True):
        out = fma(vector[:, None], coefficient[..., None], out)
    at.put(step.to, out.flatten(1))
