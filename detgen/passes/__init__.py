"""From a transformers model to `run(windows) -> logits`: loading, rewriting, KV cache, passes, their cost.

Knows models, tokens, slots and positions; knows no requests, no text and no files except a model's own.
"""
