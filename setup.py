"""Compiles the C code, once for each kind of processor. All else about the package is in pyproject.toml.

Where no C compiler is on the path, the build asks for ziglang, a compiler that pip can install. A platform on which
nothing compiles cannot install detgen: there is no second way to run a model. The library is called by ctypes, so a
wheel is for every Python of a platform; `DETGEN_PLATFORM` names one for which ziglang compiles it here. `DETGEN_URL` is
where the sources are on the web: with it, the metadata link there, and so do the links of the README.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent))  # an isolated build does not look here
from detgen import __version__
from detgen.kernels.c.layout import header

FOLDER = Path("detgen/kernels/c")
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-g0"]
# Platforms of wheels, and what ziglang calls them.
PLATFORMS = {
    "manylinux_2_17_x86_64": "x86_64-linux-gnu.2.17",
    "manylinux_2_17_aarch64": "aarch64-linux-gnu.2.17",
    "macosx_11_0_arm64": "aarch64-macos.11.0",
    "macosx_11_0_x86_64": "x86_64-macos.11.0",
}
ASKED = os.environ.get("DETGEN_PLATFORM")
if ASKED and ASKED not in PLATFORMS:
    sys.exit(f"DETGEN_PLATFORM is {ASKED!r}; choose one of {', '.join(PLATFORMS)}")
MACHINE = ASKED.split("_", 3)[-1] if ASKED else platform.machine()
# Which of them runs is decided when it is loaded; all give the same bits.
BUILDS = {"plain": []}
if MACHINE in ("x86_64", "AMD64"):
    BUILDS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    BUILDS["avxvnni"] = [*BUILDS["avx2"], "-mavxvnni"]
    BUILDS["avx512"] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
    BUILDS["vnni"] = [*BUILDS["avx512"], "-mavx512vnni"]
    BUILDS["bf16"] = [*BUILDS["vnni"], "-mavx512bf16"]
elif MACHINE == "aarch64":  # arm64, as macOS says, always has it
    BUILDS["dotprod"] = ["-mcpu=generic+dotprod"]
NEWER = ("avxvnni", "bf16")  # left out where the compiler is too old to know the flags


class Wheel(bdist_wheel):
    """A wheel for every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Of the Python, its ABI and the platform."""
        return "py3", "none", ASKED or super().get_tag()[2]


class Build(build_ext):
    """Builds that are called as no Python's in a wheel, and as this Python's beside the sources."""

    beside_sources = False

    def run(self) -> None:
        """Compile."""
        self.beside_sources = bool(self.inplace)  # which is another while this runs
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        """Where it is, below the folder of packages."""
        if self.beside_sources or self.inplace or self.editable_mode:
            return super().get_ext_filename(fullname)
        return f"{fullname.replace('.', os.sep)}.so"


def readme(url: str) -> str:
    """The README with links that work where it is shown alone; as texts, and without pictures, if there is no URL."""
    text = Path("README.md").read_text(encoding="utf-8")
    if not url:
        text = re.sub(r"!\[.*?\]\((?!https?:).*?\)\n*", "", text)
        return re.sub(r"\[([^\]]*)\]\((?!https?:).*?\)", r"\1", text)
    text = re.sub(r"(!\[.*?\]\()(?!https?:)", rf"\1{url}/raw/v{__version__}/", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?:)", rf"\1{url}/blob/v{__version__}/", text)


def project_urls(url: str) -> dict[str, str]:
    """What an index links to; nothing without a URL."""
    pages = {"Documentation": "blob/v{}/docs/index.md", "Changelog": "blob/v{}/CHANGELOG.md", "Issues": "issues"}
    return {"Source": url, **{k: f"{url}/{v.format(__version__)}" for k, v in pages.items()}} if url else {}


def compiler() -> str | None:
    """The command of the C compiler that is asked for or found; None if there is none."""
    if asked := os.environ.get("CC"):
        return asked
    configured = sysconfig.get_config_var("CC") or "cc"
    return next((c for c in (configured, "cc", "gcc", "clang") if shutil.which(shlex.split(c)[0])), None)


def use_ziglang() -> None:
    """Compile by ziglang, which the build has asked for."""
    system = {"linux": "manylinux_2_17", "darwin": "macosx_11_0"}.get(sys.platform)
    target = PLATFORMS.get(ASKED or f"{system}_{MACHINE}")  # none would mean this very processor
    if target is None:
        sys.exit(f"there is no C compiler here, and none that pip can install for {sys.platform}; install GCC or Clang")
    command = f"{shlex.quote(sys.executable)} -m ziglang cc -target {target}"
    os.environ |= {"CC": command, "LDSHARED": f"{command} -shared", "CFLAGS": "", "LDFLAGS": ""}


def write_layout() -> None:
    """Write what C takes, of what Python declares; if nothing has changed, the file stays, and nothing is built."""
    path = FOLDER / "layout.h"
    if not path.exists() or path.read_text(encoding="utf-8") != header():
        path.write_text(header(), encoding="utf-8")


write_layout()
URL = os.environ.get("DETGEN_URL", "").rstrip("/")
found = None if ASKED else compiler()
if found is None:
    use_ziglang()
elif "CC" not in os.environ and found != sysconfig.get_config_var("CC"):
    os.environ |= {"CC": found, "LDSHARED": f"{found} -shared"}
setup(
    long_description=readme(URL),
    long_description_content_type="text/markdown",
    project_urls=project_urls(URL),
    cmdclass={"bdist_wheel": Wheel, "build_ext": Build},
    setup_requires=["ziglang>=0.13"] if found is None else [],
    ext_modules=[
        Extension(
            f"detgen.kernels.c._{name}",
            sorted(map(str, FOLDER.glob("*.c"))),
            depends=sorted(map(str, [*FOLDER.glob("*.h"), *FOLDER.parent.glob("*.h")])),
            extra_compile_args=[*FLAGS, *flags],
            optional=name in NEWER,
            extra_link_args=["-pthread", "-lm"],
        )
        for name, flags in BUILDS.items()
    ],
)
