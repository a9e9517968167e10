"""What a back end is: it runs whole passes of one model over its KV cache.

There are three: a program in C, the same program in Triton, and transformers' own forward on functions in C. What
runs passes does not ask which one it is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from detgen.kernels.exchange import Exchange
from detgen.kernels.input_batch import Ends, InputBatch
from detgen.kernels.logprobs import Scores
from detgen.kernels.sampling import Choices
from detgen.program.arrays import Array


class KVBuffers(Protocol):
    """Where keys and values are stored.

    Attributes:
        keys: of each layer, [pages + 1, kv_heads, head_size, PAGE], in float32 or bfloat16.
        values: likewise, [pages + 1, kv_heads, PAGE, head_size].
        states: what layers keep of sequences; None where none does.
    """

    keys: list[Any]
    values: list[Any]

    @property
    def states(self) -> StateBuffers | None:
        """See above."""
        ...


class StateShape(NamedTuple):
    """What a layer keeps of a sequence, as the steps `Convolve` and `Recurrence` say it.

    Attributes:
        channels: that are convolved.
        taps: rows that a result of the convolution is made of.
        heads: states; 0, like what follows, of a convolution alone.
        key_heads: queries and keys.
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
        """Numbers that are kept of a row that is not certain."""
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
        layers: of each; None of one that keeps none. Others once there are more slots.
        slots: for which there is room.
    """

    layers: list[LayerStates | None]

    @property
    def slots(self) -> int:
        """See above."""
        ...


class Chaining(Protocol):
    """Runs several passes in one call, in which sequences go on with what they choose.

    A batch is the first pass, whose windows want one row each, or none, like those of `later` passes; `lengths`, int64
    [windows that want a row], are the passes from its own on that each takes part in, at least 1. They are lowered
    where results are not finite and where a sequence ends. Results are of the rows that stand then, in the order of the
    windows. Rows whose last keys are not finite are named by their numbers: first come those that want nothing, pass
    by pass, then those of the results.

    Attributes:
        outputs: entries of a row of logits, or of hidden states where there is no output layer.
        kept: entries of logits that `sample` leaves behind for each row; 0 where it leaves scores alone.
        stops: whether a sequence has no passes behind its end; else they are computed for nothing.
        reads: whether windows may want nothing, or join later; else all are in the first pass and want a row.
    """

    outputs: int
    kept: int
    stops: bool
    reads: bool

    def chain(self, batch: InputBatch, lengths: np.ndarray, ends: Ends | None) -> tuple[Scores, list[int]]:
        """Each sequence goes on with its largest logit; a row is not finite, either, whose last keys are not."""
        ...

    def sample(
        self, batch: InputBatch, lengths: np.ndarray, choices: Choices, ends: Ends | None
    ) -> tuple[np.ndarray, Array | Scores, list[int]]:
        """Each sequence goes on with what it is likely to choose; a choice that cannot be known lowers its length, too.

        Returns:
            What each row is likely to choose, int64 [rows]; the rows' logits, or their scores where there is no more to
            tell; and the rows that are named.
        """
        ...

    def draft(self, batch: InputBatch, lengths: np.ndarray, choices: Choices) -> list[list[int]]:
        """The tokens that each sequence is likely to choose next, as far as can be told."""
        ...


class Narrowed(NamedTuple):
    """A model whose linear layers are read in fewer bits.

    Attributes:
        decoder: runs it, over the KV cache of the model itself.
        improve: gives the copies up, which the first pass makes, for better ones, which the next pass makes; False if
            there are no better ones, or they are there.
        share: of the bytes of the model's own linear layers, how many are read by the first copies.
        copies: most bytes of copies.
    """

    decoder: Decoder
    improve: Callable[[], bool]
    share: float
    copies: int


class Decoder(Protocol):
    """A back end with a model.

    Attributes:
        kind: class name of the model.
        concurrent: whether several threads may run it at a time.
    """

    kind: str
    concurrent: bool

    @property
    def chaining(self) -> Chaining | None:
        """Runs several passes in one call; None where that cannot be done now."""
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
        """A pass.

        Args:
            batch: its rows.
            exchange: brings a state for each row, and takes their hidden states.
            broken: takes the rows whose keys of the last layer are not finite, ascending.
            scored: whether scores of the logits are enough.
            choices: makes how tokens are chosen, called while the pass runs; scores of what is chosen so are enough.
                None if logits are wanted, or the largest are chosen.

        Returns:
            Logits of the rows that are asked for, float32 [n, vocabulary], or hidden states where there is no output
            layer; or their scores, if these are enough and cost less.
        """
        ...

    def over(self, cache: KVBuffers) -> Decoder:
        """The same model over another cache."""
        ...

    def telling(self, take: Callable[[str, object], None]) -> AbstractContextManager[None]:
        """While the block runs, tell `take` the name and the output of each step, or module, of each pass."""
        ...

    def exactly(self) -> AbstractContextManager[None]:
        """While the block runs, what linear layers read stays as it is, even if they multiply whole numbers.

        So that passes can be compared with a forward in floating point; they are slow.
        """
        ...

    def breaking(self, token: int) -> AbstractContextManager[None]:
        """While the block runs, the embedding of a token is NaN: a check of what broken rows do to others."""
        ...

    def narrowed(self) -> Narrowed | None:
        """The same model over the same KV cache, its linear layers in fewer bits; None if all of them have few."""
        ...

    def profile(self) -> dict[str, Any]:
        """The arithmetic, and whatever else decides its bits, as manifests say it."""
        ...

    def explain_difference(self) -> str:
        """Why logits differ from those of the model's own forward, as a clause; "" where it is unknown."""
        ...
