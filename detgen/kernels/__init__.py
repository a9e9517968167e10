"""The back ends, and what they run on: input batches, attention, sampling, log-probabilities.

`c` and `triton` run programs, `generic` transformers' own forward. Knows tensors; no models, no requests, no files.
"""
