"""The probe: finds the shapes of a model's passes that agree bit for bit on this device.

A sequence of random tokens goes through passes of many shapes: row counts, window lengths, places in the pass, thread
counts, each time with other neighbours and contexts. Row counts at which its logits and KV entries come out the same
form a class; canonical passes use shapes of one class only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from detgen.errors import EngineError
from detgen.kernels.attention import Attend, AttentionTraits, attend_blocks, attend_fused
from detgen.kernels.linear import JoinedLinear, PrepackedLinear, weight_sample
from detgen.kernels.probe import Product, key_lengths, same_bits
from detgen.passes.adapter import PlainDecoder
from detgen.passes.forward import Forward
from detgen.passes.lean_decoder import LeanDecoder
from detgen.passes.native_decoder import ARITHMETIC, NativeDecoder
from detgen.passes.packing import FREE_SHAPES, LADDER, READ_ROWS, Shapes, Window
from detgen.passes.pages import PAGE
from detgen.passes.stored import Read, held
from detgen.passes.widening import widened

_SIZES = (1, 2, 3, 4, 5, 7, 8, 11, 16, 23, 32, 33, 47, 64, 97, 128)
_FEW = (1, 2, 4, 8, 16, 33, 64, 128)  # for large models on a CPU
_LARGE = ((5e7, 511), (1e8, 256))  # (parameters, rows): smaller models are also tried with that many rows on a CPU
_BETWEEN = (192, 256, 384)  # also tried on a GPU, where row counts that were not tried are not used
_REFERENCE_ROWS = (64, 128, 16, 4)  # reference row counts; the first that agrees with itself defines the class
_HEAD, _TAIL = 20, 24  # cached positions of the probed sequence, and the tokens after them that every shape computes
# Multiples tried for a tile's query rows: few rows may have a kernel of their own; 128 leaves a single number of rows.
_TILE_ROWS = (1, 4, 16, 64, 128)
_MANY = 1e9  # parameters from which fewer shapes are tried there
_LONGEST = 512  # positions of a slot
_SHARE = 32  # a pass on CUDA has at most that part of the cache's positions, and its logits that part of its bytes
_SPAN = 128  # positions of a slot that passes up to that size use


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """The result of the probe.

    Attributes:
        row_invariant: whether there is a canonical class of shapes.
        attention: "fused" or "blocks"; native attention by the name of its arithmetic; "none" if there is no class.
        tile_rows: query rows of an attention tile are a multiple of this.
        reference_rows: row count whose bits all of the class have; 0 where any number of rows gives the same.
        rows: row counts of the canonical class, of those tried.
        dense: whether every count between the first and the last is allowed too.
        key_lengths: remainders modulo 512 of the key lengths that attention may read.
        other_rows: row counts that were tried and disagree.
        threads: thread counts tried.
        passes: passes run.
        positions: positions compared.
        reference_error: largest difference from the logits of the model's own eager forward, relative to the largest
            logit; for a mixture of experts in 16 bits, over the best three quarters of the rows.
        seconds: time taken.
    """

    row_invariant: bool
    attention: str
    tile_rows: int
    reference_rows: int
    rows: tuple[int, ...]
    dense: bool
    key_lengths: tuple[int, ...]
    other_rows: tuple[int, ...]
    threads: tuple[int, ...]
    passes: int
    positions: int
    reference_error: float
    seconds: float


class _Prober:
    """Computes one random sequence, in slot 1, in passes of many shapes; the cache needs 3 slots of 128 positions.

    Its cached entries are restored before each pass, so that a pass is judged by its own results alone.
    """

    def __init__(self, forward: Forward, vocabulary: int, like: Shapes, dtype: torch.dtype) -> None:
        self.forward, self.dtype = forward, dtype
        self._like = like
        self._random = torch.Generator().manual_seed(20)
        self._vocabulary = vocabulary
        self.tokens = _probed_tokens(vocabulary)
        self.positions = 0
        cache = forward.cache
        at = torch.cat([torch.arange(_SPAN) + first * PAGE for first in cache.pages.tables[:3, 0].tolist()])
        at = at.to(forward.device)
        for layer in range(len(cache.keys)):
            cache.write(layer, at, *(self._noise(x) for x in cache.read(layer, at)))

    def _noise(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=self._random).to(like)

    def learn(self, rows: int) -> None:
        """Make the tail, as passes of `rows` rows compute it, the reference for the others."""
        width = min(rows, _TAIL)
        found = []
        for start in range(0, _TAIL, width):
            found.append(self._compute(rows, start, min(width, _TAIL - start), before=0))
        self._want = [torch.cat([f[i] for f in found], dim=d) for i, d in ((0, 0), (1, 1), (2, 1))]

    def agrees(self, rows: int) -> bool:
        """Whether passes of `rows` rows reproduce the reference at several places and window lengths."""
        spare = rows - 1
        packings = [
            (0, min(rows, _TAIL), 0),
            (_TAIL - 1, 1, spare),
            (5, min(rows, 4), max(rows - 4, 0) // 2),
            (12, 1, spare // 2),
        ]
        return all(self._agrees(rows, *packing) for packing in packings)

    def agrees_everywhere(self, rows: int) -> bool:
        """Whether the whole tail reproduces the reference at every place in passes of `rows` rows."""
        places = {*range(_TAIL, rows - _TAIL, _TAIL), max(rows - _TAIL, 0)}
        return rows < _TAIL or all(self._agrees(rows, 0, _TAIL, before) for before in places)

    def _agrees(self, rows: int, start: int, width: int, before: int) -> bool:
        self._restore()
        found = self._compute(rows, start, width, before)
        end = start + width
        logits, keys, values = self._want
        want = [logits[start:end], keys[:, start:end], values[:, start:end]]
        return all(same_bits(a, b) for a, b in zip(found, want, strict=True))

    def _restore(self) -> None:
        cache = self.forward.cache
        at = torch.arange(_TAIL, device=self.forward.device) + int(cache.pages.tables[1, 0]) * PAGE + _HEAD
        for layer in range(len(cache.keys)):
            entries = zip(cache.read(layer, at), self._want[1:], strict=True)
            cache.write(layer, at, *(want[layer, :, : old[0].numel()].view(old.shape) for old, want in entries))

    def _compute(self, rows: int, start: int, width: int, before: int) -> list[torch.Tensor]:
        """Logits and KV entries of tail tokens start..start+width-1, after `before` rows of a neighbour.

        Neighbours fill the pass up to `rows` rows.
        """
        windows = [Window(1, _HEAD + start, self.tokens[start : start + width], width)]
        for slot, count in ((0, before), (2, rows - width - before)):
            if count:
                at = int(torch.randint(0, max(_SPAN - count, 0) + 1, (1,), generator=self._random))
                windows.insert(
                    slot // 2 * len(windows), Window(slot, at, _draw(self._vocabulary, count, self._random), 1)
                )
        logits = self.run(windows, rows)
        skip = 1 if before else 0
        keys, values = self.forward.cache.entries(1, _HEAD + start, _HEAD + start + width)
        self.positions += width
        return [logits[skip : skip + width].clone(), keys, values]

    def run(self, windows: list[Window], rows: int) -> torch.Tensor:
        """A pass of exactly `rows` rows; where any count will do, of those of the windows."""
        return self.forward.run(windows, self._like if self._like.dense else replace(self._like, rows=(rows,)))


def probe(
    forward: Forward, reference: torch.Tensor, traits: Sequence[AttentionTraits], vocabulary: int, dtype: torch.dtype
) -> tuple[Shapes | None, ProbeReport]:
    """Find the canonical class of a model's passes.

    Args:
        forward: its passes; their cache is cleared.
        reference: the result of `reference_logits`.
        traits: attention traits of each layer.
        vocabulary: token ids that it reads.
        dtype: of its arithmetic.

    Returns:
        The shapes of canonical passes, None if the model is not row-invariant; and the report.

    Raises:
        EngineError: if packed passes do not compute what the model's own forward does.
    """
    if isinstance(forward.model, NativeDecoder) or forward.model.native:
        return _confirm(forward, reference, vocabulary, dtype)
    started = time.perf_counter()
    cache, before = forward.cache, forward.passes
    threads = torch.get_num_threads()
    torch.set_num_threads(threads)  # until it is called, MKL takes fewer threads as it sees fit: other bits
    counts = tuple(sorted({1, threads})) if forward.device.type == "cpu" else (threads,)
    for name, like in _attentions(forward, traits):
        cache.pages.lay_out(3, min(cache.pages.count // 3 * PAGE, LADDER[-1] if _on_ladder(forward) else _LONGEST))
        prober = _Prober(forward, vocabulary, like, dtype)
        error = _reference_error(prober, reference)
        rows, sizes, others = _class(prober, counts)
        if sizes:  # a library may use another kernel at any row count, so only those that were tried are allowed
            tried = counts, forward.passes - before, prober.positions, error, round(time.perf_counter() - started, 3)
            report = ProbeReport(True, name, like.tile_rows, rows, sizes, False, like.key_lengths, others, *tried)
            return replace(like, rows=sizes, dense=False), report
    tried = counts, forward.passes - before, 0, 0.0, round(time.perf_counter() - started, 3)
    return None, ProbeReport(False, "none", 0, 0, (), False, (), _SIZES, *tried)


_CONFIRMED = (1, 2, 5, 16, 33, 128)  # row counts of passes that are compared although they cannot differ


def _confirm(
    forward: Forward, reference: torch.Tensor, vocabulary: int, dtype: torch.dtype
) -> tuple[Shapes | None, ProbeReport]:
    """What `probe` gives where rows are the same in passes of any size by construction."""
    started = time.perf_counter()
    cache, before = forward.cache, forward.passes
    threads = torch.get_num_threads()
    counts = tuple(sorted({1, threads}))
    cache.pages.lay_out(3, min(cache.pages.count // 3 * PAGE, _LONGEST))
    shapes = replace(FREE_SHAPES, rows=(1, READ_ROWS))
    prober = _Prober(forward, vocabulary, shapes, dtype)
    error = _reference_error(prober, reference)
    prober.learn(_REFERENCE_ROWS[0])
    alike = True
    try:
        for count in counts:
            torch.set_num_threads(count)
            alike = alike and all(prober.agrees(rows) for rows in _CONFIRMED)
    finally:
        torch.set_num_threads(threads)
    tried = counts, forward.passes - before, prober.positions, error, round(time.perf_counter() - started, 3)
    report = ProbeReport(alike, ARITHMETIC, 1, 0, shapes.rows, True, shapes.key_lengths, (), *tried)
    return shapes if alike else None, report


_ATTENTIONS: dict[str, Attend] = {"fused": attend_fused, "blocks": attend_blocks}


def _attentions(forward: Forward, traits: Sequence[AttentionTraits]) -> Iterator[tuple[str, Shapes]]:
    """Name of each attention that keeps its promise here, and shapes with its tile rows and key lengths; best first."""
    cache = forward.cache
    if forward.device.type == "cuda" and forward.attention is not None:
        yield "pages", replace(FREE_SHAPES, rows=(_SIZES[-1],), dense=False)
        return
    if cache.native:
        yield ARITHMETIC, replace(FREE_SHAPES, rows=(_SIZES[-1],), dense=False)
        return
    layers = {
        (k.shape[1], (k.shape[2], v.shape[2]), k.dtype, asked)
        for k, v, asked in zip(cache.keys, cache.values, traits, strict=True)
    }
    tiled = {(heads, size, dtype, replace(asked, window=None, chunk=None)) for heads, (size, _), dtype, asked in layers}
    for name, attend in _ATTENTIONS.items():
        if name == "fused" and forward.device.type == "cuda":
            continue  # with a mask, torch may take kernels there that plan anew for each shape
        for rows in _TILE_ROWS:
            found = [key_lengths(attend, h, d, dtype, forward.device, rows, asked) for h, d, dtype, asked in tiled]
            if lengths := tuple(sorted(set.intersection(*map(set, found)))):
                yield name, Shapes((_SIZES[-1],), False, rows, lengths, attend)
                break


def _class(prober: _Prober, counts: tuple[int, ...]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Row counts that give the bits of a reference row count in all packings and at all thread counts.

    The reference is the first that agrees with itself by one thread, so that it depends on the model alone: not on the
    run's threads, and not on which others there are. One row count is enough for a class: every pass is padded to it,
    like the fixed shape of LLM-42's verifier (arXiv 2601.17768, section 3).

    Args:
        prober: computes the passes.
        counts: thread counts, one thread first on a CPU.

    Returns:
        The reference; the class, empty if there is none; and the other row counts that were tried.
    """
    threads = torch.get_num_threads()
    model = prober.forward.model
    assert not isinstance(model, NativeDecoder)
    products = _products(model)
    tried = _tried(prober.forward, model)
    try:
        torch.set_num_threads(counts[0])
        for reference_rows in _REFERENCE_ROWS:
            prober.learn(reference_rows)
            for product in products:
                product.learn(reference_rows)
            if prober.agrees(reference_rows) and prober.agrees_everywhere(reference_rows):
                break
        else:
            return 0, (), tried
        agreeing = set(tried)
        for count in counts:
            torch.set_num_threads(count)
            agreeing -= {n for n in agreeing if not prober.agrees(n)}
            agreeing -= {n for n in agreeing if not all(p.agrees(n) for p in products)}
        return reference_rows, tuple(sorted(agreeing)), tuple(n for n in tried if n not in agreeing)
    finally:
        torch.set_num_threads(threads)


