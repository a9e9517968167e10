"""What is wrong with a wheel is found: its tags, its files, what its libraries need of a system."""

from __future__ import annotations

import importlib.util
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("wheels", ROOT / "tools" / "wheels.py")
assert _SPEC is not None
assert _SPEC.loader is not None
wheels: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(wheels)


def elf(machine: int, *texts: str) -> bytes:
    """The beginning of a library of Linux, and its texts."""
    return struct.pack("<4s14xH", b"\x7fELF", machine) + b"\0" * 40 + "\0".join(["", *texts, ""]).encode()


def mach_o(kind: int, least: tuple[int, int]) -> bytes:
    """The beginning of a library of macOS, whose second command says what it needs."""
    head = struct.pack("<8I", 0xFEEDFACF, kind, 0, 6, 2, 40, 0, 0)
    return (
        head + struct.pack("<4I", 0x2, 16, 0, 0) + struct.pack("<6I", 0x32, 24, 1, least[0] << 16 | least[1] << 8, 0, 0)
    )


LINUX = elf(62, "GLIBC_2.2.5", "GLIBC_2.17", "libc.so.6", "libm.so.6")


def wheel(folder: Path, platform: str, library: bytes, *, tag: str = "", **files: bytes | None) -> list[str]:
    """What is wrong with a wheel of that platform whose libraries are all the same; of these files some are others."""
    name = f"detgen-1.0-{tag or f'py3-none-{platform}'}.whl"
    said = f"Root-Is-Purelib: false\nTag: py3-none-{platform}\n".encode()
    contents: dict[str, bytes | None] = {"detgen-1.0.dist-info/WHEEL": said, **dict.fromkeys(wheels.FILES, b"")}
    contents |= {f"detgen/kernels/c/_{build}.so": library for build in wheels.PLATFORMS[platform]}
    with zipfile.ZipFile(folder / name, "w") as file:
        for path, content in (contents | files).items():
            if content is not None:
                file.writestr(path, content)
    return list(wheels.faults(folder / name))


@pytest.mark.parametrize(
    ("platform", "library"),
    [
        ("manylinux_2_17_x86_64", LINUX),
        ("manylinux_2_17_aarch64", elf(183, "GLIBC_2.17", "libc.so.6", "ld-linux-aarch64.so.1")),
        ("macosx_11_0_arm64", mach_o(0x0100000C, (11, 0))),
        ("macosx_11_0_x86_64", mach_o(0x01000007, (10, 15))),
    ],
)
def test_nothing_is_wrong(tmp_path: Path, platform: str, library: bytes) -> None:
    assert wheel(tmp_path, platform, library) == []


@pytest.mark.parametrize(
    ("platform", "library", "fault"),
    [
        ("manylinux_2_17_x86_64", LINUX + b"GLIBC_2.18\0", "it needs glibc 2.18"),
        ("manylinux_2_17_x86_64", LINUX + b"GLIBC_2.2.5\0GLIBC_2.34\0", "it needs glibc 2.34"),
        ("manylinux_2_17_x86_64", LINUX + b"libgomp.so.1\0", "it needs ['libgomp.so.1']"),
        ("manylinux_2_17_aarch64", LINUX, "it is for x86_64"),
        ("manylinux_2_17_aarch64", mach_o(0x0100000C, (11, 0)), "it is no library of Linux"),
        ("macosx_11_0_arm64", mach_o(0x01000007, (11, 0)), "it is for x86_64"),
        ("macosx_11_0_arm64", mach_o(0x0100000C, (12, 1)), "it needs macOS (12, 1)"),
        ("macosx_11_0_x86_64", LINUX, "it is no library of macOS"),
    ],
)
def test_what_a_library_needs(tmp_path: Path, platform: str, library: bytes, fault: str) -> None:
    found = wheel(tmp_path, platform, library)
    assert found == [f"detgen/kernels/c/_{build}.so: {fault}" for build in sorted(wheels.PLATFORMS[platform])]


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"detgen/kernels/c/_avx2.so": None}, "the libraries are"),
        ({"detgen/kernels/c/_avx2.cpython-311-x86_64-linux-gnu.so": LINUX}, "the libraries are"),
        ({"detgen/py.typed": None}, "detgen/py.typed is missing"),
        ({"detgen/demo_models/draft.kept": None}, "detgen/demo_models/draft.kept is missing"),
        ({"tests/conftest.py": b""}, "tests/conftest.py does not belong there"),
        ({"detgen-1.0.dist-info/WHEEL": b"Root-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n"}, "WHEEL has other"),
    ],
)
def test_what_is_in_it(tmp_path: Path, files: dict[str, bytes | None], fault: str) -> None:
    (found,) = wheel(tmp_path, "manylinux_2_17_x86_64", LINUX, **files)
    assert found.startswith(fault)


@pytest.mark.parametrize("tag", ["cp311-cp311-manylinux_2_17_x86_64", "py3-none-any", "py3-none-linux_x86_64"])
def test_its_tags(tmp_path: Path, tag: str) -> None:
    assert wheel(tmp_path, "manylinux_2_17_x86_64", LINUX, tag=tag) == [f"the tags are {tag}"]


def test_links_of_the_metadata() -> None:
    """Absolute with a URL, texts without one; nothing else of the README changes."""
    source = (ROOT / "setup.py").read_text("utf-8")
    names: dict[str, Any] = {"re": re, "Path": lambda name: ROOT / name, "__version__": "1.2"}
    for function in ("readme", "project_urls"):
        exec(source[source.index(f"def {function}") :].split("\n\n\n")[0], names)
    text, there = (ROOT / "README.md").read_text("utf-8"), "https://host/o/n"
    linked, plain = names["readme"](there), names["readme"]("")
    assert re.sub(rf"{there}/(blob|raw)/v1.2/", "", linked) == text
    for part in re.findall(r"\]\((.*?)\)", linked):
        assert part.startswith("https://")
    assert not re.findall(r"\]\((?!https:)", plain)
    assert "Run an OpenAI batch file" in plain
    assert names["project_urls"](there)["Changelog"] == f"{there}/blob/v1.2/CHANGELOG.md"
    assert names["project_urls"]("") == {}
