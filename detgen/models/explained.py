"""Reports errors of the libraries that read a model's files in one line."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from detgen.errors import EngineError
from detgen.models.refusing import raised_in


@contextmanager
def explained(name: str, file: str | None = None) -> Iterator[None]:
    """Turn whatever a library raises inside the block, over a damaged or hostile file, into an error of one line.

    Args:
        name: name of the model.
        file: the file of its folder that is read inside, if it is a single one.

    Raises:
        EngineError: names the model, the file and the reason.
    """
    try:
        yield
    except (EngineError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # the tokenizers library panics with errors that are no `Exception`
        raise EngineError(f"cannot load the model {name}: {f'{file}: ' if file else ''}{_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Return one line of an error."""
    text = str(error).strip()
    if "trust_remote_code" in text:
        return "it needs code of its own, which detgen does not run; if you trust it, give --trust-remote-code"
    if isinstance(error, pickle.UnpicklingError):
        return "its weights are damaged, or a pickle of more than tensors, which could run code; use safetensors"
    if isinstance(error, MemoryError) or "allocate memory" in text:
        return f"out of memory ({type(error).__name__})"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    named = isinstance(error, OSError | ValueError | RuntimeError | ImportError) and said
    where = raised_in(error)
    at = "" if where is None else f" (in its {where[0]}, at `{where[1]}`)"
    return (said if named else f"{type(error).__name__}: {said}".removesuffix(": ")) + at
