"""One pass of a model over a packed bag of windows.

Prefill, plain decode, verification and the draft model all run here; they differ in their rows. Knows token ids, slots
and positions; knows no requests and no files.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias, overload

import numpy as np
import torch

from detgen.kernels import choosing
from detgen.kernels.attention import BLOCK, AttentionTraits
from detgen.kernels.judging import Scores
from detgen.kernels.native.library import Ends
from detgen.kernels.sampling import Choice, Choices
from detgen.passes.adapter import PlainDecoder, attending
from detgen.passes.cost import PassCost
from detgen.passes.exchange import Exchange
from detgen.passes.kv_cache import KVCache
from detgen.passes.native_attention import NativeAttention
from detgen.passes.native_decoder import NativeDecoder
from detgen.passes.packing import Packed, Window, Windows, pack

if TYPE_CHECKING:
    from detgen.passes.cuda_decoder import CudaDecoder  # imports Triton

Decoder: TypeAlias = "PlainDecoder | NativeDecoder | CudaDecoder"

_MOST_TIMED = 256  # rows of passes that are only timed


class Exchanging(Protocol):
    """Knows the states of slots, for the passes of a thinking model."""

    def exchange(self, windows: Windows) -> Exchange:
        """What the rows of a pass bring."""
        ...

    def note(self, windows: Windows, hidden: torch.Tensor) -> None:
        """Hold what T reads, float32 [tokens, hidden], of the rows of a pass."""
        ...


class Forward:
    """Runs packed passes of one model over one KV cache.

    Args:
        model: a decoder that runs whole passes, or one that uses the attention of the pass in progress.
        cache: its KV cache.
        group: query heads per KV head.
        attention: over the cache; None for that of the cache's layout.

    Attributes:
        passes: passes run so far.
        rows: rows of these passes.
        cost: cost of the passes and of choosing their tokens.
        group: query heads per KV head.
        attention: over the cache, of models that run no whole passes.
        thinking: brings the states of rows that bring none themselves; None if the model does not think.
    """

    def __init__(self, model: Decoder, cache: KVCache, group: int, attention: NativeAttention | None = None) -> None:
        self.model = model
        self.cache = cache
        self.device = cache.keys[0].device
        self.cost = PassCost()
        self.passes = self.rows = 0
        self.thinking: Exchanging | None = None
        self.group = group
        self.attention = NativeAttention(cache) if attention is None and cache.native else attention

    def counting(self) -> Forward:
        """The same model, cache, cost and states with counters of its own."""
        other = Forward(self.model, self.cache, self.group, self.attention)
        other.cost, other.thinking = self.cost, self.thinking
        return other

    def learn_cost(self, slots: int) -> None:
        """Time passes of one row and of `slots` rows, a few hundred at most, to know the cost before it is needed.

        Clears the cache.
        """
        slots = min(slots, _MOST_TIMED, self.cache.pages.count)
        self.cache.pages.lay_out(slots, BLOCK)
        for timed in range(4):
            for rows in (1, slots):
                self.run([Window(slot, 0, [0], 1) for slot in range(rows)])
            if not timed:
                self.cost = PassCost()  # the first passes include one-time work

    @overload
    def run(
        self,
        windows: Windows | Sequence[Window],
        broken: list[int] | None = None,
        exchange: Exchange | None = None,
    ) -> torch.Tensor: ...

    @overload
    def run(
        self, windows: Windows | Sequence[Window], broken: list[int] | None = None, *, scored: bool
    ) -> torch.Tensor | Scores: ...

    def run(
        self,
        windows: Windows | Sequence[Window],
        broken: list[int] | None = None,
        exchange: Exchange | None = None,
        *,
        scored: bool = False,
    ) -> torch.Tensor | Scores:
        """Run one pass: write the windows' KV entries and return the logits they want.

        Args:
            windows: at most one per slot.
            broken: takes the rows whose hidden states before the last layer are not finite, ascending; known by the
                keys that the last layer makes of them. What the last layer itself breaks shows in the logits.
            exchange: brings a state for each token of the windows, and takes their hidden states.
            scored: whether only the largest logits are asked for.

        Returns:
            float32 [sum of the windows' `logits`, vocabulary], in the order of the windows; where only the largest are
            asked for and the model can tell without storing all, the rows' scores.
        """
        started = time.perf_counter()
        if not isinstance(windows, Windows):
            windows = Windows.of(windows)
        model = self.model
        device = self.device if isinstance(model, PlainDecoder) else torch.device("cpu")
        packed = pack(windows, self.cache.pages.tables, self.group, device)
        rows = len(packed.ids)
        self.passes += 1
        self.rows += rows
        with torch.inference_mode(), attending(partial(self.attend, packed)):
            if exchange is None and self.thinking is not None:
                exchange = self.thinking.exchange(windows)
            scored = scored and isinstance(model, NativeDecoder)
            if isinstance(model, PlainDecoder):
                out = model(packed.ids, packed.positions, packed.wanted, exchange)
            else:
                out = model.run(packed, exchange, broken, scored=scored)
            results = Scores.of(out[: packed.count]) if scored else out[: packed.count].float()
            if exchange is not None and exchange.hidden is not None and self.thinking is not None:
                self.thinking.note(windows, exchange.hidden)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if broken is not None:
            broken += _not_finite(packed)  # none of a decoder that runs whole passes, which has named them
        self.cost.update(rows, time.perf_counter() - started, float(packed.area))
        return results

    @property
    def chains(self) -> bool:
        """Whether it can run `chain`."""
        model = self.model
        if self.thinking is not None or isinstance(model, PlainDecoder):
            return False
        return not isinstance(model, NativeDecoder) or model.broken is None

    @property
    def outputs(self) -> int | None:
        """Entries of a row of logits, where it can run `chain`."""
        return None if isinstance(self.model, PlainDecoder) else self.model.outputs

    @property
    def kept(self) -> int:
        """Entries of logits that `sample` leaves behind for each row; 0 where it chooses itself."""
        return self.model.outputs if isinstance(self.model, NativeDecoder) else 0

    def chain(self, windows: Windows, lengths: np.ndarray, ends: Ends | None = None) -> tuple[np.ndarray, Scores]:
        """Run passes one after the other in one call: each sequence goes on with its largest logit.

        What `run` with `scored` gives for the same rows. Entries are written for all but a sequence's last token.

        Args:
            windows: those of the first pass, which want one row each.
            lengths: int64 [windows], passes that each takes part in, at least 1; lowered where results are not finite,
                and where a sequence ends. The pages of its slot must reach to the last of them.
            ends: where they do; None for nowhere.

        Returns:
            The token that each row read, the last one of the window or what the row before chose, int64 [sum of
            lengths], in the order of the windows, and the rows' scores. A row is not finite, either, whose last keys
            are not.
        """
        if not isinstance(self.model, NativeDecoder):
            return self._launch(windows, lengths, None, ends)
        started = time.perf_counter()
        packed = pack(windows, self.cache.pages.tables, self.group, self.device)
        with torch.inference_mode():
            scored, broken = self.model.chain(packed, lengths, ends)
        self._count(packed, lengths, time.perf_counter() - started)
        there = _there(lengths, broken)
        scores = Scores.of(scored[torch.from_numpy(there)])
        scores.finite[broken[there]] = False
        return _read(windows, there, scores.tokens), scores

    def sample(
        self, windows: Windows, lengths: np.ndarray, choices: Choices, ends: Ends | None = None
    ) -> tuple[np.ndarray, torch.Tensor | Scores, list[int]]:
        """Run passes one after the other in one call: each sequence goes on with what it is likely to choose.

        Where it chooses something else in truth, the rows behind have read a token that is not there.

        Args:
            windows: see `chain`, like ends.
            lengths: lowered where nobody can tell what is chosen, too.
            choices: how the first token of each is chosen; the next ones likewise, at the positions behind it.
            ends: where sequences end.

        Returns:
            The token that each row read, int64 [sum of lengths], in the order of the windows, the rows' logits, or
            their scores where there is no more to tell, and the rows whose last keys are not finite.
        """
        if not isinstance(self.model, NativeDecoder):
            return *self._launch(windows, lengths, choices, ends), []
        logits = torch.empty(len(windows), int(lengths.max()), self.model.outputs)
        guessed, broken = self._draft(windows, lengths, choices, ends, logits)
        there = _there(lengths, broken)
        rows = logits.flatten(0, 1) if there.all() else logits[torch.from_numpy(there)]
        return _read(windows, there, guessed[there]), rows, np.flatnonzero(broken[there]).tolist()

    def draft(self, windows: Windows, lengths: np.ndarray, choices: Sequence[Choice]) -> list[list[int]]:
        """What each sequence is likely to choose next; arguments as those of `sample`."""
        if not isinstance(self.model, NativeDecoder):
            _, scores = self._launch(windows, lengths, Choices.of(choices), None)
            return [of[of >= 0].tolist() for of in np.split(scores.tokens, lengths.cumsum()[:-1])]
        tokens, _ = self._draft(windows, lengths, Choices.of(choices))
        return [of[of >= 0].tolist() for of in tokens]

    def _launch(
        self, windows: Windows, lengths: np.ndarray, choices: Choices | None, ends: Ends | None
    ) -> tuple[np.ndarray, Scores]:
        """`chain` where the device chooses, and an end is known behind the last pass only."""
        model = self.model
        assert not isinstance(model, (PlainDecoder, NativeDecoder))
        started, last = time.perf_counter(), windows.starts + windows.lengths - 1
        steps, passes = int(lengths.max()), []
        for step in range(steps):
            there = np.flatnonzero(lengths > step)
            ones = np.ones(len(there), np.int64)
            read = Windows(windows.slots[there], last[there] + step, ones, ones, 0 * ones) if step else windows
            passes.append((pack(read, self.cache.pages.tables, self.group, torch.device("cpu")), there))
        with torch.inference_mode():
            scores, broken = model.chain(passes, choices)
        self._count(passes[0][0], lengths, time.perf_counter() - started)
        owner = np.concatenate([there for _, there in passes])
        depth = np.repeat(np.arange(steps), [len(there) for _, there in passes])
        scores = scores._replace(finite=scores.finite & ~broken)
        over = ~scores.finite
        if ends is not None:
            over |= np.isin(scores.tokens, ends.tokens) & ends.to_end[owner]
        np.minimum.at(lengths, owner[over], depth[over] + 1)
        order = np.lexsort((depth, owner))
        scores = Scores(*(values[order] for values in scores)).only((depth < lengths[owner])[order])
        return _read(windows, np.arange(steps) < lengths[:, None], scores.tokens), scores

    def _draft(
        self,
        windows: Windows,
        lengths: np.ndarray,
        choices: Choices,
        ends: Ends | None = None,
        logits: torch.Tensor | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """`NativeDecoder.draft` of some windows."""
        assert isinstance(self.model, NativeDecoder)
        started = time.perf_counter()
        packed = pack(windows, self.cache.pages.tables, self.group, self.device)
        draws = choosing.draws(self.model.outputs, **choices.how())
        with torch.inference_mode():
            found = self.model.draft(packed, lengths, draws, ends, logits)
        self._count(packed, lengths, time.perf_counter() - started)
        return found

    def _count(self, packed: Packed, lengths: np.ndarray, seconds: float) -> None:
        """Count the passes of one call, and learn what they cost; `lengths` as `chain` leaves them."""
        rows = (lengths > np.arange(lengths.max())[:, None]).sum(1)
        rows[0] = len(packed.windows.tokens)
        self.passes += len(rows)
        total, first, area = int(rows.sum()), int(rows[0]), float(packed.area)
        self.rows += total
        for count in rows.tolist():
            self.cost.update(count, seconds * count / total, area * count / first)

    def attend(
        self,
        packed: Packed,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        traits: AttentionTraits,
    ) -> torch.Tensor:
        """Called by each attention layer: store the rows' keys and values and attend over the cache.

        Args:
            packed: the pass.
            layer: index of the layer.
            q: [rows, heads, head_size].
            k: [rows, kv_heads, head_size].
            v: like k; its head size may differ.
            traits: the layer's attention traits.

        Returns:
            [rows, heads, value head_size].
        """
        if layer == len(self.cache.keys) - 1:
            packed.last_keys = k
        assert self.attention is not None, "of a decoder that runs whole passes"
        return self.attention.attend(layer, q, k, v, packed, traits)


def _there(lengths: np.ndarray, broken: np.ndarray) -> np.ndarray:
    """Which sequences take part in which of the passes of `broken`, bool [sequences, passes]."""
    found: np.ndarray = np.arange(broken.shape[1]) < lengths[:, None]
    return found


def _read(windows: Windows, there: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """What the rows of passes one after the other read: the last token of a window, or what the row before chose."""
    tokens = np.empty_like(chosen)
    tokens[1:] = chosen[:-1]
    tokens[np.nonzero(there)[1] == 0] = windows.tokens[windows.lengths.cumsum() - 1]
    return tokens


@torch.inference_mode()
def _not_finite(packed: Packed) -> list[int]:
    """The rows of a pass whose keys of the last layer have an entry that is not finite."""
    if packed.last_keys is None:
        return []
    finite = packed.last_keys.abs().amax((1, 2)).isfinite()
    return [] if finite.all() else (~finite).nonzero()[:, 0].tolist()
