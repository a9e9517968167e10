"""The parts of a decoder, as given by its description. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from detgen.kernels.c.quantizing import Quantized
from detgen.kernels.decoder import StateShape
from detgen.models.rotary import Rotary, Tuning
from detgen.models.stored import Weight
from detgen.program.arrays import taken
from detgen.program.operands import Activation


class UnknownError(Exception):
    """A model has something that its family's traits do not cover."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of the last axis.

    Attributes:
        weight: [entries], or [heads, entries] if each head has its own.
        bias: shaped like the weight; None for none.
        epsilon: added to the mean square.
        centred: whether it is a layer norm instead of a root-mean-square norm.
    """

    weight: np.ndarray
    bias: np.ndarray | None
    epsilon: float
    centred: bool


class Linear(NamedTuple):
    """A linear layer: weight [outputs, inputs], bias [outputs] or None; its results are multiplied by the factor."""

    weight: Weight
    bias: np.ndarray | None
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Through:
    """A linear layer, a norm of the first of its results, and a linear layer of all results.

    Attributes:
        down: the first linear layer.
        norm: of the first results, as many as the norm has weights.
        up: the second linear layer.
    """

    down: Linear
    norm: Norm
    up: Linear


@dataclass(frozen=True, slots=True)
class Latent:
    """The sources of queries, and of what is kept of a token: one key for all heads, whose last entries are the value.

    Attributes:
        queries: of all heads, rotated entries first in each: a linear layer, or one through a short vector.
        down: makes the rotated entries that all keys share, followed by the short vector.
        norm: of the short vector.
        keys: [heads, entries of the short vector, entries of a query that are not rotated], takes these to the others.
        values: [heads, entries of a result, entries of the short vector].
    """

    queries: Linear | Through
    down: Linear
    norm: Norm
    keys: Weight
    values: Weight


class BeforeHead(NamedTuple):
    """A linear layer, its activation and a norm, between the last norm and the output layer."""

    linear: Linear
    activation: Activation
    norm: Norm


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A feed-forward layer.

    Attributes:
        up: its first linear layers: a gate and what it opens, one of both, or one without a gate.
        gated: whether there is a gate.
        activation: of the gate, or of `up`.
        down: its last linear layer.
        deviations: of a `GaussianTopK` that gates go through first; None for none.
        bend: the numbers of a `steps.Xielu` in place of `activation`; None for none.
    """

    up: list[Linear]
    gated: bool
    activation: Activation
    down: Linear
    deviations: float | None = None
    bend: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: feed-forward layers of which each row takes some.

    Attributes:
        router: computes the logits of the experts.
        up: gates and what they open, [experts, 2 * inner, hidden]; without gates, [experts, inner, hidden].
        down: [experts, hidden, inner].
        biases: of `up` and `down`, [experts, outputs]; None for none.
        gated: whether there are gates.
        interleaved: whether gates and what they open alternate, instead of all gates coming first.
        activation: of the gates, or of `up`.
        limited: limit, slope and shift of `ExpertLinear`.
        picks: number of experts per row.
        routing: the fields of `Route` that determine the choice.
        weighs_inputs: whether a row's weights multiply the experts' inputs, not their results.
        shared: a feed-forward for all rows, and a linear layer with one output, whose sigmoid multiplies its results,
            or None; None for none.
        short: linear layers before and after the experts, to and from short vectors; None for none.
        routed: norm of the router's input, if it is not the experts' input; None for none.
        factor: multiplies all results.
    """

    router: Linear
    up: Weight
    down: Weight
    biases: tuple[np.ndarray, np.ndarray] | None
    gated: bool
    interleaved: bool
    activation: Activation
    limited: tuple[float, float, float]
    picks: int
    routing: dict[str, Any]
    weighs_inputs: bool
    shared: tuple[FeedForward, Linear | None] | None
    short: tuple[Linear, Linear] | None = None
    routed: Norm | None = None
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention layer.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads.
        size: entries of a query or a key.
        values: entries of a value.
        qkv: linear layers of queries, keys and values, or one for all; or their sources.
        source: the layer whose keys and values are used, so that `qkv` has only queries; None for its own.
        gate: the linear layer whose sigmoid multiplies the results of attention; None for none.
        out: the linear layer that follows.
        head_norms: of queries, keys and values, each per head, or over all heads; None for none.
        rotary: the rotation of heads; None for none.
        rotated_first: whether the norms follow the rotation.
        tuning: of queries; None for none.
        interleaved: as in `Family`.
        query_scale: the attention's scale, if attention is given another one; None otherwise.
        sinks: [heads], see `Attend`; None for none.
        bound: queries, keys and values are clamped to [-bound, bound] after norms; 0 for none.
    """

    heads: int
    kv_heads: int
    size: int
    values: int
    qkv: list[Linear] | Latent
    gate: Linear | None
    out: Linear
    head_norms: tuple[Norm | None, Norm | None, Norm | None]
    rotary: Rotary | None
    rotated_first: bool
    tuning: Tuning | None
    interleaved: bool
    query_scale: float | None
    sinks: np.ndarray | None
    source: int | None = None
    bound: float = 0.0

    @property
    def kept(self) -> tuple[int, int, int]:
        """Key and value heads, and entries of a key and of a value that are kept: 0 of a value that is in a key."""
        return self.kv_heads, self.size, 0 if isinstance(self.qkv, Latent) else self.values


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The mixer of a layer with a state instead of attention: convolved queries, keys and values, and a delta rule.

    Attributes:
        shape: of its states.
        qkv: queries, keys and values, concatenated; one linear layer, or one for each.
        gate: of the results, before `out`.
        decay: as in `DeltaRule`.
        strength: as in `DeltaRule`.
        weight: [taps, channels], of the convolution, which SiLU follows.
        rates: [heads], the logarithms of the negated rates.
        bias: [heads], of the decays.
        norm: of each head's results, before the gate.
        out: the linear layer that follows.
        doubled: whether strengths reach 2 instead of 1.
    """

    shape: StateShape
    qkv: list[Linear]
    gate: Linear
    decay: Linear
    strength: Linear
    weight: np.ndarray
    rates: np.ndarray
    bias: np.ndarray
    norm: Norm
    out: Linear
    doubled: bool


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """The mixer of most layers of LFM2: a convolution of gated rows, whose results are gated.

    Attributes:
        shape: of its states.
        x: the input of the convolution.
        before: gates that multiply x.
        after: gates that multiply the results.
        weight: [taps, channels].
        bias: [channels]; None for none.
        out: the linear layer that follows.
    """

    shape: StateShape
    x: Linear
    before: Linear
    after: Linear
    weight: np.ndarray
    bias: np.ndarray | None
    out: Linear


@dataclass(frozen=True, slots=True)
class Mamba:
    """A Mamba-2 mixer: queries, keys and values, convolved, and a state space.

    Attributes:
        shape: of its states.
        qkv: queries, keys and values, also called C, B and x.
        gate: of the results, before `out`.
        step: as in `StateSpace`, where it is the decay.
        weight: [taps, channels], of the convolution, which SiLU follows.
        conv_bias: [channels]; None for none.
        rates: [heads], the logarithms of the negated rates.
        bias: [heads], of the steps.
        skip: as in `StateSpace`.
        limits: the bounds of a step.
        norm: of the results; None for none.
        norm_first: whether it comes before the gate.
        out: the linear layer that follows.
    """

    shape: StateShape
    qkv: list[Linear]
    gate: Linear
    step: Linear
    weight: np.ndarray
    conv_bias: np.ndarray | None
    rates: np.ndarray
    bias: np.ndarray
    skip: np.ndarray
    limits: tuple[float, float]
    norm: Norm | None
    norm_first: bool
    out: Linear


@dataclass(frozen=True, slots=True)
class SelectiveMamba:
    """A mixer of the first Mamba: convolved values, from which keys, queries and steps are made, and a selective scan.

    Attributes:
        shape: of its states.
        x: the values.
        gate: of the results, before `out`.
        weight: [taps, values], of the convolution, which SiLU follows.
        conv_bias: [values]; None for none.
        low: makes the short vectors from which `step` makes steps.
        kq: keys and queries, also called B and C.
        norms: of the short vectors, the keys and the queries; None for none.
        step: as in `SelectiveScan`, where it is the times; never in few bits.
        rates: [size, values], the logarithms of the negated rates.
        bias: [values], of the steps.
        skip: as in `SelectiveScan`.
        out: the linear layer that follows.
    """

    shape: StateShape
    x: Linear
    gate: Linear
    weight: np.ndarray
    conv_bias: np.ndarray | None
    low: Linear
    kq: Linear
    norms: tuple[Norm | None, Norm | None, Norm | None]
    step: Linear
    rates: np.ndarray
    bias: np.ndarray
    skip: np.ndarray
    out: Linear


# What lets a row depend on the rows before it.
Mixer: TypeAlias = Attention | DeltaNet | ShortConvolution | Mamba | SelectiveMamba


@dataclass(frozen=True, slots=True)
class Beside:
    """A mixture of experts parallel to a feed-forward: the results of both are normed and added.

    Attributes:
        experts: read the feed-forward's input before its norm.
        before: norm of the experts' input.
        after: norms of the feed-forward's and the experts' results.
    """

    experts: Experts
    before: Norm
    after: tuple[Norm, Norm]


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The vectors that a token gives to each layer, besides its embedding.

    A layer's vector is the sum of a table entry and of the normed result of a linear layer of the embedding.

    Attributes:
        table: [vocabulary, layers * size].
        factor: multiplies the entries.
        known: as in `Embed`.
        linear: makes [layers * size] from the embedding.
        norm: of each layer's part of these results.
        scale: multiplies the sums.
    """

    table: Weight
    factor: float
    known: int
    linear: Linear
    norm: Norm
    scale: float


