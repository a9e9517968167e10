"""Kernels for CUDA in Triton: one per file, each with a promise and a plain PyTorch reference.

Every kernel gives a row the same bits whatever the other rows of its launch are: the order of each sum is fixed by
constants of the model's shape, never by the number of rows, and no two programs add to the same place. Importing a file
of this package imports Triton, which only CUDA builds of torch include.
"""
