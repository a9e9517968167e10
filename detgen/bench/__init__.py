"""Measurements of detgen and of what people would use instead, on the user's own machine.

One run measures a grid of cells; a cell is one workload at one batch size, and each of its rows is one contender: a
peer and how it is run. Peers live in processes of their own that stay alive, so that the rows of a cell can take turns
(A B A B ...). Knows engines, models and files, neither the command line nor the screen.
"""
