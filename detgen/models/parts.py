"""The parts of a decoder, as its description gives them. Plain data."""

from __future__ import annotations

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
    """A model has something that its family's row does not tell of."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of the last axis.

    Attributes:
        weight: [entries], or [heads, entries] if each head has its own.
        bias: like it; None for none.
        epsilon: is added to the mean square.
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
    """A linear layer, a norm of the first of its results, and a linear layer of all of them.

    Attributes:
        down: the first.
        norm: of its first entries, as many as the norm has weights.
        up: the second.
    """

    down: Linear
    norm: Norm
    up: Linear


@dataclass(frozen=True, slots=True)
class Latent:
    """Where queries, keys and values come from.

    Attributes:
        queries: of all heads, what is rotated first in each: a linear layer, or one through a short vector.
        entries: keys and values, through a short vector and, behind it, what all keys rotate.
    """

    queries: Linear | Through
    entries: Through


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A feed-forward.

    Attributes:
        up: its first linear layers: a gate and what it opens, one of both, or one without a gate.
        gated: whether there is a gate.
        activation: of the gate, or of `up`.
        down: its last linear layer.
        deviations: of `GaussianTopK`, which gates go through first; None where all stay.
    """

    up: list[Linear]
    gated: bool
    activation: Activation
    down: Linear
    deviations: float | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts, feed-forwards of which each row takes some.

    Attributes:
        router: logits of the experts.
        up: gates and what they open, [experts, 2 * inner, hidden]; without gates, [experts, inner, hidden].
        down: [experts, hidden, inner].
        biases: of both, [experts, outputs]; None for none.
        gated: whether there are gates.
        interleaved: whether gates and what they open take turns, instead of all gates coming first.
        activation: of the gates, or of `up`.
        limited: limit, slope and shift of `ExpertLinear`.
        picks: experts of a row.
        routing: the fields of `Route` that say how they are chosen.
        weighs_inputs: whether the weights of a row multiply what its experts read, not what they give.
        shared: a feed-forward that all rows take, and the linear layer of one output by whose sigmoid its results are
            multiplied, or None; None for none.
        short: linear layers before and after the experts, which read short vectors and give them; None for none.
        routed: norm of what the router reads instead of what the experts read; None for no other.
        factor: of all results.
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
    """An attention.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads.
        size: entries of a query or a key.
        values: entries of a value.
        qkv: linear layers of queries, keys and values, or one for all; or where they come from.
        source: the layer whose keys and values are seen; then `qkv` gives queries alone. None for its own.
        gate: of what follows it: the linear layer by the sigmoid of whose results its own are multiplied; None for
            none.
        out: what follows it.
        head_norms: of queries, keys and values, each of a head, or of all heads together; None for none.
        rotary: how heads are rotated; None for not at all.
        rotated_first: whether the norms come after that.
        tuning: of queries; None for none.
        interleaved: see `Family`.
        query_scale: the attention's scale, where attention is given another one; None otherwise.
        sinks: [heads], see `Attend`; None for none.
        bound: queries, keys and values are clamped to [-bound, bound], behind norms; 0 for none.
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


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """What stands for an attention where a layer keeps a state: queries, keys and values, convolved, and a delta rule.

    Attributes:
        shape: of what it keeps.
        qkv: queries, keys and values, one behind the other; one linear layer, or one of each.
        gate: of its results, before `out`.
        decay: see `DeltaRule`.
        strength: likewise.
        weight: [taps, channels], of the convolution, whose results SiLU activates.
        rates: [heads], the logarithms of the rates, which are negated.
        bias: [heads], of the decays.
        norm: of each head's results, before the gate.
        out: what follows.
        doubled: whether strengths are up to 2 instead of 1.
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
    """What stands for an attention in most layers of LFM2: a convolution of gated rows, whose results are gated.

    Attributes:
        shape: of what it keeps.
        x: what is convolved.
        before: gates of that, its factors as they are.
        after: gates of the results.
        weight: [taps, channels].
        bias: [channels]; None for none.
        out: what follows.
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
        shape: of what it keeps.
        qkv: queries, keys and values, which others call C, B and x.
        gate: of its results, before `out`.
        step: see `StateSpace`, where it is the decay.
        weight: [taps, channels], of the convolution, whose results SiLU activates.
        conv_bias: [channels]; None for none.
        rates: [heads], the logarithms of the rates, which are negated.
        bias: [heads], of the steps.
        skip: see `StateSpace`.
        limits: the least and the most of a step.
        norm: of its results; None for none.
        norm_first: whether it comes before the gate.
        out: what follows.
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
    """A mixer of the first Mamba: values, convolved, of which keys, queries and steps are made, and a selective scan.

    Attributes:
        shape: of what it keeps.
        x: values.
        gate: of its results, before `out`.
        weight: [taps, values], of the convolution, whose results SiLU activates.
        conv_bias: [values]; None for none.
        low: gives short vectors, of which `step` makes steps.
        kq: keys and queries, which others call B and C.
        norms: of the short vectors, the keys and the queries; None for none.
        step: see `SelectiveScan`, where these are the times; never in few bits.
        rates: [size, values], the logarithms of the rates, which are negated.
        bias: [values], of the steps.
        skip: see `SelectiveScan`.
        out: what follows.
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


