"""Compiles the C code, once for each kind of processor. All else about the package is in pyproject.toml.

Where no C compiler is on the path, the build asks for ziglang, a compiler that pip can install. A platform on which
nothing compiles cannot install detgen: there is no second way to run a model.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

sys.path.insert(0, str(Path(__file__).parent))  # an isolated build does not look here
from detgen.kernels.c.layout import header

FOLDER = Path("detgen/kernels/c")
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-g0"]
# Which of them runs is decided when it is loaded; all give the same bits.
BUILDS = {"plain": []}
if platform.machine() in ("x86_64", "AMD64"):
    BUILDS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    BUILDS["avxvnni"] = [*BUILDS["avx2"], "-mavxvnni"]
    BUILDS["avx512"] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
    BUILDS["vnni"] = [*BUILDS["avx512"], "-mavx512vnni"]
    BUILDS["bf16"] = [*BUILDS["vnni"], "-mavx512bf16"]
elif platform.machine() == "aarch64":  # arm64, as macOS says, always has it
    BUILDS["dotprod"] = ["-mcpu=generic+dotprod"]
NEWER = ("avxvnni", "bf16")  # left out where the compiler is too old to know the flags
ZIG_TARGETS = {"linux": "{}-linux-gnu.2.17", "darwin": "{}-macos.11.0"}  # none would mean this very processor


def compiler() -> str | None:
    """The command of the C compiler that is asked for or found; None if there is none."""
    if asked := os.environ.get("CC"):
        return asked
    configured = sysconfig.get_config_var("CC") or "cc"
    return next((c for c in (configured, "cc", "gcc", "clang") if shutil.which(shlex.split(c)[0])), None)


def use_ziglang() -> None:
    """Compile by ziglang, which the build has asked for."""
    target = ZIG_TARGETS.get(sys.platform, "").format(platform.machine().replace("arm64", "aarch64"))
    if not target:
        sys.exit(f"there is no C compiler here, and none that pip can install for {sys.platform}; install GCC or Clang")
    command = f"{shlex.quote(sys.executable)} -m ziglang cc -target {target}"
    os.environ |= {"CC": command, "LDSHARED": f"{command} -shared", "CFLAGS": "", "LDFLAGS": ""}


def write_layout() -> None:
    """Write what C takes, of what Python declares; if nothing has changed, the file stays, and nothing is built."""
    path = FOLDER / "layout.h"
    if not path.exists() or path.read_text(encoding="utf-8") != header():
        path.write_text(header(), encoding="utf-8")


write_layout()
found = compiler()
if found is None:
    use_ziglang()
elif "CC" not in os.environ and found != sysconfig.get_config_var("CC"):
    os.environ |= {"CC": found, "LDSHARED": f"{found} -shared"}
setup(
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
