"""Whether constraints.txt fits together on every Python, with every extra, from PyPI alone. Installs nothing.

Where pip finds a CPU build of torch, an installation says nothing of this: that build brings neither Triton nor CUDA's
libraries. So what the settings of this machine add to PyPI is left out. Only metadata is fetched.

Called with a Python's version and pip's arguments, it runs pip as on that Python.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
CONSTRAINTS = ["--constraint", "constraints.txt"]
# What lm-eval needs and PyPI has as sources only, of Python alone. Pip builds none in the name of another Python.
SOURCES = ["rouge-score", "sqlitedict", "word2number"]


def requirements() -> list[str]:
    """Those of detgen and of each of its extras."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]


def run_pip(version: str, arguments: list[str]) -> int:
    """Pip, whose `--python-version` chooses files by a version, but reads markers by the Python that it runs on."""
    from pip._internal.cli.main import main
    from pip._vendor.packaging import markers

    running = markers.default_environment
    markers.default_environment = lambda: {
        **running(),
        "python_version": version,
        "python_full_version": f"{version}.0",
    }
    assert markers.Marker(f"python_version == '{version}'").evaluate(), "this pip reads markers in another way"
    return main(arguments)


def main() -> int:
    """0 if it fits together on every Python."""
    with tempfile.TemporaryDirectory() as folder:
        added = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")
        environment = {name: value for name, value in os.environ.items() if name not in added}
        environment |= {"PIP_CONFIG_FILE": os.devnull, "PYTHONPATH": f"{folder}/pip"}
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        # Older ones fetch whole files in a dry run.
        subprocess.run([*pip, "install", *CONSTRAINTS, "--target", f"{folder}/pip", "pip"], check=True, env=environment)
        build = ["wheel", *CONSTRAINTS, "--no-deps", "--wheel-dir", f"{folder}/wheels", *SOURCES]
        subprocess.run([*pip, *build], check=True, env=environment)
        dry_run = ["install", "--dry-run", "--ignore-installed", "--use-feature", "fast-deps", "--no-input", "--quiet"]
        dry_run += ["--only-binary", ":all:", "--find-links", f"{folder}/wheels", *CONSTRAINTS, *requirements()]

        def resolve(version: str) -> bool:
            arguments = [*dry_run, "--python-version", version]
            done = subprocess.run(
                [sys.executable, __file__, version, *arguments], env=environment, capture_output=True, text=True
            )
            print(f"constraints.txt on Python {version}:", done.stderr if done.returncode else "fits together")
            return done.returncode == 0

        with ThreadPoolExecutor() as threads:
            return 0 if all([*threads.map(resolve, PYTHONS)]) else 1


if __name__ == "__main__":
    sys.exit(run_pip(sys.argv[1], sys.argv[2:]) if sys.argv[1:] else main())
