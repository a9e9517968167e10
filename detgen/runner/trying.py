"""Decides whether a CUDA device may be used: its kernels must have the bits of the compiled library.

This is tried the first time that a version of the kernels meets a kind of device, with the versions of what compiles
them; the verdict is kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile

import detgen
from detgen.errors import EngineError
from detgen.machine import CPU, Device, user_cache
from detgen.program.storage import RULES
from detgen.progress import Observer

_RULES = tuple(rule.name.lower() for rule in RULES)  # endings of the names of their tests
_TRYING = "trying {}: its kernels are compared with the processor's, bit by bit"
_TAKEN = (
    "--device auto took {}, whose kernels passed their self-test. detgen was developed without a GPU: "
    "`detgen verify-determinism --device cuda` checks whole runs"
)


def trusted(device: Device, observer: Observer, *, named: bool, rule: str | None = None) -> Device:
    """Return the device if its kernels are right; otherwise the CPU, unless the device was asked for.

    Args:
        device: a CUDA device.
        observer: receives that the device is tried, and what `--device auto` takes.
        named: whether the device was asked for.
        rule: name of the rule by which its tensor cores have to add; None for none.

    Raises:
        EngineError: if the device was asked for and its kernels are wrong or cannot be tried.
    """
    import torch

    name = torch.cuda.get_device_name(str(device))
    try:
        fault = _fault(device, name, observer, rule)
    except (EngineError, ImportError, RuntimeError) as error:  # errors of Triton and CUDA
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        fault = f"its kernels cannot be tried ({first})"
    if fault is None:
        if not named:
            observer.message(_TAKEN.format(name))
        return device
    if named:
        raise EngineError(f"{name} is not used: {fault}; use --device cpu")
    observer.message(f"--device auto leaves {name} alone: {fault}. The models run on the CPU")
    return CPU


def _fault(device: Device, name: str, observer: Observer, rule: str | None) -> str | None:
    """Return what is wrong with the kernels on a device; None if they are right. Rules' tests count for `rule` only."""
    from detgen.kernels.triton.core_linear import rules_on

    there = [found.name.lower() for found in rules_on(str(device))]
    if rule not in (None, *there):
        return f"its tensor cores do not add up by {rule}, but by {there[0]}: --dtype bfloat16-{there[0]} fits it"
    path = verdict_path(device, name)
    different = kept(path)
    if different is None:
        from detgen.kernels.triton.self_test import different as tried

        observer.message(_TRYING.format(name))
        different = tried(str(device))
        keep(path, different)
    if rule is None:
        different = [name for name in different if not name.endswith(_RULES)]
    if not different:
        return None
    some = ", ".join(different[:3]) + (f" and {len(different) - 3} more" if len(different) > 3 else "")
    return f"its kernels have other bits than the processor's ({some})"


def verdict_path(device: Device, name: str) -> Path | None:
    """Return the path of the verdict about a kind of device; None if there is no home directory."""
    import torch

    from detgen.kernels.triton.launching import versions

    facts = repr((name, torch.cuda.get_device_capability(str(device)), version("torch"), versions(), _code())).encode()
    with suppress(RuntimeError):
        return user_cache() / "devices" / f"{hashlib.sha256(facts).hexdigest()}.json"
    return None


def keep(path: Path | None, different: list[str]) -> None:
    """Keep a verdict, the names of tests with other bits, if the folder can be written."""
    if path is None:
        return
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False, encoding="utf-8") as file:
            file.write(json.dumps({"version": detgen.__version__, "different": different}) + "\n")
        os.replace(file.name, path)


def kept(path: Path | None) -> list[str] | None:
    """Return the kept verdict; None if there is none, or if it is damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((path or Path(os.devnull)).read_text(encoding="utf-8"))["different"]
        if isinstance(found, list) and all(isinstance(name, str) for name in found):
            return found
    return None


@cache
def _code() -> bytes:
    """Return the digest of the kernels, and of what they are compared with."""
    code, root = hashlib.sha256(), Path(detgen.__file__).parent
    for part in ("kernels", "program"):
        for path in sorted(path for kind in ("py", "c", "h") for path in (root / part).rglob(f"*.{kind}")):
            code.update(path.read_bytes())
    return code.digest()
