"""What a model is: its files and weights, its family, its description, and the programs that are built of it.

Knows no tokens of requests and no KV cache.
"""
