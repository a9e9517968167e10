"""The arithmetic `detgen-2`: every sum of a pass in a defined order, with the same bits on every processor.

docs/numerics.md defines the orders; the C files here and `reference` implement them.
"""
