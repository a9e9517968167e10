"""The layers of `docs/design.md`, held against the imports of every module under `detgen/`.

Every import counts for the arrows, wherever it stands: at module level, inside a function (lazy, but still a
dependency) and under `TYPE_CHECKING` (never run, but a name that one module must know of another). So does a module
that is named in a string, as registries and lazy exports do it ("detgen.bench.peers.vllm:VllmPeer"). The test for
circles looks at what is ever imported: at module level or inside a function, but neither for type checkers alone nor by
a name in a string, which whoever is registered may import in turn.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import detgen

ROOT = Path(detgen.__file__).parent

# Top to bottom: a package may import those on the lines below its own.
LAYERS = (
    ("cli", "integrations", "llm"),
    ("show",),
    ("run", "verify", "export", "report", "bench", "doctor"),
    ("cache", "workers"),
    ("outputs",),
    ("prompts",),
    ("engine",),
    ("drafters",),
    ("runner",),
    ("models",),
    ("thinking", "kernels"),
    ("program",),
)
BASE = {
    "declaring",
    "errors",
    "params",
    "failing",
    "progress",
    "worker",
    "machine",
    "interruption",
    "streams",
}  # for everybody; they import nothing, but `params` the two before it
# The package itself exports the public API, and `python -m detgen` starts the command line.
ENDS = {"detgen": {"engine", "errors", "llm", "params"}, "__main__": {"cli", "failing", "interruption", "streams"}}

PACKAGES = [name for layer in LAYERS for name in layer]
MODULES = {
    ".".join(("detgen", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
_NAMED = re.compile(r"(detgen(?:\.\w+)+)(?::\w+)?")


@dataclass(frozen=True)
class Import:
    """One import: `module` of detgen, or the outermost package of anything else."""

    module: str
    line: int
    runs: bool  # ever
    runs_on_loading: bool


def imports(source: str, module: str, *, package: bool = False) -> Iterator[Import]:
    """All imports of a module's source."""
    yield from _visit(ast.parse(source), module if package else module.rpartition(".")[0], runs=True, loads=True)


