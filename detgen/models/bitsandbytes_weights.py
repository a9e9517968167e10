"""Weights quantized by bitsandbytes, in files or now: nf4 and fp4 in blocks, int8 in rows.

Stored weights are read without bitsandbytes. They may come from a stranger: errors are one line that names file and
tensor. Which numbers the weights are is stated in docs/numerics.md.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from detgen.errors import EngineError, QuantName
from detgen.kernels.c.quantizing import Quantized
from detgen.models.folders import Tensor
from detgen.models.stored import ALL, Place, Read, Weight, whole
from detgen.program.arrays import FLOAT32, array, floats, tensor
from detgen.program.operands import GROUP, Scales
from detgen.program.storage import Storage

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

QUANTS: frozenset[QuantName] = frozenset({"nf4", "int8"})  # quantizations by bitsandbytes

_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
CODES = {
    "nf4": np.array(_NF4, np.float32),
    "fp4": np.array(_FP4 + tuple(0 - x for x in _FP4), np.float32) / np.float32(12),
}

_BLOCK = 64  # weights per scale, if they are quantized here
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # block sizes of bitsandbytes
_NEAR = 1e-6  # tolerance for codes written by other versions of it
_LONGEST = 1 << 14  # bytes of a tensor's description
_LARGEST = 2**31 - 1  # of any dimension
_STATE = re.compile(r"(?P<weight>.+)\.quant_state\.bitsandbytes__(?P<kind>\w+)")
_SCALES = re.compile(r"(?P<module>.+)\.SCB")


def is_quantized(config: Any) -> bool:
    """Return whether bitsandbytes has quantized the weights, according to the configuration."""
    said = getattr(config, "quantization_config", None)
    kinds = ("load_in_4bit", "load_in_8bit")  # older configurations have only these
    return isinstance(said, dict) and (said.get("quant_method") == "bitsandbytes" or any(said.get(k) for k in kinds))


class Nested(NamedTuple):
    """Scales of blocks that are quantized themselves: a code times the scale of its block, plus a number."""

    codes: Place
    scales: Place
    block: int
    plus: float


class InBlocks(NamedTuple):
    """The place of a weight of nf4 or fp4; blocks run through all of it, row by row.

    Attributes:
        packed: two weights per byte, the first one in the high bits.
        shape: shape of the weight.
        codes: float32 [16].
        block: number of weights that share a scale.
        scales: scales of the blocks.
        nested: how the scales are quantized; None if they are not.
    """

    packed: Place
    shape: tuple[int, ...]
    codes: np.ndarray
    block: int
    scales: Place
    nested: Nested | None

    @property
    def dtype(self) -> np.dtype[Any]:
        """Number format in which it can be read."""
        return FLOAT32

    def read(self, rows: slice = ALL) -> Weight:
        """Return the weight, or some consecutive rows of it; errors as for `Place.read`."""
        outputs, inputs = self.shape
        if inputs % GROUP:  # a row may begin anywhere in a byte and in a block
            return whole(in_blocks(_plain(self.packed), self._scales(), self.shape, self.codes, self.block))[rows]
        first, last, _ = rows.indices(outputs)
        packed = _plain(self.packed, slice(first * inputs // 2, last * inputs // 2))
        skipped = first * inputs // GROUP
        return in_blocks(packed, self._scales(), (last - first, inputs), self.codes, self.block, skipped)

    def _scales(self) -> np.ndarray:
        """Return the scales of the blocks, float32."""
        scales = _plain(self.scales)
        if self.nested is None:
            return scales
        codes, of, block, plus = self.nested
        each = _plain(of).repeat(block)[: len(scales)]
        found: np.ndarray = _plain(codes)[scales] * each + np.float32(plus)
        return found


class InRows(NamedTuple):
    """The place of a weight of int8: whole numbers, and the largest magnitude of each row."""

    whole: Place
    largest: Place

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.whole.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Number format in which it can be read."""
        return FLOAT32

    def read(self, rows: slice = ALL) -> Weight:
        """Return the weight, or some consecutive rows of it; errors as for `Place.read`."""
        return in_rows(_plain(self.whole, rows), _plain(self.largest, rows))


def _plain(place: Place, rows: slice = ALL) -> np.ndarray:
    return whole(place.read(rows))


