"""The probe: which shapes of this model's passes agree bit for bit, on this device, today.

A sequence of random tokens goes through passes of many shapes: row counts, places in the pass, slots, neighbours
with shorter and longer contexts, chunks of its prompt, thread counts. Row counts under which its logits and KV
entries come out the same form a class; only shapes of one class may run canonical passes.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import torch

from detgen.engine.config import EngineError
from detgen.engine.forward import ATTENTION_NAME, Forward
from detgen.kernels.attention import attend_blocks, attend_fused
from detgen.kernels.packing import Shapes, Window
from detgen.kernels.probe import key_lengths, same_bits

_SIZES = (1, 2, 3, 4, 5, 7, 8, 11, 16, 23, 32, 48, 64, 96, 128)
_HEAD, _TAIL = 20, 4  # tokens of the probed sequence that are read first, and that every shape computes anew
_TILE_ROWS = 4  # a tile of one row takes a matrix-vector kernel


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What the probe found.

    Attributes:
        row_invariant: whether there is a class of shapes at all.
        attention: "fused" or "blocks".
        rows: row counts of the canonical class that were run.
        dense: whether they stand for every count between the first and the last.
        key_lengths: remainders of 512 that attention may read.
        other_rows: row counts that were run and disagree.
        threads: thread counts that were run.
        passes: passes run.
        positions: positions compared.
        reference_error: largest difference from the model's own eager forward, over its largest logit.
        seconds: time taken.
    """

    row_invariant: bool
    attention: str
    rows: tuple[int, ...]
    dense: bool
    key_lengths: tuple[int, ...]
    other_rows: tuple[int, ...]
    threads: tuple[int, ...]
    passes: int
    positions: int
    reference_error: float
    seconds: float

    def as_dict(self) -> dict[str, object]:
        """For the manifest."""
        return asdict(self)


class _Prober:
    """Runs one random sequence under many shapes; the cache needs 3 slots of 128 positions."""

    def __init__(self, forward: Forward, vocabulary: int) -> None:
        self.forward = forward
        g = torch.Generator().manual_seed(20)
        self.tokens = torch.randint(0, vocabulary, (_HEAD + _TAIL,), generator=g).tolist()
        self.others = torch.randint(0, vocabulary, (128,), generator=g).tolist()
        self.positions = 0

    def read_head(self, shapes: Shapes, chunk: int) -> None:
        """Read the head of the sequence into slot 1, and the neighbours' contexts."""
        for start in range(0, _HEAD, chunk):
            self.forward.run([Window(1, start, self.tokens[start : min(start + chunk, _HEAD)], 0)], shapes)

    def tail(self, rows: int, shapes: Shapes, place: int, start: int) -> list[torch.Tensor]:
        """Logits and KV entries of the tail's first row, in a pass of exactly `rows` rows.

        Args:
            rows: row count.
            shapes: of the pass.
            place: 0 puts the neighbours behind the window, 1 before it.
            start: position of the neighbours.
        """
        width = min(_TAIL, rows)
        window = Window(1, _HEAD, self.tokens[_HEAD : _HEAD + width], width)
        near = [Window(0, start, self.others[: max(rows - width - 1, 0)], 0), Window(2, 3, self.others[-1:], 1)]
        near = [w for w in near if w.tokens][: max(rows - width, 0)] if rows > width else []
        if rows == width + 1:
            near = [Window(2, 3, self.others[-1:], 1)]
        windows = [*near, window] if place else [window, *near]
        logits = self.forward.run(windows, shapes)
        skip = sum(w.logits for w in near) if place else 0
        keys, values = self.forward.cache.entries(1, _HEAD, _HEAD + 1)
        self.positions += width
        return [logits[skip].clone(), keys.clone(), values.clone()]


def _exact(rows: int, like: Shapes) -> Shapes:
    return Shapes((rows,), False, like.tile_rows, like.key_lengths, like.attend)