def _visit(node: ast.AST, package: str, *, runs: bool, loads: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for name in _names(child, package):
            parts = name.split(".")
            if parts[0] != "detgen":
                yield Import(parts[0], child.lineno, runs, loads)  # type: ignore[attr-defined]
                continue
            if len(parts) == 2 and name not in MODULES and parts[1] != "__version__":
                parts[1] = "engine"  # what `detgen` exports comes from there
            while ".".join(parts) not in MODULES:  # the last part is a name of the module
                parts.pop()
            found = runs and not isinstance(child, ast.Constant)
            yield Import(".".join(parts), child.lineno, found, found and loads)  # type: ignore[attr-defined]
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            for part in child.body:
                yield from _visit(ast.Module([part], []), package, runs=False, loads=False)
            for part in child.orelse:
                yield from _visit(ast.Module([part], []), package, runs=runs, loads=loads)
        else:
            inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _visit(child, package, runs=runs, loads=loads and not inner)


def _names(node: ast.AST, package: str) -> list[str]:
    """What a node imports, or names as a registry does, in dots."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        home = node.module or ""
        if node.level:
            parts = package.split(".")
            home = ".".join([*parts[: len(parts) - node.level + 1], *([home] if home else [])])
        return [f"{home}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and (match := _NAMED.fullmatch(node.value)):
        return [match[1]] if match[1] in MODULES else []
    return []


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def home(module: str) -> str:
    """The package (or base module) under `detgen` that a module belongs to."""
    return module.split(".")[1] if "." in module else module


def may_import(name: str) -> set[str]:
    """The packages and base modules that one of them may import, itself included."""
    if name in ENDS:
        return {name} | ENDS[name]
    if name in BASE:
        return {name} | ({"errors", "declaring"} if name == "params" else set())
    at = next(i for i, layer in enumerate(LAYERS) if name in layer)
    below = {lower for layer in LAYERS[at + 1 :] for lower in layer}
    own = {"kernels": {"errors", "params", "machine"}, "thinking": {"errors"}, "program": {"errors", "interruption"}}
    base = own.get(name, BASE)
    return {name, "detgen"} | below | base  # "detgen" for its version


@functools.cache
def there() -> dict[str, list[Import]]:
    """The imports of each module."""
    return {
        name: list(imports(path.read_text(encoding="utf-8"), name, package=path.name == "__init__.py"))
        for name, path in MODULES.items()
    }


def wrong_arrows(found: dict[str, list[Import]]) -> list[str]:
    """Imports that point up or aside."""
    wrong = {
        f"{module}:{i.line} imports {i.module}": None
        for module, all_ in found.items()
        for i in all_
        if i.module in MODULES and home(i.module) not in may_import(home(module))
    }
    return list(wrong)


def circle(found: dict[str, list[Import]]) -> list[str]:
    """Modules that import each other, at any time, in a ring; none if there is no such ring."""
    edges = {m: {i.module for i in all_ if i.runs and i.module in MODULES} - {m} for m, all_ in found.items()}
    done: set[str] = set()

    def follow(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        ring = next((r for n in sorted(edges.get(module, ())) if (r := follow(n, [*path, module]))), [])
        done.add(module)
        return ring

    return next((ring for module in sorted(edges) if (ring := follow(module, []))), [])


def users(package: str, found: dict[str, list[Import]] | None = None) -> set[str]:
    """The packages of detgen that import another library."""
    return {home(m) for m, all_ in (found or there()).items() for i in all_ if i.module == package}


def test_every_package_has_a_layer() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(PACKAGES)
    assert {path.stem for path in ROOT.glob("*.py")} == BASE | {"__init__", "__main__"}


def test_arrows_point_one_way() -> None:
    wrong = wrong_arrows(there())
    assert not wrong, "\n".join(wrong)


def test_no_circle() -> None:
    ring = circle(there())
    assert not ring, " -> ".join(ring)


def test_only_the_display_uses_rich() -> None:
    assert users("rich") == {"show"}


def test_kernels_know_no_models() -> None:
    assert "kernels" not in users("transformers")


def test_what_setup_reads_needs_no_library() -> None:
    """The declaration of steps and what makes the header of it: a build has setuptools alone."""
    declaring = (f"detgen.program.{name}" for name in ("operands", "experts", "steps", "program"))
    for module in (*declaring, "detgen.kernels.c.layout"):
        loaded = {i.module for i in there()[module] if i.runs_on_loading and not i.module.startswith("detgen")}
        assert loaded <= sys.stdlib_module_names


def test_the_command_line_knows_no_tensors() -> None:
    assert "cli" not in users("torch") | users("numpy") | users("transformers")


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_says_what_it_is(name: str) -> None:
    doc = ast.get_docstring(ast.parse(MODULES[f"detgen.{name}"].read_text(encoding="utf-8")))
    assert doc, f"detgen/{name}/__init__.py has no docstring"
    assert doc.splitlines()[0].endswith(".")


def _changed(module: str, line: str) -> dict[str, list[Import]]:
    """What would be found if a module had one more line."""
    path = MODULES[module]
    source = path.read_text(encoding="utf-8") + "\n" + line + "\n"
    return there() | {module: list(imports(source, module, package=path.name == "__init__.py"))}


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("detgen.kernels.noise", "from detgen.runner.kv_cache import KVCache"),
        ("detgen.kernels.noise", "from detgen.progress import Progress"),
        ("detgen.program.steps", "from detgen.kernels.noise import gumbel"),
        ("detgen.kernels.noise", "from ..runner import kv_cache"),
        ("detgen.kernels.noise", "def f():\n    import detgen.runner.kv_cache"),
        ("detgen.kernels.noise", "if TYPE_CHECKING:\n    from detgen.engine.request import Request"),
        ("detgen.kernels.noise", "HOME = 'detgen.runner.kv_cache:KVCache'"),
        ("detgen.verify.perturb.axes", "from detgen.run import work"),
        ("detgen.run.work", "from detgen.bench import Row"),
        ("detgen.errors", "from detgen.progress import Progress"),
        ("detgen.engine.request", "from detgen import prompts"),
        ("detgen.runner.kv_cache", "from detgen import Engine"),
    ],
)
def test_a_wrong_arrow_is_found(module: str, line: str) -> None:
    before = set(wrong_arrows(there()))
    assert any(found.startswith(f"{module}:") for found in set(wrong_arrows(_changed(module, line))) - before)


@pytest.mark.parametrize(
    "line", ["from detgen.kernels.input_batch import Window", "def f():\n    import detgen.kernels.input_batch"]
)
def test_a_circle_is_found(line: str) -> None:
    """At run time, too; what stands there for type checkers alone is none."""
    assert {"detgen.kernels.pass_cost", "detgen.kernels.input_batch"} <= set(
        circle(_changed("detgen.kernels.pass_cost", line))
    )
    typed = "if TYPE_CHECKING:\n    from detgen.kernels.input_batch import Window"
    assert not circle(_changed("detgen.kernels.pass_cost", typed))


def test_rich_elsewhere_is_found() -> None:
    assert "kernels" in users("rich", _changed("detgen.kernels.noise", "def f():\n    from rich.text import Text"))
