"""What CUDA's libraries are told, as far as that can be seen where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from detgen.passes import cuda_numerics

DEVICE = torch.device("cuda:0")
VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All settings stay as they were."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what is set is taken back
        monkeypatch.delenv(name)
    matmul = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction", "allow_tf32")
    before = {name: getattr(matmul, name) for name in names}
    tf32 = torch.backends.cudnn.allow_tf32
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    yield
    for name, value in before.items():
        setattr(matmul, name, value)
    torch.backends.cudnn.allow_tf32 = tf32


@pytest.mark.parametrize(("capability", "told"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((12, 0), True)])
def test_what_is_told(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], told: bool) -> None:
    """Nothing is added up in 16 bits anywhere; workspaces are small from Hopper on."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    cuda_numerics.settle(DEVICE)
    matmul = torch.backends.cuda.matmul
    assert not matmul.allow_bf16_reduced_precision_reduction
    assert not matmul.allow_fp16_reduced_precision_reduction
    assert not matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
    assert [os.environ.get(name) for name in VARIABLES] == ([":16:8", "1"] if told else [None, None])
    found = cuda_numerics.described(DEVICE)
    assert found["capability"] == "{}.{}".format(*capability)
    assert found["multiprocessors"] == 132
    assert found["sums"] == {"tf32": False, "bfloat16": False, "float16": False}
    matmul.allow_tf32 = matmul.allow_fp16_reduced_precision_reduction = True
    assert cuda_numerics.described(DEVICE)["sums"] == {"tf32": True, "bfloat16": False, "float16": True}
    assert found["workspaces"] == dict(zip(VARIABLES, [":16:8", "1"] if told else [None, None], strict=True))


@pytest.mark.parametrize(("name", "made"), [("cuda:1", ["cuda:1"]), ("cuda", [])])
def test_the_device_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch, name: str, made: list[str]) -> None:
    """Triton launches there; torch refuses to be told of a device without a number."""
    current: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(str(device)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    cuda_numerics.settle(torch.device(name))
    assert current == made


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cuda_numerics.settle(DEVICE)
    assert cuda_numerics.described(DEVICE)["workspaces"] == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUBLASLT_WORKSPACE_SIZE": "1",
    }
