"""Tensor functions of the canonical pass: linear layers, attention, sampling, and the probe that compares their bits.

This package knows tensors only: no requests, no files, no models by name.
"""
