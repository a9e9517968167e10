"""Check the processor, the compiled library, memory, folders and libraries, and generate a few tokens."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

import detgen
from detgen.errors import EngineError
from detgen.machine import cpu_name, size, usable_cores, user_cache

# Linux's name of the processor feature that each build needs, the fastest build first. Other systems tell nothing.
_FLAGS = {
    **{"bf16": "avx512_bf16", "vnni": "avx512_vnni", "avx512": "avx512dq", "avxvnni": "avx_vnni", "avx2": "avx2"},
    **{"dotprod": "asimddp"},
}
_EXTRAS = {"lm-eval": "lm-evaluation-harness", "ray": "--workers"}
_ENOUGH = 1 << 30  # bytes


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        name: name of the check.
        what: what was found.
        remedy: what to type or do about it, or None.
        broken: whether detgen does not work because of it.
    """

    name: str
    what: str
    remedy: str | None = None
    broken: bool = False


def examine() -> Iterator[Finding]:
    """Run all checks, the quick ones first."""
    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    yield Finding("detgen", f"{detgen.__version__}, Python {platform.python_version()}, {system}")
    yield Finding("processor", f"{cpu_name()}, {usable_cores()} of {os.cpu_count()} cores")
    yield _memory()
    yield from _libraries()
    yield _folder(
        "model cache",
        user_cache() / "models",
        "what models were found to be is asked anew at each start, which takes seconds",
        "XDG_CACHE_HOME",
    )
    from huggingface_hub import constants

    yield _folder("hub cache", Path(constants.HF_HUB_CACHE), "no model can be fetched from the hub", "HF_HOME")
    if constants.HF_HUB_OFFLINE:
        yield Finding("hub", "switched off by HF_HUB_OFFLINE", "unset HF_HUB_OFFLINE")
    yield _folder("temporary", Path(tempfile.gettempdir()), "-o - and prompts on standard input need it", "TMPDIR")
    broken = False
    for finding in (_build, _gpu, _generation):
        if not broken:
            yield (found := finding())
            broken = found.broken


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    what = f"{size(memory.available)} of {size(memory.total)} available"
    if memory.available < _ENOUGH:
        return Finding(
            "memory", what, "end other programs, or take a smaller model; `detgen models` says what each takes"
        )
    return Finding("memory", what)


def _libraries() -> Iterator[Finding]:
    """Check the libraries that detgen requires according to its metadata, and those of its extras."""
    from packaging.requirements import Requirement

    try:
        asked = [Requirement(line) for line in requires("detgen") or ()]
    except PackageNotFoundError:
        yield Finding("libraries", "detgen is not installed, so it is not known what it requires", "pip install .")
        return
    needed = [each for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})]
    wrong = [each for each in needed if (there := _version(each.name)) is None or there not in each.specifier]
    shown = ", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers", "tokenizers"))
    if wrong:
        what = ", ".join(f"{each.name} {_version(each.name) or 'is missing'}" for each in wrong)
        command = " ".join(f"'{each.name}{each.specifier}'" for each in wrong)
        yield Finding("libraries", what, f"pip install {command}", broken=True)
    else:
        yield Finding("libraries", shown)
    for extra, purpose in _EXTRAS.items():
        brought = [
            each for each in asked if each not in needed and each.marker and each.marker.evaluate({"extra": extra})
        ]
        if missing := [each for each in brought if _version(each.name) is None]:
            command = " ".join(f"'{each.name}{each.specifier}'" for each in missing)
            yield Finding(extra, f"not installed; {purpose} would need it", f"pip install {command}")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _folder(name: str, path: Path, otherwise: str, variable: str) -> Finding:
    """Check a folder that detgen writes to, or would create."""
    there = next(place for place in (path, *path.parents) if os.path.exists(place))  # `Path.exists` may raise
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding(
            name, f"{path} cannot be written: {otherwise}", f"export {variable}=FOLDER, one that you can write"
        )
    files = [file.stat().st_size for file in path.rglob("*") if file.is_file()] if name == "model cache" else []
    held = f", {len(files)} models in {size(sum(files))}" if files else ""
    return Finding(name, f"{path}{held}, {size(shutil.disk_usage(there).free)} free")


def _build() -> Finding:
    from detgen.kernels.c.library import BUILDS, CHOICE, REINSTALL, best_build, build

    try:
        best_build()
    except EngineError as error:
        return Finding("build", str(error), f"unset {CHOICE}" if CHOICE in os.environ else REINSTALL, broken=True)
    here = [name for name in BUILDS if build(name) is not None]
    asked = os.environ.get(CHOICE)
    what = f"{asked or here[0]} runs; this processor could run {', '.join(here)}"
    if asked and asked != here[0]:
        return Finding("build", what, f"unset {CHOICE}")
    flags = _flags()
    best = next((name for name, flag in _FLAGS.items() if flag in flags), here[0])
    if BUILDS.index(best) < BUILDS.index(here[0]):
        remedy = "install a newer C compiler (GCC 12 or Clang 14), or take a wheel, then reinstall detgen"
        return Finding("build", f"{what}, and {best}, which would be faster, was not compiled", remedy)
    return Finding("build", what)


def _flags() -> set[str]:
    """Return the features of the processor as named by Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith(("flags", "Features"))), set())


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("GPU", "none that PyTorch can use; models run on the processor")
    from detgen.machine import Device
    from detgen.runner.trying import kept, verdict_path

    name = torch.cuda.get_device_name(0)
    different = kept(verdict_path(Device("cuda"), name))
    if different:
        return Finding("GPU", f"{name}, whose kernels have other bits than the processor's", "--device cpu")
    state = "the first run tries it" if different is None else "it has passed its self-test"
    return Finding("GPU", f"{name}; {state}, but no developer's GPU has run detgen", "--device cpu, to be sure")


def _generation() -> Finding:
    """Check that the embedded model generates, and that drafts do not change a bit."""
    from detgen.engine import Engine

    try:
        engine = Engine(drafter="none", kv_memory=16 << 20)
        plain, drafted = (
            engine.with_settings(drafter=name).generate("import", max_tokens=8, logprobs=1)[0]
            for name in ("none", "self")
        )
    except EngineError as error:
        return Finding("generation", f"fails: {error}", "do as the message says", broken=True)
    if (plain.token_ids, plain.logprobs) != (drafted.token_ids, drafted.logprobs):
        return Finding("generation", "drafts change the text", "report it: detgen verify-determinism --json FILE", True)
    return Finding("generation", "the embedded model generates, with and without drafts the same text")
