"""Functions of transformers that render chats, taken from its files without importing the rest of it.

A full import takes half a second of CPU time, most of it for code that renders no chats. The bytes are those of the
installed version. If its files are laid out differently, it is imported after all.
"""

from __future__ import annotations
import __future__

import builtins
import dis
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

CHAT_FUNCTIONS = ("apply_chat_template", "get_chat_template")  # methods of tokenizers
_HOME, _CLASS = "tokenization_utils_base", "PreTrainedTokenizerBase"
_PACKAGE = "_detgen_transformers_utils"  # a second name of transformers.utils, whose `__init__` imports too much


class _Silent:
    """A logger that discards everything, as transformers' loggers do while detgen reports."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@cache
def chat_functions() -> dict[str, Callable[..., Any]]:
    """Return the functions by name; each takes the tokenizer first, and reads its template and `special_tokens_map`."""
    with suppress(Exception):  # whatever the files are like
        return _taken_out()
    tokenizers = getattr(import_module(f"transformers.{_HOME}"), _CLASS)
    return {name: getattr(tokenizers, name) for name in CHAT_FUNCTIONS}


def _taken_out() -> dict[str, Callable[..., Any]]:
    """Take the functions from the files: a module renders templates, and two methods of tokenizers call it.

    Raises:
        Exception: of many kinds, if they need more than that module.
    """
    spec = find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("there is no such package")
    folder = Path(spec.submodule_search_locations[0])
    package: Any = ModuleType(_PACKAGE)
    package.__path__ = [str(folder / "utils")]
    package.logging = SimpleNamespace(get_logger=lambda *_: _Silent())
    sys.modules[_PACKAGE] = package
    known = dict(vars(import_module(f"{_PACKAGE}.chat_template_utils")))
    home = folder / f"{_HOME}.py"
    lines = home.read_text("utf-8").splitlines(keepends=True)
    for name in CHAT_FUNCTIONS:
        (start,) = (i for i, line in enumerate(lines) if line.startswith(f"    def {name}("))
        source = textwrap.dedent("".join(inspect.getblock(lines[start:])))
        flags = __future__.annotations.compiler_flag  # annotations name what does not exist here
        exec(compile(source, str(home), "exec", flags, dont_inherit=True), known)
        if missing := {*_globals(known[name].__code__)} - known.keys() - vars(builtins).keys():
            raise NameError(f"{name} needs {missing}")
    return {name: known[name] for name in CHAT_FUNCTIONS}


def _globals(code: CodeType) -> Iterator[str]:
    """Return the names that code, or anything it defines, takes from its module."""
    yield from (one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals(inner)
