"""The interface of a back end, which runs whole passes of one model over its KV cache.

There are three: a program in C, the same program in Triton, and transformers' own forward on functions in C. Callers
do not ask which one they have.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from detgen.kernels.exchange import Exchange
from detgen.kernels.input_batch import Ends, InputBatch
from detgen.kernels.logprobs import Scores
from detgen.kernels.rounds import Rounding
from detgen.kernels.sampling import Choices
from detgen.program.arrays import Array


class KVBuffers(Protocol):
    """Where keys and values are stored.

    Attributes:
        keys: for each layer, [pages + 1, kv_heads, head_size, PAGE], in float32 or bfloat16.
        values: for each layer, [pages + 1, kv_heads, PAGE, head_size]; of no entries where they are in keys.
        states: states that layers keep of sequences; None where no layer keeps any.
    """

    keys: list[Any]
    values: list[Any]

    @property
    def states(self) -> StateBuffers | None:
        """See above."""
        ...


class StateShape(NamedTuple):
    """The sizes of what a layer keeps of a sequence, in the terms of the steps `Convolve` and `Recurrence`.

    Attributes:
        channels: number of channels that are convolved.
        taps: number of rows that enter a result of the convolution.
        heads: number of states; 0, like the fields that follow, for a convolution alone.
        key_heads: number of queries and of keys.
        size: entries of a key.
        values: entries of a value.
        selective: whether each value has a step of its own, as `SelectiveScan` has it.
    """

    channels: int
    taps: int
    heads: int = 0
    key_heads: int = 0
    size: int = 0
    values: int = 0
    selective: bool = False

    @property
    def kept(self) -> int:
        """Number of values that are kept of a row that is not certain."""
        values = self.heads * self.values
        return self.key_heads * self.size + values + (values if self.selective else 2 * self.heads)


class LayerStates(NamedTuple):
    """Where a layer keeps states.

    Attributes:
        convolved: `Convolve.kept`.
        state: `Recurrence.state`.
        kept: `Recurrence.kept`.
    """

    convolved: Array
    state: Array
    kept: Array


class StateBuffers(Protocol):
    """Where layers keep states.

    Attributes:
        layers: one for each layer; None for a layer without states. Replaced when there are more slots.
        slots: number of slots there is room for.
    """

    layers: list[LayerStates | None]

    @property
    def slots(self) -> int:
        """See above."""
        ...


class Chaining(Protocol):
    """Runs several passes in one call, in which sequences continue with the tokens that they choose.

    A batch is the first pass. Its windows want one row each, or none, as do those of the `later` passes. `lengths`,
    int64 [windows that want a row], is the number of passes that each takes part in, its own included, at least 1. It
    is lowered where results are not finite and where a sequence ends; results are of the rows that then remain, in the
    order of the windows. The broken rows, those whose last keys are not finite, are given by number: rows that want
    nothing are counted first, pass by pass, then the rows of the results.

    Attributes:
        outputs: entries of a row of logits, or of hidden states where there is no output layer.
        kept: number of logits that `sample` keeps for each row; 0 if it keeps only scores.
        stops: whether a sequence takes part in no passes after its end; otherwise they are computed for nothing.
        reads: whether windows may want no row, or join later; otherwise all are in the first pass and want a row.
    """

    outputs: int
    kept: int
    stops: bool
    reads: bool

    def chain(self, batch: InputBatch, lengths: np.ndarray, ends: Ends | None) -> tuple[Scores, list[int]]:
        """Continue each sequence with its largest logit; a row whose last keys are not finite counts as not finite."""
        ...

    def sample(
        self, batch: InputBatch, lengths: np.ndarray, choices: Choices, ends: Ends | None
    ) -> tuple[np.ndarray, Array | Scores, list[int]]:
        """Continue each sequence with its likely choice; a choice that cannot be known lowers its length, too.

        Returns:
            The likely choice of each row, int64 [rows]; the rows' logits, or their scores if `kept` is 0; and the
            broken rows.
        """
        ...

    def draft(self, batch: InputBatch, lengths: np.ndarray, choices: Choices) -> list[list[int]]:
        """Return the tokens that each sequence is likely to choose next, as far as can be told."""
        ...


class Narrowed(NamedTuple):
    """A model whose linear layers are read in fewer bits.

    Attributes:
        decoder: runs it, over the KV cache of the model itself.
        improve: drops the copies, which the first pass makes, for better ones, which the next pass makes; False if
            there are no better ones, or they are in use already.
        share: bytes read with the first copies, as a share of the bytes of the model's own linear layers.
        copies: most bytes that the copies take.
    """

    decoder: Decoder
    improve: Callable[[], bool]
    share: float
    copies: int


class Decoder(Protocol):
    """A back end with a model.

    Attributes:
        kind: class name of the model.
        concurrent: whether several threads may run it at once.
    """

    kind: str
    concurrent: bool

    @property
    def chaining(self) -> Chaining | None:
        """Runs several passes in one call; None where that is impossible now."""
        ...

    @property
    def rounding(self) -> Rounding | None:
        """Runs several rounds in one call; None where that is impossible."""
        ...

    def run(
        self,
        batch: InputBatch,
        exchange: Exchange | None = None,
        broken: list[int] | None = None,
        *,
        scored: bool = False,
        choices: Callable[[], Choices] | None = None,
    ) -> Array | Scores:
        """Run a pass.

        Args:
            batch: its rows.
            exchange: brings a state for each row, and takes the rows' hidden states.
            broken: takes the rows whose keys in the last layer are not finite, ascending.
            scored: whether scores of the logits are enough.
            choices: called while the pass runs, returns how to choose tokens; scores of the chosen tokens are enough.
                None if logits are wanted, or the largest are chosen.

        Returns:
            Logits of the wanted rows, float32 [n, vocabulary], or hidden states where there is no output
            layer; or their scores, if these are enough and cost less.
        """
        ...

    def over(self, cache: KVBuffers) -> Decoder:
        """Return the same model over another cache."""
        ...

    def telling(self, take: Callable[[str, object], None]) -> AbstractContextManager[None]:
        """While the block runs, call `take` with the name and the output of each step, or module, of each pass."""
        ...

    def exactly(self) -> AbstractContextManager[None]:
        """While the block runs, do not round the inputs of linear layers, even if they multiply whole numbers.

        Passes can then be compared with a forward in floating point; they are slow.
        """
        ...

    def breaking(self, token: int) -> AbstractContextManager[None]:
        """While the block runs, the embedding of a token is NaN: a check of what broken rows do to others."""
        ...

    def narrowed(self) -> Narrowed | None:
        """Return the model over the same KV cache with linear layers in fewer bits; None if all have few already."""
        ...

    def profile(self) -> dict[str, Any]:
        """Return the arithmetic, and whatever else decides its bits, as recorded in manifests."""
        ...

    def explain_difference(self) -> str:
        """Return why logits differ from those of the model's own forward, as a clause; "" if unknown."""
        ...
