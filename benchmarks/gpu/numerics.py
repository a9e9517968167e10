"""How the vendor's libraries compute in stages that leave that to detgen."""

from __future__ import annotations

import torch

from detgen.passes import cuda_numerics
from gpu.notebook import Asked


def settle(asked: Asked) -> torch.device:
    """The device, its libraries told what detgen tells them: before their first product, as some is read once."""
    device = torch.device("cpu" if asked.tiny else "cuda:0")
    if device.type == "cuda":
        cuda_numerics.settle(device)
    return device
