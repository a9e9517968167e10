"""Chooses the tokens of all rows: parameters by row in, sixteen bytes per row out.

Promise: the results for a row depend only on its logits, its parameters and its adjustment, and have the bits that
`sampling.choose` and `judging.judge_rows` give on a CPU: token, lead and log-probability. Sums over a row are in the
order of docs/numerics.md, or are sums of whole numbers; a score is computed on its own, in float64.

Two launches for rows at temperature 0: one reads the rows (`row_reading`), the other combines the results. One more
between them if rows are sampled, which reads them again for their scores. Three more if top_k or top_p cut them: see
`filter_kernels`. Adjustments cost no launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from detgen.kernels import choosing
from detgen.kernels.filters import inverse_of
from detgen.kernels.logprobs import LIKELY, Scores, most_likely
from detgen.kernels.triton.filter_kernels import boundaries, divided, key
from detgen.kernels.triton.launching import OPTIONS, above, on, sent
from detgen.kernels.triton.likely_tokens import likely
from detgen.kernels.triton.noise_kernels import gumbel, most_gumbel, word_of, words_of
from detgen.kernels.triton.row_reading import (
    FLOOR,
    POSITION,
    SAMPLE,
    SECTION,
    SEED,
    TEMPERATURE,
    Lists,
    log_total,
    parameter,
    peak_of,
    read,
    sampled,
    source_of,
)
from detgen.program.arrays import array

if TYPE_CHECKING:
    from detgen.kernels.sampling import Choices

_TILE = 1024  # entries whose noise is drawn at once
_TABLE = "temperature", "top_p", "floor", "top_k", "seed", "sample", "position", "inverse"  # as in `rows`
KNOWN = frozenset({*_TABLE, "min_p"})  # parameters that the kernels support; min_p's logarithm is the floor
BROKEN = -2  # replaces the token of a row that is not finite
_PACKED = np.dtype([("lead", "<f8"), ("logprob", "<f4"), ("token", "<i4")])


@triton.jit
def _kept(x, at, table, cuts, rows, row, vocabulary, FILTERS: tl.constexpr):
    """Return whether top_k and top_p keep entries; entries at -inf, or NaN, can be dropped anyway."""
    kept = x > float("-inf")
    if FILTERS:  # noqa: SIM102 (known when this is compiled, as the other is not)
        if divided(table, rows, row, vocabulary):
            bound, last = tl.load(cuts + 2 * row), tl.load(cuts + 2 * row + 1)
            kept = kept & ((key(x) > bound) | ((key(x) == bound) & (at <= last)))
    return kept


@triton.jit
def _scores(x, kept, word, peak, temperature, floor):
    """Return (logit - peak) / temperature plus noise, float64; -inf where a filter drops the entry."""
    scaled = (x.to(tl.float64) - peak.to(tl.float64)) / temperature
    return tl.where(kept & (scaled >= floor), scaled + gumbel(word), float("-inf"))


@triton.jit(do_not_specialize=("rows",))
def _score(
    logits,
    copies,
    bounds,
    table,
    best,
    places,
    cuts,
    leading,
    leaders,
    following,
    stride,
    rows,
    vocabulary,
    sections,
    ADJUSTS: tl.constexpr,
    FILTERS: tl.constexpr,
    SECTION: tl.constexpr,
    SECTIONS: tl.constexpr,
    TILE: tl.constexpr,
):
    row, section = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak = peak_of(best, row, sections, SECTIONS)
    if sampled(table, rows, row, peak):
        temperature, floor = parameter(table, rows, row, TEMPERATURE), parameter(table, rows, row, FLOOR)
        temperature = tl.where(temperature > 1e-200, temperature, 1e-200)  # as in `filters.scaled`
        seed = tl.load(table + SEED * rows + row).to(tl.uint64, bitcast=True)
        sample = tl.load(table + SAMPLE * rows + row).to(tl.uint64, bitcast=True)
        position = tl.load(table + POSITION * rows + row).to(tl.uint64, bitcast=True)

        # The runner-up is at least the second score of these few, the largest logits of the sections.
        at = tl.arange(0, SECTIONS)
        id = tl.load(places + row * sections + at, mask=at < sections, other=0)
        x = tl.load(best + row * sections + at, mask=at < sections, other=float("-inf"))
        kept = _kept(x, id, table, cuts, rows, row, vocabulary, FILTERS)
        known = _scores(x, kept, word_of(seed, sample, position, id), peak, temperature, floor)
        first = tl.min(tl.where(known == tl.max(known, 0), at, SECTIONS), 0)
        least = tl.max(tl.where(at == first, float("-inf"), known), 0)

        source = source_of(logits, copies, bounds, row, stride, vocabulary, ADJUSTS)
        top, second = tl.full((), float("-inf"), tl.float64), tl.full((), float("-inf"), tl.float64)
        leader = vocabulary
        sifts = (temperature >= 1e-3) & (temperature <= 1e6)  # otherwise float32 may overflow
        divisor = tl.where(sifts, temperature, 1.0).to(tl.float32)
        for start in range(section * SECTION, tl.minimum((section + 1) * SECTION, vocabulary), TILE):
            block = start // 4 + tl.arange(0, TILE // 4)
            entry = 4 * block[:, None] + tl.arange(0, 4)[None, :]
            logit = tl.load(source + entry, mask=entry < vocabulary, other=float("-inf"))
            stays = _kept(logit, entry, table, cuts, rows, row, vocabulary, FILTERS)
            limit = tl.maximum(least, second)
            limit = tl.where(sifts & (limit > -1e30), limit - 1e-4 - 1e-6 * tl.abs(limit), float("-inf"))
            bound = tl.where(stays, tl.div_rn(logit - peak, tl.zeros_like(logit) + divisor), float("-inf"))
            if tl.max(bound).to(tl.float64) + 37 >= limit:  # the largest noise
                word = words_of(seed, sample, position, block, TILE // 4)
                if tl.max(bound + most_gumbel(word)).to(tl.float64) >= limit:
                    score = _scores(logit, stays, word, peak, temperature, floor)
                    most = tl.max(score)
                    found = tl.min(tl.where(score == most, entry, vocabulary))
                    rest = tl.max(tl.where(entry == found, float("-inf"), score))
                    second = tl.where(most > top, tl.maximum(top, rest), tl.maximum(second, most))
                    leader = tl.where(most > top, found, leader)
                    top = tl.maximum(top, most)
        tl.store(leading + row * sections + section, top)
        tl.store(leaders + row * sections + section, leader)
        tl.store(following + row * sections + section, second)


@triton.jit
def _two(best, places, seconds, row, sections, vocabulary, SECTIONS: tl.constexpr):
    """Return a row's largest entry, its first place, and the largest of the others, from those of its sections."""
    at = tl.arange(0, SECTIONS)
    x = tl.load(best + row * sections + at, mask=at < sections, other=float("-inf"))
    place = tl.load(places + row * sections + at, mask=at < sections, other=vocabulary)
    top = tl.max(x, 0)
    found = tl.min(tl.where(x == top, place, vocabulary), 0)
    rest = tl.load(seconds + row * sections + at, mask=at < sections, other=float("-inf"))
    return top, found, tl.max(tl.where(place == found, rest, x), 0)


