"""`detgen verify-determinism --against`: judges a run that is there, its manifest, files, lines and tokens.

Generates nothing: all tokens are known, so they are read by canonical passes like a prompt.
"""