# What tells a row of those before it.
Mixer: TypeAlias = Attention | DeltaNet | ShortConvolution | Mamba | SelectiveMamba


@dataclass(frozen=True, slots=True)
class Beside:
    """A mixture of experts beside a feed-forward: the results of both are normed, and added.

    Attributes:
        experts: read what the feed-forward reads, before its norm.
        before: norm of that for the experts.
        after: norms of the feed-forward's results and of theirs.
    """

    experts: Experts
    before: Norm
    after: tuple[Norm, Norm]


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What a token gives to each layer by itself, beside its embedding.

    A layer's vector is the normed one that a linear layer makes of the embedding, and the entry of a table, added.

    Attributes:
        table: [vocabulary, layers * size].
        factor: of its entries.
        known: see `Embed`.
        linear: gives [layers * size] of the embedding.
        norm: of each layer's part of that.
        scale: of the sums.
    """

    table: Weight
    factor: float
    known: int
    linear: Linear
    norm: Norm
    scale: float


@dataclass(frozen=True, slots=True)
class LayerInput:
    """How a layer takes its vector of those: a gate of what it has so far opens it, and the result is added to that.

    Attributes:
        at: where the layer's vector begins.
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
    """Hidden states side by side, of which layers read one (AltUp; Baykal et al., arXiv 2301.13310).

    The first is the embedding, the others are made of it. Behind the layers, others are made of them, and the mean of
    all is what the last norm reads. What is made gets the magnitude of the first.

    Attributes:
        begin: linear layers of the embedding, which give the others.
        end: linear layers of the others, each of its own.
        least: a mean square counts as this at least when it is divided by.
    """

    begin: list[Linear]
    end: list[Linear]
    least: float


@dataclass(frozen=True, slots=True)
class AltUp:
    """How a layer reads its stream and changes all of them.

    Attributes:
        active: the stream that it reads.
        norm: of what the router reads.
        factor: of that.
        router: a linear layer, whose results are the arguments of tanh.
        predict: gives, of that, the coefficients of all streams in each one's prediction.
        correct: gives, of that, how much of what the layer has changed each prediction takes.
        scales: [hidden], of what takes the layer's input; None for none.
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
    """What stands beside an attention: two linear layers and a norm, whose results are added to their input.

    Attributes:
        left: the first.
        right: the second.
        norm: of its results.
    """

    left: Linear
    right: Linear
    norm: Norm


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer.

    Attributes:
        mixers: side by side; none in a layer that is a feed-forward alone.
        norms: as in `Family`; None for none.
        parallel: see `Family`.
        mlp: the feed-forward; None for none.
        residual: factor of what the mixers and the feed-forward add.
        added_to_normed: whether they add it to what they read, which is normed.
        beside: experts beside the feed-forward; None for none.
        input: how it takes what the token gives it; None where tokens give nothing.
        factor: of all that the layer leaves.
        laurel: what stands beside the mixers; None for nothing.
        altup: how it reads and changes one of several streams; None where there is one.
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
    """A linear layer that gives some of the results, int64 [n]."""
    weight, bias, factor = linear
    few = weight.rows(rows) if isinstance(weight, Quantized) else taken(weight, rows)
    return Linear(few, None if bias is None else taken(bias, rows), factor)
