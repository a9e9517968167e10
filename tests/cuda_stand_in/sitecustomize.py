"""Makes torch take the stand-in of stand_in.cpp for CUDA; Python imports this file by its name when it starts."""

import os

import torch

torch.ops.load_library(os.environ["DETGEN_CUDA_STAND_IN"])

NAME = "stand-in for CUDA"
cuda = torch.cuda
cuda._lazy_init = lambda: None
cuda.is_available = lambda: True
cuda.device_count = lambda: 1
cuda.current_device = lambda: 0
cuda.get_device_name = lambda device=None: NAME
cuda.synchronize = lambda device=None: None
cuda.mem_get_info = lambda device=None: (40 << 20, 4 << 30)  # its operators copy whole KV buffers
cuda.reset_peak_memory_stats = lambda device=None: None
cuda.max_memory_reserved = lambda device=None: 1 << 30
