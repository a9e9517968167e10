"""What all kernels share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version

import torch
import triton
from triton import knobs
from triton.language import TRITON_MAX_TENSOR_NUMEL

# Whether kernels run in Triton's interpreter, where a program takes as long whatever the size of its tile is.
INTERPRETED: bool = knobs.runtime.interpret
_WHOLE = 4096  # the most entries of a side of a tile there

# Products and sums are fused only where a kernel says so: what a compiler would fuse changes with its version.
OPTIONS = {"enable_fp_fusion": False}


def above(size: int, least: int = 16) -> int:
    """The least power of two that holds `size`, and is at least `least`: the sizes that blocks have."""
    found: int = max(triton.next_power_of_2(size), least)
    return found


def tile(size: int, most: int) -> int:
    """The side of a tile over `size` entries, of at most `most`. No sum depends on it."""
    return min(above(size, 1), _WHOLE if INTERPRETED else most)


def tiles(
    height: int, width: int, most_rows: int, most_columns: int, deep: int = 1
) -> tuple[int, int, tuple[int, int]]:
    """Rows and columns of the tiles of a result, at most so many, and how many tiles there are.

    `deep` is how many numbers a kernel holds for each entry of a tile.
    """
    columns = tile(width, most_columns)
    rows = min(tile(height, most_rows), max(TRITON_MAX_TENSOR_NUMEL // (columns * deep), 1))
    return rows, columns, (triton.cdiv(height, rows), triton.cdiv(width, columns))


def on(device: torch.device) -> AbstractContextManager[object]:
    """Within it, what is launched runs on a device, which must be that of its tensors."""
    return torch.cuda.device(device) if device.type == "cuda" and torch.version.cuda is not None else nullcontext()


def send(host: torch.Tensor, to: torch.Tensor) -> None:
    """Copy from this machine's memory to a tensor of a device; nothing waits for it, and `host` may change at once."""
    if to.device.type == "cuda" and torch.version.cuda is not None:
        to.copy_(host.pin_memory(), non_blocking=True)  # torch keeps the pinned copy until the device has read it
    else:
        to.copy_(host)


def sent(host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor of a device, likewise."""
    to = torch.empty(host.shape, dtype=host.dtype, device=device)
    send(host, to)
    return to


def fetched(x: torch.Tensor) -> torch.Tensor:
    """The same in this machine's memory. Here the host waits for the device, and nowhere else in this package."""
    if x.device.type != "cuda" or torch.version.cuda is None:
        return x.cpu()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return host


def versions() -> dict[str, str]:
    """Of what makes machine code of kernels: Triton, and its assemblers, of which the kind of GPU decides the one."""
    tools = [getattr(knobs.nvidia, name, None) for name in ("ptxas", "ptxas_blackwell")]
    return {"triton": version("triton"), "ptxas": ", ".join(tool.version for tool in tools if tool is not None)}