def _tried(forward: Forward, model: nn.Module) -> tuple[int, ...]:
    """Row counts to try, by the model's size and never by the time that it takes."""
    held = int(forward.cache.pages.held[0]) * PAGE
    if _on_ladder(forward):
        cache = forward.cache
        logits = 6 * (forward.outputs or 0)  # bytes of a row, in 16 bits and in 32
        most = min(cache.positions, cache.positions * cache.entry_bytes // logits) // _SHARE
        return tuple(n for n in LADDER if n <= min(max(most, _SIZES[-1]), held))
    if forward.device.type != "cpu":
        return _SIZES + tuple(n for n in (*_BETWEEN, _LARGE[0][1]) if n <= held)
    size = sum(p.numel() for p in (*model.parameters(), *model.buffers()))
    large = [n for limit, n in _LARGE if size < limit and n <= held][:1]
    return (_SIZES if size < _MANY else _FEW) + tuple(large)


def _on_ladder(forward: Forward) -> bool:
    """Whether the row counts of its passes are those of the ladder, as they are recorded."""
    return not isinstance(forward.model, (PlainDecoder, LeanDecoder, NativeDecoder))


def _products(model: nn.Module) -> list[Product]:
    """One linear layer of each kind and shape that computes in 16 bits, without its norm.

    Experts are left out: their row counts are not those of the pass.
    """
    found: dict[object, Product] = {}
    for name, module in model.named_modules():
        linear = module.joined.linear if isinstance(module, JoinedLinear) else module
        packed = isinstance(linear, PrepackedLinear)
        if "expert" in name.lower() or not (
            packed or type(linear) is nn.Linear or type(linear).__name__ == "RowLinear"
        ):
            continue
        layer: Any = linear
        compute = partial(PrepackedLinear.forward, layer) if packed else layer.forward
        sample = layer.sample if packed else weight_sample(layer.weight)
        key = packed, layer.out_features, layer.in_features, sample.dtype
        if sample.dtype in (torch.bfloat16, torch.float16) and key not in found:
            found[key] = Product(compute, sample)
    return list(found.values())


def has_experts(model: nn.Module) -> bool:
    """Whether it is a mixture of experts."""
    return any("expert" in name.lower() for name, _ in model.named_modules())


def _probed_tokens(vocabulary: int) -> list[int]:
    return _draw(vocabulary, _TAIL, torch.Generator().manual_seed(20))


def _draw(vocabulary: int, count: int, generator: torch.Generator) -> list[int]:
    tokens: list[int] = torch.randint(0, vocabulary, (count,), generator=generator).tolist()
    return tokens


@torch.inference_mode()
def reference_logits(
    model: PreTrainedModel, vocabulary: int, dtype: torch.dtype, bits: int = 0, read: Read = held
) -> torch.Tensor:
    """Logits of the probed tokens by the model's own eager forward; call it before replacing any module.

    Args:
        model: as it was loaded.
        vocabulary: token ids that it reads.
        dtype: of its arithmetic.
        bits: see `LoadedModel`.
        read: likewise.

    Returns:
        float32 [tokens, vocabulary]; hidden states if the model has no output layer.
    """
    device = "cpu" if model.device.type == "meta" else model.device
    ids = torch.tensor([_probed_tokens(vocabulary)], device=device)
    model.set_attn_implementation("eager")
    with widened(model, read, bits) if dtype == torch.float32 else nullcontext():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
    return logits


def _reference_error(prober: _Prober, reference: torch.Tensor) -> float:
    """Largest difference of packed logits from the model's own, relative to the largest logit; see `check_logits`."""
    packed = prober.run([Window(0, 0, prober.tokens, _TAIL)], _SIZES[-1])
    return check_logits(prober.forward, packed, reference, prober.dtype)


def check_logits(
    forward: Forward, packed: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype, where: str = ""
) -> float:
    """Largest difference of packed logits from the model's own, relative to the largest logit.

    In a mixture of experts, a rounding error sends a row whose experts are nearly tied to another expert, so in 16 bits
    a quarter of the rows may differ. Quantized layers round to few bits inside, where nobody sees it.

    Args:
        forward: the passes that they come from.
        packed: float32 [rows, vocabulary].
        reference: likewise, of the model's own forward.
        dtype: of the arithmetic.
        where: the rows are, for the message.

    Raises:
        EngineError: if the difference is larger than rounding explains.
    """
    rows = (reference - packed).abs().amax(-1) / reference.abs().max().clamp_min(1e-6)
    exact = dtype == torch.float32
    model = forward.model
    modules = [] if isinstance(model, NativeDecoder) else list(model.modules())
    experts = not isinstance(model, NativeDecoder) and has_experts(model)
    error = float(rows.quantile(0.75 if experts and not exact else 1.0))
    quantized = any(type(module).__module__.startswith("bitsandbytes") for module in modules)
    limit = 1e-3 if exact and not quantized else 0.1
    if not error <= limit:
        if isinstance(model, PlainDecoder) and _counts_otherwise(model.model):
            raise EngineError(f"{model.kind} is not supported: it does not count positions from 0, as passes do")
        raise EngineError(
            f"{model.kind} is not supported: packed rows{where} give other logits than the model's own forward "
            f"(largest difference {error:.1e} of the largest logit)"
        )
    return error


@torch.inference_mode()
def _counts_otherwise(model: PreTrainedModel) -> bool:
    """Whether positions from 0, as passes bring them, change what a model's own forward gives without any."""
    model.set_attn_implementation("eager")
    ids = torch.arange(2, 2 + _TAIL, device=model.device)[None]
    own = model(input_ids=ids, use_cache=False).logits
    counted = model(input_ids=ids, position_ids=ids - 2, use_cache=False).logits
    return not bool((own - counted).abs().max() <= 1e-3 * own.abs().max())
