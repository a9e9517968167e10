"""What the machine is: the device, its driver and clocks, versions, packages that are there or lacking."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from typing import Any

from gpu.notebook import Asked, Notebook

_PACKAGES: tuple[str, ...] = (
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "numpy",
    "safetensors",
    "tokenizers",
    "typer",
    "rich",
)
_PACKAGES += ("psutil", "pytest", "hypothesis", "datasets", "bitsandbytes", "gguf", "zstandard", "vllm", "sglang")
_SMI = "name,driver_version,pstate,temperature.gpu,power.draw,power.limit"
_SMI += ",clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,memory.total,memory.used"
_VARIABLES = ("CUBLAS", "CUDA", "NVIDIA", "OMP_", "PYTORCH", "TORCH", "TRITON")
_PROPERTIES: tuple[str, ...] = ("name", "multi_processor_count", "total_memory", "L2_cache_size", "major", "minor")
_PROPERTIES += ("shared_memory_per_block_optin", "regs_per_multiprocessor", "clock_rate", "memory_clock_rate")


def measure(book: Notebook, asked: Asked) -> None:
    """Everything, what needs no library first."""
    host = {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()}
    book.note("host", host, "host: " + ", ".join(f"{name} {value}" for name, value in host.items()))
    versions = {name: _version(name) for name in _PACKAGES}
    book.note("packages", versions, "packages: " + ", ".join(f"{n} {v}" for n, v in versions.items() if v))
    book.say("lacking: " + (", ".join(name for name, found in versions.items() if not found) or "nothing"))
    book.note("variables", {n: v for n, v in sorted(os.environ.items()) if n.startswith(_VARIABLES)})
    with book.part("nvidia-smi"):
        if (smi := shutil.which("nvidia-smi")) is not None and not asked.tiny:
            book.note("nvidia-smi", _smi(smi))
    with book.part("torch"):
        _torch(book, asked)
    with book.part("detgen"):
        _detgen(book, asked)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _smi(command: str) -> dict[str, str]:
    """Clocks and the like, by nvidia-smi; what it says if it does not know them."""
    query = [command, f"--query-gpu={_SMI}", "--format=csv,noheader"]
    run = subprocess.run(query, capture_output=True, text=True, timeout=20)
    values = [value.strip() for value in run.stdout.partition("\n")[0].split(",")]
    names = _SMI.split(",")
    if run.returncode or len(values) != len(names):
        return {"failed": (run.stdout + run.stderr)[-500:]}
    return dict(zip(names, values, strict=True))


def _torch(book: Notebook, asked: Asked) -> None:
    import torch

    found: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
    }
    if not asked.tiny:
        properties = torch.cuda.get_device_properties(0)
        found |= {name: getattr(properties, name) for name in _PROPERTIES if hasattr(properties, name)}
        found["cudnn"] = torch.backends.cudnn.version()
    book.note("torch", found, "torch: " + ", ".join(f"{name} {value}" for name, value in found.items()))


def _detgen(book: Notebook, asked: Asked) -> None:
    """What detgen says of the device in its profile, and whether its C code is there."""
    from detgen import __version__
    from detgen.kernels.c.library import best_build

    found: dict[str, Any] = {"version": __version__, "native": best_build() is not None}
    book.note("detgen", found, "detgen: " + ", ".join(f"{name} {value}" for name, value in found.items()))
