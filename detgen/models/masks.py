"""Finds out what the rows of a layer see, by recognizing the mask that transformers gives to the attention.

Transformers makes masks from functions that say whether a row at a position sees a key at another. A model that runs
with the attention `ASKING` gets such a function instead of a mask. It is compared with the forms that detgen's
attention supports: all positions up to the row's own, a window of the last ones, chunks that do not see each other.

Some modules compute attention on their own, without transformers' AttentionInterface. Families with a description need
only the weights of their modules. The heads and the scale of scores are read from the module; what its rows see is read
from the mask that it is given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionMaskInterface, PreTrainedConfig

ASKING = "detgen_asking"  # the attention function whose masks are functions

_Visible = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # batch, head, row, key
_AROUND = (-2, -1, 0, 1, 2)
_MULTIPLES = (1, 2, 3, 5)
_DENSE = 80  # first positions, all of which are compared
_FARTHEST = 1 << 24  # larger numbers of a configuration are not positions
# Settings that transformers does not read, so that comparing with its forward cannot show their effect.
_UNREAD: dict[str, dict[str, Any]] = {
    "MptForCausalLM": {
        **{"attn_config.alibi": True, "attn_config.alibi_bias_max": 8, "attn_config.prefix_lm": False},
        **{"attn_config.attn_uses_sequence_id": False, "logit_scale": None},
    },
}


class UnknownMaskError(NotImplementedError):
    """A mask has no form that detgen's attention supports."""


