"""Functions of tensors: linear layers, attention, norms, activations, sampling, and the comparison of bits.

Knows tensors; knows no models, no requests, no files. Each fast kernel comes with a plain reference.
"""
