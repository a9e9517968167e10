"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def placed(path: Path) -> Iterator[Path]:
    """Where to write the file or folder that is to be at `path` when the block ends; its own folder is a temporary one.

    Raises:
        OSError: there is no writing beside `path`.
    """
    with TemporaryDirectory(prefix=".detgen-", dir=path.parent) as folder:
        made = Path(folder) / path.name
        yield made
        os.replace(made, path)
