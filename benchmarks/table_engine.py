"""detgen's scheduler and its loop, where something else says what the model finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from detgen import Request
from detgen.drafters.none import NoDrafter
from detgen.engine.decoding import Decoding
from detgen.engine.scheduler import Scheduler
from detgen.engine.sequence import Sequence
from detgen.engine.stats import EngineStats
from detgen.engine.stopping import Stopping
from detgen.runner.block_manager import PAGE, BlockManager
from detgen.runner.kv_cache import KVCache


class Loop:
    """The loop of `Engine.stream` around passes of one's own; nothing is drafted.

    Args:
        passes: makes what stands in for `ModelRunner`, given the KV cache and the scheduler.
        batch: most sequences at a time.
        positions: of the KV cache, whose entries are of one number each.
        tokenizer: decodes the texts of sequences that end.

    Attributes:
        stats: running totals.
        scheduler: the scheduler.
    """

    def __init__(self, passes: Callable[[KVCache, Scheduler], Any], batch: int, positions: int, tokenizer: Any) -> None:
        cache = KVCache([(1, 1, 1)], BlockManager(positions // PAGE), torch.float32, torch.device("cpu"))
        self.stats = EngineStats()
        self.scheduler = Scheduler([cache], batch, lambda *_: None)
        target = passes(cache, self.scheduler)
        self._decoding = Decoding(target, self.scheduler, Stopping(tokenizer), self.stats, NoDrafter(), 1, 0)

    def run(self, requests: Iterable[Request], end: int | None = None) -> Iterator[list[Sequence]]:
        """Run requests of token ids, those that ended after each round.

        Args:
            requests: read as the scheduler wants them.
            end: token that ends a sequence, beside its `max_tokens`.
        """
        eos = frozenset() if end is None else frozenset({end})
        source = (_sequence(request, eos) for request in requests)
        more = True
        while more or self.scheduler.waiting or self.scheduler.live:
            wanted = self.scheduler.wants()
            taken = list(islice(source, wanted))
            more = len(taken) == wanted
            self.scheduler.add(taken)
            yield self._decoding.step()


def _sequence(request: Request, eos: frozenset[int]) -> Sequence:
    tokens = list(request.token_ids or ())
    return Sequence(request, 0, tokens, len(tokens), len(tokens) + request.params.max_tokens, eos)
