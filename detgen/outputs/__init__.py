"""What a run writes: outputs and acceptance log in input order, its store of finished samples, its manifest.

A finished sample goes to the store first; in its turn, its lines are written to `outputs.jsonl` and `acceptance.jsonl`.
So a run can be killed at any moment: resuming takes the finished samples from the store.
"""

from __future__ import annotations

from detgen.errors import OutputError
from detgen.outputs.directory import FolderLostError, open_plain
from detgen.outputs.finished import first_errors
from detgen.outputs.folder import OutputFolder
from detgen.outputs.folder_store import FolderStore
from detgen.outputs.identity import differences, differences_in_kind, model_stamp, other_arithmetic
from detgen.outputs.lines import dump, echoed
from detgen.outputs.manifest_reading import parse_manifest, read_manifest, read_manifest_of_texts, sampling_params
from detgen.outputs.samples import KeptSamples, Samples
from detgen.outputs.shared_store import SharedStore
from detgen.outputs.store import Store
from detgen.outputs.totals import Answers, Totals
from detgen.outputs.writer import Writer

__all__ = [
    "Answers",
    "FolderLostError",
    "FolderStore",
    "KeptSamples",
    "OutputError",
    "OutputFolder",
    "Samples",
    "SharedStore",
    "Store",
    "Totals",
    "Writer",
    "differences",
    "differences_in_kind",
    "dump",
    "echoed",
    "first_errors",
    "model_stamp",
    "open_plain",
    "other_arithmetic",
    "parse_manifest",
    "read_manifest",
    "read_manifest_of_texts",
    "sampling_params",
]