@triton.jit(do_not_specialize=("rows",))
def _choose(
    logits,
    table,
    tops,
    totals,
    best,
    places,
    seconds,
    broken,
    leading,
    leaders,
    following,
    given,
    out,
    stride,
    rows,
    vocabulary,
    sections,
    blocks,
    SAMPLES: tl.constexpr,
    GIVEN: tl.constexpr,
    SECTIONS: tl.constexpr,
    BROKEN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    top, token, second = _two(best, places, seconds, row, sections, vocabulary, SECTIONS)
    lead = top.to(tl.float64) - second.to(tl.float64) + 0.0  # zeros of either sign are equal
    if SAMPLES:  # noqa: SIM102 (likewise)
        if sampled(table, rows, row, top):
            score, token, other = _two(leading, leaders, following, row, sections, vocabulary, SECTIONS)
            lead = score - other
    at = tl.arange(0, SECTIONS)
    none = tl.max(tl.load(broken + row * sections + at, mask=at < sections, other=0), 0)
    chosen = tl.load(logits + row * stride + token, mask=token < vocabulary, other=float("nan"))
    finite = (none == 0) & (chosen > float("-inf")) & (chosen < float("inf"))
    if GIVEN:
        chosen = tl.load(logits + row * stride + tl.load(given + row))
    largest, log = log_total(tops + row * blocks, totals + row * blocks, blocks)
    logprob = tl.where(largest < float("inf"), chosen - largest - log, float("nan"))
    bits = lead.to(tl.int64, bitcast=True)
    tl.store(out + 4 * row, bits.to(tl.int32))
    tl.store(out + 4 * row + 1, (bits >> 32).to(tl.int32))
    tl.store(out + 4 * row + 2, logprob.to(tl.int32, bitcast=True))
    tl.store(out + 4 * row + 3, tl.where(finite, token, BROKEN))


class Asked(NamedTuple):
    """How the tokens of all rows are chosen.

    Attributes:
        table: int64 [8, rows], parameters by row, as bits of float64 or uint64. None if no row is sampled.
        lists: the rows' adjustments; None if there are none.
        cuts: whether top_k or top_p can cut a sampled row.
        likely: int64 [rows], how many of the most likely tokens are wanted; None for none.
        given: int64 [rows], tokens whose log-probabilities are wanted; None for the chosen ones.
    """

    table: torch.Tensor | None = None
    lists: Lists | None = None
    cuts: bool = False
    likely: torch.Tensor | None = None
    given: torch.Tensor | None = None

    @classmethod
    def of(cls, choices: Choices) -> Asked:
        """Convert from `choices`, on the CPU."""
        warm, table = choices.temperature > 0, None
        if warm.any():
            how = {**choices.how(), "inverse": inverse_of(choices.temperature).astype(np.float64)}
            table = torch.from_numpy(np.stack([np.ascontiguousarray(how[name]).view(np.int64) for name in _TABLE]))
        cuts = bool((warm & ((choices.top_k > 0) | (choices.top_p < 1))).any())
        lists = None if choices.adjustments is None else Lists.of(choices.adjustments)
        numbers = (None if x is None else torch.from_numpy(x) for x in (choices.likely, choices.given))
        return cls(table, lists, cuts, *numbers)

    def to(self, device: torch.device | str) -> Asked:
        """Return the parameters on a device."""
        table, *numbers = (None if x is None else sent(x, device) for x in (self.table, self.likely, self.given))
        return Asked(table, None if self.lists is None else self.lists.to(device), self.cuts, *numbers)


def choose(logits: torch.Tensor, asked: Asked | None = None, most: int = 0) -> torch.Tensor:
    """Choose the token of each row; also find its lead and its log-probability.

    Args:
        logits: float32 [rows, vocabulary], fewer than 2^23 entries a row, each row contiguous; not changed.
        asked: how tokens are chosen, on the same device; None if all rows take their best logit.
        most: as for `likely`; 0 if none are wanted.

    Returns:
        int32 [rows, 4 + 2 * most], for `unpack`: the fourth column holds the tokens, BROKEN for rows that are not
        finite; the results of `likely` follow.
    """
    table, lists, cuts, counts, given = asked or Asked()
    rows, vocabulary = logits.shape
    found = read(logits, lists)
    sections = found.best.shape[1]
    leading = leaders = following = found.best
    if table is not None:
        cut = boundaries(logits, table, found) if cuts else found.best
        leading, following = torch.empty(2, rows, sections, dtype=torch.float64, device=logits.device)
        leaders = torch.empty_like(found.places)
        _score[(rows, sections)](
            *(logits, found.copies, found.bounds, table, found.best, found.places, cut),
            *(leading, leaders, following, logits.stride(0), rows, vocabulary, sections),
            *(lists is not None, cuts, SECTION, above(sections), min(_TILE, SECTION)),
            **OPTIONS,
        )
    out = torch.empty(rows, 4, dtype=torch.int32, device=logits.device)
    blocks = found.tops.shape[1]
    _choose[(rows,)](
        *(logits, logits if table is None else table, found.tops, found.totals),
        *(found.best, found.places, found.seconds, found.broken, leading, leaders, following),
        *(logits if given is None else given, out, logits.stride(0), rows, vocabulary, sections, blocks),
        *(table is not None, given is not None, above(sections), BROKEN),
        **OPTIONS,
    )
    most = min(most, vocabulary)
    return out if counts is None or not most else torch.cat([out, likely(logits, found, counts, most)], 1)


def choose_by(
    logits: torch.Tensor,
    choices: Choices | None,
    most: int = 0,
    lists: Lists | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose tokens as `choose` does, by `choices`.

    Args:
        logits: as for `choose`, like `most`.
        choices: of the rows; None if all take their best logit.
        most: as for `choose`.
        lists: their adjustments, if they are on the device already.
        positions: int64 [rows], their positions, if only the device knows them.
    """
    with on(logits.device):
        asked = None if choices is None else Asked.of(choices).to(logits.device)
        if asked is not None and asked.table is not None and positions is not None:
            asked.table[_TABLE.index("position")] = positions
        return choose(logits, asked if asked is None or lists is None else asked._replace(lists=lists), most)


def choose_reference(logits: torch.Tensor, choices: Choices | None, most: int = 0) -> torch.Tensor:
    """Choose tokens like `choose_by`, with the CPU's functions."""
    rows = array(logits).copy()
    if choices is None:
        tokens, leads = choosing.best(rows)
    else:
        picked = choices.choose(rows)
        tokens, leads = array(picked.tokens), picked.leads
    finite = np.isfinite(rows[np.arange(len(rows)), tokens])
    packed = np.zeros(len(rows), _PACKED)
    given = None if choices is None else choices.given
    said = tokens if given is None else given
    packed["lead"], (packed["logprob"], _) = leads, choosing.logprobs(rows, said, None, full=False)
    packed["token"] = np.where(finite, tokens, BROKEN)
    made = packed.view(np.int32).reshape(-1, 4)
    if most and choices is not None and choices.likely is not None:
        _, every = choosing.logprobs(rows, tokens, None, full=True)
        assert every is not None
        best = most_likely(every, most)
        best[np.arange(best.shape[1]) >= choices.likely[:, None]] = 0
        made = np.concatenate([made, best.view(np.int32)], 1)
    return torch.from_numpy(made).to(logits.device)


def unpack(packed: torch.Tensor) -> Scores:
    """Convert the result of `choose`, copied to the CPU."""
    own, likely = (np.ascontiguousarray(part) for part in np.split(packed.numpy(), [4], 1))
    found = own.view(_PACKED)[:, 0]
    tokens = found["token"].astype(np.int64)
    likely = likely.view(LIKELY) if likely.size else np.zeros((len(own), 0), LIKELY)
    return Scores(tokens, found["lead"], found["logprob"], tokens != BROKEN, likely)
