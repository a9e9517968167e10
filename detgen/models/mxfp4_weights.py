"""Weights of experts in MXFP4, as in GPT-OSS checkpoints: blocks of 32 weights that share a scale.

A weight is two tensors, whose names end in `_blocks`, [experts, outputs, blocks, 16], and `_scales`. Files are not
trusted: faults are reported in one line that names file and tensor. docs/numerics.md defines the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from detgen.errors import EngineError
from detgen.kernels.c.quantizing import Quantized
from detgen.models.folders import Tensor
from detgen.models.gguf.kinds import MXFP4_IN_PAIRS
from detgen.models.stored import ALL, Place, whole
from detgen.program.arrays import FLOAT32
from detgen.program.operands import GROUP

_BYTES = GROUP // 2  # bytes of a block


def is_mxfp4(config: Any) -> bool:
    """Return whether a configuration declares weights in MXFP4."""
    said = getattr(config, "quantization_config", None)
    return isinstance(said, dict) and said.get("quant_method") == "mxfp4"


def are_there(tensors: Iterable[Tensor]) -> bool:
    """Return whether any of a folder's tensors is part of a weight in MXFP4."""
    return any(tensor.name.endswith("_blocks") for tensor in tensors)


class InMicro(NamedTuple):
    """The place of a weight in MXFP4."""

    blocks: Place
    scales: Place

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, [experts, outputs, inputs]."""
        return (*self.scales.shape[:-1], GROUP * self.scales.shape[-1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Number format that holds all of its values."""
        return FLOAT32

    @property
    def size(self) -> int:
        """Bytes of the weight."""
        return self.blocks.size + self.scales.size

    def read(self, rows: slice = ALL) -> Quantized:
        """Read the weight, or some consecutive experts of it.

        Raises:
            EngineError: as for `Place.read`.
        """
        scales = whole(self.scales.read(rows))
        blocks = np.concatenate([scales[..., None], whole(self.blocks.read(rows))], -1)
        try:
            found = MXFP4_IN_PAIRS.read(blocks.reshape(-1, blocks.shape[-1]))
        except ValueError as error:
            raise EngineError(f"{self.scales.path.name}: the tensor {self.scales.name} is damaged: {error}") from None
        outer = scales.shape[:-1]
        return found._replace(
            whole=found.whole.reshape(*outer, -1), scales=found.scales.each(lambda x: x.reshape(*outer, -1))
        )


def places(folder: Path, tensors: Iterable[Tensor]) -> tuple[dict[str, InMicro], list[Tensor]]:
    """Return the places of a folder's weights in MXFP4, by name, and the tensors of other weights.

    Raises:
        ValueError: names the file, the tensor and the fault.
    """
    left = {tensor.name: tensor for tensor in tensors}
    found: dict[str, InMicro] = {}
    for name in [name.removesuffix("_blocks") for name in left if name.endswith("_blocks")]:
        blocks, scales = left.pop(f"{name}_blocks"), left.pop(f"{name}_scales", None)
        if scales is None:
            raise ValueError(f"{blocks.file}: {blocks.name}: {name}_scales, which belongs to it, is missing")
        for tensor in (blocks, scales):
            if tensor.dtype != "U8" or not _is_shape(tensor.shape) or math.prod(tensor.shape) != tensor.size:
                raise ValueError(f"{tensor.file}: {tensor.name}: it must be bytes, and as large as its shape")
        if len(scales.shape) != 3 or blocks.shape != [*scales.shape, _BYTES]:
            raise ValueError(
                f"{blocks.file}: {blocks.name} has the shape {blocks.shape}, and its scales {scales.shape}"
            )
        found[name] = InMicro(
            *(Place(folder / of.file, "U8", tuple(of.shape), of.at, of.name) for of in (blocks, scales))
        )
    return found, list(left.values())


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and bool(shape) and all(type(n) is int and n >= 1 for n in shape)
