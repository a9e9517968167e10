"""Derive a run's lines from prompts, parameters and token ids: the basis of `detgen audit`.

Nothing is generated: all tokens are known, so canonical passes read them like a prompt.
"""
