"""How CUDA's libraries are told to compute, before the first product, and what profiles say of them.

Two runs of equal profile must not be able to differ, so whatever decides which of a library's kernels runs is in it.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

import torch

# Read by torch and by cuBLAS when they first multiply. With workspaces of this size, on Hopper, products split no sum
# among blocks: vLLM's batch-invariant mode keeps cuBLAS by them.
_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
_HOPPER = (9, 0)
_CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12")


def settle(device: torch.device) -> None:
    """Forbid what makes a product's bits depend on its size: sums in 16 bits, TF32, and on Hopper sums in parts.

    A device that is named by its number becomes the thread's current one, which Triton launches on. Variables of the
    environment that the user has set stay.
    """
    if device.index is not None:
        torch.cuda.set_device(device)
    matmul: Any = torch.backends.cuda.matmul
    # Neither sums in 16 bits nor sums that are split among blocks.
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    matmul.allow_fp16_reduced_precision_reduction = (False, False)
    matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if torch.version.cuda is not None:
        torch.backends.cuda.preferred_blas_library("cublaslt")
    if torch.cuda.get_device_capability(device) >= _HOPPER:
        for name, value in _WORKSPACES.items():
            os.environ.setdefault(name, value)


def described(device: torch.device) -> dict[str, Any]:
    """The device, the versions of what computes on it, and how `settle` has left it."""
    matmul: Any = torch.backends.cuda.matmul
    return {
        "sums": {
            "tf32": bool(matmul.allow_tf32),
            "bfloat16": _reduced(matmul.allow_bf16_reduced_precision_reduction),
            "float16": _reduced(matmul.allow_fp16_reduced_precision_reduction),
        },
        "capability": "{}.{}".format(*torch.cuda.get_device_capability(device)),
        "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count,
        "toolkit": torch.version.cuda,
        "driver": _driver(),
        "cublas": _cublas(),
        "cudnn": torch.backends.cudnn.version(),
        "blas": str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2].lower(),
        "workspaces": {name: os.environ.get(name) for name in _WORKSPACES},
    }


def _reduced(allowed: bool | tuple[bool, bool]) -> bool:
    """Whether sums in 16 bits, or in parts, are allowed; torch has one answer, or one for each."""
    return any(allowed) if isinstance(allowed, tuple) else allowed


def _driver() -> int | None:
    """The version of CUDA that the driver has, 12080 for 12.8."""
    version = getattr(torch._C, "_cuda_getDriverVersion", None)
    return None if version is None else int(version())


def _cublas() -> str | None:
    """The version of cuBLAS; None if it did not come as a package."""
    for name in _CUBLAS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
