"""Weights that are read from their file when needed, one parameter at a time.

The parameters of such a model have shapes but no memory: they belong to a skeleton, or are on torch's `meta` device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from detgen.errors import EngineError
from detgen.kernels.c.quantizing import Quantized, cat, in_turns, rows_of
from detgen.models.gguf.changes import CHANGES
from detgen.models.gguf.kinds import NAMED, Kind
from detgen.models.skeleton import Parameter
from detgen.program.arrays import BFLOAT16, FLOAT16, FLOAT32, array, floats, placeholder, tensor, torch_dtype

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

Weight = np.ndarray | Quantized
ALL = slice(None)

_PLAIN = {"F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16, "U8": np.dtype(np.uint8), "I8": np.dtype(np.int8)}
_KINDS = NAMED | {name: Kind(name, 1, 1) for name in ("U8", "I8")}


class Read(Protocol):
    """Reads weights."""

    def __call__(self, parameter: nn.Parameter, rows: slice = ALL) -> Weight:
        """Return the weight of a parameter, or some consecutive rows of it."""


def held(parameter: Any, rows: slice = ALL) -> np.ndarray:
    """Return the weight of a parameter that has one, else a placeholder."""
    if isinstance(parameter, Parameter):
        return placeholder(parameter.shape, parameter.dtype)[rows]
    return array(parameter)[rows]


def whole(weight: Weight) -> np.ndarray:
    """Return a weight as an array, in float32 if it is kept in few bits."""
    return weight.weight() if isinstance(weight, Quantized) else weight


def turned(module: nn.Module) -> bool:
    """Return whether a module has transposed weights, [..., inputs, outputs]: GPT-2's, and experts of some families."""
    return type(module).__name__ in ("Conv1D", "Llama4TextExperts") or bool(getattr(module, "is_transposed", False))


def taken(module: nn.Module, weight: Weight) -> torch.Tensor:
    """Return a weight as a module takes it; in few bits it stays [..., outputs, inputs]."""
    other = isinstance(weight, Quantized) and turned(module)
    return tensor(np.ascontiguousarray(whole(weight).swapaxes(-1, -2)) if other else whole(weight))


class Lying(Protocol):
    """The place of a weight."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as stored."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Number format in which it can be read whole."""
        ...

    def read(self, rows: slice = ALL) -> Weight:
        """Return the weight, or some consecutive rows of it."""
        ...


class Place(NamedTuple):
    """The place of a weight in a file.

    Attributes:
        path: path of the file.
        kind: number format, one of `_KINDS`.
        shape: shape as stored.
        at: offset of the first byte.
        name: its name in the file.
        order: new order of its rows; None leaves them.
        columns: new order of its columns; None leaves them.
        change: which of `CHANGES` turns float32 numbers, in that order, into what the model takes; None for none.
    """

    path: Path
    kind: str
    shape: tuple[int, ...]
    at: int
    name: str = ""
    order: np.ndarray | None = None
    columns: np.ndarray | None = None
    change: str | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """Number format in which it can be read whole."""
        found: np.dtype[Any] = _PLAIN.get(self.kind, FLOAT32)
        return found

    def read(self, rows: slice = ALL) -> Weight:
        """Return the weight, or some consecutive rows of it.

        Raises:
            EngineError: if the file has been truncated, or a scale is not finite.
        """
        if any(one is not None for one in (self.order, self.columns, self.change)):
            weight = self._changed(self._made(self._bytes()))
            return weight.rows(rows) if isinstance(weight, Quantized) else weight[rows]
        first, last, _ = rows.indices(self.shape[0])
        row = self.size // self.shape[0]
        part = self._replace(shape=(last - first, *self.shape[1:]), at=self.at + first * row)
        return part._made(part._bytes())

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        kind = _KINDS[self.kind]
        return math.prod(self.shape) // kind.entries * kind.size

    def _bytes(self) -> np.ndarray:
        """Return the stored bytes, [blocks, bytes of a block]."""
        left = data = np.empty(self.size, np.uint8)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.at)
            while len(left):
                count = file.readinto(left.data)
                if not count:
                    raise EngineError(f"{self.path.name} has become shorter since it was looked at")
                left = left[count:]
        return data.reshape(-1, _KINDS[self.kind].size)

    def _changed(self, weight: Weight) -> Weight:
        """Return the weight in the model's order, as the model takes it."""
        if self.order is not None:
            weight = weight.rows(self.order) if isinstance(weight, Quantized) else weight[self.order]
        if self.columns is not None:
            weight = weight.columns(self.columns) if isinstance(weight, Quantized) else weight[..., self.columns]
        if self.change is not None:
            weight = np.ascontiguousarray(CHANGES[self.change](floats(whole(weight))))
        return weight

    def _made(self, data: np.ndarray) -> Weight:
        """Make the weight from bytes, [blocks, bytes of a block]."""
        kind = _KINDS[self.kind]
        if kind.weights is None:
            plain: np.ndarray = data.reshape(-1).view(_PLAIN[self.kind]).reshape(self.shape)
            return plain
        try:
            found = kind.read(data)
        except ValueError as error:
            raise EngineError(f"{self.path.name}: the tensor {self.name} is damaged: {error}") from None
        rows = self.shape[:-1]
        scales = found.scales.each(lambda x: x.reshape(*rows, -1))
        made = found._replace(whole=found.whole.reshape(self.shape), scales=scales)
        return made if rows else made.weight()


