"""The back ends and what they share: input batches, attention, sampling, log-probabilities.

`c` and `triton` run programs, `generic` runs transformers' own forward. Knows tensors; no models, requests or files.
"""
