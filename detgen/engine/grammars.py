"""Turns the form that a request asks for into a grammar for llguidance. Knows no model; imports nothing slow."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from detgen.engine.bounded import Bounded, BoundsError
from detgen.engine.schemas import exact
from detgen.errors import RequestError
from detgen.params import GUIDES, SamplingParams

# JSON is written as by Python's json.dumps: with free white space, a model that is unsure can add white space forever.
# Keywords that llguidance does not know are refused, not ignored.
JSON: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
    # Each character has one spelling: with "\\u0061", a key could pass for another name than "a".
    "json_allowed_escapes": 'nrbtf"\\',
}
_REASON = 300  # characters
_STACK = 2 << 20  # bytes, a quarter of a thread's stack: if this is enough, llguidance's later recursion is safe
# llguidance's advice, an option with which it would write texts that do not fit, and what to say instead.
_ADVICE = ". Enable 'coerce_one_of' option to approximate oneOf with anyOf", "; write anyOf if a value may fit several"


def form_of(params: SamplingParams) -> str | None:
    """Return the parameter that sets the form of the text; None if there is none."""
    return next((name for name in GUIDES if getattr(params, name)), None)


def check_end(params: SamplingParams, key: str) -> None:
    """Refuse a form, named `key` in errors, together with a setting that keeps texts from ending."""
    if params.ignore_eos:
        raise RequestError(f"ignore_eos cannot be combined with {key}: a text that fits ends")


def as_grammar(name: str, value: Any) -> str:
    """Return the grammar for a parameter.

    Args:
        name: one of `GUIDES`, or `tool_choice`.
        value: its value; for `tool_choice`, the grammar of the calls.

    Raises:
        RequestError: if the value is invalid; the message is the reason alone, usually llguidance's.
    """
    from llguidance import LLMatcher, grammar_from

    text = exact(value) if name == "guided_json" else value
    try:
        if name == "guided_json":
            return LLMatcher.grammar_from_json_schema(text, overrides=JSON)
        kind: Any = "grammar" if name == "tool_choice" else name.removeprefix("guided_")
        return grammar_from(kind, json.dumps(value) if kind == "choice" else text)
    except Exception as error:  # its converter may raise anything
        raise RequestError(one_line(str(error))) from None


def check_form(params: SamplingParams) -> None:
    """Refuse an invalid form before a model is loaded.

    Args:
        params: sampling parameters, perhaps with a form.

    Raises:
        RequestError: if llguidance cannot compile it; gives llguidance's reason.
    """
    if (name := form_of(params)) is None:
        return
    check_end(params, name)
    if reason := fault(name, getattr(params, name)):
        raise RequestError(f"{name} is refused: {reason}")


@lru_cache(maxsize=256)
def fault(name: str, value: Any) -> str:
    """Return why llguidance cannot compile a form, whatever the model; "" if it can.

    Args:
        name: see `as_grammar`.
        value: see `as_grammar`.
    """
    return within_bounds(_READ, name, value)


def within_bounds(call: Bounded[str], *arguments: Any) -> str:
    """Return what a bounded call to llguidance finds wrong, or which limit it exceeds."""
    try:
        return call(*arguments)
    except BoundsError as error:
        deep = "; it may be nested too deeply" if f"signal {int(signal.SIGSEGV)}" in str(error) else ""
        return f"llguidance cannot read it: {error}{deep}"


def with_little_stack(function: Callable[..., str]) -> Callable[..., str]:
    """Wrap a function to run in a thread with a small stack. A stack overflow ends the process: use only in copies."""

    def call(*arguments: Any) -> str:
        with ThreadPoolExecutor(1) as pool:
            former = threading.stack_size(_STACK)
            started = pool.submit(function, *arguments)
            threading.stack_size(former)
            return started.result()

    return call


def _read(name: str, value: Any) -> str:
    from llguidance import LLMatcher

    try:
        return one_line(LLMatcher.validate_grammar(as_grammar(name, value)))
    except RequestError as error:
        return str(error)


_READ = Bounded(with_little_stack(_read))  # a stranger's grammar may take any time, memory and stack


def one_line(reason: str) -> str:
    """Return an error of llguidance in one line, without the expression that it quotes."""
    if "regex parse error" in reason and (found := re.search(r"^error: (.+)$", reason, re.MULTILINE)):
        return f"invalid regular expression: {found[1]}"
    line = " ".join(reason.replace("<non-verbose/>", "").replace(*_ADVICE).split())
    return line if len(line) <= _REASON else line[: _REASON - 3] + "..."
