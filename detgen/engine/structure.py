"""What a text must be: which tokens may come next, by llguidance. Knows no logits.

Promise: what `Masks.after` says is a function of the structure and of the tokens it is given; who asked before, for
which tokens, and what was rolled back leave no trace.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from detgen.errors import RequestError
from detgen.kernels.penalties import Mask
from detgen.params import GUIDES, SamplingParams

_KEPT = 64  # structures that are kept for requests to come, and masks of a sequence's last positions
# JSON is written as Python's json.dumps does: with free white space, a model that is not sure can go on with it for
# ever. What llguidance does not know is refused, not ignored.
JSON: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
_STATES = 50_000  # of a lexer, each of one or two kilobytes; all else is bounded by the limits that llguidance has
# For a mask, so much that the states end first: what was used before costs none, so this limit depends on the past.
_FUEL = 100_000_000
_REASON = 300  # characters


class Structures:
    """Compiles what requests ask for, each structure once.

    Args:
        tokenizer: the target's, see `LoadedModel`.
        model: what errors call the target.
        vocabulary: entries of its logits.
        eos: its end-of-sequence tokens.
    """

    def __init__(self, tokenizer: Any, model: str, vocabulary: int, eos: frozenset[int]) -> None:
        self._tokenizer, self._model, self._vocabulary, self._eos = tokenizer, model, vocabulary, eos
        self._known: OrderedDict[tuple[str, Any], Structure] = OrderedDict()
        self._own: Any = None

    def of(self, params: SamplingParams, calls: str | None = None) -> Structure | None:
        """What a request's text must be; None if it is free.

        Args:
            params: the request's.
            calls: the grammar of its calls, if it must call a tool.

        Raises:
            RequestError: it cannot be compiled, or not with this tokenizer; gives llguidance's reason.
        """
        name = next((name for name in GUIDES if getattr(params, name)), None)
        if calls is not None and name is not None:
            raise RequestError(f"both tool_choice and {name} say what the text must be; give one of them")
        name, value = ("tool_choice", calls) if calls is not None else (name, getattr(params, name or "", None))
        if name is None:
            return None
        if params.ignore_eos:
            raise RequestError(f"ignore_eos cannot be with {name}: a text that fits ends")
        key = name, value
        found = self._known.pop(key, None) or Structure(name, self._compiler(*key), self._eos)
        self._known[key] = found
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return found

    def _compiler(self, name: str, value: Any) -> Callable[[], Any]:
        """Makes matchers that know no token yet; made one, to see that it can."""
        from llguidance import LLMatcher, LLParserLimits, grammar_from

        try:
            if name == "guided_json":
                grammar = LLMatcher.grammar_from_json_schema(value, overrides=JSON)
            else:
                kind: Any = "grammar" if name == "tool_choice" else name.removeprefix("guided_")
                grammar = grammar_from(kind, json.dumps(value) if kind == "choice" else value)
        except Exception as error:  # its converter may raise anything
            raise RequestError(f"{name} is refused: {_line(str(error))}") from None
        limits = LLParserLimits(max_lexer_states=_STATES, step_lexer_fuel=_FUEL, verbose_errors=False)
        tokenizer = self._llguidance(name)

        def compile() -> Any:
            return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)

        made = compile()
        if not made.is_error():
            made.compute_bitmask()  # some errors are found only then
        if made.is_error():
            reason = _line(made.get_error())
            reason = "no text fits it" if reason.startswith("NoExtension") else reason
            raise RequestError(f"{name} is refused: {reason}")
        return compile

    def _llguidance(self, name: str) -> Any:
        """The tokenizer as llguidance has it."""
        if self._own is None:
            from llguidance import LLTokenizer
            from tokenizers import Tokenizer

            if not self._eos:
                raise RequestError(f"{name} needs a model with an end-of-sequence token, and {self._model} has none")
            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            if not isinstance(backend, Tokenizer):
                raise RequestError(f"{name} needs a tokenizer of the library tokenizers, and {self._model} has another")
            whole = Tokenizer.from_str(backend.to_str())  # transformers' own may stay cut off and padded
            whole.no_truncation()
            whole.no_padding()
            try:
                self._own = LLTokenizer(whole.to_str(), n_vocab=self._vocabulary, eos_token=sorted(self._eos))
            except Exception as error:  # whatever it does not know
                raise RequestError(
                    f"{name} cannot be with the tokenizer of {self._model}: {_line(str(error))}"
                ) from None
        return self._own


class Structure:
    """What texts must be.

    Args:
        name: of the parameter.
        compile: makes a matcher of llguidance that knows no token yet.
        eos: the end-of-sequence tokens.
    """

    def __init__(self, name: str, compile: Callable[[], Any], eos: frozenset[int]) -> None:
        self.name, self.eos = name, eos
        self._compile = compile
        self._matcher: Any = None

    def start(self) -> Any:
        """A matcher for one sequence, which shares the states of its lexer with those of others."""
        if self._matcher is None:
            self._matcher = self._compile()
        return self._matcher.deep_copy()

    def anew(self) -> Any:
        """A matcher that shares nothing; nor do those that start from now on with those that started before."""
        self._matcher = None
        return self._compile()


class Masks:
    """The masks of one sequence; goes back and forth from where it was last asked.

    Args:
        structure: what the text must be.
    """

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._matcher: Any = None  # made with the first mask
        self._read: list[int] = []  # what the matcher has consumed
        self._made: dict[int, Mask] = {}  # by the number of tokens before, of those

    def after(self, completion: list[int]) -> Mask | None:
        """What may come after a completion; None where it does not matter, since the completion does not fit or ended.

        Args:
            completion: committed and drafted tokens.
        """
        known = self._made.get(len(completion))
        if known is not None and self._read[: len(completion)] == completion:
            return known
        self._go_back(completion)
        mask = self._after(completion)
        if mask is None or not mask.error:
            return mask
        # States of other texts, of other requests or of drafts, may have reached a limit. Those of this one decide.
        self._begin(self._structure.anew())
        mask = self._after(completion)
        if mask is not None and mask.error:
            self._begin(None)
        return mask

    def forced(self, completion: list[int], most: int) -> list[int]:
        """The next tokens that are the only ones that may come, at most so many; a guess, as cheap as it can be had.

        Args:
            completion: committed tokens.
            most: at least 1.
        """
        self._go_back(completion)
        if not self._follow(completion)[0] or (not self._matcher.compute_ff_bytes() and not self._matcher.is_stopped()):
            return []
        found: list[int] = self._matcher.compute_ff_tokens()[:most]
        if len(found) < most and len(self._structure.eos) == 1:
            consumed = self._matcher.try_consume_tokens(found)
            if self._matcher.is_stopped() and not self._matcher.is_error():
                found += self._structure.eos
            self._matcher.rollback(consumed)
        return found

    def _begin(self, matcher: Any) -> None:
        self._matcher = matcher
        self._read.clear()
        self._made.clear()

    def _after(self, completion: list[int]) -> Mask | None:
        fits, fault = self._follow(completion)
        return self._mask() if fits else fault

    def _follow(self, completion: list[int]) -> tuple[bool, Mask | None]:
        """Whether it has read the completion; if not, what `after` says."""
        for token in completion[len(self._read) :]:
            mask = self._mask()
            if mask.error:
                return False, mask
            if token in self._structure.eos or not mask.allows(token):
                return False, None
            if self._matcher.try_consume_tokens([token]) != 1:
                return False, Mask(mask.bits, _reason(self._matcher))
            self._read.append(token)
        return True, None

    def _go_back(self, completion: list[int]) -> None:
        if self._matcher is None:
            self._matcher = self._structure.start()
        read = self._read
        if completion[: len(read)] == read:
            return
        kept = next(i for i, token in enumerate(read) if i >= len(completion) or completion[i] != token)
        self._matcher.rollback(len(read) - kept)
        del read[kept:]
        for depth in [depth for depth in self._made if depth > kept]:
            del self._made[depth]

    def _mask(self) -> Mask:
        depth = len(self._read)
        if (known := self._made.get(depth)) is not None:
            return known
        mask = self._make()
        if not mask.error:
            if len(self._made) >= _KEPT:
                self._made = {at: made for at, made in self._made.items() if at > depth - _KEPT // 2}
            self._made[depth] = mask
        return mask

    def _make(self) -> Mask:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        error = _reason(self._matcher) if self._matcher.is_error() else ""
        return Mask(bits, error or ("" if bits.any() else "no token of the model fits"))


def _reason(matcher: Any) -> str:
    return _line(matcher.get_error()) or "llguidance takes a token that it allows for none"


def _line(text: str) -> str:
    """The reason in one line."""
    line = " ".join(text.replace("<non-verbose/>", "").split())
    return line if len(line) <= _REASON else line[: _REASON - 3] + "..."
