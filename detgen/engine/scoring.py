"""Scoring: reads prompts with given completions in canonical passes, and judges the completions' tokens.

Nothing is chosen, so there are no drafts and no rounds: a completion is read like a prompt, and the logits before each
of its tokens say how likely that token is. What sequences have in common is read once, as for prompts. Knows no files
and no models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain

import numpy as np

from detgen.engine.reading_ahead import ReadingAhead
from detgen.engine.scheduler import Scheduler
from detgen.engine.score_requests import Score
from detgen.engine.scored import ScoredSequence
from detgen.engine.stats import EngineStats
from detgen.kernels.input_batch import Window, Windows
from detgen.kernels.logprobs import Scores, judge_rows, of_tokens
from detgen.kernels.sampling import Choices, Chosen, choose
from detgen.program.arrays import Array, array
from detgen.runner.model_runner import ModelRunner

_NONE = Windows.of(())

# Receives logits, float32 [n, vocabulary], before the scored tokens first, first + 1, ... of a sequence are judged.
ScoreTrace = Callable[[ScoredSequence, int, Array], None]


class Scoring:
    """Reads scored sequences, pass by pass, until they end.

    Args:
        target: runs canonical passes.
        scheduler: assigns slots and rows; has scored sequences only.
        stats: counters to update.
        ahead: reads the prompts of a model that thinks; None if the target does not think.

    Attributes:
        trace: receives the logits of scored tokens; None for no trace.
    """

    def __init__(
        self,
        target: ModelRunner,
        scheduler: Scheduler,
        stats: EngineStats,
        ahead: ReadingAhead | None = None,
    ) -> None:
        self._target = target
        self._scheduler = scheduler
        self._stats = stats
        self._ahead = ahead
        self._done: list[Score] = []
        self.trace: ScoreTrace | None = None

    def step(self) -> list[Score]:
        """Run one pass.

        Returns:
            The scores that the pass completed.
        """
        scheduler, live = self._scheduler, self._scheduler.live
        scheduler.admit()
        self._stats.live = len(live)
        self._stats.peak_live = max(self._stats.peak_live, len(live))
        for windows in scheduler.passes(_NONE):
            broken: list[int] = []
            choices = None if self.trace is not None else partial(self._choices, windows)
            results = self._target.run(windows, broken, scored=False, choices=choices)
            if self._ahead is not None:
                windows, results, broken = self._ahead.settle(live, windows, results, broken, self._stats)
            self._judge(windows, results, broken)
        done, self._done = self._done, []
        return done

    def clear(self) -> None:
        """Forget all sequences."""
        self._scheduler.clear()
        self._done.clear()

    def _choices(self, windows: Windows) -> Choices:
        """Return the choices of a pass: the tokens that follow its rows."""
        given = [token for w in windows for token in _behind(self._sequence(w.slot), w)]
        return Choices.largest(np.array(given, np.int64))

    def _judge(self, windows: Windows, results: Array | Scores, broken: list[int]) -> None:
        """Record the scores of the tokens that follow a pass's rows; end sequences that are read or broken.

        Args:
            windows: the windows of the pass.
            results: logits, float32 [sum of the windows' `logits`, vocabulary], or the scores of these tokens.
            broken: rows of the pass whose hidden states are not finite.
        """
        read: list[tuple[ScoredSequence, Window]] = [(self._sequence(w.slot), w) for w in windows]
        if self.trace is not None:
            assert not isinstance(results, Scores)
            at = 0
            for seq, window in read:
                self.trace(seq, len(seq.found), results[at : at + window.logits])
                at += window.logits
        finite, logprobs, greedy = _judged(results, list(chain.from_iterable(_behind(seq, w) for seq, w in read)))
        row = asked = 0
        for seq, window in read:
            count, slot = len(window.tokens), np.array([window.slot])
            part = slice(asked, asked + window.logits)
            first = count - window.logits  # first row with logits
            wrong = [b - row for b in broken if row <= b < row + count]
            wrong += (first + np.flatnonzero(~finite[part])).tolist()
            row, asked = row + count, part.stop
            self._stats.prompt_tokens += count
            if wrong:
                position = window.start + min(wrong)
                self._scheduler.advance(slot, np.array([position]))
                seq.break_off(position)
                self._end(seq)
                continue
            seq.found += logprobs[part].tolist()
            seq.greedy += greedy[part].tolist()
            self._stats.tokens += window.logits
            self._scheduler.advance(slot, np.array([window.start + count]))
            if window.start + count == len(seq.tokens):
                self._end(seq)
            else:
                self._scheduler.share(window.slot)

    def _sequence(self, slot: int) -> ScoredSequence:
        seq = self._scheduler.live[slot]
        assert isinstance(seq, ScoredSequence)
        return seq

    def _end(self, seq: ScoredSequence) -> None:
        if self._ahead is not None:
            thoughts = self._ahead.thinking.thoughts[seq.slot]
            self._stats.chunks += len(thoughts)
            self._stats.thoughts += sum(map(bool, thoughts))
        self._scheduler.release(seq)
        score = seq.tally.end(seq)
        if score is not None:
            self._done.append(score)


def _behind(seq: ScoredSequence, window: Window) -> list[int]:
    """Return the scored tokens that follow the rows of a window with logits."""
    end = window.start + len(window.tokens) - seq.asked_from
    return seq.scored[end - window.logits : end]


def _judged(results: Array | Scores, tokens: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Judge given tokens by the rows before them.

    Args:
        results: logits, float32 [rows, vocabulary], or the rows' scores.
        tokens: the given token of each row.

    Returns:
        bool [rows], whether the row is finite; float32 [rows], the tokens' log-probabilities; bool [rows], whether the
        token has the largest logit, the first of ties.
    """
    if not tokens:
        return np.zeros(0, bool), np.zeros(0, np.float32), np.zeros(0, bool)
    given = np.array(tokens)
    if isinstance(results, Scores):
        return results.finite, results.logprobs, results.tokens == given
    best = array(choose(results, None).tokens)
    # In a row that is not finite, the largest logit is not finite either.
    finite = np.isfinite(of_tokens(results, best))
    judged = judge_rows(results, Chosen(given, np.zeros(len(tokens))))
    return finite, judged.chosen, best == given
