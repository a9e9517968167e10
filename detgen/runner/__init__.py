"""Runs passes: KV cache, block manager and prefix index, model runner, and what prepares a model for it.

Knows tokens, slots and positions; knows no requests, no text and no files.
"""
