"""The common part of all kernel launches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version

import numpy as np
import torch
import triton
from triton import knobs
from triton.language import TRITON_MAX_TENSOR_NUMEL

# Whether kernels run in Triton's interpreter, where a program takes the same time whatever the size of its tile.
INTERPRETED: bool = knobs.runtime.interpret
_WHOLE = 4096  # the most entries of a side of a tile in the interpreter

# Products and sums are fused only where a kernel says so: compilers' choices change with their versions.
OPTIONS = {"enable_fp_fusion": False}


def above(size: int, least: int = 16) -> int:
    """Return the least power of two that is at least `size` and `least`, as block sizes must be."""
    found: int = max(triton.next_power_of_2(size), least)
    return found


def tile(size: int, most: int) -> int:
    """Return the side of a tile over `size` entries, `most` at most. No sum depends on it."""
    return min(above(size, 1), _WHOLE if INTERPRETED else most)


def tiles(
    height: int, width: int, most_rows: int, most_columns: int, deep: int = 1
) -> tuple[int, int, tuple[int, int]]:
    """Return the rows and columns of a result's tiles, bounded, and the number of tiles along each axis.

    `deep` is how many numbers a kernel holds per entry of a tile.
    """
    columns = tile(width, most_columns)
    rows = min(tile(height, most_rows), max(TRITON_MAX_TENSOR_NUMEL // (columns * deep), 1))
    return rows, columns, (triton.cdiv(height, rows), triton.cdiv(width, columns))


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launch on a device inside the block; it must be the device of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" and torch.version.cuda is not None else nullcontext()


def send(host: torch.Tensor, to: torch.Tensor) -> None:
    """Copy from host memory to a device tensor without waiting; `host` may be changed at once."""
    if to.device.type == "cuda" and torch.version.cuda is not None:
        to.copy_(host.pin_memory(), non_blocking=True)  # torch keeps the pinned copy until the device has read it
    else:
        to.copy_(host)


def sent(host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a tensor on a device, copied as by `send`."""
    to = torch.empty(host.shape, dtype=host.dtype, device=device)
    send(host, to)
    return to


def sent_together(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[torch.Tensor]:
    """Return int64 arrays on a device, copied at once as by `send`; each is aligned, for which kernels are compiled."""
    parts = [np.append(x, np.zeros(x.size % 2, np.int64)) for x in arrays]
    whole = sent(torch.from_numpy(np.concatenate(parts)), device).split([*map(len, parts)])
    return [part[: x.size].view(x.shape) for part, x in zip(whole, arrays, strict=True)]


def fetched(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor in host memory. This is the only place in this package where the host waits for the device."""
    if x.device.type != "cuda" or torch.version.cuda is None:
        return x.cpu()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return host


def versions() -> dict[str, str]:
    """Return the versions of what compiles kernels: Triton and its assemblers, one of which the kind of GPU selects."""
    tools = [getattr(knobs.nvidia, name, None) for name in ("ptxas", "ptxas_blackwell")]
    return {"triton": version("triton"), "ptxas": ", ".join(tool.version for tool in tools if tool is not None)}
