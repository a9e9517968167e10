"""From prompts, parameters and token ids, the lines must be these: what `detgen audit` judges a run by.

Generates nothing: all tokens are known, so canonical passes read them like a prompt.
"""
