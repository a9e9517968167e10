"""Builds the source distribution, and from it the wheels of all platforms with ziglang; checks their contents.

    python tools/wheels.py [FOLDER]      # dist by default

The same sources give the same bytes: files get the time of the last commit, or of SOURCE_DATE_EPOCH.
"""

from __future__ import annotations

import gzip
import os
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
X86 = ("plain", "avx2", "avxvnni", "avx512", "vnni", "bf16")
PLATFORMS = {
    "manylinux_2_17_x86_64": X86,
    "manylinux_2_17_aarch64": ("plain", "dotprod"),
    "macosx_11_0_arm64": ("plain",),
    "macosx_11_0_x86_64": X86,
}
# Files that are easily left out of a package.
EMBEDDED = ("target/model.safetensors", "target.kept", "draft.kept")  # of the embedded models, and what is kept of them
FILES = (
    *("detgen/__main__.py", "detgen/py.typed", "detgen/models/tried.json"),
    *(f"detgen/demo_models/{name}" for name in EMBEDDED),
)
_GLIBC = (2, 17)
_NEEDED = {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
_ELF = {62: "x86_64", 183: "aarch64"}  # e_machine
_MACH_O = {0x01000007: "x86_64", 0x0100000C: "arm64"}  # cputype
_BUILD_VERSION = 0x32  # LC_BUILD_VERSION


def faults(wheel: Path) -> Iterator[str]:
    """Yield what is wrong with a wheel: its tags, its files, or what its libraries need of a system."""
    _, _, *tags = wheel.stem.split("-")
    if tags[:2] != ["py3", "none"] or len(tags) != 3 or tags[2] not in PLATFORMS:
        yield f"the tags are {'-'.join(tags)}"
        return
    platform = tags[2]
    with zipfile.ZipFile(wheel) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    libraries = {f"detgen/kernels/c/_{build}.so" for build in PLATFORMS[platform]}
    found = {name for name in contents if name.endswith((".so", ".dylib", ".pyd"))}
    if found != libraries:
        yield f"the libraries are {sorted(found)}, not {sorted(libraries)}"
    for name in FILES:
        if name not in contents:
            yield f"{name} is missing"
    for name in contents:
        if not name.startswith("detgen/") and ".dist-info/" not in name:
            yield f"{name} does not belong there"
    tag = next((c for name, c in contents.items() if name.endswith(".dist-info/WHEEL")), b"").decode()
    if f"Tag: py3-none-{platform}\n" not in tag or "Root-Is-Purelib: false\n" not in tag:
        yield "WHEEL has other tags than the name"
    for name in sorted(found):
        yield from (f"{name}: {fault}" for fault in library_faults(contents[name], platform))


def library_faults(content: bytes, platform: str) -> Iterator[str]:
    """Yield what is wrong with a library: the processor, a system version or a library that it needs."""
    if platform.startswith("macosx"):
        if content[:4] != b"\xcf\xfa\xed\xfe":
            yield "it is no library of macOS"
            return
        _, kind, _, _, commands = struct.unpack_from("<5I", content)
        machine, at, least = _MACH_O.get(kind), 32, None
        for _ in range(commands):
            command, size, _, minimum = struct.unpack_from("<4I", content, at)
            if command == _BUILD_VERSION:
                least = minimum >> 16, minimum >> 8 & 255
            at += size
        if least is None or least > (11, 0):
            yield f"it needs macOS {least}"
    else:
        if content[:4] != b"\x7fELF":
            yield "it is no library of Linux"
            return
        machine = _ELF.get(struct.unpack_from("<H", content, 18)[0])
        # Names of versions and libraries are strings in the file, and occur nowhere else in it.
        versions = {tuple(map(int, v.split(b"."))) for v in re.findall(rb"\0GLIBC_([\d.]+)(?=\0)", content)}
        if versions and max(versions) > _GLIBC:
            yield f"it needs glibc {'.'.join(map(str, max(versions)))}"
        needed = {name.decode() for name in re.findall(rb"(?<=\0)(?:lib|ld-)[\w.+-]+\.so\.[\d.]+(?=\0)", content)}
        if others := needed - _NEEDED:
            yield f"it needs {sorted(others)}"
    if machine is None or not platform.endswith(machine):
        yield f"it is for {machine}"


def build(folder: Path) -> Iterator[Path]:
    """Build everything into a folder, the sources first; yield the files."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or _of_last_commit()
    environment = os.environ | {"SOURCE_DATE_EPOCH": epoch, "LC_ALL": "C", "PYTHONWARNINGS": "ignore"}
    os.umask(0o022)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        setup = [sys.executable, "setup.py", "-q"]
        subprocess.run([*setup, "sdist", "-d", scratch, "--formats", "tar"], cwd=ROOT, check=True, env=environment)
        (archive,) = Path(scratch).glob("*.tar")
        sources = folder / f"{archive.name}.gz"
        _pack(archive, sources, int(epoch))
        yield sources
        with tarfile.open(sources) as tar:
            tar.extractall(scratch, filter="data")
        unpacked = Path(scratch) / archive.stem
        for platform in PLATFORMS:
            to = ["build", "--build-base", f"build/{platform}", "bdist_wheel", "--dist-dir", str(folder.resolve())]
            before = set(folder.iterdir())
            for old in folder.glob(f"*-{platform}.whl"):
                old.unlink()
                before.remove(old)
            subprocess.run([*setup, *to], cwd=unpacked, check=True, env=environment | {"DETGEN_PLATFORM": platform})
            yield from set(folder.iterdir()) - before


def _of_last_commit() -> str:
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _pack(archive: Path, to: Path, epoch: int) -> None:
    """Compress an archive with its files in order, no owner, and the same time for all."""
    with (
        tarfile.open(archive) as old,
        to.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)


def main() -> int:
    """Build and check everything; return 0 if all is right."""
    found = 0
    for path in build(Path(sys.argv[1] if len(sys.argv) > 1 else "dist")):
        print(path)
        for fault in faults(path) if path.suffix == ".whl" else ():
            print(f"{path.name}: {fault}", file=sys.stderr)
            found = 1
    return found


if __name__ == "__main__":
    sys.exit(main())
