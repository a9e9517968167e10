"""The training text of the demo models: the standard library next to the interpreter.

The text is split in three: library modules, their tests (sampled less often),
and the held-out modules, which no model sees in training. The tests of a
held-out module are left out altogether, since they quote its names and text.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

HELD_OUT = (
    "bisect",
    "calendar",
    "cmd",
    "colorsys",
    "csv",
    "filecmp",
    "fnmatch",
    "fractions",
    "getopt",
    "glob",
    "graphlib",
    "heapq",
    "linecache",
    "netrc",
    "pprint",
    "queue",
    "quopri",
    "reprlib",
    "sched",
    "secrets",
    "shlex",
    "statistics",
    "string",
    "textwrap",
    "timeit",
    "zipapp",
)

# Folders that are not library source, or hold data rather than code.
SKIPPED_FOLDERS = (
    "site-packages",
    "lib-dynload",
    "pydoc_data",
    "lib2to3/tests",
    "test/crashers",
    "test/encoded_modules",
    "test/test_lib2to3",
    "test/tokenizedata",
)
# Tables of names and numbers, written by a generator rather than a person.
SKIPPED_FILES = ("_sysconfigdata*", "html/entities.py", "stringprep.py", "this.py")
# Files outside the held-out modules that repeat passages of them.
NEAR_COPIES = (
    "asyncio/queues.py",
    "idlelib/idle_test/test_calltip.py",
    "test/test_numeric_tower.py",
)
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


@dataclass
class Corpus:
    """Source texts by their path below the standard library folder."""

    library: dict[str, str] = field(default_factory=dict)
    tests: dict[str, str] = field(default_factory=dict)
    held_out: dict[str, str] = field(default_factory=dict)


def stdlib_root() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def is_held_out_test(relative: Path) -> bool:
    """Return whether the path is a test of a held-out module (a file or a folder)."""
    names = {f"test_{module}" for module in HELD_OUT}
    return any(Path(part).stem in names for part in relative.parts)


def is_skipped(relative: Path) -> bool:
    """Return whether the path is not training text: data tables, packages, build files."""
    path = relative.as_posix()
    if any(path.startswith(f"{folder}/") for folder in SKIPPED_FOLDERS):
        return True
    if relative.parts[0].startswith("config-") or path in NEAR_COPIES:
        return True
    return any(relative.match(pattern) for pattern in SKIPPED_FILES)


def read_corpus(root: Path | None = None) -> Corpus:
    """Read and split the library's source; files that are not UTF-8 are left out."""
    root = root or stdlib_root()
    corpus = Corpus()
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        name = relative.as_posix()
        if is_skipped(relative) or is_held_out_test(relative):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if not text.strip() or "decoding_table" in text or "decoding_map" in text:
            continue
        if Path(relative.parts[0]).stem in HELD_OUT:
            corpus.held_out[name] = text
        elif TEST_FOLDERS.intersection(relative.parts[:-1]):
            corpus.tests[name] = text
        else:
            corpus.library[name] = text
    return corpus
