"""Any transformers decoder, run by its own forward on functions in C."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from detgen.kernels.attention import AttentionTraits
from detgen.kernels.decoder import KVBuffers
from detgen.kernels.exchange import Exchange, exchanging
from detgen.kernels.generic.paged_attention import PagedAttention, attending
from detgen.kernels.input_batch import InputBatch
from detgen.kernels.sampling import Choices
from detgen.program.arrays import array, tensor
from detgen.program.operands import ARITHMETIC

_PROMPT = 16  # tokens
# Called with the name, module, arguments and output of a module.
Take = Callable[[str, nn.Module, tuple[Any, ...], object], None]


@dataclass(frozen=True, slots=True)
class Census:
    """The operators that a model's own forward runs beside native functions.

    Attributes:
        proved: names of the operators whose rows were compared; their bits depend on torch's kernels.
        refused: why the model is not row-invariant, as a clause; "" if it is.
    """

    proved: tuple[str, ...]
    refused: str


class Given(NamedTuple):
    """The part of a pass that a forward gets: tensors of `InputBatch`."""

    ids: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor

    @classmethod
    def of(cls, batch: InputBatch) -> Given:
        """That of a batch."""
        return cls(*map(tensor, (batch.ids, batch.positions, batch.wanted)))


class GenericDecoder:
    """A transformers decoder in place.

    Args:
        model: a transformers decoder whose modules were replaced by native ones.
        cache: where its keys and values are stored.

    Attributes:
        kind: see `Decoder`.
        concurrent: likewise; the model's layers hold state during a pass.
        chaining: likewise.
        rounding: likewise.
        model: as above.
        functions: replaces functions that its forward calls; None where that is not needed.
        census: the census of its operators; None before it is taken.
    """

    concurrent = False
    chaining = None
    rounding = None

    def __init__(self, model: Any, cache: KVBuffers) -> None:
        self.kind = type(model).__name__
        self.model = model
        self.functions: TorchFunctionMode | None = None
        self.census: Census | None = None
        self._last = len(cache.keys) - 1
        self._attention = PagedAttention(cache)
        self._chooses = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._last_keys = torch.empty(0)
        self._take: Callable[[str, object], None] | None = None

    def over(self, cache: KVBuffers) -> GenericDecoder:
        """See `Decoder`."""
        other = GenericDecoder(self.model, cache)
        other.functions, other.census = self.functions, self.census
        return other

    def run(
        self,
        batch: InputBatch,
        exchange: Exchange | None = None,
        broken: list[int] | None = None,
        *,
        scored: bool = False,
        choices: Callable[[], Choices] | None = None,
    ) -> np.ndarray:
        """See `Decoder`; gives logits whatever is enough."""
        with torch.inference_mode():
            return array(self.forward(batch, Given.of(batch), exchange, broken))

    def forward(
        self, batch: InputBatch, given: Given, exchange: Exchange | None = None, broken: list[int] | None = None
    ) -> torch.Tensor:
        """Like `run`, with the part of the batch that the forward gets."""
        layers: Any = self.model.model.layers if exchange else ()
        with (
            attending(partial(self._attend, batch)),
            exchanging(layers, exchange) if exchange else nullcontext(),
            self.functions or nullcontext(),
        ):
            logits: torch.Tensor = self.model(
                input_ids=given.ids[None],
                position_ids=given.positions[None],
                attention_mask=None,
                use_cache=False,
                **({"logits_to_keep": given.wanted} if self._chooses else {}),
            ).logits[0]
        if broken is not None:
            broken += (~self._last_keys.abs().amax((1, 2)).isfinite()).nonzero()[:, 0].tolist()
        return (logits if self._chooses else logits[given.wanted])[: batch.count].float()

    def _attend(
        self,
        batch: InputBatch,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        traits: AttentionTraits,
    ) -> torch.Tensor:
        """Called by each attention layer of a pass."""
        if layer == self._last:
            self._last_keys = k
        out = self._attention.attend(layer, q, k, v, batch, traits)
        if self._take is not None:
            for name, x in zip((", query", ", key", ", value", ""), (q, k, v, out), strict=True):
                self._take(f"attention {layer}{name}", x)
        return out

    @contextmanager
    def telling(self, take: Callable[[str, object], None]) -> Iterator[None]:
        """See `Decoder`."""
        self._take = take
        try:
            with hooked(self.model, lambda name, module, args, output: take(name, output)):
                yield
        finally:
            self._take = None

    def exactly(self) -> AbstractContextManager[None]:
        """See `Decoder`: its linear layers multiply no whole numbers."""
        return nullcontext()

    @contextmanager
    def breaking(self, token: int) -> Iterator[None]:
        """See `Decoder`."""
        embedding: Any = self.model.get_input_embeddings()
        forward = embedding.forward

        def broken(ids: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = forward(ids)
            return found.masked_fill((ids == token)[..., None], torch.nan)

        embedding.forward = broken
        try:
            yield
        finally:
            embedding.__dict__.pop("forward", None)

    def narrowed(self) -> None:
        """See `Decoder`: its linear layers are transformers' modules."""
        return

    def profile(self) -> dict[str, Any]:
        """See `Decoder`: the model's own forward says in which order functions are called."""
        versions = {"transformers": version("transformers")}
        proved = self.census.proved if self.census else ()
        if not proved:
            return {"versions": versions, "arithmetic": ARITHMETIC}
        return {
            "versions": {**versions, "torch": torch.__version__},
            "arithmetic": f"{ARITHMETIC} and torch",
            "operators": list(proved),
        }

    @torch.inference_mode()
    def explain_difference(self) -> str:
        """See `Decoder`: positions from 0, as passes bring them, may change what it gives without any."""
        self.model.set_attn_implementation("eager")
        ids = torch.arange(2, 2 + _PROMPT)[None]
        own = self.model(input_ids=ids, use_cache=False).logits
        counted = self.model(input_ids=ids, position_ids=ids - 2, use_cache=False).logits
        same = (own - counted).abs().max() <= 1e-3 * own.abs().max()
        return "" if same else "it does not count positions from 0, as passes do"


@contextmanager
def hooked(model: nn.Module, take: Take) -> Iterator[None]:
    """Call `take` after each call of a module inside `model`.

    Replaces the modules' `forward` meanwhile, since torch's own hooks miss a `forward` that is called directly.
    """
    modules = [(name, module) for name, module in model.named_modules() if name]
    for name, module in modules:
        module.forward = _telling(name, module, module.forward, take)
    try:
        yield
    finally:
        for _, module in modules:
            del module.forward


def _telling(name: str, module: nn.Module, forward: Callable[..., Any], take: Take) -> Callable[..., Any]:
    @functools.wraps(forward)
    def telling(*args: Any, **named: Any) -> Any:
        output = forward(*args, **named)
        take(name, module, args, output)
        return output

    return telling
