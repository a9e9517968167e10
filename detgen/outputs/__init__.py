"""What a run writes: outputs and acceptance log in input order, journal, manifest.

A finished sample goes to the journal first; from there it is copied to `outputs.jsonl` and `acceptance.jsonl` when its
turn comes. So whatever moment a run is killed at, the journal is all that resuming needs, and both files can be made
again from it, byte by byte.
"""

from __future__ import annotations

from detgen.errors import OutputError
from detgen.outputs.folder import OutputFolder
from detgen.outputs.identity import differences, model_stamp
from detgen.outputs.journal import read_entries
from detgen.outputs.lines import dump
from detgen.outputs.writer import Digests, Totals, Writer

__all__ = [
    "Digests",
    "OutputError",
    "OutputFolder",
    "Totals",
    "Writer",
    "differences",
    "dump",
    "model_stamp",
    "read_entries",
]
