"""A decoder on CUDA, whose passes are recorded once for each rung of a ladder of row counts and replayed.

It takes the decoders that consist of: embedding; layers of root-mean-square norm, rotary attention, residual, norm,
gated SiLU, residual; norm; output layer. A layer is ten launches. All that a pass needs to know reaches the device by
one copy into buffers that stay where they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from detgen.kernels.attention import BLOCK, AttentionTraits
from detgen.kernels.judging import Scores
from detgen.kernels.sampling import Choices
from detgen.kernels.triton.attend import most_tokens
from detgen.kernels.triton.kernels import Kernels
from detgen.kernels.triton.sampling import unpack
from detgen.passes.cuda_layers import CudaLayer, Pages, ResidualNorm, RowLinear
from detgen.passes.description import Description, FeedForward, Layer, Norm, describe
from detgen.passes.exchange import Exchange
from detgen.passes.kv_cache import KVCache
from detgen.passes.packing import Packed
from detgen.passes.replaying import Replaying
from detgen.program.steps import Activation

_LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)  # row counts of passes
_MOST_RECORDED = 512  # rows of a pass: what larger ones launch takes longer than launching it
_IN_FLIGHT = 16  # most passes that are launched before the first one's results are read
_LEAST_BLOCKS = 4  # of the contexts of a recorded pass, whose number is a power of two


class Key(NamedTuple):
    """The shape of passes that are recorded as one.

    Attributes:
        rows: how many.
        wanted: those whose logits are wanted.
        pieces: of their windows.
        blocks: of the longest context.
    """

    rows: int
    wanted: int
    pieces: int
    blocks: int


class _Statics:
    """Where the passes of some shape find what they are about, and leave their results.

    Args:
        key: the shape.
        outputs: entries of a row of results.
        dtype: of the results.
        device: of the buffers.
        replaying: brings them there.
    """

    def __init__(self, key: Key, outputs: int, dtype: torch.dtype, device: torch.device, replaying: Replaying) -> None:
        rows, wanted, pieces, blocks = key
        counts = [rows, rows, rows, wanted, 4 * pieces, pieces * blocks]
        self._replaying = replaying
        self._hosts = [replaying.host(sum(counts), torch.int64) for _ in range(_IN_FLIGHT)]
        self._fills = 0
        self._sent = torch.zeros(sum(counts), dtype=torch.int64, device=device)
        self._parts = [np.split(host.numpy(), np.cumsum(counts)[:-1]) for host in self._hosts]
        self.ids, self.positions, self.places, self.wanted, cut, tables = self._sent.split(counts)
        self.pieces, self.tables = cut.view(pieces, 4), tables.view(pieces, blocks)
        self.results = torch.zeros(wanted, outputs, dtype=dtype, device=device)
        self.broken = torch.zeros(rows, dtype=torch.bool, device=device)
        self.longest = blocks * BLOCK
        self.uses = 0
        self.replay: Callable[[], None] | None = None

    def fill(self, packed: Packed, scratch: int, pieces: np.ndarray, tables: np.ndarray) -> None:
        """Say what a pass is about; `scratch` is the place of padding, the rest as from `Packed.by_pieces`."""
        given: tuple[Any, ...] = packed.ids, packed.positions, packed.kv_positions, packed.wanted, pieces.ravel()
        turn = self._fills % _IN_FLIGHT  # a copy may not have begun when the next one is made ready
        self._fills += 1
        *parts, pages = self._parts[turn]
        for part, values, rest in zip(parts, given, (0, 0, scratch, 0, 0), strict=True):
            part[: len(values)], part[len(values) :] = values, rest
        blocks = min(self.tables.shape[1], tables.shape[1])
        pages.reshape(self.tables.shape)[: len(tables), :blocks] = tables[:, :blocks]
        self._replaying.send(self._hosts[turn], self._sent)


class CudaDecoder(nn.Module):
    """A whole decoder; it takes over the weights of the model, whose layers and output layer are released.

    Args:
        described: what it consists of.
        cache: keys and values.
        traits: attention traits of each layer.
        kernels: compute it.
        replaying: records passes.

    Attributes:
        kind: class name of the model.
        concurrent: whether several threads may run it at a time; its buffers hold one pass.
        outputs: entries of a row of logits, or of hidden states where there is no output layer.
        kernels: compute it.
    """

    concurrent = False

    def __init__(
        self,
        described: Description,
        cache: KVCache,
        traits: Sequence[AttentionTraits],
        kernels: Kernels,
        replaying: Replaying,
    ) -> None:
        super().__init__()
        self.kind = type(described.model).__name__
        self.kernels = kernels
        self._dtype, self._cache, self._replaying = cache.keys[0].dtype, cache, replaying
        self.embed_tokens: nn.Module = nn.Embedding.from_pretrained(described.embedding)
        final, head = described.final, described.head
        self.norm = None if final is None else ResidualNorm(final, self._dtype, kernels)
        self.lm_head = None if head is None else RowLinear([head], kernels)
        self.outputs = int(described.embedding.shape[1]) if head is None else head.weight.shape[0]
        described.release_head()
        first = described.layer(0)
        assert first.rotary is not None
        device = cache.keys[0].device
        self._frequencies = torch.from_numpy(first.rotary.frequencies).to(device)
        self._amplitude = first.rotary.amplitude
        self._most = most_tokens(first.heads // first.kv_heads)
        self.layers: Any = nn.ModuleList()
        # Each layer is released before the next is built, so that memory holds at most one of them twice.
        for i in range(len(described.layers)):
            self.layers.append(CudaLayer(described.layer(i), cache.keys[i], cache.values[i], traits[i], kernels))
            described.release(i)
        self._statics: dict[Key, _Statics] = {}
        self._records = True

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Compute every pass anew, for those who look into it or change it."""
        self._records = False
        try:
            yield
        finally:
            self._records = True

    def run(
        self, packed: Packed, exchange: Exchange | None, broken: list[int] | None, *, scored: bool = False
    ) -> torch.Tensor:
        """A pass.

        Args:
            packed: its rows, on the CPU; padding makes them as many as a rung of the ladder has.
            exchange: brings a state for each row, and takes their hidden states.
            broken: takes the rows whose keys of the last layer are not finite, ascending.
            scored: must be False.

        Returns:
            Logits of the rows that are wanted, float32 [n, vocabulary]; without an output layer, their hidden states.
        """
        assert not scored
        buffers = self._run(packed, exchange)
        if broken is not None:
            broken += buffers.broken[: len(packed.ids)].nonzero()[:, 0].tolist()
        return buffers.results[: len(packed.wanted)].to(torch.float32, copy=True)

    def chain(self, passes: Sequence[tuple[Packed, np.ndarray]], choices: Choices | None) -> tuple[Scores, np.ndarray]:
        """Passes one after the other, in which sequences go on with what they choose; the host waits for the last one.

        Args:
            passes: the rows of each and, int64 [n], the sequences that take part in it, ascending, whose wanted rows
                they are. Behind the first, each has one row a sequence, whose token is known by then.
            choices: how the first token of each sequence is chosen, the next ones likewise at the positions behind it;
                None if all take their largest logit.

        Returns:
            Of the rows of all passes, pass by pass: their scores, and whether a key of the last layer is not finite,
            bool.
        """
        scores, flags = [], []
        chosen = torch.empty(0)
        for step, (packed, there) in enumerate(passes):
            if step:
                before = passes[step - 1][1]
                same = len(before) == len(there)
                known = chosen if same else chosen[torch.from_numpy(np.searchsorted(before, there)).to(chosen.device)]
                buffers = self._run(packed, None, known)
            else:
                buffers = self._run(packed, None)
            asked = None if choices is None else replace(choices.take(there), position=choices.position[there] + step)
            found = self.kernels.choose(buffers.results[: len(there)].float(), asked)
            chosen = found[:, 3].long().clamp_min(0)  # what follows a row that is not finite counts for nothing
            if step % _IN_FLIGHT == _IN_FLIGHT - 1:
                chosen.cpu()  # waits, as the memory that copies are made from is used again
            scores.append(found)
            flags.append(buffers.broken[buffers.wanted[: len(there)]])
        return unpack(torch.cat(scores).cpu()), torch.cat(flags).cpu().numpy()

    def _run(self, packed: Packed, exchange: Exchange | None, tokens: torch.Tensor | None = None) -> _Statics:
        """Run a pass; where its results are. `tokens` are those of its rows, where they are on the device already."""
        rows, wanted = _rung(len(packed.ids)), _rung(len(packed.wanted))
        pieces, tables = packed.by_pieces(self._most)
        blocks = max(_LEAST_BLOCKS, _above(-(-packed.longest // BLOCK)))
        key = Key(rows, wanted, min(_above(len(pieces)), rows), blocks)
        if key not in self._statics:
            self._statics[key] = _Statics(key, self.outputs, self._dtype, self._frequencies.device, self._replaying)
        buffers = self._statics[key]
        buffers.fill(packed, self._cache.scratch, pieces, tables)
        if tokens is not None:
            buffers.ids[: len(tokens)] = tokens
        if exchange is not None:
            padded = exchange.padded(rows)
            self._compute(buffers, padded)
            exchange.hidden = None if padded.hidden is None else padded.hidden[: len(packed.ids)]
        elif not self._records or rows > _MOST_RECORDED:
            self._compute(buffers)
        elif buffers.replay is not None:
            buffers.replay()
        else:
            self._compute(buffers)
            buffers.uses += 1
            if buffers.uses > 1:  # the first pass compiles kernels, and may be the only one of its shape
                buffers.replay = self._replaying.record(lambda: self._compute(buffers))
        return buffers

    def _compute(self, buffers: _Statics, exchange: Exchange | None = None) -> None:
        """What is recorded: looks at no number, and leaves its results in the buffers."""
        cosines, sines = _turns(buffers.positions, self._frequencies, self._amplitude)
        pages = Pages(cosines, sines, buffers.positions, buffers.places, buffers.pieces, buffers.tables)
        hidden: torch.Tensor = self.embed_tokens.forward(buffers.ids)
        added: Any = None
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            if exchange is not None and i in (exchange.inject, exchange.extract):
                read = exchange.at(i, hidden if added is None else hidden + added)
                hidden, added = read.clone(), None  # what was taken must not change with it
            some, told = (buffers.wanted, buffers.broken) if i == last else (None, None)
            hidden, added = layer.forward(hidden, added, pages, buffers.longest, some, told)
        hidden = hidden + added if self.norm is None else self.norm.forward(hidden, added)
        buffers.results.copy_(hidden if self.lm_head is None else self.lm_head.forward(hidden))


def _turns(positions: torch.Tensor, frequencies: torch.Tensor, amplitude: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As `angles.turns`, of positions int64 [rows]: float32 [rows, n] each. Angles are products in float32."""
    angles = (positions.float()[:, None] * frequencies).double()
    return (angles.cos() * amplitude).float(), (angles.sin() * amplitude).float()


def _rung(rows: int) -> int:
    """The least rung of the ladder that holds `rows`."""
    return next((rung for rung in _LADDER if rung >= rows), rows)


def _above(count: int) -> int:
    """The least power of two that is not below."""
    return 1 << (count - 1).bit_length()


def cuda_decoder(
    model: Any, cache: KVCache, traits: Sequence[AttentionTraits], kernels: Kernels, replaying: Replaying
) -> CudaDecoder | None:
    """That of a loaded model; None, and the model unchanged, if there is none for it. Arguments as `CudaDecoder`."""
    described = describe(model)
    if described is None or not _is_plain(described, cache.keys[0].dtype):
        return None
    return CudaDecoder(described, cache, traits, kernels, replaying)


def _is_plain(described: Description, dtype: torch.dtype) -> bool:
    layers = [described.layer(i) for i in range(len(described.layers))]
    rotaries = [layer.rotary for layer in layers]
    first = rotaries[0]
    weights = [described.embedding, *(one.weight for layer in layers for one in (*layer.qkv, layer.out))]
    return (
        first is not None
        and all(r is not None and _same(r, first) for r in rotaries)
        and described.embedding_factor == described.head_factor == 1.0
        and described.positions is None
        and not described.softcap
        and (described.final is None or _is_rms(described.final))
        and all(isinstance(w, torch.Tensor) and w.dtype == dtype for w in weights)
        and all(_is_plain_layer(layer) for layer in layers)
    )


def _same(one: Any, other: Any) -> bool:
    return one.amplitude == other.amplitude and np.array_equal(one.frequencies, other.frequencies)


def _is_rms(norm: Norm | None) -> bool:
    return norm is not None and norm.weight is not None and norm.bias is None and not norm.centred


def _is_plain_layer(layer: Layer) -> bool:
    before, after, before_mlp, after_mlp = layer.norms
    heads = [norm for norm in layer.head_norms if norm is not None]
    mlp = layer.mlp
    return (
        not layer.interleaved
        and not layer.parallel
        and layer.query_scale is None
        and layer.residual == 1.0
        and after is after_mlp is None
        and _is_rms(before)
        and _is_rms(before_mlp)
        and len(heads) != 1
        and all(_is_rms(norm) and norm.weight is not None and norm.weight.shape == (layer.size,) for norm in heads)
        and len({linear.bias is None for linear in layer.qkv}) == 1
        and isinstance(mlp, FeedForward)
        and mlp.gated
        and mlp.activation == Activation.SILU
        and mlp.up[0].bias is None
    )