class Seen(NamedTuple):
    """What a row sees: the positions up to its own, within a window or a chunk.

    Attributes:
        window: number of positions, including the row's own; None for all.
        chunk: positions of a chunk, counted from position 0; a row sees none before its chunk. None for no chunks.
    """

    window: int | None = None
    chunk: int | None = None

    def visible(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return whether rows at these positions see keys at those, bool; int64, any shapes that broadcast."""
        seen = keys <= rows
        if self.window is not None:
            seen = seen & (keys > rows - self.window)
        if self.chunk is not None:
            seen = seen & (keys >= rows // self.chunk * self.chunk)
        return seen


class Mask:
    """Stands for the mask of some layers; refuses models that do anything with it but pass it on.

    Args:
        function: the function from which transformers would make the mask.
        device: for the tensors that the function may hold.
    """

    def __init__(self, function: _Visible, device: torch.device) -> None:
        self._function, self._device = function, device
        self._found: dict[int, Seen] = {}  # by the number of heads

    def __getattr__(self, name: str) -> Any:
        raise UnknownMaskError("it computes with the mask of its attention")

    def __getitem__(self, index: Any) -> Any:
        """Return the mask itself for an index that selects all of it."""
        if isinstance(index, tuple) and all(each in (slice(None), slice(0, None)) for each in index):
            return self
        raise UnknownMaskError("it computes with the mask of its attention")

    def to(self, *_: Any) -> Mask:
        """Return the mask itself, whatever dtype or device a model wants."""
        return self

    @classmethod
    def __torch_function__(cls, *call: Any) -> Any:
        """Refuse functions of torch that are called with a mask."""
        raise UnknownMaskError("it computes with the mask of its attention")

    def seen(self, heads: int, config: PreTrainedConfig) -> Seen:
        """Return what a row sees.

        Args:
            heads: number of query heads of the layer.
            config: of the model; positions around its numbers are compared.

        Raises:
            UnknownMaskError: if it has none of the supported forms.
        """
        if heads not in self._found:
            self._found[heads] = self._recognized(heads, config)
        return self._found[heads]

    def _recognized(self, heads: int, config: PreTrainedConfig) -> Seen:
        numbers = sorted({n for n in numbers_of(config) if 1 < n < _FARTHEST})
        bound = self._bound(2 * max(numbers, default=_DENSE))
        numbers += [bound] if bound else []
        near = {n * times + off for n in numbers for times in _MULTIPLES for off in _AROUND}
        at = torch.tensor(sorted({n for n in near if n >= 0} | set(range(_DENSE))))
        asked = self._ask(torch.tensor([0, heads - 1])[:, None, None], at[:, None], at)
        for form in (Seen(), Seen(window=bound), Seen(chunk=bound)) if bound else (Seen(),):
            if (asked == form.visible(at[:, None], at)).all():
                return form
        raise UnknownMaskError("it brings a mask that is neither causal, nor a sliding window, nor chunks")

    def _bound(self, last: int) -> int:
        """Return the first position whose row does not see position 0; 0 if there is none up to `last`."""
        zero, low, high = torch.tensor(0), 0, last + 1
        if self._ask(zero, torch.tensor(last), zero):
            return 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._ask(zero, torch.tensor(middle), zero) else (low, middle)
        return high

    def _ask(self, head: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        to = self._device if self._device.type != "meta" else torch.device("cpu")
        shape = torch.broadcast_shapes(head.shape, rows.shape, keys.shape)
        try:
            found = self._function(torch.tensor(0, device=to), head.to(to), rows.to(to), keys.to(to))
            return found.expand(shape).cpu()
        except Exception as e:  # a function of the model's own code
            raise UnknownMaskError("the mask of its attention cannot be asked for what it hides") from e


def numbers_of(config: PreTrainedConfig) -> Iterator[int]:
    """Yield the whole numbers of a configuration."""
    yield from _within(config.to_dict())


def _within(settings: Any) -> Iterator[int]:
    if isinstance(settings, dict | list | tuple):
        for one in settings.values() if isinstance(settings, dict) else settings:
            yield from _within(one)
    elif isinstance(settings, int) and not isinstance(settings, bool):
        yield settings


def _keep(*, mask_function: _Visible, device: torch.device | str = "cpu", **how: Any) -> Mask:
    """Make a mask; transformers' models call this function through the AttentionMaskInterface."""
    where = torch.device(device)
    return Mask(_unpadded(mask_function) if where.type == "meta" else mask_function, where)


def _unpadded(held: Any) -> Any:
    """Return a function without padding of sequences, here and in what it holds, if the padding is on `meta`."""
    if isinstance(held, torch.Tensor) and held.device.type == "meta" and held.ndim == 1:
        return torch.zeros(held.shape, dtype=held.dtype)
    if isinstance(held, tuple):
        return tuple(map(_unpadded, held))
    if not isinstance(held, FunctionType) or held.__closure__ is None:
        return held
    cells = tuple(CellType(_unpadded(cell.cell_contents)) for cell in held.__closure__)
    return FunctionType(held.__code__, held.__globals__, held.__name__, held.__defaults__, cells)


AttentionMaskInterface.register(ASKING, _keep)


class Heads(NamedTuple):
    """What a module says about itself.

    Attributes:
        heads: number of query heads.
        kv_heads: number of key and value heads.
        size: entries of a head.
        scale: of the scores.
        slopes: per head, see `Attend`; None for none.
        window: what its rows see, if less than the mask says; None for no window.
    """

    heads: int
    kv_heads: int
    size: int
    scale: float
    slopes: tuple[float, ...] | None = None
    window: int | None = None


Note = Callable[[int, Heads, Seen], None]  # of a layer


def _bloom(module: Any) -> Heads:
    heads = int(module.num_heads)
    biases = _of(module, "build_alibi_tensor")(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)
    return Heads(heads, heads, module.head_dim, module.inv_norm_factor, tuple(biases[:, 0, 1].tolist()))


def _mpt(module: Any) -> Heads:
    heads = int(module.n_heads)
    slopes = tuple((-_of(module, "build_mpt_alibi_tensor")(heads, 2)[:, 0, 0]).tolist())
    return Heads(heads, heads, module.head_dim, module.softmax_scale, slopes)


def _falcon(module: Any) -> Heads:
    return Heads(module.num_heads, module.num_kv_heads, module.head_dim, module.inv_norm_factor)


def _gptj(module: Any) -> Heads:
    heads = int(module.num_attention_heads)
    before_5_24 = getattr(module, "scale_attn", None)
    return Heads(heads, heads, module.head_dim, module.scaling if before_5_24 is None else 1 / before_5_24)


def _gpt_neo(module: Any) -> Heads:
    window = module.config.window_size if module.attention_type == "local" else None
    return Heads(module.num_heads, module.num_heads, module.head_dim, 1.0, window=window)


def _of(module: Any, name: str) -> Callable[..., torch.Tensor]:
    """Return a function of the file that defines a module."""
    found: Callable[..., torch.Tensor] = getattr(sys.modules[type(module).__module__], name)
    return found


# By class of the module.
KINDS: dict[str, Callable[[Any], Heads]] = {
    "BloomAttention": _bloom,
    "MptAttention": _mpt,
    "FalconAttention": _falcon,
    "GPTJAttention": _gptj,
    "CodeGenAttention": _gptj,
    "GPTNeoSelfAttention": _gpt_neo,
}


@contextmanager
def asking_modules(model: Any, note: Note) -> Iterator[None]:
    """Let such modules of a model note their properties, instead of computing, when a pass asks for masks."""
    for name, value in _UNREAD.get(type(model).__name__, {}).items():
        if (found := attrgetter(name)(model.config)) != value:
            raise UnknownMaskError(f"transformers does not read its {name} ({found})")
    own = [module for module in model.modules() if type(module).__name__ in KINDS]
    before = model.config._attn_implementation
    if not own:
        yield
        return
    try:
        model.config._attn_implementation = ASKING  # for the masks; the modules do not use this setting
        for module in own:
            module.forward = partial(_asked, module, model.config, note)
        yield
    finally:
        model.config._attn_implementation = before
        for module in own:
            del module.forward


def _asked(
    module: nn.Module,
    config: Any,
    note: Note,
    hidden_states: torch.Tensor,
    *_: Any,
    attention_mask: Mask | None = None,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    if not isinstance(attention_mask, Mask):
        raise UnknownMaskError("its attention takes a mask that transformers does not make")
    heads = KINDS[type(module).__name__](module)
    layer: Any = getattr(module, "layer_idx", None)
    layer = module.layer_id if layer is None else layer
    note(int(layer), heads, attention_mask.seen(heads.heads, config))
    return torch.zeros_like(hidden_states), None