class SideBySide(NamedTuple):
    """The place of experts' weights whose parts (gates, and what they multiply) are one tensor each for all experts.

    Attributes:
        parts: [experts, outputs, inputs] each; of biases, [experts, outputs].
        in_turns: whether the outputs of the parts alternate, instead of following part by part.
        turned: whether the model takes numbers as [experts, inputs, outputs]; few bits stay as they are.
    """

    parts: tuple[Place, ...]
    in_turns: bool = False
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """[experts, outputs of all parts, inputs]; of biases, [experts, outputs of all parts]."""
        experts, _, *inputs = self.parts[0].shape
        return experts, sum(part.shape[1] for part in self.parts), *inputs

    @property
    def dtype(self) -> np.dtype[Any]:
        """Number format in which it can be read whole."""
        return _one_of([part.dtype for part in self.parts])

    @property
    def size(self) -> int:
        """Bytes that they take."""
        return sum(part.size for part in self.parts)

    def read(self, rows: slice = ALL) -> Weight:
        """Return the weights of all experts, or of some consecutive ones; errors as for `Place.read`."""
        parts = [part.read(rows) for part in self.parts]
        weight = in_turns(parts) if self.in_turns else cat(parts, dim=1)
        return weight.swapaxes(1, 2) if self.turned and isinstance(weight, np.ndarray) else weight


class Below(NamedTuple):
    """The place of a weight whose rows are in several tensors.

    Attributes:
        parts: [outputs, inputs] each.
        order: new order of all their rows; None leaves them.
    """

    parts: tuple[Place, ...]
    order: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[outputs of all parts, inputs]."""
        return sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Number format in which it can be read whole."""
        return _one_of([part.dtype for part in self.parts])

    @property
    def size(self) -> int:
        """Bytes that they take."""
        return sum(part.size for part in self.parts)

    def read(self, rows: slice = ALL) -> Weight:
        """Return the weight, or some consecutive rows of it; errors as for `Place.read`."""
        weight = cat([part.read() for part in self.parts], dim=0)
        found = rows_of(weight, rows if self.order is None else self.order[rows])
        assert isinstance(found, Weight), "that of arrays"
        return found


class Heads(NamedTuple):
    """The place of a weight that turns the short vector of a token into keys and values, head by head.

    Attributes:
        parts: keys, [heads, inputs, outputs], as queries take them, and values, [heads, outputs, inputs].
    """

    parts: tuple[Place, Place]

    @property
    def shape(self) -> tuple[int, ...]:
        """[heads * outputs of both, inputs]."""
        (heads, inputs, keys), (_, values, _) = (part.shape for part in self.parts)
        return heads * (keys + values), inputs

    @property
    def dtype(self) -> np.dtype[Any]:
        """Number format in which it can be read whole."""
        return _one_of([part.dtype for part in self.parts])

    @property
    def size(self) -> int:
        """Bytes that they take."""
        return sum(part.size for part in self.parts)

    def read(self, rows: slice = ALL) -> np.ndarray:
        """The weight, or some consecutive rows of it; errors as `Place.read`."""
        return self.joined(*(part.read() for part in self.parts))[rows]

    def joined(self, *parts: Weight) -> np.ndarray:
        """Make the weight of what the parts have."""
        kind = _one_of([whole(part).dtype for part in parts])
        keys, values = (whole(part).astype(kind, copy=False) for part in parts)
        return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(self.shape)


