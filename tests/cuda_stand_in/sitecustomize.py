"""Makes torch take the stand-in of stand_in.cpp for CUDA; Python imports this file by its name when it starts."""

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
