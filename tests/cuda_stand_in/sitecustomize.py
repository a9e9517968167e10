"""Makes torch take the stand-in of stand_in.cpp for CUDA; Python imports this file by its name when it starts."""

import ctypes
import os
from types import SimpleNamespace

import torch

torch.ops.load_library(os.environ["DETGEN_CUDA_STAND_IN"])

NAME = "stand-in for CUDA"
cuda = torch.cuda
cuda._lazy_init = lambda: None
cuda.is_available = lambda: True
cuda.device_count = lambda: 1
cuda.current_device = lambda: 0
cuda.set_device = lambda device: None
cuda.get_device_name = lambda device=None: NAME
cuda.get_device_capability = lambda device=None: (9, 0)
cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=1)
cuda.synchronize = lambda device=None: None
cuda.mem_get_info = lambda device=None: (40 << 20, 4 << 30)  # its operators copy whole KV buffers
cuda.reset_peak_memory_stats = lambda device=None: None
cuda.max_memory_reserved = lambda device=None: 1 << 30


def _on_host(x):
    """The same memory as a tensor of the CPU; anything else as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    storage = x.untyped_storage()
    memory = (ctypes.c_char * max(storage.nbytes(), 1)).from_address(storage.data_ptr())
    host = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=x.dtype).set_(host, x.storage_offset(), x.size(), x.stride())


def _interpret_in_place():
    """Let Triton's interpreter compute where the tensors are, instead of on copies that it would bring back."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime.interpreter import GridExecutor

    GridExecutor._init_args_hst = lambda self, args, named: (
        [_on_host(x) for x in args],
        {name: _on_host(x) for name, x in named.items()},
    )
    GridExecutor._restore_args_dev = lambda self, *args: None


_interpret_in_place()
