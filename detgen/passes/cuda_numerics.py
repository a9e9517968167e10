"""Which device of CUDA computes, and what profiles say of it.

Two runs of equal profile must not be able to differ, so whatever compiles the kernels is in it.
"""

from __future__ import annotations

from typing import Any

import torch


def settle(device: torch.device) -> None:
    """Make a device that is named by its number the thread's current one, which Triton launches on."""
    if device.index is not None:
        torch.cuda.set_device(device)


def described(device: torch.device) -> dict[str, Any]:
    """The device and what compiles for it."""
    return {
        "capability": "{}.{}".format(*torch.cuda.get_device_capability(device)),
        "toolkit": torch.version.cuda,
        "driver": _driver(),
    }


def _driver() -> int | None:
    """The version of CUDA that the driver has, 12080 for 12.8."""
    version = getattr(torch._C, "_cuda_getDriverVersion", None)
    return None if version is None else int(version())
