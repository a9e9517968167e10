"""Runs a pass on another kind of processor, emulated: the same steps on copies of the same memory."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import detgen.kernels.c as native
from detgen.kernels.c import layout
from detgen.kernels.c.library import Rows, Runner
from detgen.program.operands import Buffer

SOURCES = Path(native.__file__).parent
COMPILER = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl"]
EMULATOR = "qemu-aarch64"


@dataclass(frozen=True)
class Arm:
    """The native pass for ARM64.

    Attributes:
        program: what replays a pass.
        folder: for its files.
    """

    program: Path
    folder: Path

    def run(self, runner: Runner, rows: Rows, given: Mapping[Buffer, np.ndarray], kept: list[np.ndarray]) -> None:
        """As `Runner.run`: what is given, and what else is `kept`, holds afterwards what the pass left there."""
        broken = np.zeros(len(rows.ids), bool)
        addresses = (ctypes.c_void_p * len(runner.program.buffers))()
        for buffer, array in given.items():
            addresses[runner.program.buffers[buffer]] = array.ctypes.data
        task, program = runner._task(rows, addresses, broken), runner._laid_out.whole
        steps, widths, _ = program.kept
        regions: list[tuple[int, int, object]] = [
            (ctypes.addressof(x), ctypes.sizeof(x), x) for x in (program, task, steps, widths, addresses)
        ]
        arrays = [x for step in runner.program.steps for x in arrays_of(step)]
        arrays += [x for x in (*rows, *given.values(), *kept, broken) if x is not None]
        held = {x.ctypes.data: x for x in sorted(arrays, key=lambda x: x.nbytes)}
        regions += [(a, max(x.nbytes, 1), x) for a, x in held.items()]
        pointers = [*pointers_of(program), *pointers_of(task)]
        pointers += [ctypes.addressof(addresses) + 8 * i for i in range(len(addresses))]
        for made, step in zip(steps, runner.program.steps, strict=True):
            pointers += pointers_of(getattr(made, layout.MEMBERS[type(step)]))
        told, left = self.folder / "pass", self.folder / "after"
        with told.open("wb") as file:
            head = (len(regions), len(pointers), ctypes.addressof(program), ctypes.addressof(task))
            file.write(b"".join(n.to_bytes(8, "little") for n in head))
            for address, size, _ in regions:
                file.write(address.to_bytes(8, "little") + size.to_bytes(8, "little") + ctypes.string_at(address, size))
            file.write(b"".join(place.to_bytes(8, "little") for place in pointers))
        subprocess.run([EMULATOR, self.program, told, left], check=True)
        after = left.read_bytes()
        at = 0
        for address, size, owner in regions:
            if any(owner is x for x in (*given.values(), *kept)):
                ctypes.memmove(address, after[at : at + size], size)
            at += size


def pointers_of(made: ctypes.Structure) -> Iterator[int]:
    """Where pointers lie in a structure, and in those that it has."""
    for name, kind in made._fields_:  # type: ignore[misc]
        if issubclass(kind, ctypes.c_void_p):
            yield ctypes.addressof(made) + getattr(type(made), name).offset
        elif issubclass(kind, ctypes.Structure):
            yield from pointers_of(getattr(made, name))


def arrays_of(value: Any) -> Iterator[np.ndarray]:
    """The arrays of a step."""
    for field in fields(value):
        found = getattr(value, field.name)
        if isinstance(found, np.ndarray):
            yield found
        elif is_dataclass(found):
            yield from arrays_of(found)


def build_arm(folder: Path, features: str = "") -> Arm:
    """Compile the native pass for ARM64 with some features; skips the test where there is no emulator."""
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"there is no {EMULATOR} here")
    sources = [
        Path(__file__).parents[1] / "kernels/c/replay.c",
        *(SOURCES / n for n in ("pass.c", "attend.c", "pool.c")),
    ]
    flags = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-pthread", f"-I{SOURCES}"]
    return Arm(compiled(folder, sources, flags, features), folder)


def compiled(folder: Path, sources: list[Path], flags: list[str], features: str) -> Path:
    """A program for ARM64. All are linked alike: for other features the compiler would build a C library of its own."""
    objects = [folder / f"{source.stem}.o" for source in sources]
    for source, to in zip(sources, objects, strict=True):
        subprocess.run([*COMPILER, f"-mcpu=generic{features}", *flags, "-c", source, "-o", to], check=True)
    linked = ["-mcpu=generic", "-static", "-pthread", *objects, "-lm"]
    subprocess.run([*COMPILER, *linked, "-o", folder / "program"], check=True)
    return folder / "program"
