"""Write transformers' answers about the embedded models, so that no run of them has to ask it.

    python tools/keep_demo_models.py

They are in detgen/demo_models/*.kept, and detgen/models/keeping.py reads them. A test fails if they are out of date.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from detgen import Engine
from detgen.errors import DEMO
from detgen.models.keeping import Kept, Place, shipped


def told() -> dict[Path, Kept]:
    """Return the answers to ship, by file.

    Raises:
        RuntimeError: if nothing is kept with the installed versions of libraries.
    """
    found: dict[Path, Kept] = {}
    with TemporaryDirectory() as scratch, patch.dict(os.environ, {"XDG_CACHE_HOME": f"{scratch}/cache"}):
        # For copies, nothing is shipped, so transformers is asked.
        target, draft = (shutil.copytree(DEMO / role, Path(scratch) / role) for role in ("target", "draft"))
        Engine(target=target, draft=draft, drafter="model", kv_memory=8 << 20)
        for folder in (target, draft):
            asked = folder.name, "auto", "none", None
            path, kept = shipped(DEMO / folder.name, *asked), Place(folder, *asked).read()
            if path is None or kept is None:
                raise RuntimeError(f"nothing is kept of {folder.name}: see detgen/models/keeping.py")
            found[path] = kept
    return found


def main() -> None:
    """Write the files."""
    for path, kept in told().items():
        path.write_bytes(kept.packed())
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
