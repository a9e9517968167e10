"""What a run writes: outputs and acceptance log in input order, journal, manifest.

A finished sample goes to the journal first; from there it is copied to `outputs.jsonl` and `acceptance.jsonl` when its
turn comes. Hence a run can be killed at any moment: resuming needs the journal only and rebuilds both files from it,
byte for byte.
"""

from __future__ import annotations

from detgen.errors import OutputError
from detgen.outputs.directory import open_plain
from detgen.outputs.entries import Entry, Gap, make_entry, read_entries
from detgen.outputs.failures import first_errors
from detgen.outputs.folder import OutputFolder
from detgen.outputs.holding import FolderLostError
from detgen.outputs.identity import changes, differences, model_stamp
from detgen.outputs.lines import dump, echoed
from detgen.outputs.manifest_reading import parse_manifest, read_manifest, read_manifest_of_texts, sampling_params
from detgen.outputs.writer import Totals, Writer

__all__ = [
    "Entry",
    "FolderLostError",
    "Gap",
    "OutputError",
    "OutputFolder",
    "Totals",
    "Writer",
    "changes",
    "differences",
    "dump",
    "echoed",
    "first_errors",
    "make_entry",
    "model_stamp",
    "open_plain",
    "parse_manifest",
    "read_entries",
    "read_manifest",
    "read_manifest_of_texts",
    "sampling_params",
]