class Stack(NamedTuple):
    """The places of experts' weights: part after part for each expert, expert after expert.

    Attributes:
        parts: parts of each expert, all of the same shapes.
    """

    parts: tuple[tuple[Lying, ...], ...]

    @classmethod
    def of(cls, parts: Sequence[Sequence[Lying | None]]) -> Stack | None:
        """Combine the parts; None if one is missing or differs in shape, or they are not matrices."""
        there = tuple(tuple(part for part in expert if part is not None) for expert in parts)
        shapes = {tuple(part.shape for part in expert) for expert in there}
        if len(shapes) > 1 or any(len(expert) != len(of) for expert, of in zip(there, parts, strict=True)):
            return None
        matrices = all(len(shape) == 2 and shape[1] == one[0][1] for one in shapes for shape in one)
        return cls(there) if matrices else None

    @property
    def shape(self) -> tuple[int, ...]:
        """[experts, outputs, inputs]."""
        first = self.parts[0]
        return len(self.parts), sum(part.shape[0] for part in first), first[0].shape[1]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Number format in which they can be read: their own if all have the same."""
        return _one_of([part.dtype for expert in self.parts for part in expert])

    def read(self, rows: slice = ALL) -> np.ndarray:
        """Return the weights of all experts, or of some consecutive ones; errors as for `Place.read`."""
        experts = self.parts[rows]
        made = np.empty((len(experts), *self.shape[1:]), self.dtype)
        for expert, to in zip(experts, made, strict=True):
            np.concatenate([whole(part.read()).astype(made.dtype, copy=False) for part in expert], out=to)
        return made


class Reader:
    """Reads the weights of a model.

    Args:
        model: its parameters have no memory.
        places: places of its parameters, by name.
        dtype: number format of unquantized numbers; None leaves it.

    Attributes:
        places: as above.
    """

    def __init__(self, model: nn.Module, places: Mapping[str, Lying], dtype: np.dtype[Any] | None = None) -> None:
        self.places = places
        self._places = {parameter: places[name] for name, parameter in model.named_parameters()}
        self._dtype = dtype

    @property
    def size(self) -> int:
        """Bytes of all weights as read."""
        return sum(
            size
            if (size := getattr(place, "size", None)) and (self._dtype is None or not _is_plain(place))
            else parameter.numel() * place.dtype.itemsize
            for parameter, place in self._places.items()
        )

    def __call__(self, parameter: nn.Parameter, rows: slice = ALL) -> Weight:
        """Return the weight of a parameter, or some consecutive rows of it."""
        place = self._places[parameter]
        if isinstance(place, Heads):
            return place.joined(*self._parts(place))[rows]
        return self._converted(place.read(rows), place)

    def by_head(self, parameter: nn.Parameter) -> tuple[Weight, Weight] | None:
        """The keys and the values of a weight that is kept as `Heads`, as these are; None for another weight."""
        place = self._places[parameter]
        return self._parts(place) if isinstance(place, Heads) else None

    def _parts(self, place: Heads) -> tuple[Weight, Weight]:
        keys, values = (self._converted(part.read(), part) for part in place.parts)
        return keys, values

    def _converted(self, weight: Weight, place: Lying) -> Weight:
        """Return unquantized numbers in the number format of the reader."""
        if self._dtype is None or isinstance(weight, Quantized) or not _is_plain(place):
            return weight
        with np.errstate(over="ignore"):
            return weight.astype(self._dtype, copy=False)


def _one_of(kinds: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    """Return the number format of all parts; float32 if they differ."""
    return kinds[0] if len({*kinds}) == 1 else FLOAT32


def _is_plain(place: Lying) -> bool:
    """Return whether a file has the numbers themselves, unquantized."""
    parts = [part for expert in place.parts for part in expert] if isinstance(place, Stack) else [place]
    return all(isinstance(part, Place | SideBySide | Below | Heads) for part in parts)


def damaged(model: nn.Module, read: Read) -> str | None:
    """Return the file's name of the first tensor with an infinite or NaN entry; None if there is none."""
    for name, parameter in model.named_parameters():
        if not np.isfinite(floats(whole(read(parameter)))).all():
            place = read.places[name] if isinstance(read, Reader) else None
            return place.name if isinstance(place, Place) else name
    return None


def fill(model: Any, read: Read, dtype: np.dtype[Any] | None = None) -> None:
    """Load a model's weights into memory, in a number format; None keeps the formats in which they are read."""
    from torch import nn

    wanted = None if dtype is None else torch_dtype(dtype)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in made:
                made[parameter] = nn.Parameter(taken(module, read(parameter)).to(wanted), requires_grad=False)
            setattr(module, name, made[parameter])


def without_weights(config: Any, dtype: np.dtype[Any]) -> PreTrainedModel:
    """Make a decoder with parameters on `meta` in that number format; its buffers are in memory, in their own.

    Scalar factors of embeddings are rounded to it, as transformers does.
    """
    import torch
    from accelerate import init_empty_weights

    from detgen.models.wrappers import auto_class

    # In 16 bits, some would compute buffers of angles by frequencies in 16 bits.
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch_dtype(dtype))
    for buffer in model.buffers():
        if buffer.is_floating_point() and not buffer.ndim:
            buffer.data = buffer.data.to(torch_dtype(dtype))
    model.tie_weights()  # which making the parameters empty undoes
    return model