@dataclass(frozen=True, slots=True)
class LayerInput:
    """How a layer takes its vector: a gate made from the hidden state opens it, and the result is added to that state.

    Attributes:
        at: first entry of the layer's vector.
        width: entries of all layers' vectors.
        gate: a linear layer of the hidden state.
        activation: of its results.
        out: a linear layer of the products.
        norm: of its results.
    """

    at: int
    width: int
    gate: Linear
    activation: Activation
    out: Linear
    norm: Norm


@dataclass(frozen=True, slots=True)
class Streams:
    """Parallel hidden states, of which layers read one (AltUp; Baykal et al., arXiv 2301.13310).

    The first is the embedding; the others are made from it. After the layers, others are made from these, and the mean
    of all is the input of the last norm. Each is scaled to the magnitude of the first.

    Attributes:
        begin: linear layers of the embedding, one for each other stream.
        end: linear layers of the others, one for each.
        least: lower bound of a mean square used as a divisor.
    """

    begin: list[Linear]
    end: list[Linear]
    least: float


@dataclass(frozen=True, slots=True)
class AltUp:
    """How a layer reads its stream and changes all of them.

    Attributes:
        active: the stream that the layer reads.
        norm: of the router's input.
        factor: multiplies that input.
        router: a linear layer, followed by tanh.
        predict: makes, from the router's results, the coefficients of all streams in each prediction.
        correct: makes, from the router's results, the share of the layer's change that each prediction takes.
        scales: [hidden], multiply what takes the layer's input; None for none.
    """

    active: int
    norm: Norm
    factor: float
    router: Linear
    predict: Linear
    correct: Linear
    scales: np.ndarray | None


