"""Functions of tensors: linear layers, attention, norms, activations, sampling, and the comparison of their bits.

Knows tensors only: no models, no requests, no files. Each fast kernel stands beside its plain reference.
"""
