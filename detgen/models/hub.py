"""Download a model from the Hugging Face hub into the local cache. This module imports only huggingface_hub."""

from __future__ import annotations

import io
import logging
import re
import threading
import time
from collections.abc import Callable
from glob import escape
from pathlib import Path
from typing import Any, TypeVar

from detgen.errors import EngineError
from detgen.models.folders import SUFFIXES
from detgen.progress import Observer, Progress

_PATIENCE = 8.0  # seconds for the hub to resolve a name; downloads are not limited
_WEIGHTS = re.compile(r"model.*\.safetensors|pytorch_model.*\.bin")
_T = TypeVar("_T")

_found: dict[tuple[str, bool], Path] = {}  # by name, and whether its code is wanted


def fetched(name: str, observer: Observer, *, trusted: bool) -> Path:
    """Return the folder of a model from the hub, downloading the files that are not cached yet.

    A process asks the hub once, so that it checks and loads the same commit.

    Args:
        name: OWNER/NAME.
        observer: receives the progress of a download.
        trusted: whether to fetch its code, too.

    Raises:
        EngineError: if the hub has no such model, or cannot be reached and the cache does not have it.
    """
    found = _found.get((name, trusted))
    if found is None or not found.is_dir():
        found = _found[name, trusted] = _fetch(name, observer, trusted=trusted)
    return found


def _fetch(name: str, observer: Observer, *, trusted: bool) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    _quiet()
    if constants.HF_HUB_OFFLINE:
        return _cached(name, "the network is switched off by HF_HUB_OFFLINE")
    try:
        info = _within(_PATIENCE, lambda: HfApi().model_info(name, timeout=_PATIENCE / 2, files_metadata=True))
    except GatedRepoError as error:
        raise EngineError(f"cannot load the model {name}: its owner must grant you access: {_line(error)}") from error
    except RepositoryNotFoundError as error:
        raise EngineError(
            f"cannot load the model {name} (not a local folder, and not available from the hub): there is no model"
            " of this name, or it is private and you are not logged in"
        ) from error
    except Exception as error:  # whatever the network does
        return _cached(name, _line(error))
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    wanted = _wanted(list(sizes), trusted=trusted)
    missing = [f for f in wanted if not isinstance(try_to_load_from_cache(name, f, revision=info.sha), str)]
    if missing:
        observer.stage(f"downloading {name} ({sum(sizes[f] for f in missing) / 1e6:,.1f} MB)")
    try:
        bar = _bar(observer if missing else None)
        return Path(snapshot_download(name, allow_patterns=[escape(f) for f in wanted], tqdm_class=bar))
    except Exception as error:
        raise EngineError(f"cannot download the model {name}: {_line(error)}") from error


def _wanted(files: list[str], *, trusted: bool) -> list[str]:
    """Return the files of a repository that make up the model, with weights in one format."""
    top = [f for f in files if "/" not in f or f.startswith("additional_chat_templates/")]
    weights = [f for f in top if _WEIGHTS.fullmatch(f)]
    weights = [f for f in weights if f.endswith(".safetensors")] or weights
    kept = [f for f in top if f.endswith(SUFFIXES) and not f.endswith((".safetensors", ".bin"))]
    code = [f for f in files if f.endswith(".py")] if trusted else []
    return kept + weights + code


def _cached(name: str, reason: str) -> Path:
    """Return the folder in the cache.

    Raises:
        EngineError: if there is none; says why the hub was not asked.
    """
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    if isinstance(found, str):
        return Path(found).parent
    raise EngineError(f"cannot load the model {name} (not a local folder, and not available from the hub): {reason}")


def _within(seconds: float, function: Callable[[], _T]) -> _T:
    """Return a function's result; give up after some seconds, even if it is waiting for a name server.

    Raises:
        TimeoutError: if it took longer.
    """
    found: list[_T] = []
    failed: list[BaseException] = []

    def call() -> None:
        try:
            found.append(function())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(f"no answer within {seconds:.0f} seconds; check the network")
    return found[0]


def _bar(observer: Observer | None) -> type[Any]:
    """Return a progress bar for the hub's library that sends its figures to an observer."""
    from tqdm import tqdm

    started = time.monotonic()

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "mininterval": 0.1})

        def display(self, *_: object, **__: object) -> None:
            # One bar counts what is written, another what is received, a third one files.
            if observer is not None and self.unit == "B" and "Reconstructing" in (self.desc or "") and self.total:
                seconds = time.monotonic() - started
                left = seconds * (self.total - self.n) / self.n if self.n else None
                figures = (f"{self.n / 1e6 / max(seconds, 1e-3):,.1f} MB/s",)
                megabytes = round(self.n / 1e6), max(round(self.total / 1e6), 1)
                observer.progress(Progress(*megabytes, "MB", seconds, left, figures))

    return Bar


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__


def _quiet() -> None:
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