@dataclass(frozen=True, slots=True)
class Laurel:
    """A branch parallel to an attention: two linear layers and a norm, whose results are added to their input.

    Attributes:
        left: the first linear layer.
        right: the second linear layer.
        norm: of the results.
    """

    left: Linear
    right: Linear
    norm: Norm


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer.

    Attributes:
        mixers: run in parallel; none in a layer that is only a feed-forward.
        norms: as in `Family`; None for none.
        parallel: as in `Family`.
        mlp: the feed-forward; None for none.
        residual: multiplies what the mixers and the feed-forward add.
        added_to_normed: whether they add to their normed input.
        beside: experts parallel to the feed-forward; None for none.
        input: how it takes its vector of the token; None without such vectors.
        factor: multiplies the results of the layer.
        laurel: a branch parallel to the mixers; None for none.
        altup: how it reads and changes one of several streams; None for a single one.
    """

    mixers: tuple[Mixer, ...]
    norms: tuple[Norm | None, Norm | None, Norm | None, Norm | None]
    parallel: bool
    mlp: FeedForward | Experts | None
    residual: float
    added_to_normed: bool = False
    beside: Beside | None = None
    input: LayerInput | None = None
    factor: float = 1.0
    laurel: Laurel | None = None
    altup: AltUp | None = None


def some_rows(linear: Linear, rows: np.ndarray | slice) -> Linear:
    """Return a linear layer with a selection of the results, int64 [n]."""
    weight, bias, factor = linear
    few = weight.rows(rows) if isinstance(weight, Quantized) else taken(weight, rows)
    return Linear(few, None if bias is None else taken(bias, rows), factor)
