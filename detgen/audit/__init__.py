"""`detgen audit`: judges a finished or stopped run: its manifest, files, lines and tokens.

Generates nothing: all tokens are known, so canonical passes read them like a prompt.
"""
