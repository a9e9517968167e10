"""C takes the steps as they are declared: what stands on one side alone does not compile, or is not run."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import detgen
from detgen.kernels.c import layout
from detgen.kernels.c.library import build
from detgen.program import experts, steps
from detgen.program.operands import Step, declared

NATIVE = Path(layout.__file__).parent
COMPILER = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


def compiles(folder: Path, header: str, code: str) -> bool:
    """Whether code with a header compiles."""
    if shutil.which(COMPILER[0]) is None:
        pytest.skip("there is no C compiler here")
    (folder / "layout.h").write_text(header)
    (folder / "code.c").write_text(f'#include "layout.h"\n{code}\n')
    flags = [f"-I{folder}", f"-I{NATIVE}", "-fsyntax-only", folder / "code.c"]
    return subprocess.run([*COMPILER, *flags], capture_output=True, check=False).returncode == 0


def test_the_header_is_that_of_the_declaration() -> None:
    """As setup.py wrote it; each kind of step has its fields there, but for the name."""
    header = layout.header()
    if build("plain") is not None:
        assert (NATIVE / "layout.h").read_text(encoding="utf-8") == header
    for kind in steps.STEPS:
        text = header.partition(f"}} {kind.__name__};")[0].rpartition("typedef struct {")[2]
        found = [line.split()[-1].strip("*;") for line in text.splitlines()[1:]]
        assert found == [name for name in declared(kind) if name not in ("name", "wanted")]


def test_all_kinds_have_a_number() -> None:
    """Nothing else of the module is a kind of step."""
    there = {x for of in (steps, experts) for x in vars(of).values() if isinstance(x, type) and issubclass(x, Step)}
    assert there == {Step, *steps.STEPS}


def test_a_field_in_c_alone_does_not_compile(tmp_path: Path) -> None:
    """Neither one that a function reads, nor one that was added to the header."""
    header, code = layout.header(), "int64_t size(const Norm *norm) { return norm->size; }"
    assert compiles(tmp_path, header, code)
    assert not compiles(tmp_path, header, code.replace("norm->size", "norm->length"))
    assert not compiles(tmp_path, header.replace("    int64_t vectors;", "    int64_t vectors, length;"), code)
    assert not compiles(tmp_path, header.replace("int64_t centred;", "double centred, less;"), code)


@pytest.mark.parametrize("name", ["Rows", "Best", "Judged", "Draws", "Chain", "Pass"])
def test_nor_does_one_of_another_structure(name: str, tmp_path: Path) -> None:
    """Those that tokens are chosen by are declared as steps are."""
    header = layout.header()
    assert not compiles(tmp_path, header.replace(f"}} {name};", f"    int64_t more;\n}} {name};"), "")


STEPS, LAYOUT = "program/steps.py", "kernels/c/layout.py"
ADDED = {
    "as it is": (STEPS, "", ""),
    "to a step": (STEPS, "    vectors: int = 1\n", "    vectors: int = 1\n    length: int = 0\n"),
    "to what chooses": (LAYOUT, '("leads", _OUT_DOUBLES)', '("leads", _OUT_DOUBLES), ("more", c_int64)'),
}


@pytest.mark.parametrize("added", ADDED)
def test_a_field_in_python_alone_is_not_run(added: str, tmp_path: Path) -> None:
    """The digest of the declaration is another, and a library that says the former one is left alone (test_library)."""
    path, before, after = ADDED[added]
    ignored = shutil.ignore_patterns("__pycache__", "demo_models", "*.so")
    shutil.copytree(Path(detgen.__file__).parent, tmp_path / "detgen", ignore=ignored)
    declared = tmp_path / "detgen" / path
    text = declared.read_text(encoding="utf-8")
    assert not before or text.count(before) == 1
    declared.write_text(text.replace(before, after) if before else text, encoding="utf-8")
    code = "from detgen.kernels.c.layout import DIGEST; print(DIGEST)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert (int(done.stdout) == layout.DIGEST) == (not before)
