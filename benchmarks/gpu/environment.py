"""A description of the machine: the device with its clocks, versions of packages, variables that matter."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess

from gpu.notebook import Asked, Notebook

_PACKAGES = ("torch", "triton", "transformers", "numpy", "typer", "rich", "psutil", "pytest", "hypothesis", "vllm")
_SMI = "name,driver_version,temperature.gpu,power.draw,power.limit,clocks.sm,clocks.max.sm,clocks.mem,memory.total"
_VARIABLES = ("CUBLAS", "CUDA", "NVIDIA", "OMP_", "PYTORCH", "TORCH", "TRITON")


def measure(book: Notebook, asked: Asked) -> None:
    """Record everything, first what needs no library."""
    host = {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()}
    book.note("host", host, "host: " + ", ".join(f"{name} {value}" for name, value in host.items()))
    versions = {name: _version(name) for name in _PACKAGES}
    book.note("packages", versions, "packages: " + ", ".join(f"{n} {v or 'lacking'}" for n, v in versions.items()))
    book.note("variables", {n: v for n, v in sorted(os.environ.items()) if n.startswith(_VARIABLES)})
    if asked.tiny:
        return
    with book.part("nvidia-smi"):
        query = ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader"]
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
        book.note("nvidia-smi", dict(zip(_SMI.split(","), said.split(", "), strict=False)), said)
    with book.part("torch"):
        import torch

        found = str(torch.cuda.get_device_properties(0))
        book.note("torch", {"cuda": torch.version.cuda, "device": found}, f"CUDA {torch.version.cuda}, {found}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
