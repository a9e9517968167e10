"""Runs a pass on another kind of processor, emulated: the same steps on copies of the same memory."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import detgen.kernels.native as native
from detgen.kernels.native.library import Rows, Runner

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

    def run(self, runner: Runner, rows: Rows, given: Mapping[int, torch.Tensor], kept: list[torch.Tensor]) -> None:
        """As `Runner.run`: what is given, and what else is `kept`, holds afterwards what the pass left there."""
        broken = torch.zeros(len(rows.ids), dtype=torch.bool)
        addresses = (ctypes.c_void_p * len(runner._widths))()
        for number, tensor in given.items():
            addresses[number] = tensor.data_ptr()
        task = runner._task(rows, addresses, broken)
        tensors = {
            t.data_ptr(): t for t in (*runner._builder._held, *rows, *given.values(), *kept, broken) if t.numel()
        }
        raw = [runner._program, task, runner._steps, runner._widths, addresses]
        places = {ctypes.addressof(x): (ctypes.sizeof(x), x) for x in raw}
        regions: list[tuple[int, int, object]] = [(a, size, x) for a, (size, x) in places.items()]
        regions += [(a, t.untyped_storage().nbytes() - t.storage_offset() * t.itemsize, t) for a, t in tensors.items()]
        told, left = self.folder / "pass", self.folder / "after"
        with told.open("wb") as file:
            head = (len(regions), ctypes.addressof(runner._program), ctypes.addressof(task))
            file.write(b"".join(n.to_bytes(8, "little") for n in head))
            for address, size, _ in regions:
                file.write(address.to_bytes(8, "little") + size.to_bytes(8, "little") + ctypes.string_at(address, size))
        subprocess.run([EMULATOR, self.program, told, left], check=True)
        after = left.read_bytes()
        at = 0
        for address, size, owner in regions:
            if any(owner is t for t in (*given.values(), *kept)):
                ctypes.memmove(address, after[at : at + size], size)
            at += size


def build_arm(folder: Path) -> Arm:
    """Compile the native pass for ARM64; skips the test where there is no emulator."""
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"there is no {EMULATOR} here")
    sources = [Path(__file__).parents[1] / "kernels/native/replay.c", *(SOURCES / n for n in ("pass.c", "pool.c"))]
    flags = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-static", "-pthread", f"-I{SOURCES}"]
    subprocess.run([*COMPILER, *flags, *sources, "-lm", "-o", folder / "replay"], check=True)
    return Arm(folder / "replay", folder)