def in_blocks(
    packed: np.ndarray,
    scales: np.ndarray,
    shape: tuple[int, ...],
    codes: np.ndarray,
    block: int,
    skipped: int = 0,
) -> Weight:
    """Return a weight of nf4 or fp4, in float32 where rows are not whole groups.

    Args:
        packed: bytes of two weights each.
        scales: scales of all blocks.
        shape: shape of the weight.
        codes: float32 [16].
        block: weights that share a scale.
        skipped: number of groups in the blocks before the weight.
    """
    outputs, inputs = shape
    numbers = np.stack([packed.ravel() >> 4, packed.ravel() & 15], axis=1).ravel()[: outputs * inputs]
    if inputs % GROUP:
        each = scales.repeat(block)[: len(numbers)]
        made: np.ndarray = (codes[numbers] * each).reshape(shape)
        return made
    groups = scales.repeat(block // GROUP)[skipped : skipped + len(numbers) // GROUP]
    return Quantized(
        (numbers.view(np.int8) - np.int8(8)).reshape(shape),
        Scales(steps=groups.reshape(outputs, -1)),
        Storage.CODE,
        codes,
    )


def in_rows(numbers: np.ndarray, largest: np.ndarray) -> Weight:
    """Return a weight of int8, given as [outputs, inputs] and [outputs], in float32 where rows are not whole groups."""
    scales, inputs = (largest / np.float32(127))[:, None], numbers.shape[1]
    if inputs % GROUP:
        return floats(numbers) * scales
    return Quantized(numbers, Scales(steps=scales.repeat(inputs // GROUP, 1)), Storage.BYTE)


class Quantizing:
    """Gives weights as bitsandbytes quantizes them, of the linear layers that transformers has it quantize.

    Args:
        model: the model.
        read: gives its weights unquantized.
        quant: one of `QUANTS`.

    Raises:
        EngineError: if bitsandbytes is not installed.
    """

    def __init__(self, model: PreTrainedModel, read: Read, quant: QuantName) -> None:
        from torch import nn
        from transformers.pytorch_utils import Conv1D
        from transformers.quantizers.base import HfQuantizer
        from transformers.quantizers.quantizers_utils import should_convert_module

        try:
            import bitsandbytes  # noqa: F401
        except ImportError as e:
            raise EngineError("quantization needs bitsandbytes: pip install bitsandbytes") from e
        kept = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
        self._read, self._quant = read, quant
        self._transposed: dict[nn.Parameter, bool] = {}
        for name, module in model.named_modules():
            if type(module) in (nn.Linear, Conv1D) and should_convert_module(name, kept):
                self._transposed[module.weight] = type(module) is Conv1D

    def __call__(self, parameter: nn.Parameter, rows: slice = ALL) -> Weight:
        """Return the weight of a parameter, or some consecutive rows of it."""
        transposed = self._transposed.get(parameter)
        if transposed is None:
            return self._read(parameter, rows)
        if self._quant == "nf4" and parameter.shape[1] % _BLOCK:  # blocks continue from row to row
            weight = self._quantized(whole(self._read(parameter)), transposed=transposed)
            return weight.rows(rows) if isinstance(weight, Quantized) else weight[rows]
        return self._quantized(whole(self._read(parameter, rows)), transposed=transposed)

    def _quantized(self, numbers: np.ndarray, *, transposed: bool) -> Weight:
        from bitsandbytes import functional

        weight = tensor(np.ascontiguousarray(numbers.T if transposed else numbers))
        if self._quant == "int8":
            found, largest, _ = functional.int8_vectorwise_quant(weight.half())
            return in_rows(array(found), array(largest))
        packed, state = functional.quantize_4bit(weight, blocksize=_BLOCK, quant_type="nf4")
        return in_blocks(array(packed), array(state.absmax), tuple(weight.shape), CODES["nf4"], _BLOCK)


def places(folder: Path, tensors: Iterable[Tensor]) -> tuple[dict[str, InBlocks | InRows], list[Tensor]]:
    """Return the places of a folder's quantized weights, by name, and the tensors that belong to none of them.

    Raises:
        ValueError: names the file, the tensor and what is wrong.
    """
    left = {tensor.name: tensor for tensor in tensors}
    found: dict[str, InBlocks | InRows] = {}
    for name in list(left):
        if match := _STATE.fullmatch(name):
            found[match["weight"]] = _in_blocks(folder, left, left.pop(name), **match.groupdict())
        elif match := _SCALES.fullmatch(name):
            found[f"{match['module']}.weight"] = _in_rows(folder, left, left.pop(name), match["module"])
    return found, list(left.values())


def _in_blocks(folder: Path, left: dict[str, Tensor], said: Tensor, weight: str, kind: str) -> InBlocks:
    state = _state(folder, said)
    if kind not in CODES or state.get("quant_type") != kind:
        raise _wrong(said, f"quant_type must be nf4 or fp4, as in its name, and is {state.get('quant_type')!r:.40}")
    shape: Any = state.get("shape")
    if not _is_matrix(shape):
        raise _wrong(said, f"shape must be two whole numbers from 1 on, and is {shape!r:.40}")
    block = _block(said, state, "blocksize")
    entries = math.prod(shape)
    packed = _taken(left, weight, said)
    if packed.size != -(-entries // 2):
        raise _wrong(packed, f"{shape} weights take {-(-entries // 2):,} bytes, and it has {packed.size:,}")
    codes = whole(_numbers(folder, _taken(left, f"{weight}.quant_map", said), "F32", 16).read())
    if not np.allclose(codes, CODES[kind], rtol=0, atol=_NEAR):
        raise _wrong(said, f"{weight}.quant_map has other codes than {kind}")
    blocks, nested = -(-entries // block), None
    if f"{weight}.nested_absmax" in left:
        outer, plus = _block(said, state, "nested_blocksize"), state.get("nested_offset")
        if not isinstance(plus, int | float) or not abs(plus) < np.finfo(np.float32).max:
            raise _wrong(said, f"nested_offset must be a finite number, and is {plus!r:.40}")
        nested = Nested(
            _numbers(folder, _taken(left, f"{weight}.nested_quant_map", said), "F32", 256),
            _numbers(folder, _taken(left, f"{weight}.nested_absmax", said), "F32", -(-blocks // outer)),
            outer,
            float(plus),
        )
    scales = _numbers(folder, _taken(left, f"{weight}.absmax", said), "U8" if nested else "F32", blocks)
    place = Place(folder / packed.file, "U8", (packed.size,), packed.at)
    return InBlocks(place, tuple(shape), CODES[kind], block, scales, nested)


def _in_rows(folder: Path, left: dict[str, Tensor], said: Tensor, module: str) -> InRows:
    stored, order = _taken(left, f"{module}.weight", said), left.pop(f"{module}.weight_format", None)
    if order is not None and _plain(_numbers(folder, order, "U8", 1)).item():
        raise _wrong(order, "the weight is not stored row by row; save it with a newer bitsandbytes")
    shape = stored.shape
    if stored.dtype != "I8" or not _is_matrix(shape) or math.prod(shape) != stored.size:
        raise _wrong(stored, f"it must be a matrix of int8, and is {shape!r:.40} in {stored.dtype}")
    place = Place(folder / stored.file, "I8", tuple(shape), stored.at)
    return InRows(place, _numbers(folder, said, "F32", shape[0]))


def _state(folder: Path, said: Tensor) -> dict[str, Any]:
    """Return the description of a weight, a JSON object in a tensor."""
    if said.dtype != "U8" or said.size > _LONGEST:
        raise _wrong(said, f"it must be a text of at most {_LONGEST:,} bytes")
    try:
        state = json.loads(bytes(_plain(Place(folder / said.file, "U8", (said.size,), said.at))))
    except (ValueError, RecursionError):
        raise _wrong(said, "it is not JSON") from None
    if not isinstance(state, dict):
        raise _wrong(said, "it is not an object")
    return state


def _taken(left: dict[str, Tensor], name: str, said: Tensor) -> Tensor:
    if name not in left:
        raise _wrong(said, f"{name}, which belongs to it, is missing")
    return left.pop(name)


def _numbers(folder: Path, tensor: Tensor, kind: str, count: int) -> Place:
    if tensor.dtype != kind or tensor.size != count * (4 if kind == "F32" else 1):
        raise _wrong(tensor, f"it must be {count:,} numbers in {kind}, and is {tensor.size:,} bytes in {tensor.dtype}")
    return Place(folder / tensor.file, kind, (count,), tensor.at)


def _is_matrix(shape: Any) -> bool:
    whole_numbers = isinstance(shape, list) and all(type(n) is int and 1 <= n <= _LARGEST for n in shape)
    return whole_numbers and len(shape) == 2


def _block(said: Tensor, state: dict[str, Any], name: str) -> int:
    """Return the size of blocks."""
    size: Any = state.get(name)
    if type(size) is not int or size not in _BLOCKS:
        raise _wrong(said, f"{name} must be one of {', '.join(map(str, _BLOCKS))}, and is {size!r:.40}")
    return size


def _wrong(tensor: Tensor, what: str) -> ValueError:
    return ValueError(f"{tensor.file}: {tensor.name}: {what}")
