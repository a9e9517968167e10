"""The tokens of known completions, judged at the speed of reading a prompt.

All tokens are known, so prompt and completion go through canonical passes like a prompt: many positions per pass, many
samples side by side. Each committed token must be what its logits, parameters and noise give.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import torch

from detgen.engine import Engine
from detgen.engine.reading_ahead import cut
from detgen.engine.request import TokenLogprobs
from detgen.engine.token_logprobs import token_logprobs
from detgen.kernels.input_batch import MOST_ROWS, Windows
from detgen.kernels.logprobs import Judged, Scores, judge_rows
from detgen.kernels.sampling import choose, scores
from detgen.runner.block_manager import PAGE
from detgen.runner.model_runner import ModelRunner
from detgen.runner.slot_thoughts import Thinking
from detgen.verify.replay.audited import Audited, Mismatch
from detgen.verify.replay.known_windows import Pass, Reading, side_by_side, up_to_thoughts
from detgen.verify.replay.thoughts import wrong_thoughts
from detgen.verify.replay.ties import rounding_explains

_AHEAD = 256  # samples that are read and sorted at a time
_PAGES = 512  # most pages that samples side by side take; more would take memory and save no pass


def judge(engine: Engine, samples: Iterable[Audited]) -> Iterator[Audited]:
    """Judge samples as they come.

    Args:
        engine: what its cache holds is lost.
        samples: each with at least one token, and no more than it may have.

    Yields:
        Each sample once it has been read, the longest of the next few hundred first.
    """
    pages = engine.canonical.cache.pages
    source = iter(samples)
    while some := list(itertools.islice(source, _AHEAD)):
        some.sort(key=lambda a: a.sequence.prompt_length + len(a.tokens), reverse=True)
        while some:
            longest = some[0].sequence.prompt_length + len(some[0].tokens)
            slots = min(max(min(pages.count, _PAGES) // -(-longest // PAGE), 1), len(some))
            pages.lay_out(slots, longest)
            _share(engine, some[:slots])
            yield from some[:slots]
            del some[:slots]


def _share(engine: Engine, samples: list[Audited]) -> None:
    """Read samples, the longest first; if there are enough and the model allows it, each thread reads a share of them.

    A thread with passes of its own never waits for the others between two operators.
    """
    runner = engine.canonical
    threads = torch.get_num_threads()
    workers = threads if runner.concurrent and len(samples) >= threads else 1
    shares = []
    slot = 0
    for i in range(workers):  # the slots of a share are neighbours
        share = samples[i::workers]
        tokens = [[*a.sequence.tokens, *a.tokens[:-1]] for a in share]
        shares.append([Reading(a, slot + j, t) for j, (a, t) in enumerate(zip(share, tokens, strict=True))])
        slot += len(share)
    stopped = Event()
    if engine.thinking is not None:
        _judge_thinking(engine, engine.thinking, shares[0])
        return
    if workers == 1:
        _judge(runner, side_by_side(shares[0], MOST_ROWS), stopped)
        return

    def work(share: list[Reading]) -> None:
        torch.set_num_threads(1)
        _judge(runner.counting(), side_by_side(share, MOST_ROWS), stopped)

    try:
        with ThreadPoolExecutor(workers) as pool:
            try:
                list(pool.map(work, shares))
            finally:
                stopped.set()  # an interruption does not wait for whole shares
    finally:
        torch.set_num_threads(threads)


def _judge(runner: ModelRunner, passes: Iterable[Pass], stopped: Event) -> None:
    """Run passes until somebody stops them."""
    for read in passes:
        if stopped.is_set():
            return
        _pass(runner, read)


def _judge_thinking(engine: Engine, thinking: Thinking, readings: list[Reading]) -> None:
    """Read samples of a model that thinks, and compare their thoughts."""
    runner = engine.canonical
    for reading in readings:
        thinking.start(reading.slot, 0)
        reading.pauses = sorted(first + thinking.chunk for first, _ in reading.audited.thoughts or ())
    for read in up_to_thoughts(readings, MOST_ROWS):
        _pass(runner, read, thinking)
    for reading in readings:
        if (claims := reading.audited.thoughts) is not None:
            thoughts = enumerate(thinking.thoughts[reading.slot])
            found = [(i * thinking.chunk, engine.stopping.decode(thought)) for i, thought in thoughts if thought]
            reading.audited.wrong_thoughts += wrong_thoughts(claims, found)


@torch.inference_mode()
def _pass(runner: ModelRunner, read: Pass, thinking: Thinking | None = None) -> None:
    """One pass, and what its logits give beside what was written."""
    broken: list[int] = []
    windows = Windows.of(w for _, w in read)
    results = runner.run(windows, broken, scored=all(_plain(r.audited) for r, w in read if w.logits))
    if isinstance(results, Scores) and not (results.finite & (results.tokens == _committed(read))).all():
        broken.clear()
        results = runner.run(windows, broken)  # how far off a token is, the logits tell
    if thinking is not None:
        ends = thinking.keep(windows.slots, windows.starts + windows.lengths)
        windows, results, broken = cut(windows, ends - windows.starts, results, broken)
        read = [(reading, window) for (reading, _), window in zip(read, windows, strict=True)]
        for (reading, _), end in zip(read, ends.tolist(), strict=True):
            reading.at = end
    _check_finite(broken, read)
    wanted = [(r.audited, r.place(w), w.logits) for r, w in read if w.logits]
    if not wanted:
        return
    errors = None
    if isinstance(results, Scores):
        right, judged = np.ones(len(results.tokens), bool), Judged(None, results.logprobs, results.leads)
    else:
        choices = [a.choice(place + i) for a, place, count in wanted for i in range(count)]
        picked = choose(results, choices)
        right = picked.tokens.cpu().numpy() == _committed(read)
        if not right.all():
            places = [(a, place + i) for a, place, count in wanted for i in range(count)]
            for i in np.flatnonzero(~right).tolist():
                audited, place = places[i]
                audited.mismatches.append(_mismatch(results[i], audited, place, int(picked.tokens[i])))
        if any(a.tolerance for a, _, _ in wanted):
            errors = results.abs().masked_fill_(~results.isfinite(), 0).amax(-1)  # the logits will be overwritten
        judged = judge_rows(results, picked, full=any(a.logprobs is not None for a, _, _ in wanted))
    logprobs, chosen = judged.logprobs, judged.chosen.tolist()
    margins = [None if math.isinf(lead) else lead for lead in judged.margins.tolist()]
    at = 0
    for audited, place, count in wanted:
        part = slice(at, at + count)
        if np.isnan(chosen[part]).any():
            _should_have_failed(audited, f"the logits of token {place + int(np.isnan(chosen[part]).argmax())}")
        error = (audited.tolerance * errors[part]).tolist() if errors is not None else [0.0] * count
        given = _Given(
            None if logprobs is None else logprobs[part], chosen[part], margins[part], right[part].tolist(), error
        )
        if audited.scores is not None:
            _check_scores(audited, place, given)
        if audited.logprobs is not None and given.logprobs is not None:
            _check_logprobs(audited, place, given.logprobs, given)
        at += count


def _plain(audited: Audited) -> bool:
    """Whether nothing but the largest logits decides, and nobody asks for others."""
    return not (audited.sequence.choosy or audited.tolerance) and audited.logprobs is None


def _committed(read: Pass) -> np.ndarray:
    """What was written where a pass gives logits, int64 [rows with logits]."""
    parts = [r.audited.tokens[r.place(w) : r.place(w) + w.logits] for r, w in read]
    return np.fromiter(itertools.chain.from_iterable(parts), np.int64)


def _check_finite(broken: list[int], read: Pass) -> None:
    """Note the samples that have one of the `broken` rows of a pass."""
    if not broken:
        return
    row = 0
    for reading, window in read:
        at = next((i - row for i in broken if row <= i < row + len(window.tokens)), None)
        if at is not None:
            _should_have_failed(reading.audited, f"the hidden states at position {window.start + at}")
        row += len(window.tokens)


def _should_have_failed(audited: Audited, where: str) -> None:
    what = f"{where} are not finite, so the sample should have ended with an error"
    audited.wrong_logprobs.append((what, False))


class _Given(NamedTuple):
    """What the logits of some consecutive tokens give.

    Attributes:
        logprobs: float32 [tokens, vocabulary]; None if none are to be checked.
        chosen: log-probability of each chosen token.
        margins: of each chosen token; None where there was no other candidate.
        right: whether the token is the chosen one; only then the others are compared.
        errors: largest error of differences of logits that the tolerance allows.
    """

    logprobs: torch.Tensor | None
    chosen: list[float]
    margins: list[float | None]
    right: list[bool]
    errors: list[float]


def _check_scores(audited: Audited, place: int, given: _Given) -> None:
    """Log-probabilities and margins of the acceptance log beside what the logits give."""
    written = (audited.scores or [])[place : place + len(given.chosen)]
    expected = list(zip(given.chosen, given.margins, strict=True))
    if _same_bits(written, expected):
        return
    temperature = audited.sequence.request.params.temperature or 1.0
    filtered = audited.sequence.choice().filtered
    for i, (was, now) in enumerate(zip(written, expected, strict=True)):
        if not given.right[i] or _same_bits([was], [now]):
            continue
        what = f"logprob and margin are {was[0]} and {was[1]}, the logits give {now[0]} and {now[1]}"
        pairs = list(zip(was, now, strict=True))
        apart = [0.0 if _same_bits([a], [b]) else abs(_finite(a) - _finite(b)) for a, b in pairs]
        # A margin is a difference of logits / temperature, and a filter may have dropped another runner-up.
        adjustment = audited.choice(place + i).adjustment
        stretched = 2 * given.errors[i] * (adjustment.stretch if adjustment is not None else 1.0)
        allowed = [2 * given.errors[i], math.inf if filtered else stretched / temperature]
        tie = audited.tolerance > 0 and all(a <= b for a, b in zip(apart, allowed, strict=True))
        audited.wrong_scores.append((f"token {place + i}: {what}", tie))


def _check_logprobs(audited: Audited, place: int, logprobs: torch.Tensor, given: _Given) -> None:
    """Log-probabilities of the output line beside what the logits give."""
    written = (audited.logprobs or [])[place : place + len(given.chosen)]
    expected = token_logprobs(logprobs, given.chosen, audited.sequence.request.params.logprobs or 0)
    for i, (a, b) in enumerate(zip(written, expected, strict=True)):
        same = a == b and _same_bits([a.logprob, *(p for _, p in a.top)], [b.logprob, *(p for _, p in b.top)])
        if given.right[i] and not same:
            what = f"the logprob is {a.logprob!r}, the logits give {b.logprob!r}"
            if a.logprob == b.logprob:
                what = "the most likely tokens are others"
            tie = audited.tolerance > 0 and _distance(a, b) <= 2 * given.errors[i]
            audited.wrong_logprobs.append((f"token {place + i}: {what}", tie))


def _same_bits(written: list[Any], expected: list[Any]) -> bool:
    """Whether floats are equal bit for bit; None is as good as what is not finite, which JSON cannot spell."""
    a, b = (np.array(values, dtype=np.float64) for values in (written, expected))
    a[~np.isfinite(a)] = b[~np.isfinite(b)] = math.nan
    return a.tobytes() == b.tobytes()


def _finite(value: float | None) -> float:
    """A value for comparing within a tolerance: nothing is far from everything."""
    return math.inf if value is None or not math.isfinite(value) else value


def _distance(a: TokenLogprobs, b: TokenLogprobs) -> float:
    """The largest difference of the values at the same rank; inf if one has more of them."""
    if len(a.top) != len(b.top):
        return math.inf
    tops = [abs(p - q) for (_, p), (_, q) in zip(a.top, b.top, strict=True)]
    return max([abs(a.logprob - b.logprob), *tops])


def _error(row: torch.Tensor, audited: Audited) -> float:
    """The largest error of differences of a row's logits, float32 [vocabulary], that the tolerance allows."""
    finite = row[row.isfinite()].abs()
    return audited.tolerance * float(finite.max()) if len(finite) else 0.0


def _mismatch(row: torch.Tensor, audited: Audited, place: int, expected: int) -> Mismatch:
    """A token beside what its logits, float32 [vocabulary], give."""
    token = audited.tokens[place]
    choice = audited.choice(place)
    score = scores(row, choice)
    tie = audited.tolerance > 0 and rounding_explains(row, choice, token, _error(row, audited))
    return Mismatch(place, token, expected, float(score[expected] - score[token]), tie)
