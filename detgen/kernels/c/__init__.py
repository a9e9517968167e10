"""The arithmetic `detgen-2`: every sum of a pass in a stated order, the same bits on every processor.

docs/numerics.md states the orders; the C files here and `reference` are its mirrors.
"""
