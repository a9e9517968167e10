"""Measures detgen and what people would use instead, on the user's own machine.

A run measures a grid of cells; a cell is one workload at one batch size, and each of its rows is one contender: a peer
and how it is run. Peers run in processes of their own that stay alive, so the rows of a cell can take turns (A B A B
...). Knows engines, models and files, but neither the command line nor the screen.
"""
