"""Models: their files and weights, families, descriptions, and the programs built from them.

Nothing here knows about tokens of requests or the KV cache.
"""
