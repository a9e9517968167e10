"""What is said of CUDA's devices, as far as that can be seen where there is none."""

from __future__ import annotations

import pytest
import torch

from detgen.passes import cuda_numerics


@pytest.mark.parametrize(("name", "made"), [("cuda:1", ["cuda:1"]), ("cuda", [])])
def test_the_device_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch, name: str, made: list[str]) -> None:
    """Triton launches there; torch refuses to be told of a device without a number."""
    current: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(str(device)))
    cuda_numerics.settle(torch.device(name))
    assert current == made


def test_what_compiles_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12080, raising=False)
    found = cuda_numerics.described(torch.device("cuda:0"))
    assert found == {"capability": "9.0", "toolkit": torch.version.cuda, "driver": 12080}
