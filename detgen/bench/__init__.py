"""Measurements of detgen beside what people would use instead, on the user's own machine.

One run measures a grid of cells; a cell is one workload at one batch size, and each of its rows is one setting of one
peer. Peers live in child processes that stay alive, so that the rows of a cell can take turns (A B A B ...). Knows
engines and files, no command line.
"""

from detgen.bench.interface import BenchConfig
from detgen.bench.rows import Row
from detgen.bench.session import bench
from detgen.errors import BenchError

__all__ = ["BenchConfig", "BenchError", "Row", "bench"]