def probe(forward: Forward, group: int, vocabulary: int) -> tuple[Shapes | None, ProbeReport]:
    """Find the canonical class of a model's passes.

    Args:
        forward: its passes; the cache's contents are forgotten.
        group: query heads a KV head.
        vocabulary: ids to draw tokens from.

    Returns:
        The shapes of canonical passes, None if no two row counts agree; and what was found.

    Raises:
        EngineError: if packed passes do not compute what the model's own forward does.
    """
    started = time.perf_counter()
    cache, before = forward.cache, forward.passes
    threads = torch.get_num_threads()
    counts = tuple(sorted({1, threads})) if forward.device.type == "cpu" else (threads,)
    kv = {(k.shape[1], k.shape[2], k.dtype) for k in cache.keys}
    for name, attend in (("fused", attend_fused), ("blocks", attend_blocks)):
        found = [key_lengths(attend, h, group, d, dt, forward.device, _TILE_ROWS) for h, d, dt in kv]
        lengths = tuple(sorted(set.intersection(*map(set, found))))
        if not lengths:
            continue
        cache.partition(cache.positions // 3, 3)
        like = Shapes((_SIZES[-1],), False, _TILE_ROWS, lengths, attend)
        prober = _Prober(forward, vocabulary)
        error = _reference_error(prober, like)
        agreeing = _classes(prober, like, counts)
        sizes = max(agreeing, key=len, default=())
        others = tuple(n for n in _SIZES if n not in sizes)
        least = min(sizes, default=0)
        dense = len(sizes) > 2 and all(n in sizes for n in _SIZES if n >= least)
        if len(sizes) >= 2:
            report = (name, sizes, dense, lengths, others, counts, forward.passes - before, prober.positions, error)
            seconds = time.perf_counter() - started
            return Shapes(sizes, dense, _TILE_ROWS, lengths, attend), ProbeReport(True, *report, round(seconds, 3))
    nothing = ("none", (), False, (), _SIZES, counts, forward.passes - before, 0, 0.0)
    return None, ProbeReport(False, *nothing, round(time.perf_counter() - started, 3))


def _classes(prober: _Prober, like: Shapes, counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Row counts by equal bits; a count whose own packings disagree is in no class."""
    classes: list[tuple[list[torch.Tensor], list[int]]] = []
    threads = torch.get_num_threads()
    results: dict[int, list[list[torch.Tensor]]] = {n: [] for n in _SIZES}
    try:
        for i, count in enumerate(counts):
            torch.set_num_threads(count)
            # The head in another chunking each time: its KV entries are part of what the tail's logits see.
            prober.read_head(_exact(_SIZES[-1], like) if i == 0 else _exact(64, like), (20, 7)[i % 2])
            for n in _SIZES:
                for place, start in ((0, 0), (1, 90 - min(n, 90))):
                    results[n].append(prober.tail(n, _exact(n, like), place, start))
    finally:
        torch.set_num_threads(threads)
    for n, (first, *rest) in results.items():
        if not all(_same(first, other) for other in rest):
            continue
        for members in classes:
            if _same(members[0], first):
                members[1].append(n)
                break
        else:
            classes.append((first, [n]))
    return [tuple(m) for _, m in classes]


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def _reference_error(prober: _Prober, like: Shapes) -> float:
    """Largest difference of packed logits from the model's own eager forward, over the largest logit.

    Raises:
        EngineError: if it is larger than rounding explains.
    """
    forward = prober.forward
    ids = torch.tensor([prober.tokens], device=forward.device)
    forward.model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            own = forward.model(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        forward.model.set_attn_implementation(ATTENTION_NAME)
    packed = forward.run([Window(0, 0, prober.tokens, len(prober.tokens))], _exact(_SIZES[-1], like))
    error = float((own - packed).abs().max() / own.abs().max().clamp_min(1e-6))
    limit = 1e-3 if next(forward.model.parameters()).dtype == torch.float32 else 0.1
    if not error <= limit:
        raise EngineError(
            f"{type(forward.model).__name__} is not supported: packed rows give other logits than the model's own "
            f"forward (largest difference {error:.1e} of the largest logit)"
        )
    return error
